"""The command `trace`: its options, and what they say.

What it does is imported when it does it, so that its help comes at once.
"""

from pathlib import Path
from typing import Annotated

import typer

from decoder.commands import run
from indexer.flags import AsJson, command_line


def run_trace(
    file: Annotated[
        Path, typer.Argument(metavar="FILE", help="What `generate --trace` wrote (.gz too).")
    ],
    *,
    html: Annotated[
        Path | None,
        typer.Option(
            metavar="PAGE",
            help="Write a page for a browser instead: the text by source, and each pass's tree.",
            rich_help_panel="Output",
        ),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Show the passes of a trace and what they come to; --json gives the totals alone.

    A trace that was cut in the middle of a line is shown as far as it goes.
    """
    from decoder.plugins.trace.trace_command import show_trace  # noqa: PLC0415  (loads numba)

    show_trace(file, html, as_json=as_json)


app = command_line("The command `trace`: its options, and what they say.", {"trace": run_trace})


def main() -> None:
    """Run the command line; errors are printed in one line."""
    run(app)
