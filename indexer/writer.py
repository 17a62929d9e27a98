"""Changing an index that is there: one writer at a time, published in one step."""

import fcntl
import json
import os
import shutil
import socket
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from pathlib import Path

from indexer.errors import IndexBusyError, IndexerError
from indexer.format import (
    CATALOG_FOLDER,
    LOCK_FILE,
    PHRASES_FOLDER,
    SCRATCH_FOLDER,
    SEGMENTS_FOLDER,
    is_ordinal_name,
    ordinal_name,
)
from indexer.records import Contents
from indexer.same_folder import from_same_folder
from indexer.snapshots import HeldSnapshot, hold_latest, publish, published_numbers, unheld


class IndexWriter:
    """The one who may change an index; see `writing`.

    Attributes:
        folder: the index's directory.
        contents: of the latest snapshot.
        next_number: of the snapshot that will be published.
    """

    def __init__(self, folder: Path, held: HeldSnapshot) -> None:
        self.folder = folder
        self.contents = held.contents
        self.next_number = held.number + 1

    def publish(self, contents: Contents) -> None:
        """Make contents the latest snapshot, and remove what nobody reads any longer.

        Raises:
            IndexerError: the disk is full or refuses; the index is what it was.
        """
        publish(self.folder, self.next_number, contents)
        self.next_number += 1
        self.contents = contents
        collect_garbage(self.folder)


@contextmanager
def writing(path: Path, command: str) -> Iterator[IndexWriter]:
    """Be the only writer of an index for a while.

    What killed writers left is removed first.

    Args:
        path: the index's directory.
        command: what is being done, for others to read.

    Raises:
        IndexNotFoundError: there is no index.
        IndexBusyError: somebody else writes.
        DamagedIndexError: the index cannot be read.
        IndexerError: the folder cannot be written to.
    """
    folder = Path(os.path.realpath(path))
    held = from_same_folder(path, lambda: hold_latest(path), HeldSnapshot.close)
    try:
        with _lock(folder, command):
            held.close()
            held = hold_latest(folder)
            collect_garbage(folder)
            yield IndexWriter(folder, held)
    finally:
        held.close()


def collect_garbage(folder: Path) -> None:
    """Remove snapshots that are not the latest and that nobody reads, and what only they list.

    What cannot be removed stays for the next writer. Only for who holds the lock.
    """
    *older, latest = published_numbers(folder)
    listed = _listed(folder, latest)
    for number in older:
        with unheld(folder, number) as is_unheld:
            if is_unheld:
                (folder / CATALOG_FOLDER / ordinal_name(number)).unlink()
                continue
        listed |= _listed(folder, number)
    for name in (SEGMENTS_FOLDER, PHRASES_FOLDER):
        for place in _numbered(folder / name) - listed:
            shutil.rmtree(place, ignore_errors=True)
    for partial in (folder / CATALOG_FOLDER).glob(".partial-*"):
        partial.unlink(missing_ok=True)
    shutil.rmtree(folder / SCRATCH_FOLDER, ignore_errors=True)


def _listed(folder: Path, number: int) -> set[Path]:
    """Return the folders of what a snapshot lists."""
    descriptor = os.open(folder / CATALOG_FOLDER / ordinal_name(number), os.O_RDONLY)
    held = HeldSnapshot(folder, number, descriptor)
    held.close()
    segments = {folder / SEGMENTS_FOLDER / record.name for record in held.contents.segments}
    return segments | {folder / PHRASES_FOLDER / held.contents.phrases.name}


def _numbered(folder: Path) -> set[Path]:
    with suppress(FileNotFoundError):
        return {place for place in folder.iterdir() if is_ordinal_name(place.name)}
    return set()


@contextmanager
def _lock(folder: Path, command: str) -> Iterator[None]:
    path = folder / LOCK_FILE
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    except OSError as error:
        raise IndexerError(f"cannot write to {folder}: {error.strerror}") from error
    try:
        _acquire(descriptor, folder)
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, json.dumps(_who(command)).encode(), 0)
        yield
    finally:
        with suppress(OSError):
            os.ftruncate(descriptor, 0)
        os.close(descriptor)


def _acquire(descriptor: int, folder: Path) -> None:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        raise IndexBusyError(
            f"{folder} is being changed by {_holder(descriptor)}: wait until it is done"
        ) from error
    except OSError as error:
        raise IndexerError(
            f"the file system of {folder} has no locks ({error.strerror}), so that two writers "
            "could not be told apart: build the index on another one and copy it"
        ) from error


def _who(command: str) -> dict[str, str | int]:
    now = datetime.now(UTC).isoformat(timespec="seconds")
    return {"command": command, "host": socket.gethostname(), "pid": os.getpid(), "since": now}


def _holder(descriptor: int) -> str:
    """Say who holds the lock, from what it wrote into the file."""
    try:
        who = json.loads(os.pread(descriptor, 1 << 12, 0))
        return (
            f"process {int(who['pid'])} on {who['host']} (`{who['command']}`, since {who['since']})"
        )
    except (ValueError, KeyError, TypeError):
        return "another process"
