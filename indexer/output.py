"""Where a build's result goes: to its place in one step, or nowhere."""

import ctypes
import errno
import os
import secrets
import shutil
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from indexer.errors import IndexerError, IndexExistsError
from indexer.recognise import why_not_index
from indexer.records import FileRecord
from indexer.workplace import workplace
from indexer.writer_lock import NoLocksError, writer_lock

_AT_FDCWD: Final = -100
_RENAME_EXCHANGE: Final = 2


def check_output(output: Path, *, overwrite: bool) -> None:
    """Check that an index may be written at `output`.

    Raises:
        IndexExistsError: the path is taken by something that must stay.
        IndexerError: what is at the path cannot be read.
    """
    try:
        if not output.exists():
            return
        if not output.is_dir():
            raise IndexExistsError(f"{output} is a file: name a folder for the index")
        if any(output.iterdir()):
            _check_replaceable(output, overwrite=overwrite)
    except OSError as error:
        raise IndexerError(f"cannot read {output}: {error.strerror}") from error


def _check_replaceable(output: Path, *, overwrite: bool) -> None:
    reason = why_not_index(output)
    if reason is not None:
        raise IndexExistsError(
            f"{output} is not empty and not an index ({reason}): name another folder"
        )
    if not overwrite:
        raise _exists(output)


def _exists(output: Path) -> IndexExistsError:
    return IndexExistsError(f"{output} holds an index already: pass --overwrite to replace it")


@contextmanager
def new_index_folder(output: Path, *, overwrite: bool) -> Iterator[Path]:
    """Give a folder to build in, and put it at `output` when the block ends without an error.

    The folder is a hidden sibling of `output`, so that the step is a rename: whenever a build is
    killed, `output` holds what it held before, or the whole new index. What killed builds of the
    same output left behind is removed. Nobody changes an index that is about to be replaced.

    Raises:
        IndexExistsError: the path is taken by something that must stay.
        IndexBusyError: somebody changes the index that is to be replaced.
        IndexerError: the disk refuses what was asked of it.
    """
    output = Path(os.path.realpath(output))
    check_output(output, overwrite=overwrite)
    with ExitStack() as stack:
        is_locked = _lock_index(output, stack)
        try:
            output.parent.mkdir(parents=True, exist_ok=True)
            folder = stack.enter_context(workplace(output))
        except OSError as error:
            raise IndexerError(f"cannot write to {output.parent}: {error.strerror}") from error
        yield folder
        check_output(output, overwrite=overwrite)
        if not is_locked:  # what is there now was not there then
            _lock_index(output, stack)
        _publish(folder, output, overwrite=overwrite)


def _lock_index(output: Path, stack: ExitStack) -> bool:
    """Lock the index that will be replaced, if there is one."""
    if not output.is_dir() or not any(output.iterdir()):
        return False
    with suppress(NoLocksError):  # nor does anybody change it there
        stack.enter_context(writer_lock(output, "build --overwrite"))
    return True


def write_file(path: Path, content: memoryview | bytes, *, durable: bool = True) -> None:
    """Write a file, with the folders above it.

    Args:
        path: of the file.
        content: all of it.
        durable: wait until it is on disk.

    Raises:
        IndexerError: the disk is full or refuses.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("wb") as file:
            file.write(content)
            if durable:
                file.flush()
                os.fsync(file.fileno())
    except OSError as error:
        raise IndexerError(f"cannot write {path}: {error.strerror}") from error


def write_array(path: Path, array: NDArray[Any], *, durable: bool = True) -> FileRecord:
    """Write the elements of an array to a file as `write_file` does, and return its record."""
    content = np.ascontiguousarray(array).reshape(-1).view(np.uint8).data
    write_file(path, content, durable=durable)
    return FileRecord.of(content)


def move_folder(folder: Path, place: Path) -> None:
    """Move a folder within a file system; what is at the place already is replaced.

    Raises:
        IndexerError: the disk is full or refuses.
    """
    try:
        place.parent.mkdir(parents=True, exist_ok=True)
        shutil.rmtree(place, ignore_errors=True)
        folder.rename(place)
    except OSError as error:
        raise IndexerError(f"cannot write {place}: {error.strerror}") from error


def _publish(folder: Path, output: Path, *, overwrite: bool) -> None:
    try:
        for path, _, _ in os.walk(folder):
            sync_folder(path)
        _put_in_place(folder, output, overwrite=overwrite)
        sync_folder(output.parent)
    except OSError as error:
        raise IndexerError(f"cannot put the index at {output}: {error.strerror}") from error


def _put_in_place(folder: Path, output: Path, *, overwrite: bool) -> None:
    """Rename; where an index is there already and may be replaced, the two change places."""
    try:
        folder.rename(output)
    except OSError as error:
        if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
            raise
        if not overwrite:  # another build was quicker by a moment
            raise _exists(output) from error
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
    try:
        folder.rename(output)
    except OSError as error:
        _move_back(old, output, error)
        raise
    old.rename(folder)


def _move_back(old: Path, output: Path, reason: OSError) -> None:
    try:
        old.rename(output)
    except OSError:
        raise IndexerError(
            f"cannot put the index at {output}: {reason.strerror}; "
            f"the one that was there is whole, but now at {old}"
        ) from reason


def sync_file(path: Path) -> None:
    """Wait until the content of a file is on disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def sync_folder(path: Path | str) -> None:
    """Wait until the names in a folder are on disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
