"""Private files: checks of mode and owner, and reloading when they change."""

import logging
import math
import os
import stat
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from threading import Lock
from typing import BinaryIO, Final, Generic, TypeVar

from retriever.errors import CredentialsError

LOOK_EVERY_S: Final = 0.5
"""Interval between checks of the files, in seconds. A change takes effect within a second: the
other half second is for reading the file and for calls in progress."""

PATIENCE_S: Final = 2.0
"""How long a check may take before the files count as unreadable, in seconds. Reading 16 MiB takes
one second."""

DEFAULT_GRACE_S: Final = 300.0
"""How long the last content of a file admits callers once the file cannot be used, in seconds.

An alert takes a minute or two to reach a person, who takes as long to restore the file. So a
shorter time would turn a mistake into an outage. A longer time would keep admitting callers whom
the broken change was meant to revoke.
"""

_SETTLED_NS: Final = 100_000_000  # file system clocks tick every 1 to 10 ms

_OTHERS_MAY: Final = stat.S_IWGRP | stat.S_IRWXO
_MAX_BYTES: Final = 16 << 20

_Value = TypeVar("_Value")
_Stamp = tuple[tuple[int, ...], ...]
_LOGGER: Final = logging.getLogger(__name__)


def read_file(path: Path) -> bytes:
    """Return the content of a file.

    Raises:
        CredentialsError: the file cannot be read, or is far too long.
    """
    return _read(path)[0]


def read_private_file(path: Path, *, by_operator: bool = False) -> bytes:
    """Return the content of a file that only its owner can write and only its group can read.

    Args:
        path: path of the file.
        by_operator: whether root may read a file of any user, because it acts for the service's
            user.

    Raises:
        CredentialsError: the file cannot be read, others may read or change it, or it belongs to
            another user.
    """
    content, found = _read(path)
    check_private(path, found, by_operator=by_operator)
    return content


def check_private(path: Path, found: os.stat_result, *, by_operator: bool) -> None:
    """Check the mode and owner of a file, as `read_private_file` does.

    Raises:
        CredentialsError: others may read or write the file, or it belongs to another user.
    """
    if found.st_mode & _OTHERS_MAY:
        raise CredentialsError(
            f"{path} may be read or changed by others (mode {stat.S_IMODE(found.st_mode):04o}): "
            f"run `chmod 600 {path}`"
        )
    if found.st_uid not in {0, os.geteuid()} and not (by_operator and os.geteuid() == 0):
        raise CredentialsError(
            f"{path} belongs to another user (number {found.st_uid}): give it to the user that "
            "runs this"
        )


def _read(path: Path) -> tuple[bytes, os.stat_result]:
    try:
        with open(path, "rb", opener=_open_at_once) as file:
            found = os.fstat(file.fileno())
            content = read_open_file(file, path)
    except OSError as error:
        raise CredentialsError(f"{path} cannot be read: {error.strerror or error}") from error
    return content, found


def read_open_file(file: BinaryIO, path: Path) -> bytes:
    """Return the content of an open file, from its current position.

    Raises:
        CredentialsError: the file is not a regular file, or is far too long.
        OSError: the file cannot be read.
    """
    found = os.fstat(file.fileno())
    is_file = stat.S_ISREG(found.st_mode) and found.st_size <= _MAX_BYTES
    content = file.read(_MAX_BYTES + 1) if is_file else b""
    if not is_file or len(content) > _MAX_BYTES:
        raise CredentialsError(f"{path} is not a file of at most {_MAX_BYTES} bytes")
    return content


def _open_at_once(path: str, flags: int) -> int:
    """Open a file without blocking, even a pipe without a writer."""
    return os.open(path, flags | os.O_NONBLOCK)


class Reloaded(Generic[_Value]):
    """A value read from files, reloaded when they change.

    If new content is invalid or cannot be read, the last value stays; `is_overdue` says when it
    must no longer be used. The reason is logged once for each change. Thread-safe. A call takes a
    fraction of a microsecond, plus a stat of each file twice a second.

    Args:
        paths: paths of the files.
        read: parses the files.
        clock: returns monotonic seconds.
        grace_s: how long the last value is used once the files cannot be used, in seconds.

    Raises:
        CredentialsError: the files cannot be used.
    """

    def __init__(
        self,
        paths: Sequence[Path],
        read: Callable[[], _Value],
        clock: Callable[[], float] = time.monotonic,
        *,
        grace_s: float = math.inf,
    ) -> None:
        self._paths = paths
        self._read = read
        self._clock = clock
        self._grace_s = grace_s
        self._lock = Lock()
        self._stamp = self._stamp_now()  # before reading, so that later changes are noticed
        self._is_settled = _is_settled(self._stamp)
        self._value = read()
        self._failing_since_s: float | None = None
        self._looking_since_s: float | None = None
        self._failure = ""
        self._is_told = False
        self._look_at_s = clock() + LOOK_EVERY_S

    def current(self) -> _Value:
        """Return the value of the files, at most a second old."""
        if self._clock() >= self._look_at_s and self._lock.acquire(blocking=False):
            try:  # skipped while another thread is checking
                self._look()
            finally:
                self._lock.release()
        return self._value

    def look(self) -> None:
        """Check the files now."""
        with self._lock:
            self._look()

    @property
    def look_at_s(self) -> float:
        """The time of the next check of the files, in seconds of the clock."""
        return self._look_at_s

    @property
    def failing_s(self) -> float | None:
        """How long the files have been unusable, in seconds; None while they are usable.

        Files also count as unusable while their file system does not answer.
        """
        since_s, looking_since_s = self._failing_since_s, self._looking_since_s
        if since_s is not None:
            return self._clock() - since_s
        for_s = 0.0 if looking_since_s is None else self._clock() - looking_since_s
        return for_s if for_s > PATIENCE_S else None

    @property
    def is_overdue(self) -> bool:
        """Whether the files have been unusable for so long that the last value must not be used."""
        failing_s = self.failing_s
        return failing_s is not None and failing_s >= self._grace_s

    def _look(self) -> None:
        self._looking_since_s = self._clock()
        try:
            self._look_at_files()
        finally:
            self._looking_since_s = None

    def _look_at_files(self) -> None:
        self._look_at_s = self._clock() + LOOK_EVERY_S
        stamp = self._stamp_now()
        has_changed = stamp != self._stamp
        if has_changed or not self._is_settled:
            self._stamp, self._is_settled = stamp, _is_settled(stamp)
            self._read_again(has_changed=has_changed)
        if self.is_overdue and not self._is_told:
            self._is_told = True
            _LOGGER.error("%s: it admits no caller any more", self._failure)

    def _read_again(self, *, has_changed: bool) -> None:
        try:
            self._value = self._read()
        except CredentialsError as error:
            if self._failing_since_s is None:
                self._failing_since_s = self._clock()
            if isinstance(error.__cause__, OSError):
                self._is_settled = False  # the obstacle can vanish without a change of the file
            if str(error) != self._failure:
                self._failure = str(error)
                _LOGGER.warning("%s; its earlier content %s", error, self._for_how_long())
        else:
            has_failed = self._failing_since_s is not None
            self._failing_since_s, self._failure, self._is_told = None, "", False
            if has_changed or has_failed:
                _LOGGER.info("read again: %s", ", ".join(map(str, self._paths)))

    def _for_how_long(self) -> str:
        if math.isinf(self._grace_s):
            return "stays in force"
        left_s = max(0.0, self._grace_s - (self.failing_s or 0.0))
        return f"stays in force for {left_s:.0f} s: restore the file"

    def _stamp_now(self) -> _Stamp:
        return tuple(map(_stamp_of, self._paths))


def _stamp_of(path: Path) -> tuple[int, ...]:
    try:
        found = path.stat()
    except OSError:
        return ()
    return found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns


def _is_settled(stamp: _Stamp) -> bool:
    """Return whether any later change gives another stamp, because file times advance in steps."""
    now_ns = time.time_ns()
    return all(abs(now_ns - changed_ns) > _SETTLED_NS for *_, changed_ns in filter(None, stamp))
