"""The output folder of training: checked before training starts, locked while it runs."""

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
    """Refuse an output folder that the trained head could not be written to.

    Args:
        output: folder for the head; it need not exist.

    Raises:
        HeadFileError: the path is a file, or the folder is not writable.
    """
    if output.exists() and not output.is_dir():
        raise HeadFileError(f"{output} is a file: name a folder for the head")
    try:
        output.parent.mkdir(parents=True, exist_ok=True)
        for folder in (output.parent, output) if output.exists() else (output.parent,):
            Path(tempfile.mkdtemp(dir=folder, prefix=f".{output.name}-")).rmdir()
    except OSError as error:
        raise HeadFileError(
            f"the head cannot be written to {output} ({reason_of(error)}): name another folder"
        ) from error


@contextmanager
def folder_lock(folder: Path) -> Iterator[None]:
    """Lock a folder during the block, so that only one process trains a head in it.

    The lock ends with the process, even if the process is killed. If the file system has no locks,
    the folder stays unlocked.

    Args:
        folder: folder to lock; it is made if it does not exist.

    Raises:
        HeadFileError: another process holds the lock, or the folder is not writable.
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
            f"{folder} is in use: another process is training a head there; wait until it ends, "
            "or name another folder"
        ) from error
