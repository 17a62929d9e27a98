"""The files of a log of generations: locking, integrity checks and repair."""

import errno
import fcntl
import json
import logging
import os
import secrets
import subprocess
import sys
import threading
import time
import zlib
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Final

import lmdb

from retriever.errors import StateError, VocabularyMismatchError
from retriever.log import salvage as log_salvage
from retriever.log.log_store import FINGERPRINT_KEY, FORMAT_KEY, FORMAT_VERSION, LogStore
from retriever.log.options import LogOptions
from retriever.log.salvage import Verdict

_LOGGER: Final = logging.getLogger(__name__)
_CHUNK_BYTES: Final = 1 << 20
_SALVAGE_S: Final = 60.0  # a salvage that hangs on damage is killed after this and the rate below
_SALVAGE_BYTES_PER_S: Final = 5e6  # a slow disk; faster ones never reach the limit

DATA_NAME: Final = "generations.mdb"
SEAL_NAME: Final = "generations.seal"

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
            StateError: another drafter uses it, or it cannot be created.
        """
        self.data = directory / DATA_NAME
        self._seal = directory / SEAL_NAME
        self._salvaged = directory / "generations.salvaged"
        with _refusals(directory), _LOCKED_GUARD:
            directory.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._lock, self.writable = _lock(directory / "generations.lock")
            self._key = _identity(os.fstat(self._lock))
            _LOCKED.add(self._key)

    def make_whole(self) -> None:
        """Check the data if the last process did not seal it, and repair damage.

        Readable records of a damaged file are kept; the file itself is renamed.

        Raises:
            StateError: the disk refuses.
        """
        with _refusals(self.data.parent):
            if self.writable:
                self._finish_mending()
                if self.data.exists() and not self._is_sealed():
                    self._mend()
                self._seal.unlink(missing_ok=True)

    def set_aside(self) -> Path:
        """Rename the data file, and return the new name.

        Raises:
            StateError: the disk refuses.
        """
        aside = self.data.with_name(f"generations.damaged-{time.time_ns()}.mdb")
        with _refusals(self.data.parent):
            self.data.rename(aside)
        return aside

    def replace(self, copy: Path) -> None:
        """Replace the data by a synced copy; raises OSError where the disk refuses."""
        copy.replace(self.data)
        self.sync_names()

    def new_copy(self) -> Path:
        """Return an unused name for a copy of the data."""
        return self._salvaged.with_name(f"{self._salvaged.name}-{secrets.token_hex(4)}")

    def sync_names(self) -> None:
        """Sync the directory; raises OSError where the disk refuses."""
        sync_path(self.data.parent)

    def seal(self) -> None:
        """Store the checksum of the data after the last write: the next start trusts it."""
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

    def _finish_mending(self) -> None:
        """Continue a repair during which an earlier process was killed."""
        if self._salvaged.exists() and not self.data.exists():
            self._salvaged.replace(self.data)
        for path in self.data.parent.glob(f"{self._salvaged.name}*"):
            path.unlink()

    def _mend(self) -> None:
        """Replace the data by a copy of all readable records."""
        # If this process is killed its salvage runs on for a while; its file name is unique.
        copy = self.new_copy()
        verdict = _salvage(self.data, copy)
        if verdict is Verdict.WHOLE:
            copy.replace(self.data)
        elif verdict is Verdict.DAMAGED:
            if copy.exists():
                copy.replace(self._salvaged)
            aside = self.set_aside()
            _LOGGER.warning(
                "the log of generations %s is damaged and was set aside as %s; drafts start with "
                "what could be read of it",
                self.data,
                aside.name,
            )
            self._finish_mending()
        copy.unlink(missing_ok=True)


def _lock(path: Path) -> tuple[int, bool]:
    """Lock a file; return its descriptor, and whether its directory is writable.

    The lock belongs to the process, not to the descriptor, which children would inherit. Closing
    any descriptor of the file releases it, so the file is never opened twice.
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


def _in_use(directory: Path) -> StateError:
    return StateError(
        f"another drafter uses the state directory {directory}: shut it down, or give this one "
        "a directory of its own"
    )


def _salvage(data: Path, target: Path) -> Verdict | None:
    """Copy readable records in a subprocess, which may crash; None if there are none."""
    command = [sys.executable, "-P", log_salvage.__file__, str(data), str(target)]
    timeout_s = _SALVAGE_S + data.stat().st_size / _SALVAGE_BYTES_PER_S
    try:
        done = subprocess.run(  # noqa: S603  (our own program and files)
            command,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
            capture_output=True,
            timeout=timeout_s,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return Verdict.DAMAGED
    except OSError:
        return None
    if done.returncode < 0:
        return Verdict.DAMAGED
    return Verdict(done.returncode) if done.returncode in set(Verdict) else None


def sync_path(path: Path) -> None:
    """Sync a file or a directory; raises OSError where the disk refuses."""
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_seal(data: Path, seal: Path) -> None:
    """Store the checksum of a file that nobody writes; raises OSError where the disk refuses."""
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
    try:
        yield
    except OSError as error:
        raise StateError(
            f"cannot use the state directory {directory}: {error.strerror or error}; "
            "choose another one, or free space and permissions"
        ) from error


REFUSALS: Final = (lmdb.Error, OSError)
"""Errors of the disk and LMDB."""


_DAMAGE: Final = (
    lmdb.CorruptedError,
    lmdb.InvalidError,
    lmdb.PageNotFoundError,
    lmdb.VersionMismatchError,
)


def open_store(files: LogFiles, fingerprint: str, options: LogOptions) -> tuple[LogStore, str]:
    """Open the store in locked files; a damaged one is renamed and a new one created.

    Args:
        files: of the store.
        fingerprint: of the tokenizer whose tokens will come; empty if it is not known.
        options: how the log is kept.

    Returns:
        The store, and the fingerprint of its tokenizer; empty if unknown.

    Raises:
        StateError: the disk refuses, or the log is of another format version.
        VocabularyMismatchError: it holds outputs of another tokenizer.
    """
    files.make_whole()
    try:
        store = _open_whole(files, options)
        try:
            _check_format(store, files)
            if files.writable:
                files.sync_names()
            return store, _checked_fingerprint(store, files, fingerprint)
        except BaseException:
            store.close()
            raise
    except REFUSALS as error:
        raise StateError(
            f"the log {files.data} cannot be opened: {error}; free space and permissions, or "
            "choose another state directory"
        ) from error


def _open_whole(files: LogFiles, options: LogOptions) -> LogStore:
    try:
        store = LogStore(files.data, options, writable=files.writable)
        if store.is_empty or _is_introduced(store):
            return store
        store.close()
        reason = "it does not say of what tokenizer it is"
    except _DAMAGE as error:
        if not files.writable:
            raise
        reason = str(error)
    aside = files.set_aside()
    _LOGGER.warning(
        "the log of generations %s is damaged (%s) and was set aside as %s; drafts start cold",
        files.data,
        reason,
        aside.name,
    )
    return LogStore(files.data, options)


def _is_introduced(store: LogStore) -> bool:
    keys = (FORMAT_KEY, FINGERPRINT_KEY)
    return all(store.record(key) is not None for key in keys)


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
