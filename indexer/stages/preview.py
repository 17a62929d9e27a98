"""Previews what a build or an addition would index, without writing anything."""

from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from indexer.build_report import BuildTally, counted_of
from indexer.format.documents import digest_of
from indexer.format.names import DIGEST_BYTES
from indexer.sources import SourceBlock, plan, read
from indexer.sources.blocks import SourcePiece
from indexer.sources.record_samples import MOST_SAMPLES, RecordSample, given_in, sample_of
from indexer.stages.build_options import BuildOptions
from indexer.stages.gathering import DUPLICATE, first_of
from indexer.stages.tokenise import UsableText, usable_texts

_MAX_FILES: Final = 10
"""Most files to show. They fit on one screen."""


@dataclass(frozen=True, slots=True)
class PreviewedFile:
    """A file that would be read, its form, and its number of documents including duplicates."""

    name: str
    form: str
    num_documents: int


@dataclass(frozen=True, slots=True)
class Preview:
    """What a build would index.

    Attributes:
        files: files that would be read, in order.
        samples: first documents of the first pieces.
        num_bytes: size of the text to index, in UTF-8.
        tally: counts of conversations, and of what would be skipped and why, duplicates included.
    """

    files: tuple[PreviewedFile, ...]
    samples: tuple[RecordSample, ...]
    num_bytes: int
    tally: BuildTally

    def to_json(self) -> dict[str, Any]:
        """Return the preview as JSON values."""
        return {
            "documents": self.tally.num_documents,
            "bytes": self.num_bytes,
            "files": [
                {"file": file.name, "form": file.form, "documents": file.num_documents}
                for file in self.files
            ],
            "samples": [
                {"document": each.name, "given": each.given, "text": each.written}
                for each in self.samples
            ],
            **self.tally.to_json(),
        }

    def describe(self) -> str:
        """Return the preview as text, without the samples."""
        files = [
            f"  {file.name}: {file.form}, {counted_of(file.num_documents, 'document')}"
            for file in self.files[:_MAX_FILES]
        ]
        num_more = len(self.files) - _MAX_FILES
        documents = counted_of(self.tally.num_documents, "document")
        found = f"{documents}, {self.num_bytes:,} bytes of text"
        return "\n".join(
            [
                f"would index {found}, of {len(self.files):,} files; nothing was written",
                *files,
                *([f"  and {num_more:,} more files"] if num_more > 0 else []),
                *self.tally.describe_conversations(),
                *self.tally.describe_suffixes(),
                f"skipped: {self.tally.describe_skipped() or 'nothing'}",
            ]
        )


def preview_of(
    sources: Sequence[Path | str],
    options: BuildOptions,
    known: Sequence[NDArray[np.uint8]] = (),
) -> Preview:
    """Read sources as a build does, but stop before texts are tokenised.

    Args:
        sources: as for `build_index`.
        options: as for `build_index`.
        known: uint8[n, DIGEST_BYTES] each, digests of documents that are already in the index.

    Raises:
        SourceError: a source does not exist, or has only tables without a usable column.
    """
    tally = BuildTally()
    files: dict[str, PreviewedFile] = {}
    samples: list[RecordSample] = []
    found = _Found()
    with TemporaryDirectory() as scratch:
        for block in plan(sources, options.sources, tally, Path(scratch)):
            for piece in block.pieces:
                file = PreviewedFile(piece.file.name, str(piece.file.format.form), 0)
                num_documents = 0
                for number, text in enumerate(_texts_of(piece, options, tally), 1):
                    num_documents = number
                    found.add(text)
                    if number == 1 and len(samples) < MOST_SAMPLES:
                        given = "" if options.screen else given_in(piece, options.sources)
                        samples.append(sample_of(text.name, given, text.text))
                before = files.get(file.name, file).num_documents
                files[file.name] = PreviewedFile(file.name, file.form, before + num_documents)
    num_bytes = found.count(tally, known, deduplicate=not options.keep_duplicates)
    return Preview(tuple(files.values()), tuple(samples), num_bytes, tally)


class _Found:
    """The documents found. Only a digest and a size of each document are stored."""

    def __init__(self) -> None:
        self._digests = bytearray()
        self._sizes = array("q")

    def add(self, text: UsableText) -> None:
        """Add a document."""
        self._digests += digest_of(text.text.encode("utf-8"))
        self._sizes.append(text.num_bytes)

    def count(
        self, tally: BuildTally, known: Sequence[NDArray[np.uint8]], *, deduplicate: bool
    ) -> int:
        """Count the documents to index and the duplicates; return the bytes to index.

        Args:
            tally: tally to update.
            known: uint8[n, DIGEST_BYTES] each, digests of documents that are already in the index.
            deduplicate: whether duplicates are left out.
        """
        sizes = np.frombuffer(self._sizes, np.int64)
        if deduplicate:
            own = np.frombuffer(self._digests, np.uint8).reshape(-1, DIGEST_BYTES)
            num_known = sum(map(len, known))
            sizes = sizes[first_of(np.concatenate([*known, own]))[num_known:]]
        tally.num_documents += len(sizes)
        if len(sizes) < len(self._sizes):
            tally.skipped[DUPLICATE] += len(self._sizes) - len(sizes)
        return int(sizes.sum())


def _texts_of(piece: SourcePiece, options: BuildOptions, tally: BuildTally) -> Iterator[UsableText]:
    documents = read(SourceBlock((piece,)), options.sources, tally)
    return usable_texts(documents, options.sources.max_document_bytes, tally, options.screen)
