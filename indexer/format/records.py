"""The records of a snapshot: segments, phrase tables and files, as values and as JSON."""

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Self

from indexer.errors import DamagedIndexError
from indexer.format.names import (
    OPTIONAL_SEGMENT_FILES,
    PHRASE_FILES,
    SEGMENT_FILES,
    TEXTS_FILE,
    is_ordinal_name,
)
from indexer.tokenizer import Vocabulary

_CHECKSUM_BYTES: Final = 32
_READ_BYTES: Final = 1 << 22
"""Bytes to read at a time for a checksum: enough for a disk's full speed."""


@dataclass(frozen=True, slots=True)
class Document:
    """A document as an index lists it.

    Attributes:
        name: origin of the text: a path, or a path and a line number.
        licence: licence of the text; empty if unknown.
        start: position of the document's first token in its segment.
    """

    name: str
    licence: str
    start: int


@dataclass(frozen=True, slots=True)
class FileRecord:
    """The size in bytes and the hexadecimal BLAKE2b-256 checksum of one file."""

    num_bytes: int
    checksum: str

    @classmethod
    def of(cls, content: memoryview | bytes) -> Self:
        """Return the record of a file with this content."""
        return cls(memoryview(content).nbytes, checksum_of(content))

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
        """Return the JSON value of the record."""
        return {"blake2b": self.checksum, "bytes": self.num_bytes}

    @classmethod
    def decode(cls, value: Any) -> Self:
        """Read the result of `encode`."""
        return cls(int(value["bytes"]), str(value["blake2b"]))


@dataclass(frozen=True, slots=True)
class SegmentRecord:
    """A segment as a snapshot lists it.

    Attributes:
        name: name of the segment's folder.
        num_documents: number of documents.
        num_tokens: number of tokens, without separators.
        licences: licences that the documents' licence numbers refer to.
        files: size and checksum of each of `SEGMENT_FILES`, and of the `OPTIONAL_SEGMENT_FILES`
            that the segment has.
    """

    name: str
    num_documents: int
    num_tokens: int
    licences: tuple[str, ...]
    files: dict[str, FileRecord]

    @property
    def keeps_texts(self) -> bool:
        """Whether the texts of the segment's documents are stored."""
        return TEXTS_FILE in self.files

    def encode(self) -> dict[str, Any]:
        """Return the JSON value of the record."""
        return {
            "documents": self.num_documents,
            "files": {name: record.encode() for name, record in self.files.items()},
            "licences": list(self.licences),
            "name": self.name,
            "tokens": self.num_tokens,
        }

    @classmethod
    def decode(cls, value: Any) -> Self:
        """Read the result of `encode`."""
        files = {name: FileRecord.decode(value["files"][name]) for name in SEGMENT_FILES}
        for name in OPTIONAL_SEGMENT_FILES:
            if name in value["files"]:
                files[name] = FileRecord.decode(value["files"][name])
        licences = tuple(str(licence) for licence in value["licences"])
        return cls(
            checked_name(value), int(value["documents"]), int(value["tokens"]), licences, files
        )


@dataclass(frozen=True, slots=True)
class PhrasesRecord:
    """The phrase tables as a snapshot lists them.

    Attributes:
        name: name of the tables' folder.
        segments: names of the segments whose n-grams the tables count. Segments of the snapshot
            that were added later are missing.
        files: size and checksum of each of `PHRASE_FILES`.
    """

    name: str
    segments: tuple[str, ...]
    files: dict[str, FileRecord]

    def encode(self) -> dict[str, Any]:
        """Return the JSON value of the record."""
        files = {name: record.encode() for name, record in self.files.items()}
        return {"files": files, "name": self.name, "segments": list(self.segments)}

    @classmethod
    def decode(cls, value: Any) -> Self:
        """Read the result of `encode`."""
        files = {name: FileRecord.decode(value["files"][name]) for name in PHRASE_FILES}
        return cls(checked_name(value), tuple(map(str, value["segments"])), files)


@dataclass(frozen=True, slots=True)
class ScreeningRecord:
    """What screening removed from all documents of an index.

    Attributes:
        redacted: whether secrets were replaced.
        excluded: checksum of the excluded phrases and the method; empty if there are none.
    """

    redacted: bool = False
    excluded: str = ""

    def encode(self) -> dict[str, Any]:
        """Return the JSON value of the record."""
        return {"excluded": self.excluded, "redacted": self.redacted}

    @classmethod
    def decode(cls, value: Any) -> Self:
        """Read the result of `encode`."""
        return cls(bool(value["redacted"]), str(value["excluded"]))


NOT_SCREENED: Final = ScreeningRecord()


@dataclass(frozen=True, slots=True)
class Contents:
    """The contents that one snapshot publishes.

    Attributes:
        vocabulary: vocabulary of the tokenizer.
        segments: segments of the index, in order.
        phrases: phrase tables of the segments.
        next_segment: number of the next segment to write; names are never reused.
        tokenizer: stored tokenizer; None for an index that was built from token ids.
        screening: screening of the documents.
        licence: licence that was stated for all documents, and the default for added documents;
            empty if each document has its own.
    """

    vocabulary: Vocabulary
    segments: tuple[SegmentRecord, ...]
    phrases: PhrasesRecord
    next_segment: int
    tokenizer: FileRecord | None = None
    screening: ScreeningRecord = NOT_SCREENED
    licence: str = ""

    @property
    def num_tokens(self) -> int:
        """Number of tokens in all segments, without separators."""
        return sum(record.num_tokens for record in self.segments)

    @property
    def num_uncounted_tokens(self) -> int:
        """Number of tokens in segments that the phrase tables do not cover."""
        counted = set(self.phrases.segments)
        return sum(each.num_tokens for each in self.segments if each.name not in counted)

    @property
    def keeps_texts(self) -> bool:
        """Whether the texts of all documents are stored."""
        return all(record.keeps_texts for record in self.segments)

    def encode(self) -> dict[str, Any]:
        """Return the JSON value of a snapshot, without the format's version."""
        return {
            "licence": self.licence,
            "next_segment": self.next_segment,
            "phrases": self.phrases.encode(),
            "screening": self.screening.encode(),
            "segments": [record.encode() for record in self.segments],
            "tokenizer": self.tokenizer.encode() if self.tokenizer else None,
            "vocabulary": {
                "fingerprint": self.vocabulary.fingerprint,
                **({"name": self.vocabulary.name} if self.vocabulary.name else {}),
                "size": self.vocabulary.size,
            },
        }

    @classmethod
    def decode(cls, value: Any) -> Self:
        """Read the result of `encode`.

        Raises:
            KeyError, TypeError, ValueError, OverflowError: the value is not from `encode`.
        """
        vocabulary, tokenizer = value["vocabulary"], value["tokenizer"]
        return cls(
            Vocabulary(
                int(vocabulary["size"]),
                str(vocabulary["fingerprint"]),
                str(vocabulary.get("name", "")),
            ),
            tuple(SegmentRecord.decode(segment) for segment in value["segments"]),
            PhrasesRecord.decode(value["phrases"]),
            int(value["next_segment"]),
            FileRecord.decode(tokenizer) if tokenizer else None,
            ScreeningRecord.decode(value["screening"]),
            str(value["licence"]),
        )


def checked_name(value: Any) -> str:
    """Return the name in a record after checking that it is a number, not some other path.

    Raises:
        ValueError: the name is not a number.
    """
    name = str(value["name"])
    if not is_ordinal_name(name):
        raise ValueError(name)
    return name


def checksum_of(content: memoryview | bytes) -> str:
    """Return the BLAKE2b-256 checksum of bytes, in hexadecimal."""
    return hashlib.blake2b(content, digest_size=_CHECKSUM_BYTES).hexdigest()


def encode_json(value: Any) -> bytes:
    """Return compact ASCII JSON with sorted keys, so that equal values give equal bytes."""
    return json.dumps(value, separators=(",", ":"), sort_keys=True).encode("ascii")


def decode_json(value: bytes) -> Any:
    """Read a record.

    Raises:
        DamagedIndexError: the record is not JSON.
    """
    try:
        return json.loads(value)
    except (ValueError, RecursionError) as error:
        raise DamagedIndexError(f"a record is not JSON: {value[:80]!r}") from error
