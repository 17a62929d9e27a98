"""Writing segments: documents gathered to a bounded size, sorted and stored; then their phrases."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from indexer.errors import IndexerError
from indexer.format import (
    MAX_POSITIONS,
    PHRASES_FOLDER,
    SEGMENTS_FOLDER,
    STARTS_FILE,
    SUFFIXES_FILE,
    TOKENS_FILE,
    Document,
    PhrasesRecord,
    SegmentRecord,
    Tokens,
    segment_name,
    separator_of,
)
from indexer.opening import open_segment
from indexer.output import write_array
from indexer.suffixes import first_token_starts, sort_suffixes
from indexer.tables import build_tables

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
        TOKENS_FILE: write_array(folder / TOKENS_FILE, tokens),
        STARTS_FILE: write_array(folder / STARTS_FILE, first_token_starts(tokens, vocabulary_size)),
        SUFFIXES_FILE: write_array(folder / SUFFIXES_FILE, sort_suffixes(tokens)),
    }
    num_documents = len(block.documents)
    return SegmentRecord(name, num_documents, len(tokens) - num_documents, files)


def write_phrases(
    index_folder: Path, records: Sequence[SegmentRecord], vocabulary_size: int
) -> PhrasesRecord:
    """Write the phrase tables of all segments under an index that is being built."""
    segments = [open_segment(index_folder, record, vocabulary_size) for record in records]
    tables = build_tables(segments, vocabulary_size)
    name = segment_name(0)
    folder = index_folder / PHRASES_FOLDER / name
    files = {file: write_array(folder / file, array) for file, array in tables.files().items()}
    return PhrasesRecord(name, files)
