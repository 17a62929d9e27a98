"""The command `estimate`: its options, and what they say.

What it does is imported when it does it, so that its help comes at once.
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
            help="Recorded traffic, of which each turn of the assistant is an output: .jsonl (.gz "
            "too), .json, .csv or .parquet with `messages`, `conversations`, `prompt` and "
            "`output`, `request` and `response` and the like; or `prompt_ids` and `output_ids`.",
        ),
    ],
    *,
    chosen: LogSettings,
    drafts: EstimatedDrafts,
    costs: CostSettings,
    plot: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Draw it, too (.png or .svg).", rich_help_panel="Output"),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Say from recorded prompts and outputs whether drafts would help, and how much.

    The log is replayed without a model: a draft changes no output, so the
    tokens that each pass would have brought are known. Each record drafts
    from its own prompt and from the outputs before it, as in service. Prompt
    lookup is replayed next to it, or what --drafter names.

    Time follows from what a pass costs by the nodes that it verifies, and from
    how long drafting takes here. Measure passes with --model where you would
    run it. By default they are those of an 8B model on one H100, computed from
    its data sheet.

    What of the log cannot be read is skipped, and standard error says how much,
    where and why. The last line is the answer. The status is 0 whatever it is.
    """
    from decoder.plugins.estimate.estimate_command import estimate  # noqa: PLC0415  (loads torch)

    estimate(log, chosen, drafts, costs, plot, is_json=as_json)


app = command_line(
    "The command `estimate`: its options, and what they say.", {"estimate": run_estimate}
)


def main() -> None:
    """Run the command line; errors are printed in one line."""
    run(app)
