"""Changing a private file, one process at a time, by replacing it with a new file.

The lock is an flock on the file itself, because a separate lock file would belong to root if root
came first. A rename replaces the locked file, so a process that waited for the lock opens the path
again; the new file is locked before the rename. Editors take no lock, so a concurrent edit is
detected before the rename.
"""

import fcntl
import os
import stat
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO, Final

from retriever.errors import CredentialsError
from retriever.security.private_files import check_private, read_open_file

WAIT_S: Final = 30.0
"""Longest wait for the lock, in seconds; a change takes milliseconds, or a second on a busy
disk."""

_LOOK_EVERY_S: Final = 0.005


def rewrite(path: Path, change: Callable[[bytes], bytes], *, make: bool = False) -> bytes:
    """Change the content of a private file; its owner, group and mode stay the same.

    A symlink is followed, and its target is changed.

    Args:
        path: path of the file.
        change: returns the new content, given the current one. If it raises, the file is unchanged.
        make: whether to create the file, with mode 0600, if it does not exist.

    Returns:
        The new content of the file, read back.

    Raises:
        CredentialsError: the file cannot be read or replaced, others may read or write it, it is
            locked for too long, or another program has written it meanwhile.
    """
    try:
        target = path.resolve()
        with _locked(target, make=make) as file:
            before = os.fstat(file.fileno())
            content = read_open_file(file, target)
            check_private(target, before, by_operator=True)
            _replace(file, target, change(content), before)
            return target.read_bytes()
    except (OSError, RuntimeError) as error:  # RuntimeError: a symlink loop
        text = getattr(error, "strerror", None) or error
        raise CredentialsError(
            f"{path} cannot be changed: {text}; it is unchanged: run this as a user who may write "
            "to its folder, or change the file at its source"
        ) from error


@contextmanager
def _locked(path: Path, *, make: bool) -> Iterator[BinaryIO]:
    """Open and lock the file at a path; it stays there if all writers take the lock."""
    until_s = time.monotonic() + WAIT_S
    while True:
        with os.fdopen(_opened(path, make=make), "rb") as file:
            while not _is_lock_taken(file.fileno()):
                if time.monotonic() > until_s:
                    raise CredentialsError(
                        f"{path} has been locked by another process for {WAIT_S:.0f} s: find it "
                        "with `lslocks`, end it, and try again"
                    )
                time.sleep(_LOOK_EVERY_S)
            if _is_at(path, os.fstat(file.fileno())):
                yield file
                return


def _opened(path: Path, *, make: bool) -> int:
    flags = os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC
    try:
        return os.open(path, flags)
    except FileNotFoundError:
        if not make:
            raise
        return os.open(path, flags | os.O_CREAT, 0o600)


def _is_lock_taken(descriptor: int) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _is_at(path: Path, opened: os.stat_result) -> bool:
    with suppress(FileNotFoundError):
        return os.path.samestat(path.stat(), opened)
    return False


def _replace(file: BinaryIO, path: Path, content: bytes, before: os.stat_result) -> None:
    """Replace a locked file with a new file of this content, and sync it."""
    if before.st_nlink > 1:
        raise CredentialsError(
            f"{path} has a second name (a hard link), under which it would stay unchanged: remove "
            "that"
        )
    descriptor, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}-")
    try:
        with os.fdopen(descriptor, "wb") as new:
            fcntl.flock(descriptor, fcntl.LOCK_EX)  # held until this returns
            new.write(content)
            new.flush()
            os.fchown(descriptor, before.st_uid, before.st_gid)
            os.fchmod(descriptor, stat.S_IMODE(before.st_mode))
            os.fsync(descriptor)
            now = os.fstat(file.fileno())
            written = (now.st_size, now.st_mtime_ns) != (before.st_size, before.st_mtime_ns)
            if written or not _is_at(path, before):
                raise CredentialsError(f"{path} was changed by another program: try again")
            Path(name).replace(path)
    finally:
        with suppress(FileNotFoundError):
            Path(name).unlink()
    folder = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY)
    with suppress(OSError):  # some file systems cannot sync a folder
        os.fsync(folder)
    os.close(folder)
