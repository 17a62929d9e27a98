"""Drafts from an index whose files are not in memory: the page cache is emptied of them first."""

import ctypes
import gc
import mmap
import os
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import numpy as np

from indexer.reader import Index
from retriever.plugins.replay.replay import ReplayReport, replay_one
from retriever.sessions.embedded import EmbeddedDrafter
from retriever.traces.traces import Trace

_PAGE: Final = mmap.PAGESIZE
_SESSION: Final = "cold"


def files_of(index: Path) -> Iterator[Path]:
    """Yield the files of an index that hold anything."""
    for place, _, names in os.walk(index):
        yield from (path for name in names if (path := Path(place, name)).stat().st_size)


def drop_from_cache(index: Path) -> None:
    """Have the system forget the pages of an index's files; those that are mapped now stay."""
    for path in files_of(index):
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fdatasync(descriptor)  # only pages that are on disk can be dropped
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(descriptor)


def cached_share(index: Path) -> float:
    """Return the share of an index's pages that are in memory, by mincore(2)."""
    resident = pages = 0
    for path in files_of(index):
        flags = _resident(path)
        resident += int(np.count_nonzero(flags & 1))
        pages += len(flags)
    return resident / max(1, pages)


def _resident(path: Path) -> "np.ndarray[Any, np.dtype[np.uint8]]":
    """Return a byte for each page of a file, whose lowest bit says that it is in memory."""
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY) as content:
        flags = np.zeros(-(-len(content) // _PAGE), np.uint8)
        buffer = (ctypes.c_char * len(content)).from_buffer(content)
        try:
            library = ctypes.CDLL(None, use_errno=True)
            size = ctypes.c_size_t(len(content))
            if library.mincore(buffer, size, ctypes.c_void_p(flags.ctypes.data)):
                raise OSError(ctypes.get_errno(), f"mincore of {path}")
        finally:
            del buffer  # or the mapping cannot be closed
    return flags


@dataclass(slots=True)
class ColdDrafts:
    """What drafts from an index take that nobody has read from yet.

    Attributes:
        first_us: of the first draft of each sequence.
        later_us: of all drafts after the first.
        opening_ms: from the path of the index to a drafter.
        cached_shares: of the index's pages, before each sequence.
    """

    first_us: list[float] = field(default_factory=list)
    later_us: list[float] = field(default_factory=list)
    opening_ms: list[float] = field(default_factory=list)
    cached_shares: list[float] = field(default_factory=list)

    def to_json(self) -> dict[str, Any]:
        """Return medians and percentiles for machines to read."""
        return {
            "sequences": len(self.first_us),
            "first_draft_us": _percentiles(self.first_us),
            "later_drafts_us": _percentiles(self.later_us),
            "opening_ms": round(float(np.median(self.opening_ms)), 2),
            "cached_share_before": round(max(self.cached_shares), 4),
        }


def _percentiles(times: Sequence[float]) -> dict[str, float]:
    p50, p90, p99 = np.percentile(times or [0.0], (50, 90, 99)).tolist()
    return {"p50": round(p50, 1), "p90": round(p90, 1), "p99": round(p99, 1)}


def cold_drafts(index: Path, traces: Sequence[Trace], budget: int) -> ColdDrafts:
    """Replay each trace on an index that is dropped from the cache and opened again before it.

    Args:
        index: opened by nobody else, or its pages stay.
        traces: recorded outputs, one at least and none empty; the first is replayed once before,
            so that kernels are compiled.
        budget: most nodes of each tree.
    """
    measured = ColdDrafts()
    _measure(index, traces[0], budget, ColdDrafts())
    for trace in traces:
        _measure(index, trace, budget, measured)
    return measured


def _measure(index: Path, trace: Trace, budget: int, measured: ColdDrafts) -> None:
    gc.collect()
    drop_from_cache(index)
    measured.cached_shares.append(cached_share(index))
    began = time.perf_counter()
    drafter = EmbeddedDrafter([Index.open(index)])
    measured.opening_ms.append((time.perf_counter() - began) * 1000)
    report = ReplayReport()
    replay_one(drafter, _SESSION, trace, budget, report)
    drafter.shut_down()
    first, *later = report.draft_us
    measured.first_us.append(first)
    measured.later_us += later
