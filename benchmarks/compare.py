"""Compares our drafter with our implementations of published rules, at equal budgets, in one run.

Every drafter starts each replay with the same stored outputs and indexes. Recordings are tokenised
once. Without a workload, a small one is made from the standard library of this interpreter.
"""

import datetime as dt
import gc
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Annotated, Final

import typer
from rich.console import Console
from rich.progress import track

from benchmarks.comparison import Comparison, Measurement, circumstances, describe
from benchmarks.workloads import Workload, WorkloadFiles, stdlib_workload
from retriever.commands.factories import OWN, DrafterFactory, find_factory, known_drafters
from retriever.commands.options import clear_errors
from retriever.plugins.replay.replay import replay
from retriever.traces.traces import ChatEncoder

BUDGETS: Final = (8, 16, 32, 64)
RESULTS: Final = Path(__file__).parent / "results" / "drafting"

console = Console(stderr=True)


def main(
    workload: Annotated[
        list[str] | None,
        typer.Option(help="NAME=TRACES[,warm=FILE]...[,index=DIRECTORY]... Repeatable."),
    ] = None,
    drafter: Annotated[
        list[str] | None, typer.Option(help="A drafter to measure. Repeatable; default: all.")
    ] = None,
    budget: Annotated[
        list[int] | None,
        typer.Option(min=1, help="Nodes in each tree. Repeatable; default: 8, 16, 32 and 64."),
    ] = None,
    tokenizer: Annotated[
        str | None, typer.Option(help="Tokenizer for text. Default: SmolLM2's.")
    ] = None,
    limit: Annotated[
        int | None, typer.Option(min=1, help="Replay only the first traces of each workload.")
    ] = None,
    output: Annotated[
        Path | None, typer.Option(help="Where to write, without suffix. Default: by date.")
    ] = None,
) -> None:
    """Compare drafters; write JSON, a table and a plot."""
    known, _ = known_drafters()
    stem = output or RESULTS / f"{dt.datetime.now(dt.UTC).date()}-peers"
    with clear_errors():
        with ExitStack() as opened:
            factories = {name: find_factory(name) for name in drafter or known}
            workloads = _workloads(workload or [], ChatEncoder(tokenizer), limit, opened)
            before = circumstances()
            rows = list(_measure(workloads, factories, sorted(budget or BUDGETS)))
            comparison = Comparison(before, [describe(each) for each in workloads], rows)
        paths = comparison.write(stem)
    print(comparison.as_markdown())
    print(*paths, sep="\n")


def _workloads(
    stated: list[str], encoder: ChatEncoder, limit: int | None, opened: ExitStack
) -> list[Workload]:
    files = [WorkloadFiles.parse(text) for text in stated]
    if not files:
        console.print("tokenising the standard library")
        return [opened.enter_context(stdlib_workload(encoder, limit))]
    console.print("tokenising", *(each.name for each in files))
    return [each.load(encoder, limit) for each in files]


def _measure(
    workloads: list[Workload], factories: Mapping[str, DrafterFactory], budgets: list[int]
) -> Iterator[Measurement]:
    cells = [(each, name, budget) for each in workloads for name in factories for budget in budgets]
    for workload, name, budget in track(cells, "replaying", console=console):
        made = factories[name](workload.indexes, workload.outputs, budget)
        figures = replay(made, workload.traces, budget).as_json()
        row = Measurement(
            workload=workload.name,
            drafter=name,
            budget=budget,
            tokens_per_step=figures["tokens_per_step"],
            nodes_per_step=figures["mean_nodes"],
            draft_us_p50=figures["draft_us"]["p50"] if name == OWN else None,
            draft_us_p99=figures["draft_us"]["p99"] if name == OWN else None,
        )
        console.print(row.in_a_line())
        yield row
        del made
        gc.collect()


if __name__ == "__main__":
    typer.run(main)
