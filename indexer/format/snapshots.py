"""Snapshots: each lists the segments that make up an index at one time.

A snapshot is a small file. It is written completely and then renamed to the next number. The
highest number is the current index. A process that reads a snapshot holds a shared lock on its
file. A writer removes an old snapshot only if nobody holds that lock.
"""

import errno
import fcntl
import os
import secrets
import time
import weakref
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Final

from indexer.errors import (
    DamagedIndexError,
    FormatVersionError,
    IndexerError,
    IndexNotFoundError,
    TokenizerError,
)
from indexer.format.names import (
    CATALOG_FOLDER,
    FORMAT_VERSION,
    SEGMENTS_FOLDER,
    is_ordinal_name,
    ordinal_name,
)
from indexer.format.output import sync_folder, write_file
from indexer.format.records import Contents, checksum_of, decode_json, encode_json

_MAX_ATTEMPTS: Final = 100
"""Attempts to hold the latest snapshot while writers publish and remove; about a second in all."""

_PATIENT_ATTEMPTS: Final = 10
"""Attempts without a pause. Later ones pause, because network file systems may list old files."""

_PAUSE_S: Final = 0.01
"""Pause between later attempts, in seconds."""

_GONE: Final = frozenset({errno.ENOENT, errno.ESTALE})
_MALFORMED: Final = (KeyError, OverflowError, TypeError, ValueError, AttributeError, TokenizerError)


class HeldSnapshot:
    """A published snapshot. No writer removes it while this object is open or referenced.

    Attributes:
        number: number of the snapshot.
        contents: contents that the snapshot publishes.
        num_bytes: size of the snapshot's file.
        published_s: time of publication, in seconds since 1970.
    """

    def __init__(self, index: Path, number: int, descriptor: int) -> None:
        self.number = number
        self._index = index
        self._descriptor: int | None = descriptor
        self._close = weakref.finalize(self, os.close, descriptor)
        try:
            content = _read_all(index, number, descriptor)
            self.num_bytes = len(content)
            self.published_s = os.fstat(descriptor).st_mtime
            self.contents = _decoded(index, number, content)
        except BaseException:
            self.close()
            raise

    def is_latest(self) -> bool:
        """Return whether this is still the latest snapshot of the index at the path.

        Raises:
            IndexerError: there is no index.
            OSError: the index is being replaced.
        """
        number = published_numbers(self._index)[-1]
        if number != self.number or self._descriptor is None:
            return False
        there = (self._index / CATALOG_FOLDER / ordinal_name(number)).stat()
        return os.path.samestat(there, os.fstat(self._descriptor))

    def close(self) -> None:
        """Release the snapshot."""
        self._descriptor = None
        self._close()


def published_numbers(index: Path) -> list[int]:
    """Return the numbers of all existing snapshots, ascending.

    Raises:
        IndexNotFoundError: the folder has no part of an index.
        DamagedIndexError: the folder has parts of an index, but no snapshot.
    """
    numbers: list[int] = []
    for _ in range(_PATIENT_ATTEMPTS):
        numbers = sorted(int(name) for name in _names(index) if is_ordinal_name(name))
        if numbers:  # the list may be empty because files changed while they were listed
            break
    if not numbers:
        raise DamagedIndexError(
            f"{index / CATALOG_FOLDER} holds no snapshot, one is missing: "
            "copy or build the index again"
        )
    return numbers


def _names(index: Path) -> list[str]:
    try:
        return [entry.name for entry in (index / CATALOG_FOLDER).iterdir()]
    except OSError as error:
        if (index / SEGMENTS_FOLDER).exists():
            raise DamagedIndexError(
                f"{index / CATALOG_FOLDER} is missing: copy or build the index again"
            ) from error
        raise IndexNotFoundError(f"{index} is a folder but not an index") from error


def hold_latest(index: Path) -> HeldSnapshot:
    """Return the latest snapshot, and hold it.

    Raises:
        IndexNotFoundError: there is no index.
        DamagedIndexError: the snapshot is unreadable or invalid.
        FormatVersionError: the snapshot has another format.
    """
    for attempt in range(_MAX_ATTEMPTS):
        number = published_numbers(index)[-1]
        descriptor = _hold(index / CATALOG_FOLDER / ordinal_name(number))
        if descriptor is not None:
            return HeldSnapshot(index, number, descriptor)
        if attempt >= _PATIENT_ATTEMPTS:  # a network file system may have cached the listing
            time.sleep(_PAUSE_S)
    raise IndexerError(f"{index} changes faster than it can be opened: try again")


def read_snapshot(index: Path, number: int) -> Contents:
    """Return the contents of a snapshot without holding it. Call only under the writer's lock.

    Raises:
        DamagedIndexError: the snapshot is unreadable or invalid.
        FormatVersionError: the snapshot has another format.
    """
    path = index / CATALOG_FOLDER / ordinal_name(number)
    try:
        content = path.read_bytes()
    except OSError as error:
        raise _unreadable(path, error) from error
    return _decoded(index, number, content)


def publish(index: Path, number: int, contents: Contents) -> None:
    """Make a snapshot the latest one, in one step. All files that it lists must be on disk.

    Args:
        index: directory of the index, whose lock the caller holds.
        number: one more than the latest number, or 0.
        contents: contents to publish.

    Raises:
        IndexerError: the disk is full, or the system denies the write.
    """
    body = encode_json({"format": FORMAT_VERSION, **contents.encode()})
    folder = index / CATALOG_FOLDER
    partial = folder / f".partial-{secrets.token_hex(4)}"
    try:
        write_file(partial, checksum_of(body).encode("ascii") + b"\n" + body)
        partial.rename(folder / ordinal_name(number))
    except OSError as error:
        raise IndexerError(f"cannot publish in {folder}: {error.strerror}") from error
    finally:
        with suppress(OSError):
            partial.unlink(missing_ok=True)
    with suppress(OSError):  # published, though a power failure might still undo it
        sync_folder(folder)


@contextmanager
def unheld(index: Path, number: int) -> Iterator[bool]:
    """Yield whether nobody holds a snapshot, and let nobody open it during the block."""
    path = index / CATALOG_FOLDER / ordinal_name(number)
    descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    try:
        yield _lock(descriptor, fcntl.LOCK_EX)
    finally:
        os.close(descriptor)


def _hold(path: Path) -> int | None:
    """Open and lock a snapshot's file. Return None if a writer is about to remove it."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError as error:
        if error.errno in _GONE:
            return None
        raise _unreadable(path, error) from error
    if _lock(descriptor, fcntl.LOCK_SH) and os.fstat(descriptor).st_nlink > 0:
        return descriptor
    os.close(descriptor)
    return None


def _lock(descriptor: int, kind: int) -> bool:
    """Lock a file without waiting. On a file system without locks, nothing is ever removed."""
    try:
        fcntl.flock(descriptor, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        return kind == fcntl.LOCK_SH
    return True


def _read_all(index: Path, number: int, descriptor: int) -> bytes:
    try:
        with open(descriptor, "rb", closefd=False) as file:
            return file.read()
    except OSError as error:
        raise _unreadable(index / CATALOG_FOLDER / ordinal_name(number), error) from error


def _unreadable(path: Path, error: OSError) -> DamagedIndexError:
    return DamagedIndexError(f"{path} is unreadable: {error.strerror}")


def _decoded(index: Path, number: int, content: bytes) -> Contents:
    path = index / CATALOG_FOLDER / ordinal_name(number)
    checksum, _, body = content.partition(b"\n")
    if checksum != checksum_of(body).encode("ascii"):
        raise DamagedIndexError(
            f"{path} is damaged, its checksum is not the one it was written with: "
            "copy or build the index again"
        )
    value = decode_json(body)
    version = value.get("format") if isinstance(value, dict) else None
    if version != FORMAT_VERSION:
        raise FormatVersionError(
            f"{index} has format version {version!r}, and this program reads version "
            f"{FORMAT_VERSION}: build it again"
        )
    try:
        return Contents.decode(value)
    except (
        KeyError,
        OverflowError,
        TypeError,
        ValueError,
        AttributeError,
        TokenizerError,
    ) as error:
        raise DamagedIndexError(f"{path} holds an invalid record: {error!r}") from error
