"""Where a build writes: a hidden folder that becomes the index in one step, or is removed."""

import ctypes
import errno
import fcntl
import os
import secrets
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Final

from indexer.errors import IndexerError, IndexExistsError
from indexer.format import CATALOG_FOLDER, CHECKSUM_FILE, SEGMENTS_FOLDER

_INDEX_ENTRIES: Final = {CATALOG_FOLDER, CHECKSUM_FILE, SEGMENTS_FOLDER}
_AT_FDCWD: Final = -100
_RENAME_EXCHANGE: Final = 2


def check_output(output: Path, *, overwrite: bool) -> None:
    """Check that an index may be written at `output`.

    Raises:
        IndexExistsError: the path is taken by something that must stay.
    """
    if not output.exists():
        return
    if not output.is_dir():
        raise IndexExistsError(f"{output} is a file: name a folder for the index")
    entries = {entry.name for entry in output.iterdir()}
    if not entries:
        return
    if not entries <= _INDEX_ENTRIES:
        raise IndexExistsError(f"{output} is not empty and not an index: name another folder")
    if not overwrite:
        raise IndexExistsError(f"{output} holds an index already: pass --overwrite to replace it")


@contextmanager
def new_index_folder(output: Path, *, overwrite: bool) -> Iterator[Path]:
    """Give a folder to build in, and put it at `output` when the block ends without an error.

    The folder is a hidden sibling of `output`, so that the step is a rename: whenever a build is
    killed, `output` holds what it held before, or the whole new index. What killed builds of the
    same output left behind is removed.

    Raises:
        IndexExistsError: the path is taken by something that must stay.
        IndexerError: the disk refuses what was asked of it.
    """
    output = Path(os.path.realpath(output))
    try:
        check_output(output, overwrite=overwrite)
        output.parent.mkdir(parents=True, exist_ok=True)
        folder, lock = _claim_folder(output)
    except OSError as error:
        raise IndexerError(f"cannot write to {output.parent}: {error.strerror}") from error
    try:
        yield folder
        check_output(output, overwrite=overwrite)
        _publish(folder, output)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        os.close(lock)


def write_file(path: Path, content: memoryview | bytes) -> None:
    """Write a file, with the folders above it, and wait until its content is on disk.

    Raises:
        IndexerError: the disk is full or refuses.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        raise IndexerError(f"cannot write {path}: {error.strerror}") from error


def _claim_folder(output: Path) -> tuple[Path, int]:
    """Create a folder and lock it: the lock is what tells a living build from a dead one."""
    prefix = f".{output.name}.partial-"
    parent = os.open(output.parent, os.O_RDONLY)
    try:
        # Else another build could take the new folder for a dead one before it is locked.
        fcntl.flock(parent, fcntl.LOCK_EX)
        _remove_leftovers(output.parent, prefix)
        folder = output.parent / f"{prefix}{secrets.token_hex(4)}"
        folder.mkdir()
        lock = os.open(folder, os.O_RDONLY)
        fcntl.flock(lock, fcntl.LOCK_EX)
    finally:
        os.close(parent)
    return folder, lock


def _remove_leftovers(parent: Path, prefix: str) -> None:
    for path in parent.iterdir():
        if not path.name.startswith(prefix):
            continue
        with suppress(OSError):
            lock = os.open(path, os.O_RDONLY)
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(path)
            finally:
                os.close(lock)


def _publish(folder: Path, output: Path) -> None:
    try:
        for path, _, _ in os.walk(folder):
            _sync_folder(path)
        _put_in_place(folder, output)
        _sync_folder(output.parent)
    except OSError as error:
        raise IndexerError(f"cannot put the index at {output}: {error.strerror}") from error


def _put_in_place(folder: Path, output: Path) -> None:
    """Rename; where an index is there already, the two change places."""
    try:
        folder.rename(output)
    except OSError as error:
        if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
            raise
        if not _exchange(folder, output):
            _move_aside(folder, output)


def _exchange(first: Path, second: Path) -> bool:
    """Swap two folders in one step, where system and file system can."""
    rename = getattr(ctypes.CDLL(None), "renameat2", None)
    if rename is None:
        return False
    paths = (_AT_FDCWD, os.fsencode(first), _AT_FDCWD, os.fsencode(second))
    return bool(rename(*paths, _RENAME_EXCHANGE) == 0)


def _move_aside(folder: Path, output: Path) -> None:
    """Swap in steps; a kill after the first one leaves the old index under a hidden name."""
    old = output.parent / f".{output.name}.replaced-{secrets.token_hex(4)}"
    output.rename(old)
    folder.rename(output)
    old.rename(folder)


def _sync_folder(path: Path | str) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
