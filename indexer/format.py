"""The names, numbers and records of the on-disk format; docs/format.md specifies them.

These are the values that writers and readers agree on; where they go is not decided here.
"""

import hashlib
import json
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Self

import numpy as np
from numpy.typing import NDArray

from indexer.errors import DamagedIndexError

FORMAT_VERSION: Final = 2

CATALOG_FOLDER: Final = "catalog"
CATALOG_FILE: Final = "data.mdb"
CATALOG_LOCK_FILE: Final = "lock.mdb"
"""Left by tools that open a catalog with locks; no index needs it."""

CHECKSUM_FILE: Final = "checksum"
SEGMENTS_FOLDER: Final = "segments"
TOKENS_FILE: Final = "tokens"
SUFFIXES_FILE: Final = "suffixes"
STARTS_FILE: Final = "starts"
SEGMENT_FILES: Final = (TOKENS_FILE, SUFFIXES_FILE, STARTS_FILE)
PHRASES_FOLDER: Final = "phrases"
PHRASE_FILES: Final = (
    *("counts1", "starts1"),
    *("tokens2", "counts2", "starts2"),
    *("tokens3", "counts3", "starts3"),
    *("tokens4", "counts4"),
)

FORMAT_KEY: Final = b"format"
VOCABULARY_KEY: Final = b"vocabulary"
SEGMENTS_KEY: Final = b"segments"
PHRASES_KEY: Final = b"phrases"
_DOCUMENT_PREFIX: Final = b"document/"

POSITION_DTYPE: Final = np.dtype("<u4")
"""Of suffixes and starts: a segment has fewer than 2**32 tokens."""

COUNT_DTYPE: Final = np.dtype("u1")
"""Of counts in the phrase tables: see `indexer.counts`."""

MAX_POSITIONS: Final = 2**32 - 1
"""Of a segment, so that counts of positions fit `POSITION_DTYPE` as well."""

MAX_ORDER: Final = 4
"""Tokens of the longest n-grams in the phrase tables."""

_CHECKSUM_BYTES: Final = 32
_READ_BYTES: Final = 1 << 22

Tokens = NDArray[np.uint16] | NDArray[np.uint32]


@dataclass(frozen=True, slots=True)
class Document:
    """A document as the catalog lists it.

    Attributes:
        name: where the text came from: a path, or a path and a line number.
        licence: the licence of the text, empty where unknown.
        start: position of its first token in its segment.
    """

    name: str
    licence: str
    start: int


@dataclass(frozen=True, slots=True)
class FileRecord:
    """Size in bytes and BLAKE2b-256 checksum, in hexadecimal, of one file."""

    num_bytes: int
    checksum: str

    @classmethod
    def of(cls, content: memoryview | bytes) -> Self:
        """Return the record of a file with this content."""
        checksum = hashlib.blake2b(content, digest_size=_CHECKSUM_BYTES).hexdigest()
        return cls(memoryview(content).nbytes, checksum)

    @classmethod
    def of_file(cls, path: Path) -> Self:
        """Return the record of a file on disk."""
        digest = hashlib.blake2b(digest_size=_CHECKSUM_BYTES)
        num_bytes = 0
        with path.open("rb") as file:
            while piece := file.read(_READ_BYTES):
                digest.update(piece)
                num_bytes += len(piece)
        return cls(num_bytes, digest.hexdigest())

    def encode(self) -> dict[str, Any]:
        """Return what stands in the JSON of a record."""
        return {"blake2b": self.checksum, "bytes": self.num_bytes}

    @classmethod
    def decode(cls, value: Any) -> Self:
        """Read what `encode` made."""
        return cls(int(value["bytes"]), str(value["blake2b"]))


@dataclass(frozen=True, slots=True)
class SegmentRecord:
    """A segment as the catalog lists it.

    Attributes:
        name: name of its folder.
        num_documents: documents in it.
        num_tokens: tokens in it, separators not counted.
        files: size and checksum of each of `SEGMENT_FILES`.
    """

    name: str
    num_documents: int
    num_tokens: int
    files: dict[str, FileRecord]

    def encode(self) -> dict[str, Any]:
        """Return what stands in the JSON of the record of segments."""
        return {
            "documents": self.num_documents,
            "files": {name: record.encode() for name, record in self.files.items()},
            "name": self.name,
            "tokens": self.num_tokens,
        }

    @classmethod
    def decode(cls, value: Any) -> Self:
        """Read what `encode` made."""
        files = {name: FileRecord.decode(value["files"][name]) for name in SEGMENT_FILES}
        name = str(value["name"])
        if not is_segment_name(name):
            raise ValueError(name)
        return cls(name, int(value["documents"]), int(value["tokens"]), files)


@dataclass(frozen=True, slots=True)
class PhrasesRecord:
    """The phrase tables as the catalog lists them.

    Attributes:
        name: name of their folder.
        files: size and checksum of each of `PHRASE_FILES`.
    """

    name: str
    files: dict[str, FileRecord]

    def encode(self) -> dict[str, Any]:
        """Return what stands in the JSON of the record."""
        files = {name: record.encode() for name, record in self.files.items()}
        return {"files": files, "name": self.name}

    @classmethod
    def decode(cls, value: Any) -> Self:
        """Read what `encode` made."""
        files = {name: FileRecord.decode(value["files"][name]) for name in PHRASE_FILES}
        name = str(value["name"])
        if not is_segment_name(name):
            raise ValueError(name)
        return cls(name, files)


def token_dtype(vocabulary_size: int) -> np.dtype[Any]:
    """Return the dtype of tokens: two bytes where ids and the separator fit, else four."""
    return np.dtype("<u2") if vocabulary_size <= np.iinfo(np.uint16).max else np.dtype("<u4")


def separator_of(dtype: np.dtype[Any]) -> int:
    """Return the token that ends every document: the largest value of the dtype."""
    return int(np.iinfo(dtype).max)


def segment_name(ordinal: int) -> str:
    """Return the name of the folder of the segment that was written as number `ordinal`."""
    return f"{ordinal:08d}"


def is_segment_name(name: str) -> bool:
    """Tell whether `segment_name` makes this name."""
    return name.isascii() and name.isdecimal() and name == segment_name(int(name))


def document_key(segment: str, start: int) -> bytes:
    """Return the catalog's key of the document that starts at `start` in the named segment.

    Big-endian, so that the order of keys is the order of documents.
    """
    return document_prefix(segment) + struct.pack(">I", start)


def document_prefix(segment: str) -> bytes:
    """Return what the keys of a segment's documents begin with."""
    return _DOCUMENT_PREFIX + segment.encode("ascii") + b"/"


def encode_document(document: Document) -> bytes:
    """Return the catalog's value for a document; its start is in the key."""
    return encode_json({"licence": document.licence, "name": document.name})


def decode_document(key: bytes, value: bytes) -> Document:
    """Read a key and a value of the document table.

    Raises:
        DamagedIndexError: they are not what `document_key` and `encode_document` make.
    """
    fields = decode_json(value)
    try:
        (start,) = struct.unpack(">I", key[-4:])
        return Document(str(fields["name"]), str(fields["licence"]), start)
    except (KeyError, TypeError, struct.error) as error:
        raise DamagedIndexError(f"a record of the document table is not one: {value!r}") from error


def encode_json(value: Any) -> bytes:
    """Return compact ASCII JSON with sorted keys: equal values give equal bytes."""
    return json.dumps(value, separators=(",", ":"), sort_keys=True).encode("ascii")


def decode_json(value: bytes) -> Any:
    """Read a record.

    Raises:
        DamagedIndexError: it is not JSON.
    """
    try:
        return json.loads(value)
    except (ValueError, RecursionError) as error:
        raise DamagedIndexError(f"a record is not JSON: {value[:80]!r}") from error
