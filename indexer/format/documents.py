"""The document table of a segment: the start, name, licence and digest of each document."""

import hashlib
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from indexer.errors import DamagedIndexError
from indexer.format.names import (
    DIGEST_BYTES,
    DIGESTS_FILE,
    DOCUMENT_STARTS_FILE,
    LICENCE_DTYPE,
    LICENCES_FILE,
    NAME_ENDS_FILE,
    NAMES_FILE,
    OFFSET_DTYPE,
    POSITION_DTYPE,
)
from indexer.format.records import Document

# File names need not be valid Unicode. Python encodes their invalid bytes as lone surrogates.
_NAME_ERRORS = "surrogatepass"


@dataclass(frozen=True, slots=True, eq=False)
class DocumentTable:
    """The documents of a segment, or some of them, as arrays.

    Attributes:
        starts: uint32[d], position of each document's first token; ascending.
        names: uint8[n], all names in UTF-8, concatenated.
        name_ends: uint64[d], where each name ends in `names`.
        licence_ids: uint32[d], index of each document's licence in `licences`.
        digests: uint8[d, DIGEST_BYTES]; equal documents have equal digests.
        licences: the licences that `licence_ids` refer to.
    """

    starts: NDArray[np.uint32]
    names: NDArray[np.uint8]
    name_ends: NDArray[np.uint64]
    licence_ids: NDArray[np.uint32]
    digests: NDArray[np.uint8]
    licences: tuple[str, ...]

    def __len__(self) -> int:
        return len(self.starts)

    def files(self) -> dict[str, NDArray[Any]]:
        """Return the array of each document file, by file name."""
        return {
            DOCUMENT_STARTS_FILE: self.starts,
            NAMES_FILE: self.names,
            NAME_ENDS_FILE: self.name_ends,
            LICENCES_FILE: self.licence_ids,
            DIGESTS_FILE: self.digests,
        }

    @classmethod
    def of_files(cls, arrays: dict[str, NDArray[Any]], licences: Sequence[str]) -> Self:
        """Return the table of arrays that `files` returned."""
        return cls(
            arrays[DOCUMENT_STARTS_FILE],
            arrays[NAMES_FILE],
            arrays[NAME_ENDS_FILE],
            arrays[LICENCES_FILE],
            arrays[DIGESTS_FILE].reshape(-1, DIGEST_BYTES),
            tuple(licences),
        )

    def document(self, number: int) -> Document:
        """Return a document.

        Raises:
            DamagedIndexError: the arrays have invalid values for this document.
        """
        licence = int(self.licence_ids[number])
        if licence >= len(self.licences):
            raise DamagedIndexError(f"document {number} has a licence that is not listed")
        return Document(self.name(number), self.licences[licence], int(self.starts[number]))

    def named(self, names: Collection[bytes]) -> NDArray[np.bool_]:
        """Return bool[d]: which documents have one of the names, given in UTF-8."""
        found = np.zeros(len(self), np.bool_)
        ends = self.name_ends.astype(np.int64)
        begins = np.concatenate([[0], ends[:-1]])
        lengths = np.array(sorted({len(name) for name in names}), np.int64)
        for number in np.flatnonzero(np.isin(ends - begins, lengths)).tolist():
            found[number] = self.names[begins[number] : ends[number]].tobytes() in names
        return found

    def name(self, number: int) -> str:
        """Return the name of a document. Raises the same errors as `document`."""
        try:
            return self.name_bytes(number).decode("utf-8", _NAME_ERRORS)
        except UnicodeDecodeError as error:
            raise DamagedIndexError(f"the name of document {number} is not UTF-8") from error

    def name_bytes(self, number: int) -> bytes:
        """Return the name of a document in UTF-8. Raises the same errors as `document`."""
        begin = int(self.name_ends[number - 1]) if number else 0
        end = int(self.name_ends[number])
        if not begin <= end <= len(self.names):
            raise DamagedIndexError(f"the name of document {number} lies outside of the names")
        return self.names[begin:end].tobytes()

    def count_licences(self) -> dict[str, int]:
        """Return the number of documents for each licence. Raises the same errors as `document`."""
        used, counts = np.unique(self.licence_ids, return_counts=True)
        if len(used) and used[-1] >= len(self.licences):
            raise DamagedIndexError("a document has a licence that is not listed")
        numbers = zip(used.tolist(), counts.tolist(), strict=True)
        return {self.licences[licence]: number for licence, number in numbers}

    def rows(self, runs: Sequence[tuple[int, int]], length: int) -> "DocumentTable":
        """Return the table of some documents, with starts as if the other tokens were removed.

        Args:
            runs: starts and ends of ranges of document numbers, ascending and not empty.
            length: number of tokens and separators of all documents in this table.
        """
        numbers = np.concatenate([np.arange(begin, end) for begin, end in runs])
        lengths = np.diff(self.starts, append=POSITION_DTYPE.type(length))[numbers]
        ends = self.name_ends.astype(np.int64)
        begins = np.concatenate([[0], ends[:-1]])
        names = [self.names[begins[begin] : ends[end - 1]] for begin, end in runs]
        return DocumentTable(
            (np.cumsum(lengths, dtype=np.int64) - lengths).astype(POSITION_DTYPE),
            np.concatenate(names),
            np.cumsum((ends - begins)[numbers]).astype(OFFSET_DTYPE),
            self.licence_ids[numbers],
            self.digests[numbers],
            self.licences,
        )

    def at(self, position: int) -> int | None:
        """Return the number of the last document that starts at or before a position."""
        # If the position had another dtype, numpy would convert all starts at every call.
        number = int(np.searchsorted(self.starts, np.uint32(position), side="right")) - 1
        return number if number >= 0 else None


def join_tables(tables: Sequence[DocumentTable], offsets: Sequence[int]) -> DocumentTable:
    """Join tables into one, which lists only the licences that its documents have.

    Args:
        tables: at least one table.
        offsets: for each table, the position at which its first document will start.
    """
    licences: dict[str, int] = {}
    starts, name_ends, licence_ids = [], [], []
    name_offset = 0
    for table, offset in zip(tables, offsets, strict=True):
        ids = _renumbered(table, licences)
        starts.append(table.starts + POSITION_DTYPE.type(offset))
        name_ends.append(table.name_ends + OFFSET_DTYPE.type(name_offset))
        licence_ids.append(ids[table.licence_ids])
        name_offset += len(table.names)
    return DocumentTable(
        np.concatenate(starts),
        np.concatenate([table.names for table in tables]),
        np.concatenate(name_ends),
        np.concatenate(licence_ids),
        np.concatenate([table.digests for table in tables]),
        tuple(licences),
    )


def _renumbered(table: DocumentTable, licences: dict[str, int]) -> NDArray[np.uint32]:
    """Number a table's licences by `licences`, to which new ones are added; return the numbers.

    New licences are numbered in the order of the documents, whatever their order in the table.
    """
    ids = np.zeros(len(table.licences), LICENCE_DTYPE)
    used, firsts = np.unique(table.licence_ids, return_index=True)
    for number in used[np.argsort(firsts)].tolist():
        ids[number] = licences.setdefault(table.licences[number], len(licences))
    return ids


class DocumentTableBuilder:
    """Collects the documents of a part or a segment, in order."""

    def __init__(self) -> None:
        self._starts: list[int] = []
        self._names: list[bytes] = []
        self._licences: dict[str, int] = {}
        self._licence_ids: list[int] = []
        self._digests: list[bytes] = []

    def __len__(self) -> int:
        return len(self._starts)

    def add(self, document: Document, digest: bytes) -> None:
        """Append a document and its digest of DIGEST_BYTES; see `digest_of`."""
        self._starts.append(document.start)
        self._names.append(document.name.encode("utf-8", _NAME_ERRORS))
        self._licence_ids.append(self._licences.setdefault(document.licence, len(self._licences)))
        self._digests.append(digest)

    def table(self) -> DocumentTable:
        """Return the table of all documents that were added."""
        ends = np.cumsum([len(name) for name in self._names])
        digests = np.frombuffer(b"".join(self._digests), np.uint8)
        return DocumentTable(
            np.array(self._starts, POSITION_DTYPE),
            np.frombuffer(b"".join(self._names), np.uint8),
            ends.astype(OFFSET_DTYPE),
            np.array(self._licence_ids, LICENCE_DTYPE),
            digests.reshape(-1, DIGEST_BYTES),
            tuple(self._licences),
        )


def digest_of(content: bytes | memoryview) -> bytes:
    """Return a digest of DIGEST_BYTES. Documents with equal content have equal digests."""
    return hashlib.blake2b(content, digest_size=DIGEST_BYTES).digest()
