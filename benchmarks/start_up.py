"""How long commands take to start: `python -m benchmarks.start_up`.

Commands run in turn, five times each, and the median counts: of the time by the clock, and of the
processor's time, which other work on the machine changes less. A service counts until it says that
it is ready. The first runs on a machine, before anything is cached, are told by themselves: a build
prepares the tokenizer, and the first draft compiles the kernels.
"""

import json
import os
import resource
import signal
import socket
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
_GOALS: Final = {"help": 0.3, "generate --help": 0.3, "build": 3.0}
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

_READY: Final = "serving on "


def timed(command: Sequence[str]) -> Spent:
    """Run a command and return what it took: to its end, or until a service is ready.

    The processors' time of a service is that of its end, too.

    Raises:
        CalledProcessError: it failed.
    """
    before, start = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
    if "serve" in command:
        wall_s = _until_ready(command)
    else:
        subprocess.run(command, check=True, capture_output=True)
        wall_s = time.perf_counter() - start
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return Spent(wall_s, after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime)


def _until_ready(command: Sequence[str]) -> float:
    """Start a service, end it once it is ready, and return the seconds until then.

    Raises:
        CalledProcessError: it ended before.
    """
    start = time.perf_counter()
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    ) as process:
        is_ready = any(line.startswith(_READY) for line in process.stdout or ())
        wall_s = time.perf_counter() - start
        process.send_signal(signal.SIGINT)
        process.communicate()
    if not is_ready:
        raise subprocess.CalledProcessError(process.returncode, list(command))
    return wall_s


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
    recorded = {"prompt": "Which document?", "output": "Document 1 says what it says."}
    (folder / "recorded.jsonl").write_text(json.dumps(recorded) + "\n")
    foredraft, index = [sys.executable, "-m", "foredraft"], str(folder / "texts.index")
    with socket.create_server(("127.0.0.1", 0)) as free:
        address = f"127.0.0.1:{free.getsockname()[1]}"
    return {
        "python": [sys.executable, "-c", "pass"],
        "help": [*foredraft, "--help"],
        "generate --help": [*foredraft, "generate", "--help"],
        "build": [*foredraft, "build", str(texts), "--output", index, "--overwrite"],
        "explain": [*foredraft, "explain", "--index", index, "--context", "Document 1 says"],
        "replay": [*foredraft, "replay", str(folder / "recorded.jsonl"), "--index", index],
        "serve": [*foredraft, "serve", "--index", index, "--address", address],
    }


def main(
    rounds: Annotated[int, typer.Option(min=1, help="Runs of each command.")] = 5,
    *,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Measure how long help, a small build, a draft and a service's start take."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        os.environ["FOREDRAFT_CACHE"] = str(folder / "cache")
        os.environ["NUMBA_CACHE_DIR"] = str(folder / "kernels")
        os.environ["COLUMNS"] = "80"
        commands = commands_in(folder)
        load = os.getloadavg()[0]
        first = {f"first {each}": timed(commands[each]) for each in ("build", "explain")}
        timed(commands["replay"])  # compiles what it needs besides
        found = {**first, **medians(commands, rounds)}
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
    typer.echo(f"{'':15} {'clock':>8} {'processor':>10}   goal")
    for name, spent in found.items():
        goal = f"{_GOALS[name]:.1f} s" if name in _GOALS else ""
        typer.echo(f"{name:15} {spent.wall_s:6.2f} s {spent.cpu_s:8.2f} s   {goal}")
    typer.echo(f"medians of {rounds}, load {load:.1f} on {os.cpu_count()} processors")


if __name__ == "__main__":
    typer.run(main)
