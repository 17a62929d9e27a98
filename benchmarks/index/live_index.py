"""Drafts from an index that is changed all the time, against the same load on one that is not.

    python -m benchmarks.index.live_index --output results.json

A service, in a process of its own, looks for a new snapshot every second. Clients, each a process,
draft along documents without end. By turns nothing changes; a writer, at the lowest priority, adds
documents, removes others and merges segments as fast as it can in another index without readers,
which shows what a busy machine does; and it does the same to the index that is served. Nothing may
fail, and nothing may be drafted that was in no document that could be in the index: one that was
removed may still be drafted from for two looks of the service and no longer.
"""

import json
import math
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from multiprocessing import get_context
from pathlib import Path
from typing import Annotated, Any, Final

import numpy as np
import typer
from numpy.typing import NDArray

from benchmarks.comparison import circumstances
from benchmarks.index.live_load import Drafted, Load, Span, keep_changing, keep_drafting
from indexer.build import build_from_texts
from retriever import RemoteDrafter
from tests.oracles.fuzz.planted_leaks import (
    Life,
    judge,
    merge,
    other_documents,
    text_of,
    word_tokenizer,
)

_START_S: Final = 10.0
"""For all clients to start."""

_LOOK_S: Final = 0.1


@dataclass(frozen=True, slots=True)
class Settings:
    """How much of everything.

    Attributes:
        clients: that draft at once.
        tokens: of the index before it is changed.
        turns: of quiet, of changes elsewhere and of changes.
        seconds: of changes in each turn.
        elsewhere_s: of changes of an index that is not served.
        quiet_s: before both.
        refresh_s: between looks of the service for a new snapshot.
        pause_s: between a draft and the next one of a client.
        start_s: for all processes to start.
    """

    clients: int = 8
    tokens: int = 1_000_000
    turns: int = 3
    seconds: float = 40.0
    elsewhere_s: float = 20.0
    quiet_s: float = 15.0
    refresh_s: float = 1.0
    pause_s: float = 0.005
    start_s: float = _START_S

    def spans(self, begin: float) -> list[Span]:
        """Return when to make changes elsewhere, and then here, having begun at some moment."""
        spans = []
        for _ in range(self.turns):
            first = begin + self.quiet_s
            second = first + self.elsewhere_s
            begin = second + self.seconds
            spans += [(first, second), (second, begin)]
        return spans


def measure(settings: Settings) -> dict[str, Any]:
    """Run it all and return the report."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for place in (folder, folder / "elsewhere"):
            place.mkdir(exist_ok=True)
            documents = other_documents(settings.tokens)
            texts = ((f"other-{i}", text_of(tokens)) for i, tokens in enumerate(documents))
            build_from_texts(texts, place / "index", word_tokenizer())
            (place / "newest").write_text("-1")
        with _service(folder, settings.refresh_s) as address:
            return _run(folder, address, settings)


def _run(folder: Path, address: str, settings: Settings) -> dict[str, Any]:
    begin = time.monotonic() + settings.start_s
    spans = settings.spans(begin)
    load = Load(folder, folder / "index", address, settings.pause_s, spans[-1][1])
    with ProcessPoolExecutor(settings.clients + 1, get_context("spawn")) as processes:
        place = folder / "elsewhere"
        elsewhere = replace(load, folder=place, index=place / "index")
        writer = processes.submit(keep_changing, [elsewhere, load], spans)
        clients = [processes.submit(keep_drafting, load, each) for each in range(settings.clients)]
        snapshots = _watch(address, clients)
        drafted, (other, changed) = [client.result() for client in clients], writer.result()
    verdict = judge(merge(each.seen for each in drafted), changed.lives, 2 * settings.refresh_s)
    return {
        **circumstances(),
        "settings": asdict(settings),
        "writer": "at the lowest priority (nice 19)",
        "errors": dict(sum((each.errors for each in drafted), Counter[str]())),
        "changes": _changes(changed.lives, snapshots),
        **asdict(verdict),
        "latency": _latencies(drafted, begin, other.spans, changed.spans),
    }


def _watch(address: str, clients: Sequence[Future[Drafted]]) -> list[int]:
    """Return the snapshots that the service drafted from, as it says itself."""
    snapshots: list[int] = []
    with RemoteDrafter(address, timeout_s=_START_S) as service:
        while not all(client.done() for client in clients):
            (index,) = service.list_indexes()
            if [index.snapshot] != snapshots[-1:]:
                snapshots.append(index.snapshot)
            time.sleep(_LOOK_S)
    return snapshots


def _changes(lives: dict[int, Life], snapshots: Sequence[int]) -> dict[str, Any]:
    return {
        "documents_added": len(lives),
        "documents_removed": sum(math.isfinite(life.end) for life in lives.values()),
        "snapshots_published": snapshots[-1],
        "snapshots_drafted_from": len(snapshots),
    }


def _latencies(
    drafted: Sequence[Drafted], begin: float, elsewhere: Sequence[Span], here: Sequence[Span]
) -> dict[str, Any]:
    """Return percentiles of round trips while nothing changes, something, or what is served."""
    times = np.concatenate([each.times for each in drafted])
    micros = np.concatenate([each.seconds for each in drafted]) * 1e6
    is_here, is_elsewhere = _within(times, here), _within(times, elsewhere)
    figures = {
        "quiet": _percentiles(micros[(times >= begin) & ~is_here & ~is_elsewhere]),
        "changing_elsewhere": _percentiles(micros[is_elsewhere]),
        "changing": _percentiles(micros[is_here]),
    }
    ratios = {
        f"changing_to_{name}": {
            key: round(figures["changing"][key] / figures[name][key], 2)
            for key in ("p50_us", "p99_us")
        }
        for name in ("quiet", "changing_elsewhere")
    }
    return {**figures, **ratios}


def _within(times: NDArray[np.float64], spans: Sequence[Span]) -> NDArray[np.bool_]:
    within = np.zeros(len(times), np.bool_)
    for first, last in spans:
        within |= (times >= first) & (times < last)
    return within


def _percentiles(micros: NDArray[np.float64]) -> dict[str, float]:
    p50, p99 = np.percentile(micros, (50, 99)).tolist()
    return {
        "drafts": len(micros),
        "p50_us": round(p50),
        "p99_us": round(p99),
        "max_us": round(float(micros.max())),
    }


@contextmanager
def _service(folder: Path, refresh_s: float) -> Iterator[str]:
    """Serve the index on a unix socket."""
    command = [sys.executable, "-m", "retriever", "serve", "--index", str(folder / "index")]
    command += ["--address", f"unix:{folder}/socket", "--refresh", str(refresh_s)]
    with (
        (folder / "log").open("w+") as log,
        subprocess.Popen(command, stdout=subprocess.PIPE, stderr=log, text=True) as process,
    ):
        try:
            line = process.stdout.readline() if process.stdout else ""
            if not line.startswith("serving on "):
                log.seek(0)
                raise RuntimeError(f"the service did not start: {log.read()}")
            yield line.removeprefix("serving on ").strip()
        finally:
            process.terminate()


def main(  # noqa: PLR0913, PLR0917  (options are given by name)
    turns: Annotated[int, typer.Option(min=1, help="Of quiet and of changes.")] = 3,
    seconds: Annotated[float, typer.Option(min=1, help="Of changes in each turn.")] = 40,
    elsewhere: Annotated[
        float, typer.Option(min=1, help="Of changes of another index, in each turn.")
    ] = 20,
    quiet: Annotated[float, typer.Option(min=1, help="Seconds of quiet in each turn.")] = 15,
    clients: Annotated[int, typer.Option(min=1, help="Processes that draft.")] = 8,
    tokens: Annotated[int, typer.Option(min=1, help="In the index before.")] = 1_000_000,
    refresh: Annotated[float, typer.Option(min=0.01, help="As `serve --refresh`.")] = 1.0,
    pause_ms: Annotated[
        float, typer.Option(min=0, help="Of a client between drafts, as for a pass of a model.")
    ] = 5.0,
    output: Annotated[Path | None, typer.Option(help="Where to write the report.")] = None,
) -> None:
    """Draft while an index changes; end with status 1 if anything fails or is wrong."""
    settings = Settings(clients, tokens, turns, seconds, elsewhere, quiet, refresh, pause_ms / 1000)
    report = measure(settings)
    text = json.dumps(report, indent=1)
    if output is not None:
        output.write_text(text + "\n")
    print(text)
    if report["errors"] or report["wrong"]:
        sys.exit(1)


if __name__ == "__main__":
    typer.run(main)
