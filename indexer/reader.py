"""Opens an index: maps its segments into memory, and finds the document at a position.

This module loads only numpy. Opening reads the snapshot and maps all other files, so it takes
milliseconds for an index of any size. With `hold`, it reads all files into memory instead, which
takes longer.
"""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Self

from numpy.typing import NDArray

from indexer.errors import DamagedIndexError, IndexerError, TokenizerMismatchError
from indexer.format.names import KEY_STRIDE, key_bits, token_dtype
from indexer.format.opening import Before, Segment, Snapshot, enter_resident_pages, open_snapshot
from indexer.format.phrase_tables import COUNT_VALUES, PhraseTables
from indexer.format.records import Document
from indexer.format.same_folder import Identity, folder_identity, from_same_folder
from indexer.format.snapshots import HeldSnapshot, hold_latest
from indexer.format.table_sums import sum_tables
from indexer.tokenizer import Vocabulary

__all__ = [
    "COUNT_VALUES",
    "KEY_STRIDE",
    "Document",
    "Index",
    "PhraseTables",
    "Segment",
    "Vocabulary",
    "key_bits",
    "sum_tables",
    "token_dtype",
]


class Index:
    """An open snapshot of an index. Several may be open at once, in any thread.

    While a snapshot is open, no writer removes its files. It closes once nothing refers to it.

    Attributes:
        path: the index's directory.
        vocabulary: vocabulary of the tokenizer that the index was built with.
        segments: segments of the index, in the order in which they were built.
        phrases: the phrase tables of the segments.
        number: number of the snapshot; it rises with every change.
        published_s: when the snapshot was published, in seconds since 1970.
        num_tokens: number of tokens in all segments, without separators.
        num_documents: number of documents in all segments.
        num_uncounted_tokens: number of tokens in segments that the phrase tables do not cover yet.
        keeps_texts: whether the texts of the documents are stored.
        screening: what screening removed from the documents.
        num_bytes: size on disk of the snapshot file, all segments and the phrase tables.
        is_held: whether memory holds copies of all files; otherwise the files are mapped.
    """

    def __init__(
        self,
        path: Path,
        held: HeldSnapshot,
        snapshot: Snapshot,
        identity: Identity,
        *,
        hold: bool = False,
    ) -> None:
        contents = held.contents
        self.path = path
        self.vocabulary = contents.vocabulary
        self.segments = snapshot.segments
        self.phrases = snapshot.phrases
        self.is_held = hold
        self.number = held.number
        self.published_s = held.published_s
        self.num_tokens = contents.num_tokens
        self.num_documents = sum(record.num_documents for record in contents.segments)
        self.num_uncounted_tokens = contents.num_uncounted_tokens
        self.keeps_texts = contents.keeps_texts
        self.screening = contents.screening
        folders = [*(record.files for record in contents.segments), contents.phrases.files]
        self.num_bytes = held.num_bytes + sum(
            file.num_bytes for files in folders for file in files.values()
        )
        if contents.tokenizer is not None:
            self.num_bytes += contents.tokenizer.num_bytes
        self._held: HeldSnapshot | None = held
        self._identity = identity

    @classmethod
    def open(
        cls, path: Path | str, *, vocabulary: Vocabulary | None = None, hold: bool = False
    ) -> Self:
        """Open the latest snapshot of the index at `path`.

        All files belong to one index, even if another index replaces it during the call.

        The snapshot's checksum and the sizes of all files are checked. File contents are not read,
        so damaged bytes go unnoticed here. `verify` finds them. Code that looks up positions and
        entries must expect any value. If a mapped file is truncated, the next read past its end
        kills the process (SIGBUS). A held file can safely be truncated, overwritten or removed.

        Args:
            path: the index's directory.
            vocabulary: vocabulary of the tokenizer whose tokens will be looked up. If given, an
                index with a different vocabulary is refused.
            hold: whether to read all files into memory instead of mapping them. Indexes that hold
                the same files in this process share one copy.

        Raises:
            IndexNotFoundError: there is no index.
            DamagedIndexError: files are missing or have the wrong size, or a check found damage.
            FormatVersionError: the index has another format.
            TokenizerMismatchError: the index was built with another tokenizer.
            IndexerError: the folder cannot be opened, is replaced constantly, or memory is too
                small to hold it.
                enough memory to hold it.
        """
        path = Path(path)
        return from_same_folder(
            path, lambda: cls._open(path, vocabulary, _nothing, hold=hold), cls.close
        )

    @classmethod
    def _open(
        cls,
        path: Path,
        vocabulary: Vocabulary | None,
        before: Callable[[Identity], Before],
        *,
        hold: bool,
    ) -> Self:
        identity = folder_identity(path)
        held = hold_latest(path)
        try:
            if vocabulary is not None:
                _check_vocabulary(path, held.contents.vocabulary, vocabulary)
            snapshot = open_snapshot(path, held.contents, before(identity), hold=hold)
            return cls(path, held, snapshot, identity, hold=hold)
        except BaseException:
            held.close()
            raise

    def is_latest(self) -> bool:
        """Return whether this is still the latest snapshot at the path. Takes about 20 us.

        Returns False if the index is gone or unreadable; `reopened` then raises the reason.
        """
        try:
            return self._held is not None and self._held.is_latest()
        except (OSError, IndexerError):
            return False

    def reopened(self) -> Self:
        """Open the latest snapshot at the path. This one stays open; `is_held` stays the same.

        Segments and phrase tables that both snapshots have are shared, so they use memory once.

        Raises:
            IndexerError: as for `open`; an index with a different vocabulary is refused.
        """
        return from_same_folder(
            self.path,
            lambda: self._open(self.path, self.vocabulary, self._shared_with, hold=self.is_held),
            type(self).close,
        )

    def _shared_with(self, identity: Identity) -> Before:
        if self._held is None or self._identity != identity:
            return None
        return self._held.contents, Snapshot(self.segments, self.phrases)

    def document_at(self, segment: int, position: int) -> Document:
        """Return the document that contains a token. A separator belongs to the document before it.

        Args:
            segment: index into `segments`.
            position: index into that segment's `tokens`.

        Raises:
            IndexError: there is no such segment or position.
            DamagedIndexError: the document table does not cover the position.
        """
        if self._held is None:
            raise ValueError(f"the index {self.path} is closed")
        if not 0 <= segment < len(self.segments):
            raise IndexError(f"no segment {segment} among {len(self.segments)}")
        name, documents = self.segments[segment].name, self.segments[segment].documents
        num_positions = len(self.segments[segment].tokens)
        if not 0 <= position < num_positions:
            raise IndexError(f"no position {position} in a segment of {num_positions} tokens")
        number = documents.at(position)
        if number is None:
            raise DamagedIndexError(
                f"{self.path} lists no document for position {position} of segment {name}"
            )
        return documents.document(number)

    def documents(self) -> Iterator[tuple[Document, int]]:
        """Yield every document with its number of tokens, in order.

        Raises:
            DamagedIndexError: a document table is damaged.
        """
        for segment in self.segments:
            table, end = segment.documents, len(segment.tokens)
            for number in range(len(table)):
                start = int(table.starts[number])
                next_start = int(table.starts[number + 1]) if number + 1 < len(table) else end
                if not start < next_start - 1 < end:
                    raise DamagedIndexError(
                        f"{self.path} lists document {number} of segment {segment.name} "
                        "where it cannot be"
                    )
                yield table.document(number), next_start - 1 - start

    def mapped_arrays(self) -> Iterator[NDArray[Any]]:
        """Yield the array of each file that is mapped into memory."""
        return Snapshot(self.segments, self.phrases).mapped_arrays()

    def enter_resident_pages(self) -> None:
        """Prevent page faults for pages already in memory; see `opening.enter_resident_pages`."""
        enter_resident_pages(self.mapped_arrays())

    def close(self) -> None:
        """Release the snapshot. Arrays stay valid while something refers to them."""
        if self._held is not None:
            self._held.close()
            self._held = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _nothing(_identity: Identity) -> Before:
    return None


def _check_vocabulary(path: Path, built_for: Vocabulary, at_hand: Vocabulary) -> None:
    if built_for != at_hand:
        raise TokenizerMismatchError(
            f"index {path} was built for another tokenizer ({built_for.describe()}), "
            f"not for this one ({at_hand.describe()}): use that one, or rebuild the index for "
            "this one"
        )
