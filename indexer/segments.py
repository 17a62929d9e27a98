"""Writing segments: documents of parts, or of older segments, joined, sorted and stored."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from indexer.documents import DocumentTable, join_tables
from indexer.errors import DamagedIndexError, IndexerError
from indexer.format import (
    MAX_POSITIONS,
    STARTS_FILE,
    SUFFIXES_FILE,
    TEXTS_FILE,
    TOKENS_FILE,
    token_dtype,
)
from indexer.output import sync_file, sync_folder, write_array
from indexer.parts import Part, text_stream
from indexer.records import FileRecord, SegmentRecord
from indexer.suffixes import first_token_starts, sort_suffixes

MAX_SEGMENT_TOKENS: Final = 64_000_000
"""Sorting a segment of this size takes 1.1 to 1.5 GB of memory, by the size of the vocabulary."""


@dataclass(frozen=True, slots=True)
class Piece:
    """Documents of a part that go into one segment.

    Attributes:
        part: where they are.
        runs: begins and ends of ranges of their numbers, rising and not empty.
    """

    part: Part
    runs: tuple[tuple[int, int], ...]


@dataclass(frozen=True, slots=True)
class SegmentTask:
    """All that `write_segment` needs to know.

    Attributes:
        folder: where the segment's folder is made; nothing in it is published.
        name: of the segment's folder.
        pieces: the documents, in order; one at least.
        vocabulary_size: largest token id plus one.
    """

    folder: Path
    name: str
    pieces: tuple[Piece, ...]
    vocabulary_size: int


def write_segment(task: SegmentTask) -> SegmentRecord:
    """Join, sort and write a segment; what is at its place already is written over.

    Depends on nothing but its argument and the files of the parts: may run in any process that
    sees them, and again.

    Raises:
        DamagedIndexError: a part is not what was written.
        IndexerError: the disk is full or refuses.
    """
    folder = task.folder / task.name
    dtype = token_dtype(task.vocabulary_size)
    tokens, documents = _joined(task.pieces, dtype)
    files = {name: write_array(folder / name, array) for name, array in documents.files().items()}
    files[TOKENS_FILE] = write_array(folder / TOKENS_FILE, tokens)
    starts = first_token_starts(tokens, task.vocabulary_size)
    files[STARTS_FILE] = write_array(folder / STARTS_FILE, starts)
    if all(piece.part.keeps_texts for piece in task.pieces):
        files[TEXTS_FILE] = _write_texts(folder / TEXTS_FILE, task.pieces)
    files[SUFFIXES_FILE] = write_array(folder / SUFFIXES_FILE, sort_suffixes(tokens))
    sync_folder(folder)
    num_documents = len(documents)
    num_tokens = len(tokens) - num_documents
    return SegmentRecord(task.name, num_documents, num_tokens, documents.licences, files)


def gather(pieces: Iterable[Piece], most: int) -> Iterator[list[Piece]]:
    """Yield the pieces of one segment after the other, divided between documents.

    Args:
        pieces: in order.
        most: tokens and separators of a segment, unless it is a single document.

    Raises:
        IndexerError: a document has more tokens than a segment can address.
    """
    gathered: list[tuple[Part, list[tuple[int, int]]]] = []
    length = 0
    for piece in pieces:
        table, end = piece.part.documents(), _length(piece.part)
        starts = table.starts.astype(np.int64)
        ends = np.append(starts[1:], end)
        gathered.append((piece.part, []))
        for begin, last in piece.runs:
            first = begin
            while first < last:
                fitting = starts[first] + most - length
                stop = int(np.searchsorted(ends[first:last], fitting, side="right")) + first
                if stop == first and length == 0:
                    stop = first + 1  # a document is never divided
                    _check_length(table, first, int(ends[first] - starts[first]))
                if stop > first:
                    gathered[-1][1].append((first, stop))
                    length += int(ends[stop - 1] - starts[first])
                    first = stop
                if first < last:
                    yield _pieces(gathered)
                    gathered, length = [(piece.part, [])], 0
    if length:
        yield _pieces(gathered)


def _check_length(documents: DocumentTable, number: int, length: int) -> None:
    if length > MAX_POSITIONS:
        raise IndexerError(f"{documents.name(number)} has too many tokens: split it")


def _pieces(gathered: Iterable[tuple[Part, list[tuple[int, int]]]]) -> list[Piece]:
    return [Piece(part, tuple(runs)) for part, runs in gathered if runs]


def _length(part: Part) -> int:
    return part.num_tokens + part.num_documents


def _joined(pieces: Iterable[Piece], dtype: np.dtype[Any]) -> tuple[NDArray[Any], DocumentTable]:
    """Return the tokens of all pieces, and their documents."""
    tables, columns, offsets, length = [], [], [], 0
    for piece in pieces:
        documents, tokens = piece.part.documents(), piece.part.tokens(dtype)
        bounds = np.append(documents.starts, len(tokens)).astype(np.int64)
        if np.any(np.diff(bounds) <= 0):
            raise DamagedIndexError(
                f"the documents of {piece.part.folder} lie outside of its tokens"
            )
        offsets.append(length)
        tables.append(documents.rows(piece.runs, len(tokens)))
        for begin, end in piece.runs:
            columns.append(tokens[bounds[begin] : bounds[end]])
            length += len(columns[-1])
    return np.concatenate(columns), join_tables(tables, offsets)


def _write_texts(path: Path, pieces: Iterable[Piece]) -> FileRecord:
    try:
        with text_stream(path) as stream:
            for piece in pieces:
                for line in piece.part.text_lines(piece.runs):
                    stream.write(line + b"\n")
        sync_file(path)
        return FileRecord.of_file(path)
    except OSError as error:
        raise IndexerError(f"cannot write {path}: {error.strerror}") from error
