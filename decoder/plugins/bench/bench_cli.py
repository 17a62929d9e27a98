"""The command `bench`: its options, and what they say.

What it does is imported when it does it, so that its help comes at once.
"""

from typing import Annotated

import typer

from decoder.commands import run
from decoder.commands.options import ModelSettings
from decoder.drafters.options import DraftOptions
from decoder.plugins.bench.options import ContestOptions, MeasuredOutput, MeasuredPrompts
from indexer.flags import AsJson, command_line, with_flags


def _list_contenders(value: bool) -> None:
    """Print all contenders and end."""
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
            help="List the contenders that have names, and end: in a checkout published rules too.",
            is_eager=True,
            callback=_list_contenders,
            rich_help_panel="Contenders",
        ),
    ] = False,
) -> None:
    """Measure against plain generation, prompt lookup and published rules, in one run.

    With --parallel, by how many prompts share the passes; in float32 every output is compared with
    that of its prompt alone then, and the status is 1 if one of ours is wrong. Ctrl-C ends it with
    a report of what was measured until then.
    """
    from decoder.plugins.bench.bench_command import measure  # noqa: PLC0415  (loads torch)

    measure(given, contest, chosen, drafts, output, as_json=as_json)


app = command_line("The command `bench`: its options, and what they say.", {"bench": run_bench})


def main() -> None:
    """Run the command line; errors are printed in one line."""
    run(app)
