"""The hidden folder that a build writes in, and what tells a living build from a dead one."""

import fcntl
import os
import re
import secrets
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final

_TOKEN_BYTES: Final = 4


@dataclass(frozen=True, slots=True)
class _Workplace:
    """A folder to build in and the lock of whoever builds there, siblings of the output.

    The lock is a file of its own: on NFS a file is locked only by who may write to it, so that a
    folder cannot be.
    """

    folder: Path
    lock: Path

    @classmethod
    def of(cls, output: Path, token: str) -> "_Workplace":
        return cls(
            output.parent / f".{output.name}.partial-{token}",
            output.parent / f".{output.name}.lock-{token}",
        )

    def remove(self) -> None:
        """Remove the folder, then the lock; the lock stays where the folder cannot be removed."""
        shutil.rmtree(self.folder, ignore_errors=True)
        if not self.folder.exists():
            self.lock.unlink(missing_ok=True)


@contextmanager
def workplace(output: Path) -> Iterator[Path]:
    """Give an empty folder beside `output`, and remove what is at its path in the end.

    First removes the folders that killed builds of the same output left. On a file system that
    has no locks they stay.

    Raises:
        OSError: the disk refuses.
    """
    _remove_leftovers(output)
    place, lock = _claim(output)
    try:
        place.folder.mkdir()
        yield place.folder
    finally:
        with suppress(OSError):
            place.remove()
        os.close(lock)


def _claim(output: Path) -> tuple[_Workplace, int]:
    """Create and lock a lock file; until it is locked, another build may take it for a dead one."""
    while True:
        place = _Workplace.of(output, secrets.token_hex(_TOKEN_BYTES))
        lock = os.open(place.lock, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644)
        with suppress(OSError):  # without locks, nobody removes what others left either
            fcntl.flock(lock, fcntl.LOCK_EX)
        if place.lock.exists():
            return place, lock
        os.close(lock)


def _remove_leftovers(output: Path) -> None:
    pattern = re.compile(rf"\.{re.escape(output.name)}\.lock-([0-9a-f]{{{2 * _TOKEN_BYTES}}})")
    for path in output.parent.iterdir():
        if match := pattern.fullmatch(path.name):
            with suppress(OSError):
                _remove_if_dead(_Workplace.of(output, match[1]))


def _remove_if_dead(place: _Workplace) -> None:
    lock = os.open(place.lock, os.O_RDWR)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        place.remove()
    finally:
        os.close(lock)
