"""Checking the files of an index and mapping them into memory.

All paths are resolved anew for every file: `from_same_folder` guards against indexes that are
replaced meanwhile.
"""

import mmap
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from indexer.catalog import CatalogReader, Contents
from indexer.errors import DamagedIndexError, IndexNotFoundError
from indexer.format import (
    CATALOG_FILE,
    CATALOG_FOLDER,
    CHECKSUM_FILE,
    COUNT_DTYPE,
    PHRASE_FILES,
    PHRASES_FOLDER,
    POSITION_DTYPE,
    SEGMENT_FILES,
    SEGMENTS_FOLDER,
    STARTS_FILE,
    SUFFIXES_FILE,
    TOKENS_FILE,
    FileRecord,
    PhrasesRecord,
    SegmentRecord,
    Tokens,
    decode_json,
    token_dtype,
)
from indexer.phrases import PhraseTables

MAX_CHECKED_CATALOG_BYTES: Final = 16 << 20
"""Larger catalogs are opened unread: opening is to take less than 50 ms."""


@dataclass(frozen=True, slots=True, eq=False)
class Segment:
    """A part of an index, immutable and memory-mapped; all arrays are read-only.

    Attributes:
        name: name of its folder.
        tokens: uint16[n] or uint32[n], the documents one after the other, each ended by a
            separator, which is the largest value of the dtype and never a token id.
        suffixes: uint32[m], the positions in `tokens` that hold no separator, in the
            lexicographic order of the tokens from there to the end of the segment.
        starts: uint32[vocabulary size + 1]; the suffixes that begin with token t are
            `suffixes[starts[t]:starts[t + 1]]`.
    """

    name: str
    tokens: Tokens
    suffixes: NDArray[np.uint32]
    starts: NDArray[np.uint32]


@dataclass(frozen=True, slots=True, eq=False)
class Snapshot:
    """What a catalog publishes, mapped: its segments and their phrase tables."""

    segments: tuple[Segment, ...]
    phrases: PhraseTables


def open_catalog(path: Path, record: FileRecord) -> CatalogReader:
    """Open the catalog of the index at `path`, having checked its file.

    LMDB maps the file and trusts it: reading a damaged one may kill the process. Hence the size
    is always checked, and the checksum where the file has at most `MAX_CHECKED_CATALOG_BYTES`.

    Args:
        path: the index's directory.
        record: what `catalog_record` says of the file.

    Raises:
        DamagedIndexError: the catalog is missing, damaged or unreadable.
    """
    file = path / CATALOG_FOLDER / CATALOG_FILE
    if record.num_bytes <= MAX_CHECKED_CATALOG_BYTES:
        check_file(file, record)
    else:
        check_size(file, record.num_bytes)
    return CatalogReader(path / CATALOG_FOLDER)


def catalog_record(path: Path) -> FileRecord:
    """Return the size and checksum that the catalog of the index at `path` was written with.

    Raises:
        IndexNotFoundError: the folder holds nothing of an index.
        DamagedIndexError: the file that says so is missing or unreadable.
    """
    if not any((path / name).exists() for name in (CATALOG_FOLDER, SEGMENTS_FOLDER, CHECKSUM_FILE)):
        raise IndexNotFoundError(f"{path} is a folder but not an index")
    try:
        return FileRecord.decode(decode_json((path / CHECKSUM_FILE).read_bytes()))
    except (DamagedIndexError, OSError, KeyError, OverflowError, TypeError, ValueError) as error:
        raise DamagedIndexError(f"{path / CHECKSUM_FILE} is unreadable: {error}") from error


def check_size(path: Path, num_bytes: int) -> None:
    """Check that a file exists and has its size.

    Raises:
        DamagedIndexError: it does not, or has not.
    """
    try:
        actual = path.stat().st_size
    except OSError as error:
        raise DamagedIndexError(f"{path} is missing: copy or build the index again") from error
    if actual != num_bytes:
        raise DamagedIndexError(
            f"{path} has {actual} bytes and should have {num_bytes}: copy or build the index again"
        )


def check_file(path: Path, expected: FileRecord) -> None:
    """Check that a file has the size and the checksum that it was built with; reads all of it.

    Raises:
        DamagedIndexError: it does not exist, cannot be read or has not.
    """
    check_size(path, expected.num_bytes)
    try:
        actual = FileRecord.of_file(path)
    except OSError as error:
        raise DamagedIndexError(f"{path} is unreadable: {error.strerror}") from error
    if actual != expected:
        raise DamagedIndexError(
            f"{path} is damaged, its checksum is not the one it was built with: "
            "copy or build the index again"
        )


def open_snapshot(path: Path, contents: Contents) -> Snapshot:
    """Map and check all that the catalog of the index at `path` lists.

    Raises:
        DamagedIndexError: see `open_segment` and `open_phrases`.
    """
    size = contents.vocabulary.size
    return Snapshot(
        tuple(open_segment(path, record, size) for record in contents.segments),
        open_phrases(path, contents.phrases, size),
    )


def open_segment(path: Path, record: SegmentRecord, vocabulary_size: int) -> Segment:
    """Map the files of a segment of the index at `path`, and check their sizes and `starts`.

    What `tokens` and `suffixes` hold is not read.

    Raises:
        DamagedIndexError: files are missing or of another size than was written, or `starts` does
            not divide `suffixes`.
    """
    folder = path / SEGMENTS_FOLDER / record.name
    for name in SEGMENT_FILES:
        check_size(folder / name, record.files[name].num_bytes)
    tokens = _map(folder / TOKENS_FILE, token_dtype(vocabulary_size))
    suffixes = _map(folder / SUFFIXES_FILE, POSITION_DTYPE)
    starts = _map(folder / STARTS_FILE, POSITION_DTYPE)
    lengths = (record.num_tokens + record.num_documents, record.num_tokens, vocabulary_size + 1)
    if (len(tokens), len(suffixes), len(starts)) != lengths:
        raise DamagedIndexError(f"the files of {folder} contradict the counts in the catalog")
    if not _divides(starts, len(suffixes)):
        raise DamagedIndexError(
            f"{folder / STARTS_FILE} is damaged, it does not divide the suffixes: "
            "copy or build the index again"
        )
    return Segment(record.name, tokens, suffixes, starts)


def open_phrases(path: Path, record: PhrasesRecord, vocabulary_size: int) -> PhraseTables:
    """Map the files of the phrase tables of the index at `path`, and check that they fit.

    Of `starts`, level 1 is read whole, and of levels 2 and 3 the ends; of the other files nothing.

    Raises:
        DamagedIndexError: files are missing or of another size than was written, or `starts` do
            not divide the entries of the next level.
    """
    folder = path / PHRASES_FOLDER / record.name
    dtypes = {"tokens": token_dtype(vocabulary_size), "counts": COUNT_DTYPE}
    arrays = {}
    for name in PHRASE_FILES:
        check_size(folder / name, record.files[name].num_bytes)
        arrays[name] = _map(folder / name, dtypes.get(name[:-1], POSITION_DTYPE))
    tables = PhraseTables.of_files(arrays)
    if not _agree(tables, vocabulary_size):
        raise DamagedIndexError(f"the files of {folder} contradict each other")
    if not _divides(tables.starts[0], len(tables.tokens[1])):
        raise DamagedIndexError(
            f"{folder / PHRASE_FILES[1]} is damaged, it does not divide the entries of level 2: "
            "copy or build the index again"
        )
    return tables


def _agree(tables: PhraseTables, vocabulary_size: int) -> bool:
    """Tell whether arrays of one level are of one length and `starts` end with the next level."""
    _, *sizes = tables.num_entries
    return (
        tables.vocabulary_size == vocabulary_size
        and [len(tokens) for tokens in tables.tokens[1:]] == sizes
        and [len(starts) - 1 for starts in tables.starts] == [vocabulary_size, *sizes[:-1]]
        and all(
            (starts[0], starts[-1]) == (0, size)
            for starts, size in zip(tables.starts, sizes, strict=True)
        )
    )


def _divides(starts: NDArray[np.uint32], num_suffixes: int) -> bool:
    """Tell whether any slice between two neighbours in `starts` lies within the suffixes."""
    ends_fit = starts[0] == 0 and starts[-1] == num_suffixes
    return bool(ends_fit and np.all(starts[:-1] <= starts[1:]))


def _map(path: Path, dtype: np.dtype[Any]) -> NDArray[Any]:
    try:
        with path.open("rb") as file:
            if os.fstat(file.fileno()).st_size == 0:  # which cannot be mapped
                return np.empty(0, dtype)
            content = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        return np.frombuffer(content, dtype)
    except (OSError, ValueError) as error:
        raise DamagedIndexError(f"{path} cannot be mapped into memory: {error}") from error
