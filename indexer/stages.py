"""The stages of a build, from sources to the contents of a snapshot; each maps over tasks.

Every stage is a function of arguments that travel between processes, so that an engine may run
it anywhere: blocks of sources become parts, parts without duplicates become segments, and the
segments' n-grams become phrase tables.
"""

import shutil
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import numpy as np
from numpy.typing import NDArray

from indexer.engines import Engine
from indexer.format import (
    DIGEST_BYTES,
    PHRASES_FOLDER,
    SCRATCH_FOLDER,
    ordinal_name,
    token_dtype,
)
from indexer.parts import Part, PartWriter, TokenisedDocument, kept_runs
from indexer.phrase_writer import write_phrases
from indexer.records import Contents, PhrasesRecord, SegmentRecord
from indexer.segments import Piece, SegmentTask, write_segment
from indexer.sources import SourceFile, read_documents
from indexer.suffixes import sorting_bytes
from indexer.tally import Tally
from indexer.tokenise import stored_encoder, tokenise, tokenising_bytes, usable_texts

DUPLICATE: Final = "exact duplicate"

_UNCOUNTED_SHARE: Final = 8
"""Phrase tables are made anew once more than one in so many tokens is not counted in them."""

_BYTES_PER_VOCABULARY_ENTRY: Final = 16

_BYTES_PER_DOCUMENT: Final = 512
"""Of memory while a segment is written: of its place in the tables, and its name twice."""


@dataclass(frozen=True, slots=True)
class PartTask:
    """All that `write_part` needs to know.

    Attributes:
        folder: of the part, to be made.
        files: the sources.
        tokenizer: the stored tokenizer.
        vocabulary_size: largest token id plus one.
        field: key of the text in a line of JSON.
        max_document_bytes: longer documents are skipped.
        keep_texts: whether texts are stored.
    """

    folder: Path
    files: tuple[SourceFile, ...]
    tokenizer: Path
    vocabulary_size: int
    field: str
    max_document_bytes: int
    keep_texts: bool

    @property
    def memory_bytes(self) -> int:
        """How much memory `write_part` takes at most."""
        largest = max(
            self.max_document_bytes if file.name.lower().endswith(".gz") else file.num_bytes
            for file in self.files
        )
        return tokenising_bytes(min(largest, self.max_document_bytes))


def write_part(task: PartTask) -> tuple[Part, Tally]:
    """Read and tokenise sources; return where the result is and what was counted."""
    tally = Tally()
    read = read_documents(task.files, task.field, task.max_document_bytes, tally)
    named = ((name, "", text) for name, text in read)
    usable = usable_texts(named, task.max_document_bytes, tally)
    dtype = token_dtype(task.vocabulary_size)
    documents = tokenise(usable, stored_encoder(task.tokenizer), dtype, tally)
    part = gather_part(documents, task.folder, task.vocabulary_size, keep_texts=task.keep_texts)
    return part, tally


def gather_part(
    documents: Iterable[TokenisedDocument], folder: Path, vocabulary_size: int, *, keep_texts: bool
) -> Part:
    """Write documents as a part."""
    writer = PartWriter(folder, token_dtype(vocabulary_size), keeps_texts=keep_texts)
    try:
        for document in documents:
            writer.add(document)
    except BaseException:
        writer.discard()
        raise
    return writer.close()


def without_duplicates(
    parts: Sequence[Part], known: Sequence[NDArray[np.uint8]], tally: Tally
) -> list[Piece]:
    """Return the documents of parts that no part before has, nor what is known; count the rest.

    Args:
        parts: in order.
        known: uint8[n, DIGEST_BYTES] each, digests of documents that are there already.
        tally: counts the duplicates.
    """
    digests = np.concatenate([*known, *(part.documents().digests for part in parts)])
    is_first = np.zeros(len(digests), np.bool_)
    keys = np.ascontiguousarray(digests).view(f"V{DIGEST_BYTES}").reshape(-1)
    is_first[np.unique(keys, return_index=True)[1]] = True
    begin = sum(len(each) for each in known)
    pieces = []
    for part in parts:
        kept = is_first[begin : begin + part.num_documents]
        begin += part.num_documents
        if not kept.all():
            table = part.documents()
            for number in np.flatnonzero(~kept).tolist():
                tally.skip(DUPLICATE, table.name(number))
        if kept.any():
            pieces.append(Piece(part, tuple(kept_runs(kept))))
    return pieces


def write_segments(
    engine: Engine,
    folder: Path,
    groups: Iterable[Sequence[Piece]],
    first: int,
    vocabulary_size: int,
) -> list[SegmentRecord]:
    """Write a segment for each group of pieces, numbered from `first` on."""
    tasks = [
        SegmentTask(folder, ordinal_name(number), tuple(group), vocabulary_size)
        for number, group in enumerate(groups, first)
    ]
    need = max((_segment_bytes(task) for task in tasks), default=0)
    return list(engine.map(write_segment, tasks, need))


def renewed_phrases(
    engine: Engine, folder: Path, number: int, contents: Contents, *, always: bool = False
) -> PhrasesRecord:
    """Return phrase tables for the segments of contents: those that they have, if these will do.

    They will where they count nothing that is gone, and lack no more than an eighth of the tokens:
    what was just added is still found in the suffixes, and counting all anew takes as long as all
    is large.

    Args:
        engine: where to run.
        folder: the index's directory.
        number: of the snapshot that will be published.
        contents: with the phrase tables of the snapshot before.
        always: make them anew unless they are exactly those of the segments.
    """
    counted = set(contents.phrases.segments)
    uncounted = [record for record in contents.segments if record.name not in counted]
    is_stale = bool(counted - {record.name for record in contents.segments})
    num_uncounted = sum(record.num_tokens for record in uncounted)
    most = 0 if always else contents.num_tokens // _UNCOUNTED_SHARE
    if contents.phrases.files and not is_stale and num_uncounted <= most:
        return contents.phrases
    return _write_phrases(engine, folder, ordinal_name(number), contents)


def _write_phrases(engine: Engine, folder: Path, name: str, contents: Contents) -> PhrasesRecord:
    scratch, place = folder / SCRATCH_FOLDER / "phrases", folder / PHRASES_FOLDER / name
    size = contents.vocabulary.size
    try:
        files = write_phrases(engine, folder, contents.segments, size, scratch, place)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    return PhrasesRecord(name, tuple(record.name for record in contents.segments), files)


def _segment_bytes(task: SegmentTask) -> int:
    """Return how much memory `write_segment` takes at most."""
    num_documents = sum(end - begin for piece in task.pieces for begin, end in piece.runs)
    num_tokens = sum(_num_tokens(piece) for piece in task.pieces)
    return (
        sorting_bytes(num_tokens, task.vocabulary_size)
        + _BYTES_PER_DOCUMENT * num_documents
        + _BYTES_PER_VOCABULARY_ENTRY * task.vocabulary_size
    )


def _num_tokens(piece: Piece) -> int:
    """Return the length of a piece, separators included."""
    starts = piece.part.documents().starts
    length = piece.part.num_tokens + piece.part.num_documents
    return sum(
        (int(starts[end]) if end < len(starts) else length) - int(starts[begin])
        for begin, end in piece.runs
    )
