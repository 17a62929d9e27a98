"""Checks the files of an index, and maps them into memory or copies them."""

import ctypes
import mmap
import os
import sys
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any, BinaryIO, Final
from weakref import WeakValueDictionary

import numpy as np
from numpy.typing import NDArray

from indexer.errors import DamagedIndexError, IndexerError
from indexer.format.documents import DocumentTable
from indexer.format.names import (
    COUNT_DTYPE,
    DIGEST_BYTES,
    DIGESTS_FILE,
    DOCUMENT_STARTS_FILE,
    KEY_DTYPE,
    KEY_STRIDE,
    KEYS_FILE,
    LICENCE_DTYPE,
    LICENCES_FILE,
    NAME_ENDS_FILE,
    NAMES_FILE,
    OFFSET_DTYPE,
    PHRASE_FILES,
    PHRASES_FOLDER,
    POSITION_DTYPE,
    SEGMENTS_FOLDER,
    STARTS_FILE,
    SUFFIXES_FILE,
    TOKENIZER_FILE,
    TOKENS_FILE,
    Tokens,
    token_dtype,
)
from indexer.format.phrase_tables import PhraseTables
from indexer.format.records import Contents, FileRecord, PhrasesRecord, SegmentRecord

DOCUMENT_DTYPES: Final[dict[str, np.dtype[Any]]] = {
    DOCUMENT_STARTS_FILE: POSITION_DTYPE,
    NAMES_FILE: np.dtype(np.uint8),
    NAME_ENDS_FILE: OFFSET_DTYPE,
    LICENCES_FILE: LICENCE_DTYPE,
    DIGESTS_FILE: np.dtype(np.uint8),
}

_SMALL_BYTES: Final = 1 << 16
"""Smaller files are read instead of mapped. Each map holds a file descriptor. A process has few
descriptors, and an index with many small segments has many files."""

_STEP_BYTES: Final = 1 << 24
"""Bytes of a file to copy to memory at a time. Other threads run between these steps."""


@dataclass(frozen=True, slots=True, eq=False)
class Segment:
    """A part of an index. It is immutable; its arrays are read-only mapped files or copies.

    Attributes:
        name: name of the segment's folder.
        tokens: uint16[n] or uint32[n], the tokens of all documents. A separator follows each
            document. It is the largest value of the dtype, and never a token id.
        suffixes: uint32[m], the positions in `tokens` that have no separator. Their order is the
            lexicographic order of the tokens from each position to the end of the segment.
        starts: uint32[vocabulary size + 1]; the suffixes that start with token t are
            `suffixes[starts[t]:starts[t + 1]]`. On a damaged disk, all elements but the first and
            the last may have any value, so code that slices with them must clamp.
        documents: table of the documents that the tokens belong to.
        keys: uint64[m / `KEY_STRIDE`, rounded up], see `indexer.stages.segments.suffix_keys`;
            uint64[0] if the segment has no keys.
    """

    name: str
    tokens: Tokens
    suffixes: NDArray[np.uint32]
    starts: NDArray[np.uint32]
    documents: DocumentTable
    keys: NDArray[np.uint64] = field(default_factory=lambda: np.zeros(0, KEY_DTYPE))

    def arrays(self) -> Iterator[NDArray[Any]]:
        """Yield the array of each file."""
        yield from (self.tokens, self.suffixes, self.starts, self.keys)
        yield from self.documents.files().values()


@dataclass(frozen=True, slots=True, eq=False)
class Snapshot:
    """The segments and phrase tables of one published snapshot, mapped or held in memory."""

    segments: tuple[Segment, ...]
    phrases: PhraseTables

    def mapped_arrays(self) -> Iterator[NDArray[Any]]:
        """Yield the array of each file that is mapped into memory; other arrays may be views."""
        files = (array for segment in self.segments for array in segment.arrays())
        for each in (*files, *self.phrases.files().values()):
            array = each
            while isinstance(array.base, np.ndarray):
                array = array.base
            if isinstance(array.base, memoryview) and isinstance(array.base.obj, _MappedFile):
                yield array


Before = tuple[Contents, Snapshot] | None
"""An earlier snapshot of the same folder, with its contents; None if there is none."""


def check_size(path: Path, num_bytes: int) -> None:
    """Check that a file exists and has the expected size.

    Raises:
        DamagedIndexError: the file does not exist, or has another size.
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
    """Check a file's size and checksum against its record. The whole file is read.

    Raises:
        DamagedIndexError: the file does not exist, cannot be read, or differs from its record.
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


def open_snapshot(
    path: Path, contents: Contents, before: Before = None, *, hold: bool = False
) -> Snapshot:
    """Map or hold all files that the catalog of the index at `path` lists, and check them.

    Args:
        path: directory of the index.
        contents: contents of the index's catalog.
        before: earlier snapshot; files that both snapshots have are not opened again.
        hold: whether to copy files to memory instead of mapping them.

    Raises:
        DamagedIndexError: as for `open_segment` and `open_phrases`, or the tokenizer's file is
            missing or has another size.
    """
    size = contents.vocabulary.size
    if contents.tokenizer is not None:
        check_size(path / TOKENIZER_FILE, contents.tokenizer.num_bytes)
    mapped = _mapped(before)
    segments = [
        mapped[record.name][1]
        if record.name in mapped and mapped[record.name][0] == record
        else open_segment(path, record, size, hold=hold)
        for record in contents.segments
    ]
    if before is not None and before[0].phrases == contents.phrases:
        return Snapshot(tuple(segments), before[1].phrases)
    return Snapshot(tuple(segments), open_phrases(path, contents.phrases, size, hold=hold))


def _mapped(before: Before) -> dict[str, tuple[SegmentRecord, Segment]]:
    """Return the segments of a snapshot by name, each with its record."""
    if before is None:
        return {}
    contents, snapshot = before
    pairs = zip(contents.segments, snapshot.segments, strict=True)
    return {record.name: (record, segment) for record, segment in pairs}


def open_segment(
    path: Path, record: SegmentRecord, vocabulary_size: int, *, hold: bool = False
) -> Segment:
    """Map or hold the files of a segment of the index at `path`, and check their sizes.

    Of mapped files, only the first and last elements of `starts` are read.

    Raises:
        DamagedIndexError: a file is missing or has the wrong size, or `starts` does not end with
            the number of `suffixes`.
    """
    folder = path / SEGMENTS_FOLDER / record.name
    for name, file in record.files.items():
        check_size(folder / name, file.num_bytes)
    tokens = map_array(folder / TOKENS_FILE, token_dtype(vocabulary_size), hold=hold)
    suffixes = map_array(folder / SUFFIXES_FILE, POSITION_DTYPE, hold=hold)
    starts = map_array(folder / STARTS_FILE, POSITION_DTYPE, hold=hold)
    lengths = (record.num_tokens + record.num_documents, record.num_tokens, vocabulary_size + 1)
    if (len(tokens), len(suffixes), len(starts)) != lengths:
        raise DamagedIndexError(f"the files of {folder} contradict the counts in the catalog")
    if (starts[0], starts[-1]) != (0, len(suffixes)):
        raise DamagedIndexError(
            f"{folder / STARTS_FILE} is damaged, it does not divide the suffixes: "
            "copy or build the index again"
        )
    documents = open_documents(folder, record.num_documents, record.licences, hold=hold)
    if KEYS_FILE not in record.files:
        return Segment(record.name, tokens, suffixes, starts, documents)
    keys = map_array(folder / KEYS_FILE, KEY_DTYPE, hold=hold)
    if len(keys) != -(-len(suffixes) // KEY_STRIDE):
        raise DamagedIndexError(f"the files of {folder} contradict the counts in the catalog")
    return Segment(record.name, tokens, suffixes, starts, documents, keys)


def open_documents(
    folder: Path, num_documents: int, licences: tuple[str, ...], *, hold: bool = False
) -> DocumentTable:
    """Map or hold the document files in a folder, and check the number of documents.

    Raises:
        DamagedIndexError: files are missing, or have a different number of documents.
    """
    arrays = {
        name: map_array(folder / name, dtype, hold=hold) for name, dtype in DOCUMENT_DTYPES.items()
    }
    lengths = [len(arrays[name]) for name in (DOCUMENT_STARTS_FILE, NAME_ENDS_FILE, LICENCES_FILE)]
    if {*lengths, len(arrays[DIGESTS_FILE]) / DIGEST_BYTES} != {num_documents}:
        raise DamagedIndexError(f"the documents of {folder} contradict the counts in the catalog")
    return DocumentTable.of_files(arrays, licences)


def open_phrases(
    path: Path, record: PhrasesRecord, vocabulary_size: int, *, hold: bool = False
) -> PhraseTables:
    """Map or hold the phrase table files of the index at `path`, and check that they fit together.

    Of mapped files, only the first and last elements of `starts` are read.

    Raises:
        DamagedIndexError: a file is missing or has the wrong size, or `starts` do not cover the
            entries of the next level.
    """
    folder = path / PHRASES_FOLDER / record.name
    dtypes = {"tokens": token_dtype(vocabulary_size), "counts": COUNT_DTYPE}
    arrays = {}
    for name in PHRASE_FILES:
        check_size(folder / name, record.files[name].num_bytes)
        arrays[name] = map_array(folder / name, dtypes.get(name[:-1], POSITION_DTYPE), hold=hold)
    tables = PhraseTables.of_files(arrays)
    if not _agree(tables, vocabulary_size):
        raise DamagedIndexError(f"the files of {folder} contradict each other")
    return tables


def _agree(tables: PhraseTables, vocabulary_size: int) -> bool:
    """Return whether a level's arrays have equal lengths, and `starts` cover the next level."""
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


class _MappedFile(mmap.mmap):
    """A file mapped into memory. If the file is truncated, the mapping loses the same data.

    Attributes:
        tells_residence: whether the system tells this process which pages are in memory. If the
            process may not change the file, the system reports all of its pages as resident.
        is_entered: whether `enter_resident_pages` has entered the file's pages.
    """

    tells_residence = False
    is_entered = False


_POPULATE_READ: Final = 22
"""MADV_POPULATE_READ of Linux 5.14 and later, which Python does not define."""


def enter_resident_pages(arrays: Iterable[NDArray[Any]]) -> None:
    """Enter pages of mapped files that are in memory into this process's page table.

    Without this, the first read of every few pages costs a microsecond or two. With a billion
    tokens in memory, that happens ten times in each draft. Pages that are not in memory stay on
    disk. It takes 0.1 s per gigabyte, once, because snapshots share unchanged files. On systems
    other than Linux, it does nothing.

    Args:
        arrays: arrays from `Snapshot.mapped_arrays`.
    """
    system = _system()
    if system is None:
        return
    for array in arrays:
        file = array.base.obj if isinstance(array.base, memoryview) else None
        if not isinstance(file, _MappedFile) or file.is_entered or not file.tells_residence:
            continue
        file.is_entered = True
        resident = np.zeros(-(-array.nbytes // mmap.PAGESIZE), np.uint8)
        begin = ctypes.c_void_p(array.ctypes.data)
        if system.mincore(
            begin, ctypes.c_size_t(array.nbytes), ctypes.c_void_p(resident.ctypes.data)
        ):
            continue
        changes = np.flatnonzero(np.diff(resident & 1, prepend=0, append=0)) * mmap.PAGESIZE
        for first, end in changes.reshape(-1, 2).tolist():
            # If the file was truncated meanwhile, this returns an error, and a later read detects
            # it.
            system.madvise(
                ctypes.c_void_p(array.ctypes.data + first),
                ctypes.c_size_t(end - first),
                _POPULATE_READ,
            )


@cache
def _system() -> ctypes.CDLL | None:
    """Return Linux's C library, whose calls run without the GIL."""
    return ctypes.CDLL(None) if sys.platform == "linux" else None


class _HeldFile(mmap.mmap):
    """A copy of a file in memory."""


_FileState = tuple[int, int, int, int]

_held: Final[WeakValueDictionary[_FileState, _HeldFile]] = WeakValueDictionary()
"""Copies in use, by device, inode, size and change time. All holders of a file share one copy."""


def map_array(path: Path, dtype: np.dtype[Any], *, hold: bool = False) -> NDArray[Any]:
    """Map a file as a read-only array. A small file is read, because each map uses a descriptor.

    Args:
        path: path of the file.
        dtype: dtype of the elements.
        hold: whether to copy the file to memory, in huge pages if the system has them.

    Raises:
        DamagedIndexError: the file is missing, unreadable, or not a whole number of elements long.
        IndexerError: there is not enough memory to hold the file.
    """
    try:
        with path.open("rb") as file:
            content: bytes | mmap.mmap
            if os.fstat(file.fileno()).st_size < _SMALL_BYTES:
                content = file.read()
            elif hold:
                content = _copy_of(file, path)
            else:
                content = _MappedFile(file.fileno(), 0, access=mmap.ACCESS_READ)
                content.tells_residence = _tells_residence(file, path)
        array = np.frombuffer(content, dtype)
    except (OSError, ValueError) as error:
        raise DamagedIndexError(f"{path} cannot be mapped into memory: {error}") from error
    array.flags.writeable = False
    return array


def _tells_residence(file: BinaryIO, path: Path) -> bool:
    """Return whether this process owns a file or may change it."""
    user = os.geteuid() if hasattr(os, "geteuid") else -1
    return user in {0, os.fstat(file.fileno()).st_uid} or os.access(path, os.W_OK)


def _copy_of(file: BinaryIO, path: Path) -> _HeldFile:
    """Return a private copy of a file's content in memory.

    Raises:
        DamagedIndexError: the file was truncated while it was read.
        IndexerError: there is not enough memory.
    """
    status = os.fstat(file.fileno())
    state = (status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns)
    if (copy := _held.get(state)) is not None:
        return copy
    try:
        copy = _HeldFile(-1, status.st_size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except OSError as error:
        raise IndexerError(
            f"{path} cannot be held in memory: {error.strerror}: free {status.st_size >> 20} MiB, "
            "or leave out --hold-indexes"
        ) from error
    with suppress(OSError, AttributeError):  # the kernel or system has no huge pages
        copy.madvise(mmap.MADV_HUGEPAGE)
    with memoryview(copy) as target:
        num_read = 0
        while num_read < len(target):
            step = file.readinto(target[num_read : num_read + _STEP_BYTES])  # type: ignore[attr-defined]
            if not step:
                raise DamagedIndexError(
                    f"{path} was truncated while it was read: copy or build the index again"
                )
            num_read += step
    return _held.setdefault(state, copy)
