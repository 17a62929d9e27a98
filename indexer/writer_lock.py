"""The lock of whoever changes an index: one at a time, and it says who."""

import fcntl
import json
import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Final

from indexer.errors import IndexBusyError, IndexerError
from indexer.format import LOCK_FILE
from indexer.same_folder import is_at

_MAX_ATTEMPTS: Final = 20
_MAX_NOTE_BYTES: Final = 1 << 12


@contextmanager
def writer_lock(folder: Path, command: str) -> Iterator[None]:
    """Be the only one who changes an index for a while.

    It ends with the process, however that ends. While it is held, the folder stays in its place:
    who replaces an index by another one holds the lock of the one that is there.

    Args:
        folder: the index's directory.
        command: what is being done, for others to read.

    Raises:
        IndexBusyError: somebody else holds the lock.
        NoLocksError: the file system has none.
        IndexerError: the folder cannot be written to, or is replaced all the time.
    """
    descriptor = _locked(folder)
    try:
        with suppress(OSError):  # on a full disk the lock holds without its note
            os.ftruncate(descriptor, 0)
            os.pwrite(descriptor, json.dumps(_note(command)).encode(), 0)
        yield
    finally:
        with suppress(OSError):
            os.ftruncate(descriptor, 0)
        os.close(descriptor)


class NoLocksError(IndexerError):
    """Two writers could not be told apart."""


def _locked(folder: Path) -> int:
    """Return the locked file; it is that of the folder that is there, not of one before."""
    path = folder / LOCK_FILE
    for _ in range(_MAX_ATTEMPTS):
        try:
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        except OSError as error:
            raise IndexerError(f"cannot write to {folder}: {error.strerror}") from error
        try:
            _acquire(descriptor, folder)
        except BaseException:
            os.close(descriptor)
            raise
        if is_at(path, descriptor):
            return descriptor
        os.close(descriptor)
    raise IndexerError(f"{folder} is replaced faster than it can be changed: try again")


def _acquire(descriptor: int, folder: Path) -> None:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        raise IndexBusyError(
            f"{folder} is being changed by {_holder(descriptor)}: wait until it is done"
        ) from error
    except OSError as error:
        raise NoLocksError(
            f"the file system of {folder} has no locks ({error.strerror}), so that two writers "
            "could not be told apart: build the index on another one and copy it"
        ) from error


def _note(command: str) -> dict[str, str | int]:
    now = datetime.now(UTC).isoformat(timespec="seconds")
    return {"command": command, "host": socket.gethostname(), "pid": os.getpid(), "since": now}


def _holder(descriptor: int) -> str:
    """Say who holds the lock, from the note in its file."""
    try:
        who = json.loads(os.pread(descriptor, _MAX_NOTE_BYTES, 0))
        return (
            f"process {int(who['pid'])} on {who['host']} (`{who['command']}`, since {who['since']})"
        )
    except (OSError, ValueError, KeyError, TypeError):
        return "another process"
