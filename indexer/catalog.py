"""The catalog of an index: an LMDB environment with what must change in one transaction."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Self

import lmdb

from indexer.environments import acquire, release
from indexer.errors import DamagedIndexError, FormatVersionError, IndexerError
from indexer.format import (
    CATALOG_FILE,
    CATALOG_FOLDER,
    CHECKSUM_FILE,
    FORMAT_KEY,
    FORMAT_VERSION,
    PHRASES_KEY,
    SEGMENTS_KEY,
    VOCABULARY_KEY,
    Document,
    FileRecord,
    PhrasesRecord,
    SegmentRecord,
    decode_document,
    decode_json,
    document_key,
    document_prefix,
    encode_document,
    encode_json,
)
from indexer.output import write_file
from indexer.tokenizer import Vocabulary

_INITIAL_MAP_BYTES: Final = 1 << 20


@dataclass(frozen=True, slots=True)
class Contents:
    """What a catalog publishes: the vocabulary, the segments that are live, and their phrases."""

    vocabulary: Vocabulary
    segments: tuple[SegmentRecord, ...]
    phrases: PhrasesRecord


class CatalogWriter:
    """Writes the catalog of a new index, in a folder that nobody else sees yet.

    Documents of a segment may be added before the segment is published: a reader looks only at
    those of the segments that `publish` lists. Leaving the `with` block without an error closes
    the catalog and writes its checksum beside it. All methods raise IndexerError where the disk
    is full or refuses.
    """

    def __init__(self, index_folder: Path) -> None:
        self._index_folder = index_folder
        self._folder = index_folder / CATALOG_FOLDER
        # Nobody else can open what is not published yet, so there is nothing to lock.
        with _writing(self._folder):
            self._environment = lmdb.open(
                str(self._folder), map_size=_INITIAL_MAP_BYTES, lock=False
            )

    def add_documents(self, segment: str, documents: Sequence[Document]) -> None:
        """Enter the documents of a segment, in one transaction."""
        self._put(
            [
                (document_key(segment, document.start), encode_document(document))
                for document in documents
            ]
        )

    def publish(self, contents: Contents) -> None:
        """Make segments and their phrase tables live, in one transaction."""
        vocabulary = contents.vocabulary
        self._put(
            [
                (FORMAT_KEY, encode_json(FORMAT_VERSION)),
                (PHRASES_KEY, encode_json(contents.phrases.encode())),
                (SEGMENTS_KEY, encode_json([record.encode() for record in contents.segments])),
                (
                    VOCABULARY_KEY,
                    encode_json({"fingerprint": vocabulary.fingerprint, "size": vocabulary.size}),
                ),
            ]
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, error: type[BaseException] | None, *_: object) -> None:
        self._environment.close()
        if error is None:
            with _writing(self._folder):
                record = FileRecord.of_file(self._folder / CATALOG_FILE)
            write_file(self._index_folder / CHECKSUM_FILE, encode_json(record.encode()))

    def _put(self, records: Sequence[tuple[bytes, bytes]]) -> None:
        with _writing(self._folder):
            while not self._fits(records):
                self._environment.set_mapsize(2 * self._environment.info()["map_size"])

    def _fits(self, records: Sequence[tuple[bytes, bytes]]) -> bool:
        """Write records where there is room for all of them; else write none."""
        try:
            with self._environment.begin(write=True) as transaction:
                transaction.cursor().putmulti(records)
        except lmdb.MapFullError:
            return False
        return True


@contextmanager
def _writing(folder: Path) -> Iterator[None]:
    try:
        yield
    except (lmdb.Error, OSError) as error:
        raise IndexerError(
            f"cannot write the catalog {folder}: {error}: "
            "free space on the disk, or write to another one"
        ) from error


class CatalogReader:
    """Reads a published catalog. Any number may be open on the same one, in any thread."""

    def __init__(self, folder: Path) -> None:
        """Open the catalog in `folder`.

        Raises:
            DamagedIndexError: there is no readable LMDB environment.
        """
        self._folder = folder
        try:
            self._key, self._environment = acquire(folder)
        except (lmdb.Error, OSError) as error:
            raise DamagedIndexError(f"the catalog {folder} cannot be opened: {error}") from error

    def contents(self) -> Contents:
        """Return what the catalog publishes.

        Raises:
            DamagedIndexError: its records are missing or not what a writer writes.
            FormatVersionError: it was written in another format.
        """
        self._check_version(self._record(FORMAT_KEY))
        vocabulary, segments = self._record(VOCABULARY_KEY), self._record(SEGMENTS_KEY)
        phrases = self._record(PHRASES_KEY)
        try:
            return Contents(
                Vocabulary(int(vocabulary["size"]), str(vocabulary["fingerprint"])),
                tuple(SegmentRecord.decode(segment) for segment in segments),
                PhrasesRecord.decode(phrases),
            )
        except (KeyError, OverflowError, TypeError, ValueError) as error:
            raise DamagedIndexError(
                f"the catalog {self._folder} holds a record that no builder writes: {error!r}"
            ) from error

    def document_at(self, segment: str, position: int) -> Document | None:
        """Return the last document of a segment that starts at `position` or before it."""
        with self._cursor() as cursor:
            # LMDB seeks to the first key that is not smaller; what is sought is the one before
            # the first key that is larger.
            found = cursor.set_range(document_key(segment, position + 1))
            if not (cursor.prev() if found else cursor.last()):
                return None
            if not cursor.key().startswith(document_prefix(segment)):
                return None
            return decode_document(cursor.key(), cursor.value())

    def documents(self, segment: str) -> Iterator[Document]:
        """Yield the documents of a segment in order; a transaction is open meanwhile."""
        prefix = document_prefix(segment)
        with self._cursor() as cursor:
            if not cursor.set_range(prefix):
                return
            for key, value in cursor:
                if not key.startswith(prefix):
                    return
                yield decode_document(key, value)

    def close(self) -> None:
        """Let go of the catalog; the last reader closes its files."""
        release(self._key)

    def _check_version(self, version: Any) -> None:
        if version == FORMAT_VERSION:
            return
        is_older = isinstance(version, int) and version < FORMAT_VERSION
        raise FormatVersionError(
            f"{self._folder.parent} has format version {version!r}, and this is a reader of "
            f"version {FORMAT_VERSION}: "
            + ("build it again" if is_older else "upgrade foredraft, or build the index again")
        )

    def _record(self, key: bytes) -> Any:
        try:
            with self._environment.begin() as transaction:
                value = transaction.get(key)
        except lmdb.Error as error:
            raise DamagedIndexError(f"the catalog {self._folder} is unreadable: {error}") from error
        if value is None:
            raise DamagedIndexError(f"the catalog {self._folder} has no record {key.decode()!r}")
        return decode_json(value)

    @contextmanager
    def _cursor(self) -> Iterator[Any]:
        try:
            with self._environment.begin() as transaction, transaction.cursor() as cursor:
                yield cursor
        except lmdb.Error as error:
            raise DamagedIndexError(f"the catalog {self._folder} is unreadable: {error}") from error

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
