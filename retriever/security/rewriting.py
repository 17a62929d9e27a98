"""Changing a private file: one process at a time, owner and mode kept, read back.

The lock is flock's, on the file itself: a lock file next to it would need a folder that can be
written, and would be root's where root comes first. A rename puts another file in its place, so
that who has waited opens the path again; the new file is locked before it gets there. Editors do
not lock: what they wrote meanwhile is noticed, and changed in its turn.
"""

import errno
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
"""Longest wait for other changes: one takes milliseconds, or a second on a disk under load."""

_LOOK_EVERY_S: Final = 0.005
_ATTEMPTS: Final = 100
_Change = Callable[[bytes], bytes]


def rewrite(path: Path, change: _Change, *, make: bool = False) -> bytes:
    """Change what a private file holds; owner, group, mode and extended attributes stay.

    The new content gets there at once, by a rename. Where that cannot be (the folder cannot be
    written, the file is a mount point or has a second name, or owner and attributes cannot be given
    to another file) it is written in place. Behind a symlink, the file that it leads to is changed.

    Args:
        path: of the file.
        change: returns the new content for the current one; called again if another program wrote
            the file meanwhile. What it raises leaves the file as it is.
        make: whether to make the file, with the mode 0600, if it is not there.

    Returns:
        What the file holds after it.

    Raises:
        CredentialsError: it cannot be read or written, others may read or write it, it is locked
            for too long, or it does not hold what was written.
    """
    try:
        target = path.resolve()
        for _ in range(_ATTEMPTS):
            with _locked(target, make=make) as file:
                done = _changed(file, target, change)
            if done is not None:
                return done
    except (OSError, RuntimeError) as error:  # resolve: a symlink that leads to itself
        text = getattr(error, "strerror", None) or error
        raise CredentialsError(f"{path} cannot be changed: {text}; it is as before") from error
    raise CredentialsError(f"{path} is changed by another program all the time: try again later")


@contextmanager
def _locked(path: Path, *, make: bool) -> Iterator[BinaryIO]:
    """Open and lock the file that is at a path; it stays there as long as all who write lock."""
    until_s = time.monotonic() + WAIT_S
    while True:
        with os.fdopen(_opened(path, make=make), "rb") as file:
            while not _is_lock_taken(file.fileno()):
                if time.monotonic() > until_s:
                    raise CredentialsError(
                        f"{path} has been locked by another process for {WAIT_S:.0f} s: see which "
                        f"by `lslocks`, end it, and try again"
                    )
                time.sleep(_LOOK_EVERY_S)
            if _is_at(path, os.fstat(file.fileno())):
                yield file
                return


def _opened(path: Path, *, make: bool) -> int:
    """Open a file: to write it if that is allowed, for a rename needs the folder alone."""
    flags = os.O_NONBLOCK | os.O_CLOEXEC | (os.O_CREAT if make else 0)
    try:
        return os.open(path, flags | os.O_RDWR, 0o600)
    except OSError as error:
        try:
            return os.open(path, flags & ~os.O_CREAT | os.O_RDONLY)
        except FileNotFoundError:
            raise error from None


def _is_lock_taken(descriptor: int) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _is_at(path: Path, opened: os.stat_result) -> bool:
    try:
        found = path.stat()
    except FileNotFoundError:
        return False
    return (found.st_dev, found.st_ino) == (opened.st_dev, opened.st_ino)


def _changed(file: BinaryIO, path: Path, change: _Change) -> bytes | None:
    """Change a locked file; None if another program has written it meanwhile."""
    before = os.fstat(file.fileno())
    content = read_open_file(file, path)
    check_private(path, before, by_operator=True)
    new = change(content)
    now = os.fstat(file.fileno())
    if (now.st_size, now.st_mtime_ns) != (before.st_size, before.st_mtime_ns) or not _is_at(
        path, before
    ):
        return None
    with suppress(_CannotReplaceError):
        return _replaced(file.fileno(), path, new, before)
    _write_in_place(path, new, before.st_size)
    return _read_back(path, new, before)


class _CannotReplaceError(Exception):
    """Another file cannot be put in the place of this one with all that it has."""


def _replaced(old: int, path: Path, content: bytes, before: os.stat_result) -> bytes:
    if before.st_nlink > 1:
        raise _CannotReplaceError
    try:
        descriptor, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}-")
    except OSError as error:
        raise _CannotReplaceError from error
    try:
        with os.fdopen(descriptor, "wb"):
            fcntl.flock(descriptor, fcntl.LOCK_EX)  # kept until what was written is read back
            _write_all(descriptor, content)
            try:
                _make_alike(old, descriptor, before)
                Path(name).replace(path)
            except OSError as error:
                raise _CannotReplaceError from error
            _sync_folder(path.parent)
            return _read_back(path, content, before)
    finally:
        with suppress(FileNotFoundError):
            Path(name).unlink()


def _make_alike(old: int, new: int, before: os.stat_result) -> None:
    """Give a file the owner, group, mode and attributes (such as ACLs) of another."""
    os.fchown(new, before.st_uid, before.st_gid)
    wanted, found = _attributes(old), _attributes(new)
    for name in found.keys() - wanted.keys():  # a folder can have ACLs for what is made in it
        os.removexattr(new, name)
    for name, value in wanted.items():
        if found.get(name) != value:
            os.setxattr(new, name, value)
    os.fchmod(new, stat.S_IMODE(before.st_mode))


def _attributes(descriptor: int) -> dict[str, bytes]:
    try:
        return {name: os.getxattr(descriptor, name) for name in os.listxattr(descriptor)}
    except OSError as error:
        if error.errno == errno.ENOTSUP:
            return {}
        raise


def _write_in_place(path: Path, content: bytes, size: int) -> None:
    """Write over a file; one who reads in between sees a part, which is invalid or is read again.

    Raises:
        CredentialsError: it cannot be written.
    """
    try:
        descriptor = os.open(path, os.O_WRONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        try:
            _make_room(descriptor, len(content), size)
            _write_all(descriptor, content)
            os.ftruncate(descriptor, len(content))
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
    except OSError as error:
        raise CredentialsError(
            f"{path} cannot be written, nor replaced in its folder: {error.strerror or error}; run "
            "this as a user who may, or change the file where it comes from"
        ) from error


def _make_room(descriptor: int, wanted: int, size: int) -> None:
    """Have a full disk refuse before anything is written over."""
    if wanted <= size:
        return
    try:
        os.posix_fallocate(descriptor, 0, wanted)
    except OSError:
        os.ftruncate(descriptor, size)
        raise


def _write_all(descriptor: int, content: bytes) -> None:
    left = memoryview(content)
    while left:
        left = left[os.write(descriptor, left) :]
    os.fsync(descriptor)


def _sync_folder(folder: Path) -> None:
    """Have a rename survive a power failure, where the file system can."""
    with suppress(OSError):
        descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def _read_back(path: Path, content: bytes, before: os.stat_result) -> bytes:
    """Return what is in the file now, having seen that it is what was written, and whose it was.

    Raises:
        CredentialsError: it is not.
    """
    with path.open("rb") as file:
        found = os.fstat(file.fileno())
        is_same = read_open_file(file, path) == content
    if not is_same or any(
        getattr(found, name) != getattr(before, name) for name in ("st_uid", "st_gid", "st_mode")
    ):
        raise CredentialsError(
            f"{path} does not hold what was written, or has another owner or mode: see what else "
            "writes it, and look with `access list`"
        )
    return content
