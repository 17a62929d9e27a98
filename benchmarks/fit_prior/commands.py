"""The command: record and fit in rounds, say how well it does on what it was not fitted to."""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Final

import numpy as np
import typer
from rich.console import Console
from rich.progress import track

from benchmarks.fit_prior.network import Schedule, fit, mean_surprise
from benchmarks.fit_prior.outcomes import Outcomes
from benchmarks.fit_prior.recording import record, variants
from benchmarks.workloads import Workload, WorkloadError, WorkloadFiles
from retriever.commands.options import clear_errors
from retriever.kernels.layout import DEPTH_BUCKETS, MATCH_BUCKETS
from retriever.predict.weights import Weights, prior_weights, values_of
from retriever.traces.traces import ChatEncoder
from retriever.tree import Source

BUDGETS: Final = (16, 64)

console = Console(stderr=True)


def main(
    workload: Annotated[
        list[str], typer.Option(help="NAME=TRACES[,warm=FILE]...[,index=DIRECTORY]... Repeatable.")
    ],
    output: Annotated[Path, typer.Option(help="Where to write the weights.")] = Path("prior.npy"),
    budget: Annotated[
        list[int] | None,
        typer.Option(min=1, help="Nodes in each tree. Repeatable; default: 16 and 64."),
    ] = None,
    limit: Annotated[
        int, typer.Option(min=1, help="Replay only the first traces of each workload.")
    ] = 100,
    nodes: Annotated[
        int, typer.Option(min=1, help="Most nodes of a workload, so that none outweighs others.")
    ] = 60_000,
    rounds: Annotated[
        int, typer.Option(min=1, help="Record and fit so often: weights decide what is recorded.")
    ] = 2,
    epochs: Annotated[int, typer.Option(min=1, help="Times that each node is seen.")] = 20,
    rate: Annotated[
        float, typer.Option(min=0, help="Highest learning rate; --tune wants a lower one.")
    ] = 0.01,
    tune: Annotated[
        bool,
        typer.Option("--tune", help="Begin with the shipped weights, and stay near those."),
    ] = False,
    tokenizer: Annotated[
        str | None, typer.Option(help="Tokenizer for text. Default: SmolLM2's.")
    ] = None,
    seed: Annotated[int, typer.Option(min=0, help="Of all that is drawn.")] = 0,
) -> None:
    """Fit the weights that drafters begin with to workloads; write them as float32 values."""
    schedule = Schedule(epochs=epochs, rate=rate, seed=seed)
    weights = prior_weights()
    first = start = weights if tune else None
    with clear_errors():
        if not output.parent.is_dir():
            raise WorkloadError(f"{output.parent} is no directory: make it first")
        files = [WorkloadFiles.parse(text) for text in workload]
        encoder = ChatEncoder(tokenizer)
        workloads = [each.load(encoder, limit) for each in files]
        for round_ in range(1, rounds + 1):
            recorded = _record(workloads, weights, sorted(budget or BUDGETS), nodes, seed)
            everything = Outcomes.joined(recorded.values())
            before = weights
            weights = start = fit(everything, schedule, start)
            figures = mean_surprise(before, everything), mean_surprise(weights, everything)
            print("round {}: {:.4f} bits per node, fitted {:.4f}".format(round_, *figures))
        _write(weights, recorded.values(), output)
    print(output)
    for line in _held_out(
        recorded, before, weights, replace(schedule, epochs=epochs * rounds), first
    ):
        print(line)


def _write(weights: Weights, recorded: Iterable[Outcomes], path: Path) -> None:
    """Write the weights, but for the rows after those of all sources that were recorded."""
    num_rows = 1 + max(int(each.places[:, 0].max()) for each in recorded)
    num_left_out = (len(Source) - num_rows) * MATCH_BUCKETS * DEPTH_BUCKETS
    values = values_of(weights)
    try:
        with path.open("wb") as file:
            np.save(file, values[: len(values) - num_left_out])
    except OSError as error:
        raise WorkloadError(f"{path} cannot be written: {error}") from error


def _record(
    workloads: list[Workload], weights: Weights, budgets: list[int], nodes: int, seed: int
) -> dict[str, Outcomes]:
    """Return what each workload teaches, by its name; of a name that comes twice, of both."""
    cells = [(each, part, b) for each in workloads for part in variants(each) for b in budgets]
    parts: dict[str, list[Outcomes]] = {}
    for workload, part, budget in track(cells, "recording", console=console):
        parts.setdefault(workload.name, []).append(record(part, weights, budget))
    rng = np.random.default_rng(seed)
    recorded = {name: Outcomes.joined(each).sample(nodes, rng) for name, each in parts.items()}
    for name, each in recorded.items():
        if len(each) == 0:
            raise WorkloadError(f"{name} has no outputs of a token or more: nothing to learn from")
    return recorded


def _held_out(
    recorded: Mapping[str, Outcomes],
    before: Weights,
    weights: Weights,
    schedule: Schedule,
    start: Weights | None,
) -> Iterator[str]:
    """Give a table of how well each workload is predicted, also by what the others taught."""
    yield "| workload | nodes | bits per node when recorded | fitted | fitted to the others |"
    yield "|---|---|---|---|---|"
    for name, outcomes in recorded.items():
        others = [each for other, each in recorded.items() if other != name]
        without = (
            f"{mean_surprise(_fit_to(others, schedule, start), outcomes):.4f}" if others else "-"
        )
        recording = f"{mean_surprise(before, outcomes):.4f}"
        fitted = f"{mean_surprise(weights, outcomes):.4f}"
        yield f"| {name} | {len(outcomes)} | {recording} | {fitted} | {without} |"


def _fit_to(parts: list[Outcomes], schedule: Schedule, start: Weights | None) -> Weights:
    return fit(Outcomes.joined(parts), schedule, start)
