"""The command `trace`: its options and their help.

The work itself is imported only when the command runs, so `--help` answers at once.
"""

from pathlib import Path
from typing import Annotated

import typer

from decoder.commands import run
from indexer.flags import AsJson, command_line


def run_trace(
    file: Annotated[
        Path, typer.Argument(metavar="FILE", help="A trace of `generate --trace` (.gz too).")
    ],
    *,
    html: Annotated[
        Path | None,
        typer.Option(
            metavar="PAGE",
            help="Write an HTML page instead: the text by source, and the tree of each pass.",
            rich_help_panel="Output",
        ),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Show the passes of a trace and their totals; --json prints only the totals.

    A trace that was cut in the middle of a line is shown up to that line.
    """
    from decoder.plugins.trace.trace_command import show_trace  # noqa: PLC0415  (loads numba)

    show_trace(file, html, as_json=as_json)


app = command_line("The command `trace`: its options and their help.", {"trace": run_trace})


def main() -> None:
    """Run the command line and print errors in one line."""
    run(app)
