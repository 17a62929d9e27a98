"""The writer of an existing index. Only one writes at a time, and each change is one step."""

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from indexer.errors import IndexerError, writing_to
from indexer.format.names import (
    CATALOG_FOLDER,
    PHRASES_FOLDER,
    SCRATCH_FOLDER,
    SEGMENTS_FOLDER,
    is_ordinal_name,
    ordinal_name,
)
from indexer.format.output import sync_folder, writer_lock
from indexer.format.records import Contents
from indexer.format.same_folder import from_same_folder
from indexer.format.snapshots import (
    HeldSnapshot,
    hold_latest,
    publish,
    published_numbers,
    read_snapshot,
    unheld,
)


class IndexWriter:
    """The only writer of an index; see `writing`.

    Attributes:
        folder: directory of the index.
        contents: contents of the latest snapshot.
        next_number: number of the next snapshot.
        num_older: number of older snapshots that stay because processes still read them.
    """

    def __init__(self, folder: Path, number: int, contents: Contents, num_older: int) -> None:
        self.folder = folder
        self.contents = contents
        self.next_number = number + 1
        self.num_older = num_older

    def publish(self, contents: Contents) -> None:
        """Publish contents as the latest snapshot, and remove files that no process needs.

        Raises:
            IndexerError: the disk is full, or the system denies the write; the index is unchanged.
        """
        _sync_new(self.folder, contents, self.contents)
        publish(self.folder, self.next_number, contents)
        self.next_number += 1
        self.contents = contents
        self.num_older = collect_garbage(self.folder)


@contextmanager
def writing(path: Path, command: str) -> Iterator[IndexWriter]:
    """Be the only writer of an index during the block.

    Files that killed writers left behind are removed first. If this writer fails, its own files are
    removed as well.

    Args:
        path: directory of the index.
        command: the writer's command, which other processes show in messages.

    Raises:
        IndexNotFoundError: there is no index.
        IndexBusyError: another process is writing.
        DamagedIndexError: the index cannot be read.
        IndexerError: the folder cannot be written to.
    """
    folder = Path(os.path.realpath(path))
    from_same_folder(path, lambda: hold_latest(path), HeldSnapshot.close).close()
    with writer_lock(folder, command):
        number = published_numbers(folder)[-1]
        contents = read_snapshot(folder, number)
        try:
            yield IndexWriter(folder, number, contents, collect_garbage(folder))
        except BaseException:
            collect_garbage(folder)
            raise


def collect_garbage(folder: Path) -> int:
    """Remove older snapshots that nobody reads, and the files that only these snapshots list.

    Files that cannot be removed stay for the next writer. The caller must hold the lock.

    Returns:
        The number of older snapshots that remain.
    """
    *older, latest = published_numbers(folder)
    left = [number for number in older if not _remove_unread(folder, number)]
    for partial in (folder / CATALOG_FOLDER).glob(".partial-*"):
        with suppress(OSError):
            partial.unlink()
    shutil.rmtree(folder / SCRATCH_FOLDER, ignore_errors=True)
    with suppress(IndexerError):  # a snapshot that cannot be read may list any file
        listed = {place for number in (*left, latest) for place in _listed(folder, number)}
        for name in (SEGMENTS_FOLDER, PHRASES_FOLDER):
            for place in _numbered(folder / name) - listed:
                shutil.rmtree(place, ignore_errors=True)
    return len(left)


def _remove_unread(folder: Path, number: int) -> bool:
    with suppress(OSError), unheld(folder, number) as is_unheld:
        if is_unheld:
            (folder / CATALOG_FOLDER / ordinal_name(number)).unlink()
            return True
    return False


def _listed(folder: Path, number: int) -> set[Path]:
    return _places(folder, read_snapshot(folder, number))


def _places(folder: Path, contents: Contents) -> set[Path]:
    """Return the folders of all segments and phrase tables in some contents."""
    segments = {folder / SEGMENTS_FOLDER / record.name for record in contents.segments}
    return segments | {folder / PHRASES_FOLDER / contents.phrases.name}


def _numbered(folder: Path) -> set[Path]:
    with suppress(OSError):
        return {place for place in folder.iterdir() if is_ordinal_name(place.name)}
    return set()


def _sync_new(folder: Path, contents: Contents, before: Contents) -> None:
    """Wait until the names of new folders, and of the files in them, are on disk."""
    new = _places(folder, contents) - _places(folder, before)
    for place in sorted(new | {place.parent for place in new}):
        with writing_to(place):
            sync_folder(place)
