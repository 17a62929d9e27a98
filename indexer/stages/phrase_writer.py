"""Builds the phrase tables of an index: counts n-grams by ranges, then joins the ranges."""

from collections.abc import Iterable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, Final, Self

import numpy as np
from numpy.typing import NDArray

from indexer.engines import Engine
from indexer.errors import writing_to
from indexer.format.names import MAX_ORDER, PHRASE_FILES, POSITION_DTYPE, token_dtype
from indexer.format.opening import Segment, open_segment
from indexer.format.output import sync_file, sync_folder, write_array
from indexer.format.phrase_tables import encode_counts
from indexer.format.records import FileRecord, SegmentRecord
from indexer.format.table_sums import NUM_CODES, Level, least_codes, prune, size_limit
from indexer.stages.ngram_ranges import (
    COUNTING_BYTES,
    Branches,
    NgramRange,
    joined,
    plan_ranges,
    write_branches,
)

_TOP: Final = MAX_ORDER - 2


@dataclass(frozen=True, slots=True)
class CountTask:
    """The arguments of `count_branches`.

    Attributes:
        index_folder: directory of the index.
        segments: segments whose n-grams are counted.
        vocabulary_size: largest token id plus one.
        counted: range of n-grams to count.
        path: path of the file to write.
    """

    index_folder: Path
    segments: tuple[SegmentRecord, ...]
    vocabulary_size: int
    counted: NgramRange
    path: Path


def count_branches(task: CountTask) -> Branches:
    """Count the n-grams of a range. It may run repeatedly, in any process that sees the index.

    Raises:
        DamagedIndexError: a segment is damaged.
        IndexerError: the disk is full, or the system denies the write.
    """
    segments = _opened(task.index_folder, task.segments, task.vocabulary_size)
    return write_branches(segments, task.counted, task.vocabulary_size, task.path)


def write_phrases(  # noqa: PLR0913, PLR0917
    engine: Engine,
    index_folder: Path,
    records: Sequence[SegmentRecord],
    vocabulary_size: int,
    scratch: Path,
    place: Path,
) -> dict[str, FileRecord]:
    """Write the phrase tables of all documents in segments; see docs/reference/format.md.

    Each process holds one range of n-grams in memory, regardless of the corpus size. The scratch
    folder needs two to three bytes per token of the corpus.

    Args:
        engine: where to count.
        index_folder: directory of the index.
        records: records of the index's segments.
        vocabulary_size: largest token id plus one.
        scratch: folder for temporary files.
        place: folder of the tables.

    Returns:
        The records of `PHRASE_FILES`.

    Raises:
        DamagedIndexError: a segment is damaged.
        IndexerError: the disk is full, or the system denies the write.
    """
    segments = _opened(index_folder, records, vocabulary_size)
    tasks = [
        CountTask(index_folder, tuple(records), vocabulary_size, each, scratch / f"{number:08d}")
        for number, each in enumerate(plan_ranges(segments, vocabulary_size))
    ]
    branches = list(engine.map(count_branches, tasks, COUNTING_BYTES))
    return join_branches(branches, token_counts(segments, vocabulary_size), place)


def join_branches(
    branches: Sequence[Branches], counts: NDArray[np.int64], place: Path
) -> dict[str, FileRecord]:
    """Write tables of the most frequent entries of all branches; return the records of the files.

    Args:
        branches: branches of all ranges, in order.
        counts: int64[vocabulary size], number of occurrences of each token.
        place: folder of the tables.

    Raises:
        IndexerError: the disk is full, or the system denies the write.
    """
    histograms = np.zeros((MAX_ORDER - 1, NUM_CODES), np.int64)
    for each in branches:
        histograms += each.histograms
    token_bytes = token_dtype(len(counts)).itemsize
    least = least_codes(histograms, token_bytes, size_limit(int(counts.sum())))
    with _TableFiles(place, len(counts)) as files:
        for levels in joined(branches):
            files.add(prune(levels, least))
    return files.records(counts)


def token_counts(segments: Iterable[Segment], vocabulary_size: int) -> NDArray[np.int64]:
    """Return int64[vocabulary size], the number of occurrences of each token."""
    counts = np.zeros(vocabulary_size, np.int64)
    for segment in segments:
        counts += np.diff(segment.starts)
    return counts


class _TableFiles:
    """Writes the files of levels 2 to 4, piece by piece.

    An entry's successors begin where the previous entry's successors end. So `starts` are written
    together with the entries of their level.
    """

    def __init__(self, place: Path, vocabulary_size: int) -> None:
        self._place = place
        self._stack = ExitStack()
        self._num_successors = np.zeros(vocabulary_size, np.int64)
        self._num_entries = [0] * (MAX_ORDER - 1)
        self._files: dict[str, BinaryIO] = {}

    def __enter__(self) -> Self:
        with writing_to(self._place):
            self._place.mkdir(parents=True, exist_ok=True)
            for name in PHRASE_FILES[2:]:
                file = (self._place / name).open("wb")
                self._files[name] = self._stack.enter_context(file)
        return self

    def __exit__(self, *_: object) -> None:
        with writing_to(self._place), self._stack:
            for number in range(_TOP):
                end = np.array([self._num_entries[number + 1]], POSITION_DTYPE)
                self._files[f"starts{number + 2}"].write(end.data)

    def add(self, levels: Sequence[Level]) -> None:
        """Append entries that `joined` yielded."""
        pairs = levels[0].parents
        if len(pairs):
            first = int(pairs[0])
            own = np.bincount(pairs - first)
            self._num_successors[first : first + len(own)] += own
        for number, level in enumerate(levels):
            self._write(f"tokens{number + 2}", level.tokens)
            self._write(f"counts{number + 2}", level.counts)
            if number < _TOP:
                begins = np.searchsorted(levels[number + 1].parents, np.arange(len(level)))
                begins += self._num_entries[number + 1]
                self._write(f"starts{number + 2}", begins.astype(POSITION_DTYPE))
        for number, level in enumerate(levels):
            self._num_entries[number] += len(level)

    def records(self, counts: NDArray[np.int64]) -> dict[str, FileRecord]:
        """Finish the files, wait until they are on disk, and return their records."""
        starts = np.concatenate([[0], np.cumsum(self._num_successors)]).astype(POSITION_DTYPE)
        records = {
            "counts1": write_array(self._place / "counts1", encode_counts(counts)),
            "starts1": write_array(self._place / "starts1", starts),
        }
        with writing_to(self._place):
            for name in self._files:
                path = self._place / name
                sync_file(path)
                records[name] = FileRecord.of_file(path)
            sync_folder(self._place)
        return records

    def _write(self, name: str, array: NDArray[Any]) -> None:
        with writing_to(self._place):
            self._files[name].write(np.ascontiguousarray(array).data)


def _opened(folder: Path, records: Iterable[SegmentRecord], vocabulary_size: int) -> list[Segment]:
    return [open_segment(folder, record, vocabulary_size) for record in records]
