"""The command `replay`: its options and their help.

Its code is imported when it runs, so that its help appears immediately.
"""

from pathlib import Path
from typing import Annotated, Final

import typer

from indexer.flags import AsJson, command_line, with_flags
from retriever.commands.options import clear_errors
from retriever.limits import Limits
from retriever.operations.settings import DraftSettings, RecordSettings, TokenizerSettings
from retriever.predict.grammar.options import ConstraintSettings

_MAX_BUDGET: Final = Limits().max_budget_nodes


@clear_errors()
@with_flags
def replay(
    traces: Annotated[
        Path,
        typer.Argument(
            metavar="TRACES",
            help="Conversations; each assistant turn is replayed: .jsonl (.gz "
            "too), .json, .csv or .parquet with `messages`, `conversations`, `prompt` and "
            "`output`, `request` and `response` and the like; or `prompt_ids` and `output_ids`.",
        ),
    ],
    *,
    recorded: RecordSettings,
    source: DraftSettings,
    texts: TokenizerSettings,
    stated: ConstraintSettings,
    warm: Annotated[
        list[Path] | None,
        typer.Option(
            metavar="FILE",
            help="Outputs that count as recent generations: files like TRACES. Repeatable.",
            rich_help_panel="Drafts",
        ),
    ] = None,
    drafter: Annotated[
        str,
        typer.Option(
            metavar="NAME",
            help="The drafter: our own, prompt-lookup, in a checkout one of "
            "benchmarks/papers, or MODULE:NAME of a factory in a module's mapping DRAFTERS.",
            rich_help_panel="Drafts",
        ),
    ] = "foredraft",
    budget: Annotated[
        int,
        typer.Option(
            min=0,
            max=_MAX_BUDGET,
            help=f"Nodes in each draft tree, at most {_MAX_BUDGET}.",
            rich_help_panel="Drafts",
        ),
    ] = 32,
    lanes: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="Replay the traces of a group together, this many at once, step by step: records "
            "with the same `group`; of these, those with the same `lane` follow one "
            "another. Our own drafter drafts for each from the others. Without it, traces follow "
            "one another as they are read.",
            rich_help_panel="Drafts",
        ),
    ] = None,
    limit: Annotated[
        int | None,
        typer.Option(min=1, help="Replay only this many traces.", rich_help_panel="Report"),
    ] = None,
    calibration: Annotated[
        bool,
        typer.Option(
            help="Also report how often nodes of each probability were accepted.",
            rich_help_panel="Report",
        ),
    ] = False,
    calibration_after: Annotated[
        int,
        typer.Option(
            min=0,
            help="With --calibration: leave out this many traces at the start.",
            rich_help_panel="Report",
        ),
    ] = 0,
    as_json: AsJson = False,
) -> None:
    """Replay recorded outputs and report how many tokens each decoding step would have committed.

    No model is run: a draft changes no output, so what would have been accepted is known. Our own
    drafter also drafts from what a record expects its output to contain: a `prediction`, as a text
    or as OpenAI's API takes it, or a list of `predictions`. Unreadable parts of TRACES are skipped,
    and standard error says how many, where and why.
    """
    from retriever.plugins.replay.replay_command import replay_traces  # noqa: PLC0415  (loads numba)

    replay_traces(
        traces,
        recorded,
        source,
        texts,
        stated.constraint(),
        warm or [],
        drafter,
        budget,
        lanes,
        limit,
        calibration_after if calibration else None,
        as_json=as_json,
    )


app = command_line("The command `replay`: its options and their help.", {"replay": replay})


def main() -> None:
    """Run the command line; errors are printed on one line."""
    app(prog_name="foredraft")
