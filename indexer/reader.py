"""Opening an index: memory-mapped segments, and which document a position belongs to.

Loads numpy and lmdb only. Opening maps files and reads none of them, so it takes milliseconds
whatever the size of the index.
"""

import mmap
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from indexer.catalog import CatalogReader, Contents
from indexer.errors import DamagedIndexError, IndexNotFoundError, TokenizerMismatchError
from indexer.format import (
    CATALOG_FILE,
    CATALOG_FOLDER,
    CHECKSUM_FILE,
    POSITION_DTYPE,
    SEGMENT_FILES,
    SEGMENTS_FOLDER,
    STARTS_FILE,
    SUFFIXES_FILE,
    TOKENS_FILE,
    Document,
    FileRecord,
    SegmentRecord,
    Tokens,
    decode_json,
    token_dtype,
)
from indexer.tokenizer import Vocabulary

__all__ = ["Document", "Index", "Segment", "Vocabulary"]


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


class Index:
    """An index that is open for reading. Several may be open on one path, in any thread.

    Attributes:
        path: the index's directory.
        vocabulary: of the tokenizer that it was built with.
        segments: its parts, in the order in which they were built.
        num_tokens: tokens in all segments, separators not counted.
        num_documents: documents in all segments.
    """

    def __init__(
        self, path: Path, catalog: CatalogReader, contents: Contents, segments: tuple[Segment, ...]
    ) -> None:
        self.path = path
        self.vocabulary = contents.vocabulary
        self.segments = segments
        self.num_tokens = sum(record.num_tokens for record in contents.segments)
        self.num_documents = sum(record.num_documents for record in contents.segments)
        self._catalog: CatalogReader | None = catalog

    @classmethod
    def open(cls, path: Path | str, *, vocabulary: Vocabulary | None = None) -> Self:
        """Open the index at `path`.

        The sizes of all files are checked, their checksums are not: `verify` does that.

        Args:
            path: the index's directory.
            vocabulary: of the tokenizer whose tokens will be looked up; where given, an index
                for another one is refused.

        Raises:
            IndexNotFoundError: there is no index.
            DamagedIndexError: files are missing or of another size than was written.
            FormatVersionError: the index is of a newer format.
            TokenizerMismatchError: the index was built with another tokenizer.
        """
        path = Path(path)
        catalog = open_catalog(path)
        try:
            contents = catalog.contents()
            if vocabulary is not None:
                _check_vocabulary(path, contents.vocabulary, vocabulary)
            segments = tuple(
                open_segment(path, record, contents.vocabulary.size) for record in contents.segments
            )
        except BaseException:
            catalog.close()
            raise
        return cls(path, catalog, contents, segments)

    def document_at(self, segment: int, position: int) -> Document:
        """Return the document that holds a token; a separator belongs to the one it ends.

        Args:
            segment: index into `segments`.
            position: index into that segment's `tokens`.

        Raises:
            IndexError: there is no such segment or position.
            DamagedIndexError: the document table does not cover the position.
        """
        if self._catalog is None:
            raise ValueError(f"the index {self.path} is closed")
        if not 0 <= segment < len(self.segments):
            raise IndexError(f"no segment {segment} among {len(self.segments)}")
        name, tokens = self.segments[segment].name, self.segments[segment].tokens
        if not 0 <= position < len(tokens):
            raise IndexError(f"no position {position} in a segment of {len(tokens)} tokens")
        document = self._catalog.document_at(name, position)
        if document is None:
            raise DamagedIndexError(
                f"{self.path} lists no document for position {position} of segment {name}"
            )
        return document

    def close(self) -> None:
        """Let go of the catalog. Arrays stay valid as long as they are referred to."""
        if self._catalog is not None:
            self._catalog.close()
            self._catalog = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def open_catalog(path: Path) -> CatalogReader:
    """Open the catalog of the index at `path`, having checked that its file is whole in size.

    Raises:
        IndexNotFoundError: there is no index.
        DamagedIndexError: the catalog is missing, short or unreadable.
    """
    # LMDB maps its file and trusts it: reading past the end of a short one kills the process.
    check_size(path / CATALOG_FOLDER / CATALOG_FILE, catalog_record(path).num_bytes)
    return CatalogReader(path / CATALOG_FOLDER)


def catalog_record(path: Path) -> FileRecord:
    """Return the size and checksum that the catalog of the index at `path` was written with.

    Raises:
        IndexNotFoundError: there is no index.
        DamagedIndexError: the file that says so is missing or unreadable.
    """
    if not path.is_dir():
        raise IndexNotFoundError(
            f"there is no index at {path}: build one with `python -m indexer build`"
        )
    if not any((path / name).exists() for name in (CATALOG_FOLDER, SEGMENTS_FOLDER, CHECKSUM_FILE)):
        raise IndexNotFoundError(f"{path} is a folder but not an index")
    try:
        return FileRecord.decode(decode_json((path / CHECKSUM_FILE).read_bytes()))
    except (DamagedIndexError, OSError, KeyError, TypeError, ValueError) as error:
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


def open_segment(path: Path, record: SegmentRecord, vocabulary_size: int) -> Segment:
    """Map the files of a segment of the index at `path`.

    Raises:
        DamagedIndexError: files are missing or of another size than was written.
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
    return Segment(record.name, tokens, suffixes, starts)


def _check_vocabulary(path: Path, built_for: Vocabulary, at_hand: Vocabulary) -> None:
    if built_for.fingerprint != at_hand.fingerprint:
        raise TokenizerMismatchError(
            f"index {path} was built for another tokenizer ({_describe(built_for)}), "
            f"not for this one ({_describe(at_hand)}): rebuild it with --tokenizer"
        )


def _describe(vocabulary: Vocabulary) -> str:
    return f"vocabulary {vocabulary.size}, fingerprint {vocabulary.fingerprint[:12]}\u2026"


def _map(path: Path, dtype: np.dtype[Any]) -> NDArray[Any]:
    try:
        with path.open("rb") as file:
            content = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        return np.frombuffer(content, dtype)
    except (OSError, ValueError) as error:
        raise DamagedIndexError(f"{path} cannot be mapped into memory: {error}") from error
