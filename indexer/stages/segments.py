"""Writes segments: joins the documents of parts or older segments, sorts and stores them."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from indexer.errors import DamagedIndexError, IndexerError, writing_to
from indexer.format.documents import DocumentTable, join_tables
from indexer.format.names import (
    KEY_DTYPE,
    KEY_STRIDE,
    KEYS_FILE,
    MAX_POSITIONS,
    MIN_KEYED_SUFFIXES,
    POSITION_DTYPE,
    STARTS_FILE,
    SUFFIXES_FILE,
    TEXTS_FILE,
    TOKENS_FILE,
    Tokens,
    key_bits,
    separator_of,
    token_dtype,
)
from indexer.format.opening import map_array
from indexer.format.output import sync_file, sync_folder, write_array, write_columns
from indexer.format.records import FileRecord, SegmentRecord
from indexer.stages.parts import Part, text_stream

_STRIDE: Final = 1 << 20
"""Number of elements to convert at a time, so that temporary arrays take a few MB."""

_FIXED_BYTES: Final = 64 << 20
"""Memory for the temporary arrays of a stride, and for the library."""


def sort_suffixes(tokens: Tokens) -> NDArray[np.uint32]:
    """Return the positions of all tokens that are not separators, in order of their suffixes.

    A suffix consists of the tokens from a position to the end of the array. Suffixes are ordered
    lexicographically over unsigned integers, and a prefix of a suffix comes before it. Big-endian
    bytes compare like the integers. So libdivsufsort sorts the bytes, and positions inside a token
    are dropped. It needs five bytes of memory per sorted byte (nine from 2**31 bytes). The argument
    is read sequentially, so it may be a mapped file.

    Args:
        tokens: uint16[n] or uint32[n], n < 2**32, little-endian; the largest value of the dtype is
            the separator.

    Returns:
        uint32[m], where m is the number of tokens that are not separators.
    """
    from pydivsufsort import divsufsort  # noqa: PLC0415  (readers of an index do not need it)

    separator = separator_of(tokens.dtype)
    num_suffixes = len(tokens) - int(np.count_nonzero(tokens == separator))
    if num_suffixes == 0:
        return np.empty(0, POSITION_DTYPE)
    keys, width = _sort_keys(tokens, separator)
    return _aligned(divsufsort(keys), width, num_suffixes)


def sorting_bytes(num_tokens: int, vocabulary_size: int) -> int:
    """Return the most memory that `sort_suffixes` takes, including its result.

    Args:
        num_tokens: number of tokens in its argument, including separators.
        vocabulary_size: largest token id plus one.
    """
    width = (vocabulary_size.bit_length() + 7) // 8
    order_bytes = 4 if num_tokens * width < 2**31 else 8
    return _FIXED_BYTES + num_tokens * width * (1 + order_bytes)


def first_token_starts(tokens: Tokens, vocabulary_size: int) -> NDArray[np.uint32]:
    """Return, for each token, where its suffixes start in the suffix array.

    Args:
        tokens: uint16[n] or uint32[n], as for `sort_suffixes`.
        vocabulary_size: largest token id plus one.

    Returns:
        uint32[vocabulary_size + 1]; the last element is the number of suffixes.
    """
    counts = np.zeros(vocabulary_size + 1, np.int64)
    separator = separator_of(tokens.dtype)
    for begin in range(0, len(tokens), _STRIDE):
        piece = tokens[begin : begin + _STRIDE]
        counts[1:] += np.bincount(piece[piece != separator], minlength=vocabulary_size)
    return np.cumsum(counts).astype(POSITION_DTYPE)


def suffix_keys(
    tokens: Tokens, suffixes: NDArray[np.uint32], vocabulary_size: int
) -> NDArray[np.uint64]:
    """Return packed keys: for every `KEY_STRIDE`-th suffix, the tokens after its first token.

    Bisecting these keys reads contiguous memory, and leaves few suffixes to compare.

    Args:
        tokens: uint16[n] or uint32[n], as for `sort_suffixes`.
        suffixes: uint32[m], as `sort_suffixes` returns them.
        vocabulary_size: largest token id plus one.

    Returns:
        uint64[m / KEY_STRIDE, rounded up]. Each key has as many tokens as fit, from the highest
        used bits down. `vocabulary_size` stands for a separator or a position past the end.
    """
    bits = np.uint64(key_bits(vocabulary_size))
    sampled = suffixes[::KEY_STRIDE]
    keys = np.zeros(len(sampled), KEY_DTYPE)
    for begin in range(0, len(keys), _STRIDE):
        piece = keys[begin : begin + _STRIDE]
        positions = sampled[begin : begin + _STRIDE].astype(np.int64)
        for _ in range(KEY_DTYPE.itemsize * 8 // int(bits)):
            positions += 1
            read = tokens[np.minimum(positions, len(tokens) - 1)]
            piece <<= bits
            piece |= np.minimum(read, vocabulary_size).astype(KEY_DTYPE)
    return keys


def _sort_keys(tokens: Tokens, separator: int) -> tuple[NDArray[np.uint8], int]:
    """Return big-endian sort keys, as narrow as the ids allow, and their width in bytes.

    Fewer bytes sort faster. The separator becomes the largest key, and the largest id must stay
    below it.
    """
    is_separator = tokens == separator
    largest = int(tokens.max(where=~is_separator, initial=0))
    width = (int(largest + 1).bit_length() + 7) // 8
    keys = np.empty((len(tokens), width), np.uint8)
    for byte in range(width):
        keys[:, byte] = tokens >> 8 * (width - 1 - byte)
    keys[is_separator] = 0xFF
    return keys.reshape(-1), width


def _aligned(order: NDArray[Any], width: int, num_suffixes: int) -> NDArray[np.uint32]:
    """Return the token positions for sorted byte positions, without separators.

    Byte positions inside a token are dropped. Separators are the largest keys, so their suffixes
    come last. The result overwrites the part of `order` that has been read, whose elements are at
    least as large.
    """
    positions = order.view(POSITION_DTYPE)[:num_suffixes]
    filled = 0
    for begin in range(0, len(order), _STRIDE):
        piece = order[begin : begin + _STRIDE]
        token, between = np.divmod(piece, width)
        kept = token[between == 0][: num_suffixes - filled]
        positions[filled : filled + len(kept)] = kept
        filled += len(kept)
    return positions


MAX_SEGMENT_TOKENS: Final = 64_000_000
"""Default size of a segment. Sorting it takes 0.7 to 1 GB of memory, depending on the
vocabulary."""

_BYTES_PER_VOCABULARY_ENTRY: Final = 16
"""Memory per entry of `starts` while a segment is written, for two counts of eight bytes."""

_BYTES_PER_DOCUMENT: Final = 512
"""Memory per document while a segment is written: its table row, and its name twice."""


@dataclass(frozen=True, slots=True)
class Piece:
    """Documents of a part that go into one segment.

    Attributes:
        part: part that contains the documents.
        runs: starts and ends of ranges of document numbers, ascending and not empty.
    """

    part: Part
    runs: tuple[tuple[int, int], ...]

    @property
    def length(self) -> int:
        """Number of tokens and separators in the piece."""
        starts = self.part.documents().starts
        bounds = np.append(starts, self.part.length).astype(np.int64)
        return sum(int(bounds[end] - bounds[begin]) for begin, end in self.runs)


@dataclass(frozen=True, slots=True)
class SegmentTask:
    """The arguments of `write_segment`.

    Attributes:
        folder: folder of the segment, to be created; nothing in it is published.
        name: name of the segment.
        pieces: documents in order, in at least one piece.
        vocabulary_size: largest token id plus one.
        key: see `kept_results.Task`.
    """

    folder: Path
    name: str
    pieces: tuple[Piece, ...]
    vocabulary_size: int
    key: str = ""

    @property
    def memory_bytes(self) -> int:
        """Most memory that `write_segment` takes."""
        num_documents = sum(end - begin for piece in self.pieces for begin, end in piece.runs)
        num_tokens = sum(piece.length for piece in self.pieces)
        return (
            sorting_bytes(num_tokens, self.vocabulary_size)
            + _BYTES_PER_DOCUMENT * num_documents
            + _BYTES_PER_VOCABULARY_ENTRY * self.vocabulary_size
        )


def write_segment(task: SegmentTask) -> SegmentRecord:
    """Join documents, sort them and write a segment. An existing folder of its name is overwritten.

    The result depends only on the argument and the files of the parts. So it may run in any process
    that sees these files, and may run again.

    Raises:
        DamagedIndexError: a part is damaged.
        IndexerError: the disk is full, or the system denies the write.
    """
    folder, dtype = task.folder, token_dtype(task.vocabulary_size)
    columns, documents = _joined(task.pieces, dtype)
    files = {name: write_array(folder / name, array) for name, array in documents.files().items()}
    files[TOKENS_FILE] = write_columns(folder / TOKENS_FILE, columns)
    tokens: Tokens = map_array(folder / TOKENS_FILE, dtype)  # the system can reclaim its pages
    starts = first_token_starts(tokens, task.vocabulary_size)
    files[STARTS_FILE] = write_array(folder / STARTS_FILE, starts)
    if all(piece.part.keeps_texts for piece in task.pieces):
        files[TEXTS_FILE] = _write_texts(folder / TEXTS_FILE, task.pieces)
    suffixes = sort_suffixes(tokens)
    files[SUFFIXES_FILE] = write_array(folder / SUFFIXES_FILE, suffixes)
    if len(suffixes) >= MIN_KEYED_SUFFIXES:
        keys = suffix_keys(tokens, suffixes, task.vocabulary_size)
        files[KEYS_FILE] = write_array(folder / KEYS_FILE, keys)
    del suffixes  # frees gigabytes
    sync_folder(folder)
    num_documents = len(documents)
    num_tokens = len(tokens) - num_documents
    return SegmentRecord(task.name, num_documents, num_tokens, documents.licences, files)


def gather(pieces: Iterable[Piece], most: int) -> Iterator[list[Piece]]:
    """Yield the pieces of each segment. Segments are divided only between documents.

    Args:
        pieces: pieces in order.
        most: most tokens and separators of a segment, unless it is a single document.

    Raises:
        IndexerError: a document has more tokens than a segment can address.
    """
    gathered: list[tuple[Part, list[tuple[int, int]]]] = []
    length = 0
    for piece in pieces:
        table, end = piece.part.documents(), piece.part.length
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


def _joined(pieces: Iterable[Piece], dtype: np.dtype[Any]) -> tuple[list[Tokens], DocumentTable]:
    """Return the mapped tokens of all pieces in order, and the table of their documents."""
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
    return columns, join_tables(tables, offsets)


def _write_texts(path: Path, pieces: Iterable[Piece]) -> FileRecord:
    with writing_to(path):
        with text_stream(path) as stream:
            for piece in pieces:
                for line in piece.part.text_lines(piece.runs):
                    stream.write(line + b"\n")
        sync_file(path)
        return FileRecord.of_file(path)
