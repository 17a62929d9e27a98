"""Files that others must neither change nor read, and how they are read again when they change."""

import logging
import os
import stat
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from threading import Lock
from typing import Final, Generic, TypeVar

from retriever.errors import CredentialsError

LOOK_EVERY_S: Final = 1.0
"""A change of a file takes effect within this time, in seconds."""

_OTHERS_MAY: Final = stat.S_IWGRP | stat.S_IRWXO
_MAX_BYTES: Final = 16 << 20

_Value = TypeVar("_Value")
_Stamp = tuple[tuple[int, ...], ...]
_LOGGER: Final = logging.getLogger(__name__)


def read_file(path: Path) -> bytes:
    """Return what a file holds.

    Raises:
        CredentialsError: it cannot be read, or is far too long.
    """
    return _read(path)[0]


def read_private_file(path: Path) -> bytes:
    """Return what a file holds that only its owner may change, and nobody else but its group read.

    Raises:
        CredentialsError: it cannot be read, others may do so, or it is another user's.
    """
    content, found = _read(path)
    if found.st_mode & _OTHERS_MAY:
        raise CredentialsError(
            f"{path} may be read or changed by others (mode {stat.S_IMODE(found.st_mode):04o}): "
            f"run `chmod 600 {path}`"
        )
    if found.st_uid not in {0, os.geteuid()}:
        raise CredentialsError(
            f"{path} belongs to another user (number {found.st_uid}): give it to the user that "
            "runs this"
        )
    return content


def _read(path: Path) -> tuple[bytes, os.stat_result]:
    try:
        with open(path, "rb", opener=_open_at_once) as file:
            found = os.fstat(file.fileno())
            content = file.read(_MAX_BYTES + 1) if stat.S_ISREG(found.st_mode) else None
    except OSError as error:
        raise CredentialsError(f"{path} cannot be read: {error.strerror or error}") from error
    if content is None or len(content) > _MAX_BYTES:
        raise CredentialsError(f"{path} is no file of at most {_MAX_BYTES} bytes")
    return content, found


def _open_at_once(path: str, flags: int) -> int:
    """Open without waiting for whoever should write to a pipe."""
    return os.open(path, flags | os.O_NONBLOCK)


class Reloaded(Generic[_Value]):
    """What files say, read again when they change.

    Where they cannot be used any more, what was read last stays, and the reason is logged once
    for each change. Safe to call from any thread; a call costs a fraction of a microsecond, and
    once in a second a look at each file.

    Args:
        paths: of the files.
        read: what they say.
        clock: seconds, rising.

    Raises:
        CredentialsError: they cannot be used.
    """

    def __init__(
        self,
        paths: Sequence[Path],
        read: Callable[[], _Value],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._paths = paths
        self._read = read
        self._clock = clock
        self._lock = Lock()
        self._stamp = self._stamp_now()  # before reading: what changes meanwhile is read again
        self._value = read()
        self._look_at_s = clock() + LOOK_EVERY_S

    def current(self) -> _Value:
        """Return what the files say now, or said at most a second ago."""
        if self._clock() < self._look_at_s:
            return self._value
        with self._lock:
            self._look_at_s = self._clock() + LOOK_EVERY_S
            stamp = self._stamp_now()
            if stamp != self._stamp:
                self._stamp = stamp
                self._read_again()
            return self._value

    def _read_again(self) -> None:
        names = ", ".join(map(str, self._paths))
        try:
            self._value = self._read()
        except CredentialsError as error:
            _LOGGER.warning("%s; what was read from it before still counts", error)
        else:
            _LOGGER.info("read again: %s", names)

    def _stamp_now(self) -> _Stamp:
        return tuple(map(_stamp_of, self._paths))


def _stamp_of(path: Path) -> tuple[int, ...]:
    try:
        found = path.stat()
    except OSError:
        return ()
    return found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns
