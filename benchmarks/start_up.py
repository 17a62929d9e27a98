"""How long commands take to start: `python -m benchmarks.start_up`.

Commands run in turn, five times each, and the median counts: of the time by the clock, and of the
processor's time, which other work on the machine changes less. The first build, for which the
tokenizer is prepared once on a machine, is told by itself.
"""

import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Annotated, Any, Final

import typer

from decoder.budget.cost_store import describe_machine, versions

_DOCUMENTS: Final = 3
_GOALS: Final = {"help": 0.3, "build": 3.0}
"""Seconds by the clock, on a machine of two cores that does nothing else."""


@dataclass(frozen=True, slots=True)
class Spent:
    """What a run took, or the median of several.

    Attributes:
        wall_s: seconds by the clock.
        cpu_s: seconds of processors, of all its processes.
    """

    wall_s: float
    cpu_s: float


Run = Callable[[Sequence[str]], Spent]


def timed(command: Sequence[str]) -> Spent:
    """Run a command and return what it took.

    Raises:
        CalledProcessError: it failed.
    """
    before, start = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
    subprocess.run(command, check=True, capture_output=True)
    wall_s = time.perf_counter() - start
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return Spent(wall_s, after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime)


def medians(
    commands: Mapping[str, Sequence[str]], rounds: int, run: Run = timed
) -> dict[str, Spent]:
    """Return the medians of commands that run in turn, so that a busy moment meets all of them."""
    taken: dict[str, list[Spent]] = {name: [] for name in commands}
    for _ in range(rounds):
        for name, command in commands.items():
            taken[name].append(run(command))
    return {
        name: Spent(median(each.wall_s for each in all_), median(each.cpu_s for each in all_))
        for name, all_ in taken.items()
    }


def commands_in(folder: Path) -> dict[str, list[str]]:
    """Return the commands by name; documents and index are in a folder of their own."""
    texts = folder / "texts"
    texts.mkdir()
    for number in range(_DOCUMENTS):
        (texts / f"{number}.txt").write_text(f"Document {number} says what it says.\n" * 20)
    foredraft = [sys.executable, "-m", "foredraft"]
    build = ["build", str(texts), "--output", str(folder / "texts.index"), "--overwrite"]
    return {
        "python": [sys.executable, "-c", "pass"],
        "help": [*foredraft, "--help"],
        "build": [*foredraft, *build],
    }


def main(
    rounds: Annotated[int, typer.Option(min=1, help="Runs of each command.")] = 5,
    *,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Measure how long the help and a small build take."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        os.environ["FOREDRAFT_CACHE"] = str(folder / "cache")
        commands = commands_in(folder)
        first = timed(commands["build"])
        load = os.getloadavg()[0]
        found = {"first build": first, **medians(commands, rounds)}
    report: dict[str, Any] = {
        "seconds": {name: asdict(spent) for name, spent in found.items()},
        "goals": _GOALS,
        "rounds": rounds,
        "load": load,
        "machine": describe_machine(),
        "versions": versions(),
    }
    if as_json:
        typer.echo(json.dumps(report, indent=1))
        return
    typer.echo(f"{'':12} {'clock':>8} {'processor':>10}   goal")
    for name, spent in found.items():
        goal = f"{_GOALS[name]:.1f} s" if name in _GOALS else ""
        typer.echo(f"{name:12} {spent.wall_s:6.2f} s {spent.cpu_s:8.2f} s   {goal}")
    typer.echo(f"medians of {rounds}, load {load:.1f} on {os.cpu_count()} processors")


if __name__ == "__main__":
    typer.run(main)
