"""Writing segments: documents gathered to a bounded size, then sorted and stored."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from indexer.errors import IndexerError
from indexer.format import (
    MAX_POSITIONS,
    SEGMENTS_FOLDER,
    STARTS_FILE,
    SUFFIXES_FILE,
    TOKENS_FILE,
    Document,
    FileRecord,
    SegmentRecord,
    Tokens,
    segment_name,
    separator_of,
)
from indexer.output import write_file
from indexer.suffixes import first_token_starts, sort_suffixes

MAX_SEGMENT_TOKENS: Final = 64_000_000
"""A build with segments of this size takes some two gigabytes of memory."""


@dataclass(frozen=True, slots=True, eq=False)
class TokenisedDocument:
    """A document's name and its token ids, uint16[n] or uint32[n], separator not included."""

    name: str
    tokens: Tokens


@dataclass(slots=True, eq=False)
class Block:
    """Documents that will be one segment.

    Attributes:
        pieces: tokens of the documents, a separator after each.
        documents: the documents, with their places.
        length: tokens and separators so far.
    """

    pieces: list[NDArray[Any]] = field(default_factory=list)
    documents: list[Document] = field(default_factory=list)
    length: int = 0

    def add(self, document: TokenisedDocument) -> None:
        """Append a document."""
        dtype = document.tokens.dtype
        self.documents.append(Document(document.name, "", self.length))
        self.pieces += [document.tokens, np.array([separator_of(dtype)], dtype)]
        self.length += len(document.tokens) + 1


def gather_blocks(
    documents: Iterable[TokenisedDocument], max_segment_tokens: int
) -> Iterator[Block]:
    """Yield blocks of whole documents, none longer than the limit unless one document is.

    Raises:
        IndexerError: a document has more tokens than a segment can address.
    """
    block = Block()
    for document in documents:
        if len(document.tokens) >= MAX_POSITIONS:
            raise IndexerError(f"{document.name} has too many tokens: split it")
        if block.documents and block.length + len(document.tokens) + 1 > max_segment_tokens:
            yield block
            block = Block()
        block.add(document)
    if block.documents:
        yield block


def write_segment(
    index_folder: Path, ordinal: int, block: Block, vocabulary_size: int
) -> SegmentRecord:
    """Sort a block and write its segment under an index that is being built.

    Depends on nothing but its arguments, so that blocks can be written in parallel.
    """
    name = segment_name(ordinal)
    folder = index_folder / SEGMENTS_FOLDER / name
    tokens: NDArray[Any] = np.concatenate(block.pieces)
    block.pieces.clear()
    files = {
        TOKENS_FILE: _store(folder / TOKENS_FILE, tokens),
        STARTS_FILE: _store(folder / STARTS_FILE, first_token_starts(tokens, vocabulary_size)),
        SUFFIXES_FILE: _store(folder / SUFFIXES_FILE, sort_suffixes(tokens)),
    }
    num_documents = len(block.documents)
    return SegmentRecord(name, num_documents, len(tokens) - num_documents, files)


def _store(path: Path, array: NDArray[Any]) -> FileRecord:
    content = np.ascontiguousarray(array).data.cast("B")
    write_file(path, content)
    return FileRecord.of(content)
