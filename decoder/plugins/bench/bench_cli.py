"""The command `bench`: its options and their help.

The work itself is imported only when the command runs, so `--help` answers at once.
"""

from typing import Annotated

import typer

from decoder.commands import run
from decoder.commands.options import ModelSettings
from decoder.drafters.options import DraftOptions
from decoder.plugins.bench.options import ContestOptions, MeasuredOutput, MeasuredPrompts
from indexer.flags import AsJson, command_line, with_flags


def _list_contenders(value: bool) -> None:
    """Print all contenders and exit."""
    if value:
        from decoder.plugins.bench.bench_command import list_contenders  # noqa: PLC0415  (loads torch)

        list_contenders()
        raise typer.Exit


@with_flags
def run_bench(
    *,
    given: MeasuredPrompts,
    contest: ContestOptions,
    chosen: ModelSettings,
    drafts: DraftOptions,
    output: MeasuredOutput,
    as_json: AsJson = False,
    contenders: Annotated[  # noqa: ARG001  its callback answers
        bool,
        typer.Option(
            "--contenders",
            help="List the named contenders and exit. A checkout also has published rules.",
            is_eager=True,
            callback=_list_contenders,
            rich_help_panel="Contenders",
        ),
    ] = False,
) -> None:
    """Measure against plain generation, prompt lookup and published rules, in one run.

    With --parallel, figures are reported by the number of prompts that share passes. In float32,
    every output is then compared with the output of its prompt alone. The exit status is 1 if one
    of our outputs is wrong. Ctrl-C ends the run with a report of the measurements so far.
    """
    from decoder.plugins.bench.bench_command import measure  # noqa: PLC0415  (loads torch)

    measure(given, contest, chosen, drafts, output, as_json=as_json)


app = command_line("The command `bench`: its options and their help.", {"bench": run_bench})


def main() -> None:
    """Run the command line and print errors in one line."""
    run(app)
