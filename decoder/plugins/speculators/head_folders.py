"""Folders that heads are trained in: found out before it begins, and held while it runs."""

import fcntl
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Final

from decoder.errors import HeadFileError
from indexer.errors import reason_of

_LOCK: Final = "lock"


def check_writable(output: Path) -> None:
    """Refuse a folder that a head cannot be written to once it is trained.

    Args:
        output: of the head; it need not be there.

    Raises:
        HeadFileError: it is a file, or the disk refuses it.
    """
    if output.exists() and not output.is_dir():
        raise HeadFileError(f"{output} is a file: name a folder for the head")
    try:
        output.parent.mkdir(parents=True, exist_ok=True)
        for folder in (output.parent, output) if output.exists() else (output.parent,):
            Path(tempfile.mkdtemp(dir=folder, prefix=f".{output.name}-")).rmdir()
    except OSError as error:
        raise HeadFileError(
            f"the head could not be written to {output} ({reason_of(error)}): name another folder"
        ) from error


@contextmanager
def folder_lock(folder: Path) -> Iterator[None]:
    """Have a folder for one process that trains a head in it during the block.

    The lock ends with the process, however that ends. Where the file system has no locks, there is
    none.

    Args:
        folder: made if it is not there.

    Raises:
        HeadFileError: another one holds it, or the disk refuses.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(folder / _LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    except OSError as error:
        raise HeadFileError(
            f"{folder} cannot be written ({reason_of(error)}): name another folder"
        ) from error
    try:
        with suppress(OSError):
            _acquire(descriptor, folder)
        yield
    finally:
        os.close(descriptor)


def _acquire(descriptor: int, folder: Path) -> None:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        raise HeadFileError(
            f"{folder} is in use: another process trains a head there; wait until that ends, or "
            "name another folder"
        ) from error
