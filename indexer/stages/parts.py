"""Parts: tokenised documents before sorting, stored on disk between the stages of a build."""

import json
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from indexer.errors import DamagedIndexError, SourceError, writing_to
from indexer.format.compression import zstd
from indexer.format.documents import DocumentTable, DocumentTableBuilder, digest_of
from indexer.format.names import MAX_POSITIONS, TEXTS_FILE, TOKENS_FILE, Tokens, separator_of
from indexer.format.opening import map_array, open_documents
from indexer.format.output import write_array
from indexer.format.records import Document, SegmentRecord


@dataclass(frozen=True, slots=True, eq=False)
class TokenisedDocument:
    """A tokenised document to write into a part.

    Attributes:
        name: name of the source document.
        licence: licence; empty if unknown.
        tokens: uint16[n] or uint32[n], n ≥ 1, without the separator.
        text: text of the document; None if the document came as tokens.
    """

    name: str
    licence: str
    tokens: Tokens
    text: str | None = None

    def digest(self) -> bytes:
        """Return a digest of the document. Equal documents have equal digests."""
        return digest_of(self.tokens.data if self.text is None else self.text.encode("utf-8"))


@dataclass(frozen=True, slots=True)
class Part:
    """A folder of documents with their tokens. Either a build wrote it, or it is a segment.

    Attributes:
        folder: folder with `TOKENS_FILE`, `DOCUMENT_FILES` and, if texts are stored, `TEXTS_FILE`.
        num_documents: number of documents.
        num_tokens: number of tokens, without separators.
        licences: licences that the documents' licence numbers refer to.
        keeps_texts: whether the texts are stored.
    """

    folder: Path
    num_documents: int
    num_tokens: int
    licences: tuple[str, ...]
    keeps_texts: bool

    @classmethod
    def of_segment(cls, folder: Path, record: SegmentRecord) -> Self:
        """Return a segment as a part, because it contains documents and tokens, too."""
        return cls(
            folder, record.num_documents, record.num_tokens, record.licences, record.keeps_texts
        )

    @property
    def whole(self) -> tuple[tuple[int, int]]:
        """The range that covers all documents of the part."""
        return ((0, self.num_documents),)

    @property
    def length(self) -> int:
        """Number of tokens and separators."""
        return self.num_tokens + self.num_documents

    def tokens(self, dtype: np.dtype[Any]) -> Tokens:
        """Return the mapped tokens: each document's tokens, followed by a separator."""
        tokens: Tokens = map_array(self.folder / TOKENS_FILE, dtype)
        if len(tokens) != self.length:
            raise DamagedIndexError(f"{self.folder / TOKENS_FILE} has another size than was built")
        return tokens

    def documents(self) -> DocumentTable:
        """Return the document table, mapped into memory."""
        return open_documents(self.folder, self.num_documents, self.licences)

    def texts(self) -> Iterator[tuple[str, str, str]]:
        """Yield the name, licence and text of each document, if texts are stored.

        Raises:
            DamagedIndexError: the texts file is damaged.
        """
        for line in self.text_lines(self.whole):
            try:
                fields = json.loads(line)
                yield str(fields["name"]), str(fields["licence"]), str(fields["text"])
            except (ValueError, KeyError, TypeError, RecursionError) as error:
                raise _damaged_texts(self.folder) from error

    def text_lines(self, runs: Sequence[tuple[int, int]]) -> Iterator[bytes]:
        """Yield the lines of the texts file for some documents.

        Args:
            runs: starts and ends of ranges of document numbers, ascending and not empty.

        Raises:
            DamagedIndexError: the texts file is damaged.
        """
        lines = enumerate(self._all_text_lines())
        for begin, end in runs:
            for number, line in lines:
                if number >= begin:
                    yield line
                if number + 1 == end:
                    break
            else:
                raise _damaged_texts(self.folder)

    def _all_text_lines(self) -> Iterator[bytes]:
        try:
            with zstd.open(self.folder / TEXTS_FILE, "rb") as lines:
                for line in lines:
                    yield line.removesuffix(b"\n")
        except (OSError, EOFError, zstd.ZstdError) as error:
            raise _damaged_texts(self.folder) from error


class PartWriter:
    """Writes a part, document by document. Only the names are held in memory.

    Args:
        folder: folder to create; an unfinished part in it is overwritten.
        dtype: dtype of tokens.
        keeps_texts: whether to store the texts, which the documents must then have.

    Raises:
        IndexerError: the disk is full, or the system denies the write; raised by every method.
    """

    def __init__(self, folder: Path, dtype: np.dtype[Any], *, keeps_texts: bool = False) -> None:
        self.folder = folder
        self._separator = np.array([separator_of(dtype)], dtype)
        self._documents = DocumentTableBuilder()
        self._keeps_texts = keeps_texts
        self.length = 0
        self._stack = ExitStack()
        with writing_to(folder):
            folder.mkdir(parents=True, exist_ok=True)
            self._tokens = self._stack.enter_context((folder / TOKENS_FILE).open("wb"))
            if keeps_texts:
                self._texts = self._stack.enter_context(text_stream(folder / TEXTS_FILE))

    def add(self, document: TokenisedDocument) -> None:
        """Append a document.

        Raises:
            SourceError: the part has more tokens than can be addressed.
        """
        if self.length + len(document.tokens) >= MAX_POSITIONS:
            raise SourceError(
                f"too many tokens come from one source, up to {document.name}: cut it"
            )
        self._documents.add(
            Document(document.name, document.licence, self.length), document.digest()
        )
        self.length += len(document.tokens) + 1
        with writing_to(self.folder):
            self._tokens.write(np.ascontiguousarray(document.tokens).data)
            self._tokens.write(self._separator.data)
            if self._keeps_texts:
                self._texts.write(text_line(document) + b"\n")

    def close(self) -> Part:
        """Write the document table and return the part."""
        table = self._documents.table()
        with writing_to(self.folder):
            self._stack.close()
        for name, array in table.files().items():
            write_array(self.folder / name, array, durable=False)
        num_documents = len(table)
        return Part(
            self.folder,
            num_documents,
            self.length - num_documents,
            table.licences,
            self._keeps_texts,
        )

    def discard(self) -> None:
        """Close the files of an unfinished part."""
        with suppress(OSError):  # a full disk cannot take the buffered bytes
            self._stack.close()


def text_stream(path: Path) -> Any:
    """Return a stream that compresses lines into a texts file."""
    return zstd.open(path, "wb", level=6)


def text_line(document: TokenisedDocument) -> bytes:
    """Return the JSON line of a document in a texts file."""
    fields = {"licence": document.licence, "name": document.name, "text": document.text}
    return json.dumps(fields, separators=(",", ":"), sort_keys=True).encode("ascii")


def kept_runs(kept: NDArray[np.bool_]) -> list[tuple[int, int]]:
    """Return the starts and ends of the runs of true values."""
    edges = np.flatnonzero(np.diff(np.concatenate([[False], kept, [False]]).astype(np.int8)))
    return list(zip(edges[::2].tolist(), edges[1::2].tolist(), strict=True))


def _damaged_texts(folder: Path) -> DamagedIndexError:
    return DamagedIndexError(
        f"{folder / TEXTS_FILE} is damaged, it does not hold the texts of the documents: "
        "copy or build the index again"
    )
