"""A day of a service in small: full load, all kinds of callers, and its memory and descriptors.

    python -m benchmarks.serving.soak --seconds 600 --json

A real `foredraft serve` keeps a log of generations that is at its limit soon. Engines
ask without a pause; others come and go, are refused, are killed, have data deleted. Each second it
is noted what the process holds. After the first fifth of the time its memory must stay within 2%,
and without callers it must have as many descriptors as the last time that there were none.
"""

import asyncio
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import cycle
from multiprocessing import get_context
from pathlib import Path
from typing import Annotated, Any, Final

import typer

from benchmarks.comparison import circumstances
from benchmarks.serving.soak.board import NUM_CELLS, Board, Counts
from benchmarks.serving.soak.caller import Load, fill, texts
from benchmarks.serving.soak.load import call
from benchmarks.serving.soak.report import PERCENTS, Soaked, figures_of
from benchmarks.serving.soak.samples import WARM_UP, Watched, draw
from indexer.build import build_from_tokens
from indexer.reader import Vocabulary
from retriever.security.access import TENANT_SCOPES, add_token

_IDLE_S: Final = 8.0
_MAX_TENANT_SESSIONS: Final = 400
_KILL_EVERY_S: Final = 8.0
_SETTLE_S: Final = 120.0
_CALLERS_PROCESSES: Final = 3


@contextmanager
def _service(
    folder: Path, indexes: list[Path], generations_tokens: int, max_tenants: int
) -> Iterator[tuple[str, Watched]]:
    """Run a service; give its address and what it is watched by."""
    command = [
        *(sys.executable, "-m", "retriever", "serve", "--address", "127.0.0.1:0"),
        *(word for path in indexes for word in ("--index", str(path))),
        *("--state", str(folder / "state"), "--access", str(folder / "access")),
        *("--generations-tokens", str(generations_tokens), "--max-tenants", str(max_tenants)),
        *("--max-tenant-sessions", str(_MAX_TENANT_SESSIONS), "--idle-session-s", str(_IDLE_S)),
        *("--metrics-address", "127.0.0.1:0", "--log-format", "json"),
    ]
    with (folder / "log").open("wb") as log:
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=log, text=True)
    try:
        line = process.stdout.readline() if process.stdout is not None else ""
        if not line.startswith("serving on "):
            raise SystemExit(f"the service did not start: {(folder / 'log').read_text()}")
        events = map(json.loads, (folder / "log").read_text().splitlines())
        web = next(each["address"] for each in events if each.get("event") == "metrics")
        yield (
            line.removeprefix("serving on ").strip(),
            Watched(process.pid, web, folder / "state"),
        )
    finally:
        process.terminate()
        process.communicate(timeout=30)


@contextmanager
def _callers(load: Load, boards: list[Board], engines: int) -> Iterator[Counter[str]]:
    """Have processes call during the block; errors are there after it."""
    context, errors = get_context("spawn"), Counter[str]()
    failed = context.SimpleQueue()
    shares = [engines - engines // 2, engines // 2, 0]
    processes = [
        context.Process(target=call, args=(load, board, share, failed))
        for board, share in zip(boards, shares, strict=True)
    ]
    load.until.clear()
    for each in processes:
        each.start()
    killing = threading.Thread(target=_keep_killing, args=(load,))
    killing.start()
    try:
        yield errors
    finally:
        load.until.set()
        for _ in processes:
            errors.update(failed.get())
        for each in processes:
            each.join()
        killing.join()


def _keep_killing(load: Load) -> None:
    """Start clients that hold sessions, and kill them."""
    for token in cycle(load.rare.values()):
        if load.until.wait(_KILL_EVERY_S):
            return
        command = [sys.executable, "-m", "benchmarks.serving.soak.load", load.address, token, "200"]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as holder:
            if holder.stdout is not None:
                holder.stdout.readline()
            holder.kill()


def _watch(
    watched: Watched, boards: list[Board], soaked: Soaked, from_s: float, to_s: float
) -> None:
    """Take a sample each second, from one second of the load to another."""
    before, at_s = Counts.read(boards), time.monotonic()
    begin_s = at_s - from_s
    while at_s < begin_s + to_s:
        time.sleep(max(0.0, at_s + 1 - time.monotonic()))
        now, at_s = Counts.read(boards), time.monotonic()
        step = now.since(before)
        p50_ms, p99_ms = step.latencies_ms(PERCENTS)
        held = watched.sample()
        soaked.samples.append(
            {
                "at_s": round(at_s - begin_s, 2),
                **held,
                "beside_mib": held["anonymous_mib"] - held["session_mib"] - held["generations_mib"],
                "steps": step.steps,
                "drafts": step.drafts,
                "p50_ms": p50_ms,
                "p99_ms": p99_ms,
                "refused": step.refused,
                "errors": step.errors,
            }
        )
        before = now


def _quiet(watched: Watched) -> dict[str, float]:
    """Return a sample once all callers are gone and no session is left."""
    until_s = time.monotonic() + _SETTLE_S
    held = watched.sample()
    while time.monotonic() < until_s:
        time.sleep(2)
        before, held = held, watched.sample()
        if not held["sessions"] and held["descriptors"] == before["descriptors"]:
            break
    return held


def _soak(
    watched: Watched, load: Load, boards: list[Board], engines: int, seconds: float
) -> Soaked:
    """Load the service in two parts, before and after the warm-up, and look when all are gone."""
    soaked, warm_s = Soaked(quiet=[_quiet(watched)]), WARM_UP * seconds
    for from_s, to_s in ((0.0, warm_s), (warm_s, seconds)):
        before = Counts.read(boards)
        with _callers(load, boards, engines) as errors:
            _await_steps(boards, before)
            _watch(watched, boards, soaked, from_s, to_s)
        soaked.total = Counts.read(boards).since(before)
        soaked.errors += errors
        soaked.quiet.append(_quiet(watched))
    return soaked


def _await_steps(boards: list[Board], before: Counts) -> None:
    """Wait until callers have begun."""
    while not Counts.read(boards).since(before).steps:
        time.sleep(0.05)


def _load(folder: Path, address: str, tenants: int, until: Any) -> Load:
    access = folder / "access"
    tokens = {f"engine-{at}": add_token(access, f"engine-{at}") for at in range(tenants)}
    rare = {
        name: add_token(access, name, TENANT_SCOPES)
        for name in (f"rare-{at}" for at in range(tenants))
    }
    return Load(address, tokens, rare, _MAX_TENANT_SESSIONS, until)


def _small_index(folder: Path) -> Path:
    documents = [(f"document-{at}", tokens) for at, tokens in enumerate(texts(1))]
    build_from_tokens(documents, folder / "index", Vocabulary(32_000, "5a" * 32))
    return folder / "index"


def main(  # noqa: PLR0913  (a command has as many options as it has)
    *,
    seconds: Annotated[float, typer.Option(help="How long it is loaded.")] = 600.0,
    index: Annotated[
        list[Path] | None,
        typer.Option(help="Indexes to serve, of 32,000 token ids or more. Repeatable."),
    ] = None,
    engines: Annotated[int, typer.Option(help="Streams that ask without a pause.")] = 48,
    tenants: Annotated[int, typer.Option(help="Tenants of engines, and as many others.")] = 12,
    max_tenants: Annotated[int, typer.Option(help="Tenants that the service has room for.")] = 16,
    generations_tokens: Annotated[
        int, typer.Option(help="Recent outputs that it keeps of each.")
    ] = 1 << 15,
    plot: Annotated[Path | None, typer.Option(help="Draw what was sampled.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON on one line.")] = False,
    output: Annotated[Path | None, typer.Option(help="Write all samples here.")] = None,
) -> None:
    """Load a service and tell whether it stays as it is; exit with 1 if not."""
    context = get_context("spawn")
    boards = [Board(at, context.RawArray("q", NUM_CELLS)) for at in range(_CALLERS_PROCESSES)]
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        load = _load(folder, "", tenants, context.Event())
        indexes = index or [_small_index(folder)]
        with _service(folder, indexes, generations_tokens, max_tenants) as (address, watched):
            load = Load(address, load.tokens, load.rare, load.max_tenant_sessions, load.until)
            asyncio.run(fill(load, generations_tokens))
            soaked = _soak(watched, load, boards, engines, seconds)
    figures = {
        **circumstances(),
        "seconds": seconds,
        "engines": engines,
        "tenants": 2 * tenants,
        "max_tenants": max_tenants,
        "generations_tokens": generations_tokens,
        **figures_of(soaked),
    }
    if plot is not None:
        draw(soaked.samples, plot)
    if output is not None:
        output.write_text(json.dumps({**figures, "samples": soaked.samples}) + "\n")
    print(json.dumps(figures, indent=None if as_json else 1))
    failed = [name for name, passed in figures["verdicts"].items() if not passed]
    print(f"failed: {', '.join(failed)}" if failed else "passed", file=sys.stderr)
    raise typer.Exit(1 if failed else 0)


if __name__ == "__main__":
    os.environ.setdefault("GRPC_VERBOSITY", "ERROR")
    typer.run(main)
