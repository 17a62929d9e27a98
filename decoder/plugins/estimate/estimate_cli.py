"""The command `estimate`: its options and their help.

The work itself is imported only when the command runs, so `--help` answers at once.
"""

from pathlib import Path
from typing import Annotated

import typer

from decoder.commands import run
from decoder.plugins.estimate.options import CostSettings, EstimatedDrafts, LogSettings
from indexer.flags import AsJson, command_line, with_flags


@with_flags
def run_estimate(
    log: Annotated[
        Path,
        typer.Argument(
            metavar="LOG",
            help="Recorded traffic; each turn of the assistant is one output. Formats: .jsonl (.gz "
            "too), .json, .csv or .parquet. Fields: `messages`, `conversations`, `prompt` and "
            "`output`, `request` and `response` and the like, or `prompt_ids` and `output_ids`.",
        ),
    ],
    *,
    chosen: LogSettings,
    drafts: EstimatedDrafts,
    costs: CostSettings,
    plot: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Draw a plot (.png or .svg).", rich_help_panel="Output"),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Say from recorded prompts and outputs whether drafts would help, and how much.

    The log is replayed without a model. A draft changes no output, so the
    recording shows which tokens each pass would have accepted. Each record
    drafts from its own prompt and from the outputs before it, as in service.
    For comparison, prompt lookup is replayed too, or the rules that --drafter
    names.

    The projected time adds up the cost of each pass, which depends on its
    number of nodes, and the drafting time measured on this machine. Run with
    --model on the target machine to measure passes there. The default costs
    are those of an 8B model on one H100, computed from its data sheet.

    Records that cannot be read are skipped. Standard error says how many,
    where and why. The last line is the verdict. The exit status is 0 for
    either verdict.
    """
    from decoder.plugins.estimate.estimate_command import estimate  # noqa: PLC0415  (loads torch)

    estimate(log, chosen, drafts, costs, plot, is_json=as_json)


app = command_line(
    "The command `estimate`: its options and their help.", {"estimate": run_estimate}
)


def main() -> None:
    """Run the command line and print errors in one line."""
    run(app)
