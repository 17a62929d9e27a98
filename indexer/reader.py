"""Opening an index: memory-mapped segments, and which document a position belongs to.

Loads numpy and lmdb only. Opening maps tokens and suffixes and reads neither, so it takes
milliseconds whatever the size of the index.
"""

from pathlib import Path
from typing import Self

from indexer.catalog import CatalogReader, Contents
from indexer.counts import COUNT_VALUES
from indexer.errors import DamagedIndexError, TokenizerMismatchError
from indexer.format import Document, token_dtype
from indexer.opening import Segment, Snapshot, catalog_record, open_catalog, open_snapshot
from indexer.phrases import PhraseTables
from indexer.same_folder import from_same_folder
from indexer.tables import merge_tables
from indexer.tokenizer import Vocabulary

__all__ = [
    "COUNT_VALUES",
    "Document",
    "Index",
    "PhraseTables",
    "Segment",
    "Vocabulary",
    "merge_tables",
    "token_dtype",
]


class Index:
    """An index that is open for reading. Several may be open on one path, in any thread.

    Attributes:
        path: the index's directory.
        vocabulary: of the tokenizer that it was built with.
        segments: its parts, in the order in which they were built.
        phrases: the phrase tables of all segments together.
        num_tokens: tokens in all segments, separators not counted.
        num_documents: documents in all segments.
        num_bytes: size of the catalog, all segments and the phrase tables on disk.
    """

    def __init__(
        self,
        path: Path,
        catalog: CatalogReader,
        contents: Contents,
        snapshot: Snapshot,
        num_catalog_bytes: int,
    ) -> None:
        self.path = path
        self.vocabulary = contents.vocabulary
        self.segments = snapshot.segments
        self.phrases = snapshot.phrases
        self.num_tokens = sum(record.num_tokens for record in contents.segments)
        self.num_documents = sum(record.num_documents for record in contents.segments)
        folders = [*(record.files for record in contents.segments), contents.phrases.files]
        self.num_bytes = num_catalog_bytes + sum(
            file.num_bytes for files in folders for file in files.values()
        )
        self._catalog: CatalogReader | None = catalog

    @classmethod
    def open(cls, path: Path | str, *, vocabulary: Vocabulary | None = None) -> Self:
        """Open the index at `path`.

        What is opened is one index, even where another takes its place meanwhile.

        Checked are the sizes of all files, that `starts` divides the suffixes, and the checksum
        of a catalog of at most 16 MiB. Not read are tokens, suffixes and most of the phrase
        tables, so that damage to their bytes goes unnoticed: `verify` finds it, and what looks
        positions and entries up must expect any.
        A larger catalog is left to `verify` as well; LMDB may crash on a damaged one.

        Args:
            path: the index's directory.
            vocabulary: of the tokenizer whose tokens will be looked up; where given, an index
                for another one is refused.

        Raises:
            IndexNotFoundError: there is no index.
            DamagedIndexError: files are missing, of another size than was written, or damaged
                as far as is checked.
            FormatVersionError: the index is of another format.
            TokenizerMismatchError: the index was built with another tokenizer.
            IndexerError: the folder cannot be opened, or is replaced all the time.
        """
        path = Path(path)
        return from_same_folder(path, lambda: cls._open(path, vocabulary), cls.close)

    @classmethod
    def _open(cls, path: Path, vocabulary: Vocabulary | None) -> Self:
        catalog_file = catalog_record(path)
        catalog = open_catalog(path, catalog_file)
        try:
            contents = catalog.contents()
            if vocabulary is not None:
                _check_vocabulary(path, contents.vocabulary, vocabulary)
            snapshot = open_snapshot(path, contents)
        except BaseException:
            catalog.close()
            raise
        return cls(path, catalog, contents, snapshot, catalog_file.num_bytes)

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


def _check_vocabulary(path: Path, built_for: Vocabulary, at_hand: Vocabulary) -> None:
    if built_for.fingerprint != at_hand.fingerprint:
        raise TokenizerMismatchError(
            f"index {path} was built for another tokenizer ({_describe(built_for)}), "
            f"not for this one ({_describe(at_hand)}): rebuild it with --tokenizer"
        )


def _describe(vocabulary: Vocabulary) -> str:
    return f"vocabulary {vocabulary.size}, fingerprint {vocabulary.fingerprint[:12]}\u2026"
