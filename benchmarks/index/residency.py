"""The memory of a service besides the pages of its index, and the time to open an index.

    python -m benchmarks.index.residency small.index large.index --output results.json

An index is mapped: its pages belong to the system's cache, which takes them back when it needs
room. What a process cannot give back is anonymous memory, from /proc/PID/smaps_rollup (Linux). A
service without an index is the base; what others have beyond it is what an index costs.
"""

import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any, Final

import numpy as np
import typer

from benchmarks.comparison import circumstances
from indexer.build import BuildOptions, build_from_tokens
from indexer.reader import Index, Vocabulary
from retriever import RemoteDrafter
from retriever.sessions.embedded import EmbeddedDrafter

VOCABULARY_SIZE: Final = 257_000
SEGMENTS: Final = (1, 10, 100)

_CONTEXT_TOKENS: Final = 64
_DOCUMENT_TOKENS: Final = 20
_REPEATS: Final = 7
_MIB: Final = 2**20
_FIELDS: Final = ("Rss", "Anonymous", "Private_Dirty")


def memory_of(process: int) -> dict[str, float]:
    """Return the memory of a process in MiB, by the names of the kernel, lower case."""
    lines = Path(f"/proc/{process}/smaps_rollup").read_text().splitlines()[1:]
    kib = {name: int(value.split()[0]) for name, _, value in (x.partition(":") for x in lines)}
    return {name.lower(): round(kib[name] * 1024 / _MIB, 1) for name in _FIELDS}


def residency(paths: Sequence[Path], drafts: int) -> dict[str, Any]:
    """Serve indexes, draft for contexts out of them, and return memory before and after."""
    indexes = [Index.open(path) for path in paths]
    with _service(paths) as (process, address), RemoteDrafter(address, timeout_s=60) as drafter:
        at_rest = memory_of(process)
        for context in _contexts(indexes, drafts):
            drafter.draft_context(context, 32)
        return {
            "tokens": sum(index.num_tokens for index in indexes),
            "segments": sum(len(index.segments) for index in indexes),
            "mib": round(sum(index.num_bytes for index in indexes) / _MIB, 1),
            "at_rest": at_rest,
            "after_drafts": memory_of(process),
        }


def opening(num_segments: int, folder: Path) -> dict[str, Any]:
    """Return how long an index of so many segments takes to open, and a drafter on it, in ms."""
    path = folder / str(num_segments)
    rng = np.random.default_rng(0)
    documents = (
        (str(i), rng.integers(0, VOCABULARY_SIZE, _DOCUMENT_TOKENS)) for i in range(num_segments)
    )
    vocabulary = Vocabulary(VOCABULARY_SIZE, "ab" * 32)
    options = BuildOptions(max_segment_tokens=_DOCUMENT_TOKENS + 1)
    build_from_tokens(documents, path, vocabulary, options)
    return {"segments": num_segments, "vocabulary": VOCABULARY_SIZE, **opening_times(path)}


def opening_times(path: Path) -> dict[str, float]:
    """Return how long an index takes to open, and a drafter on it, in ms; median."""
    return {
        "index_ms": _median_ms(lambda: Index.open(path).close()),
        "drafter_ms": _median_ms(lambda: EmbeddedDrafter.open_indexes([path]).shut_down()),
    }


def _median_ms(run: Any) -> float:
    seconds = []
    for _ in range(_REPEATS):
        began = time.perf_counter()
        run()
        seconds.append(time.perf_counter() - began)
    return round(statistics.median(seconds) * 1000, 2)


def _contexts(indexes: Sequence[Index], number: int) -> Iterator[Any]:
    rng = np.random.default_rng(0)
    segments = [segment for index in indexes for segment in index.segments]
    for _ in range(number if segments else 0):
        tokens = segments[int(rng.integers(len(segments)))].tokens
        begin = int(rng.integers(max(1, len(tokens) - _CONTEXT_TOKENS)))
        context = tokens[begin : begin + _CONTEXT_TOKENS]
        yield context[context != np.iinfo(context.dtype).max].astype(np.int32)


@contextmanager
def _service(paths: Sequence[Path]) -> Iterator[tuple[int, str]]:
    command = [sys.executable, "-m", "retriever", "serve", "--address", "127.0.0.1:0"]
    command += [word for path in paths for word in ("--index", str(path))]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            line = process.stdout.readline() if process.stdout else ""
            yield process.pid, line.removeprefix("serving on ").strip()
        finally:
            process.terminate()


def measure(paths: Sequence[Path], drafts: int, segments: Sequence[int]) -> dict[str, Any]:
    """Return the report: for no index, for each, and for all together where there are several."""
    groups = [[], *([path] for path in paths), *([list(paths)] if len(paths) > 1 else [])]
    with tempfile.TemporaryDirectory() as folder:
        opened = [opening(number, Path(folder)) for number in segments]
    return {
        **circumstances(),
        "drafts": drafts,
        "memory_mib": [residency(group, drafts) for group in groups],
        "opening_by_segments": opened,
        "opening": [{"index": path.name, **opening_times(path)} for path in paths],
    }


def main(
    index: Annotated[list[Path], typer.Argument(metavar="DIR", help="Indexes of one tokenizer.")],
    drafts: Annotated[int, typer.Option(min=0, help="For each measurement.")] = 20_000,
    output: Annotated[Path | None, typer.Option(help="Where to write the report.")] = None,
) -> None:
    """Measure resident memory and opening times."""
    text = json.dumps(measure(index, drafts, SEGMENTS), indent=1)
    if output is not None:
        output.write_text(text + "\n")
    print(text)


if __name__ == "__main__":
    typer.run(main)
