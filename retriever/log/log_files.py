"""The files of a log of generations: locking, and checks for damage."""

import errno
import fcntl
import json
import logging
import os
import secrets
import signal
import subprocess
import sys
import threading
import zlib
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from itertools import count
from pathlib import Path
from typing import Final

import lmdb

from retriever.errors import StateError, VocabularyMismatchError
from retriever.log import log_reader
from retriever.log.log_store import FINGERPRINT_KEY, FORMAT_KEY, FORMAT_VERSION, LogStore
from retriever.log.options import LogOptions

_LOGGER: Final = logging.getLogger(__name__)
_CHUNK_BYTES: Final = 1 << 20
_READ_BYTES_PER_S: Final = 5e6  # speed of a slow disk; on a faster one the timeout is never reached
_CRASHES: Final = {signal.SIGSEGV, signal.SIGBUS, signal.SIGABRT, signal.SIGFPE, signal.SIGILL}

READING_S: Final = 60.0
"""A process that hangs while it reads a damaged log is killed after this time, plus the time to
read the log's bytes."""

DATA_NAME: Final = "generations.mdb"
SEAL_NAME: Final = "generations.seal"

REFUSALS: Final = (lmdb.Error, OSError)
"""Errors of the disk and LMDB."""

_DAMAGE: Final = (
    lmdb.CorruptedError,
    lmdb.InvalidError,
    lmdb.PageNotFoundError,
    lmdb.VersionMismatchError,
)

# A process does not see its own file locks, so they are listed here.
_LOCKED: Final[set[tuple[int, ...]]] = set()
_LOCKED_GUARD: Final = threading.Lock()


class LogFiles:
    """The files in a state directory.

    Attributes:
        data: the LMDB file.
        writable: whether it can be written.
    """

    def __init__(self, directory: Path) -> None:
        """Lock the directory for this process; create it if missing.

        Raises:
            StateError: another drafter uses it, it cannot be created, or it only holds copies.
        """
        _check_holds_no_copies(directory)
        self.data = directory / DATA_NAME
        self._seal = directory / SEAL_NAME
        self._copies = "generations.copy-"
        with _refusals(directory), _LOCKED_GUARD:
            directory.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._lock, self.writable = _lock(directory / "generations.lock")
            self._key = _identity(os.fstat(self._lock))
            _LOCKED.add(self._key)

    def make_safe(self) -> None:
        """Let a separate process read the data first, unless the last process sealed it.

        Intact data is replaced by a copy of its records; damaged data is set aside.

        Raises:
            StateError: the disk refuses, the data cannot be checked, or it cannot be set aside.
        """
        if self.writable:
            for path in self.data.parent.glob(f"{self._copies}*"):  # left by killed processes
                path.unlink()
        if self.data.exists() and not self._is_sealed():
            copy = self.new_copy() if self.writable else None
            damage = damage_in(self.data, copy)
            if damage:
                self.set_aside(damage)
            elif copy is not None and copy.exists():
                self.replace(copy)
        if self.writable:
            self._seal.unlink(missing_ok=True)

    def set_aside(self, damage: str) -> None:
        """Rename damaged data to an unused name, and log it.

        Raises:
            StateError: the directory is read-only.
        """
        if not self.writable:
            raise StateError(
                f"the log of generations {self.data} is damaged ({damage}), and its directory "
                "cannot be written: make it writable, so that the log is set aside, or choose "
                "another state directory"
            )
        names = (self.data.with_name(f"generations.damaged-{number}.mdb") for number in count(1))
        aside = next(name for name in names if not os.path.lexists(name))
        self.data.rename(aside)
        _LOGGER.warning(
            "the log of generations %s is damaged (%s) and was set aside as %s; drafts start cold. "
            "Check the disk. To recover the outputs, stop the drafter and put a copy of the "
            "state directory in its place; remove %s once it is not needed",
            *(self.data, damage, aside.name, aside.name),
        )

    def replace(self, copy: Path) -> None:
        """Replace the data by a copy and sync both; raises OSError if the disk refuses."""
        sync_path(copy)
        copy.replace(self.data)
        sync_path(self.data.parent)

    def new_copy(self) -> Path:
        """Return an unused path for a copy of the data; the next start removes such copies."""
        return self.data.with_name(f"{self._copies}{secrets.token_hex(4)}")

    def seal(self) -> None:
        """Store the checksum of the data after the last write; the next start relies on it."""
        with suppress(OSError):
            write_seal(self.data, self._seal)

    def release(self) -> None:
        """Unlock the files."""
        with _LOCKED_GUARD:
            _LOCKED.remove(self._key)
            os.close(self._lock)

    def _is_sealed(self) -> bool:
        try:
            return bool(json.loads(self._seal.read_bytes()) == _checksum(self.data))
        except (OSError, ValueError):
            return False


def _lock(path: Path) -> tuple[int, bool]:
    """Lock a file; return its descriptor, and whether its directory is writable.

    The lock belongs to the process, not to the descriptor, which children would inherit. The
    process loses the lock when it closes any descriptor of the file, so it never opens the file
    twice.
    """
    if path.exists() and _identity(path.stat()) in _LOCKED:
        raise _in_use(path.parent)
    descriptor, writable = _open_lock(path)
    try:
        fcntl.lockf(descriptor, (fcntl.LOCK_EX if writable else fcntl.LOCK_SH) | fcntl.LOCK_NB)
    except OSError as error:
        os.close(descriptor)
        if error.errno in {errno.EACCES, errno.EAGAIN}:
            raise _in_use(path.parent) from error
        raise
    return descriptor, writable


def _open_lock(path: Path) -> tuple[int, bool]:
    try:
        return os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600), True
    except OSError:
        if not path.exists():
            raise
    return os.open(path, os.O_RDONLY | os.O_CLOEXEC), False


def _identity(status: os.stat_result) -> tuple[int, ...]:
    return os.getpid(), status.st_dev, status.st_ino


def _check_holds_no_copies(directory: Path) -> None:
    """Check that a directory without a log has no subdirectories with one.

    Raises:
        StateError: it has some; a drafter would start empty instead of from one of these copies.
    """
    with _refusals(directory):
        if (directory / DATA_NAME).exists():
            return
        copies = sorted(path.parent.name for path in directory.glob(f"*/{DATA_NAME}"))
    if copies:
        raise StateError(
            f"{directory} is not a state directory, it holds {len(copies)}: name one of them, the "
            f"last is {copies[-1]}, or an empty directory"
        )


def _in_use(directory: Path) -> StateError:
    return StateError(
        f"another drafter uses the state directory {directory}: shut it down, or give this one "
        "a directory of its own"
    )


def damage_in(data: Path, copy: Path | None) -> str:
    """Read a log in a child process, which may crash; return the damage, or "" if there is none.

    Args:
        data: the log.
        copy: path for a copy of its records, written if all can be read and there is room.

    Raises:
        StateError: the process could not check the log.
    """
    command = [sys.executable or "python3", "-P", log_reader.__file__, str(data)]
    timeout_s = READING_S + data.stat().st_size / _READ_BYTES_PER_S
    try:
        done = subprocess.run(  # noqa: S603  (our own program and files)
            [*command, str(copy)] if copy is not None else command,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
            capture_output=True,
            text=True,
            errors="replace",
            timeout=timeout_s,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return f"it cannot be read within {timeout_s:.0f} s"
    except OSError as error:
        raise _unread(data, f"cannot be started: {error}") from error
    if done.returncode in {0, log_reader.NO_COPY}:
        return ""
    last_words = done.stderr.strip().rpartition("\n")[2]
    if done.returncode == log_reader.DAMAGED:
        return last_words or "it cannot be read"
    if -done.returncode in _CRASHES:
        return f"reading it ends with {signal.Signals(-done.returncode).name}"
    raise _unread(data, f"ended with status {done.returncode}: {last_words or 'it was killed'}")


def _unread(data: Path, reason: str) -> StateError:
    return StateError(
        f"the log of generations {data} was not closed properly, and the process that reads it "
        f"first {reason}; check memory and permissions and start again, or choose another state "
        "directory"
    )


def sync_path(path: Path) -> None:
    """Sync a file or a directory; raises OSError if the disk refuses."""
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_seal(data: Path, seal: Path) -> None:
    """Store the checksum of a file that does not change; raises OSError if the disk refuses."""
    temporary = seal.with_suffix(".new")
    temporary.write_text(json.dumps(_checksum(data)))
    temporary.replace(seal)


def _checksum(path: Path) -> dict[str, int]:
    crc, size = 0, 0
    with path.open("rb") as file:
        while chunk := file.read(_CHUNK_BYTES):
            crc, size = zlib.crc32(chunk, crc), size + len(chunk)
    return {"crc32": crc, "num_bytes": size}


@contextmanager
def _refusals(directory: Path) -> Iterator[None]:
    """Turn errors of the disk and of LMDB in a state directory into StateError."""
    try:
        yield
    except REFUSALS as error:
        raise StateError(
            f"cannot use the state directory {directory}: "
            f"{getattr(error, 'strerror', None) or error}; choose another one, or free space and "
            "permissions"
        ) from error


def open_store(files: LogFiles, fingerprint: str, options: LogOptions) -> tuple[LogStore, str]:
    """Open the store in locked files; a damaged store is set aside and a new one created.

    Args:
        files: files of the store.
        fingerprint: fingerprint of the tokenizer that will be used; empty if unknown.
        options: options of the log.

    Returns:
        The store, and the fingerprint of its tokenizer; empty if unknown.

    Raises:
        StateError: the disk refuses, or the log has another format version.
        VocabularyMismatchError: it holds outputs of another tokenizer.
    """
    with _refusals(files.data.parent):
        files.make_safe()
        store = _opened(files, options)
        try:
            _check_format(store, files)
            if files.writable:
                sync_path(files.data.parent)
            return store, _checked_fingerprint(store, files, fingerprint)
        except BaseException:
            store.close()
            raise


def _opened(files: LogFiles, options: LogOptions) -> LogStore:
    """Return the store; set aside files that LMDB rejects or that lack our first records."""
    store, damage = None, "it does not name its tokenizer"
    try:
        store = LogStore(files.data, options, writable=files.writable)
        introduced = (store.record(key) is not None for key in (FORMAT_KEY, FINGERPRINT_KEY))
        if store.is_empty or all(introduced):
            return store
    except _DAMAGE as error:
        damage = str(error)
    if store is not None:
        store.close()
    files.set_aside(damage)
    return LogStore(files.data, options)


def _check_format(store: LogStore, files: LogFiles) -> None:
    version = store.record(FORMAT_KEY)
    if version is None and files.writable:
        version = bytes([FORMAT_VERSION])
        store.put({FORMAT_KEY: version, FINGERPRINT_KEY: b""})
    if version is not None and version != bytes([FORMAT_VERSION]):
        raise StateError(
            f"{files.data} has format version {version.hex()}, and this is version "
            f"{FORMAT_VERSION}: remove the state directory, or choose another one"
        )


def _checked_fingerprint(store: LogStore, files: LogFiles, fingerprint: str) -> str:
    known = (store.record(FINGERPRINT_KEY) or b"").decode()
    if fingerprint in {"", known}:
        return known
    if known or store.has_outputs():
        named = f"with the fingerprint {known[:12]}\u2026" if known else "that was not named"
        raise VocabularyMismatchError(
            f"the state directory {files.data.parent} holds outputs of a tokenizer {named} "
            f"and not of {fingerprint[:12]}\u2026: give each tokenizer a directory of its own"
        )
    if files.writable:
        store.put({FINGERPRINT_KEY: fingerprint.encode()})
    return fingerprint
