"""Writes an index safely: locks it, builds in a hidden folder, and renames the folder at the end.

A new index is built in a hidden folder next to its path. The folder is renamed when the index is
complete. Only one writer at a time holds the lock of an index. Written files never change.
"""

import ctypes
import errno
import fcntl
import json
import os
import re
import secrets
import shutil
import socket
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final, NoReturn

import numpy as np
from numpy.typing import NDArray

from indexer.errors import IndexBusyError, IndexerError, IndexExistsError, writing_to
from indexer.format.names import (
    CATALOG_FOLDER,
    LOCK_FILE,
    OPTIONAL_SEGMENT_FILES,
    PHRASE_FILES,
    PHRASES_FOLDER,
    SCRATCH_FOLDER,
    SEGMENT_FILES,
    SEGMENTS_FOLDER,
    TOKENIZER_FILE,
    is_ordinal_name,
)
from indexer.format.records import FileRecord
from indexer.format.same_folder import is_at

_FILES: Final = ((LOCK_FILE,), (TOKENIZER_FILE,))
_FOLDERS: Final = ((CATALOG_FOLDER,), (SEGMENTS_FOLDER,), (PHRASES_FOLDER,))
_NUMBERED: Final[dict[tuple[str, ...], tuple[str, ...]]] = {
    (SEGMENTS_FOLDER,): (*SEGMENT_FILES, *OPTIONAL_SEGMENT_FILES),
    (PHRASES_FOLDER,): PHRASE_FILES,
}


def why_not_index(folder: Path) -> str | None:
    """Return why a folder is not an index, or None if it is one and contains nothing else.

    An index may lack segments and phrase tables, for example if it was only partly copied, but it
    must have its snapshots. It has no links, and no entries with other names or of other kinds.

    Raises:
        OSError: the folder cannot be read.
    """
    for place, folders, files in os.walk(folder, onerror=_fail):
        parts = Path(place).relative_to(folder).parts
        if not parts and SCRATCH_FOLDER in folders:
            folders.remove(SCRATCH_FOLDER)
        for names, is_known in ((folders, _is_folder_of_index), (files, _is_file_of_index)):
            for name in sorted(names):
                if not is_known((*parts, name)) or Path(place, name).is_symlink():
                    return f"it holds {Path(*parts, name)}"
    return None if _has_snapshot(folder) else "it has no snapshot in its catalog"


def _has_snapshot(folder: Path) -> bool:
    catalog = folder / CATALOG_FOLDER
    return catalog.is_dir() and any(is_ordinal_name(each.name) for each in catalog.iterdir())


def _is_folder_of_index(parts: tuple[str, ...]) -> bool:
    return parts in _FOLDERS or _is_numbered(parts)


def _is_numbered(parts: tuple[str, ...]) -> bool:
    """Return whether the path is the folder of a segment or of phrase tables."""
    return bool(parts) and parts[:-1] in _NUMBERED and is_ordinal_name(parts[-1])


def _is_file_of_index(parts: tuple[str, ...]) -> bool:
    if parts in _FILES or (parts[:-1] == (CATALOG_FOLDER,) and _is_snapshot_name(parts[-1])):
        return True
    return _is_numbered(parts[:-1]) and parts[-1] in _NUMBERED[parts[:-2]]


def _is_snapshot_name(name: str) -> bool:
    return is_ordinal_name(name) or name.startswith(".partial-")


def _fail(error: OSError) -> NoReturn:
    raise error


_TOKEN_BYTES: Final = 4


@dataclass(frozen=True, slots=True)
class _Workplace:
    """A folder to build in and the builder's lock file, both next to the output.

    The folder itself cannot be locked, because NFS locks only files that are open for writing.
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
        """Remove the folder, then the lock file. The lock file stays if the folder does."""
        shutil.rmtree(self.folder, ignore_errors=True)
        if not self.folder.exists():
            self.lock.unlink(missing_ok=True)


@contextmanager
def workplace(output: Path, *, resume: bool) -> Iterator[Path]:
    """Yield a folder next to `output`, and remove it at the end if it still exists.

    To resume, the folder is the one that a killed or failed build of the same output left behind,
    if there is one. Otherwise, folders of such builds are removed first, and the new folder is
    empty. On a file system without locks, the old folders stay.

    Args:
        output: output path of the build.
        resume: whether to continue from the folder of another build. The folder then also stays if
            this build fails.

    Raises:
        OSError: the disk is full, or the system denies access.
        IndexBusyError: another build of the same output is running.
    """
    adopted = _adopt(output) if resume else None
    _remove_leftovers(output)
    if adopted is None:
        _check_alone(output)
    place, lock = adopted or _claim(output)
    with suppress(OSError):
        os.ftruncate(lock, 0)
        os.pwrite(lock, json.dumps(_note("build")).encode(), 0)
    keeps = resume
    try:
        place.folder.mkdir(exist_ok=adopted is not None)
        yield place.folder
        keeps = False
    finally:
        if not keeps:
            with suppress(OSError):
                place.remove()
        os.close(lock)


def _adopt(output: Path) -> tuple[_Workplace, int] | None:
    """Lock and return this user's leftover folder of a dead build, if any, ready to resume."""
    for place in _leftovers(output):
        with suppress(OSError):
            lock = os.open(place.lock, os.O_RDWR | os.O_CLOEXEC)
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                if is_at(place.lock, lock) and place.folder.stat().st_uid == os.geteuid():
                    _forget_unfinished(place.folder)
                    return place, lock
            except OSError:
                os.close(lock)
                raise
            os.close(lock)
    return None


def _forget_unfinished(folder: Path) -> None:
    """Remove the snapshot and the phrase tables, because they are written again."""
    for name in (CATALOG_FOLDER, PHRASES_FOLDER):
        shutil.rmtree(folder / name, ignore_errors=True)


def _claim(output: Path) -> tuple[_Workplace, int]:
    """Create and lock a lock file. Until it is locked, another build may consider this one dead."""
    while True:
        place = _Workplace.of(output, secrets.token_hex(_TOKEN_BYTES))
        lock = os.open(place.lock, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644)
        with suppress(OSError):  # without file locks, no leftover folders are removed either
            fcntl.flock(lock, fcntl.LOCK_EX)
        if place.lock.exists():
            return place, lock
        os.close(lock)


def _leftovers(output: Path) -> Iterator[_Workplace]:
    """Yield the working folders of builds of an output, whether the builds run or are dead."""
    pattern = re.compile(rf"\.{re.escape(output.name)}\.lock-([0-9a-f]{{{2 * _TOKEN_BYTES}}})")
    for path in sorted(output.parent.iterdir()):
        if match := pattern.fullmatch(path.name):
            yield _Workplace.of(output, match[1])


def _check_alone(output: Path) -> None:
    """Refuse to build while another build of the same output runs; one would be wasted."""
    for place in _leftovers(output):
        with suppress(FileNotFoundError):  # the other build has ended
            lock = os.open(place.lock, os.O_RDONLY | os.O_CLOEXEC)
            try:
                fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
            except BlockingIOError as error:
                raise IndexBusyError(
                    f"{output} is being built by {_holder(lock)}: wait until it is done, or name "
                    "another folder"
                ) from error
            except OSError:
                continue  # the file system has no locks
            finally:
                os.close(lock)


def _remove_leftovers(output: Path) -> None:
    for place in _leftovers(output):
        with suppress(OSError):
            _remove_if_dead(place)


def _remove_if_dead(place: _Workplace) -> None:
    lock = os.open(place.lock, os.O_RDWR)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        place.remove()
    finally:
        os.close(lock)


_MAX_ATTEMPTS: Final = 20
"""Attempts to lock a folder that may be replaced meanwhile; even two replacements are rare."""

_MAX_NOTE_BYTES: Final = 1 << 12


@contextmanager
def writer_lock(folder: Path, command: str) -> Iterator[None]:
    """Hold the lock of an index's only writer during the block.

    The lock ends with the process, however the process ends. While it is held, no build replaces
    the folder, because a build that replaces an index needs the lock, too.

    Args:
        folder: directory of the index.
        command: the writer's command, which other processes show in messages.

    Raises:
        IndexBusyError: another process holds the lock.
        NoLocksError: the file system has no locks.
        IndexerError: the folder cannot be written to, or is replaced constantly.
    """
    descriptor = _locked(folder)
    try:
        with suppress(OSError):  # on a full disk, the lock works without the note in its file
            os.ftruncate(descriptor, 0)
            os.pwrite(descriptor, json.dumps(_note(command)).encode(), 0)
        yield
    finally:
        with suppress(OSError):
            os.ftruncate(descriptor, 0)
        os.close(descriptor)


class NoLocksError(IndexerError):
    """The file system has no locks, so two writers could run at once."""


def _locked(folder: Path) -> int:
    """Return the locked file of the folder that is now at the path."""
    path = folder / LOCK_FILE
    for _ in range(_MAX_ATTEMPTS):
        with writing_to(folder):
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            _acquire(descriptor, folder)
        except BaseException:
            os.close(descriptor)
            raise
        if is_at(path, descriptor):
            return descriptor
        os.close(descriptor)
    raise IndexerError(f"{folder} is replaced faster than it can be changed: try again")


def _acquire(descriptor: int, folder: Path) -> None:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        raise IndexBusyError(
            f"{folder} is being changed by {_holder(descriptor)}: wait until it is done"
        ) from error
    except OSError as error:
        raise NoLocksError(
            f"the file system of {folder} has no locks ({error.strerror}), so two writers "
            "could run at once: build the index on another one and copy it"
        ) from error


def _note(command: str) -> dict[str, str | int]:
    now = datetime.now(UTC).isoformat(timespec="seconds")
    return {"command": command, "host": socket.gethostname(), "pid": os.getpid(), "since": now}


def _holder(descriptor: int) -> str:
    """Describe the holder of the lock, from the note in the lock file."""
    try:
        who = json.loads(os.pread(descriptor, _MAX_NOTE_BYTES, 0))
        return (
            f"process {int(who['pid'])} on {who['host']} (`{who['command']}`, since {who['since']})"
        )
    except (OSError, ValueError, KeyError, TypeError):
        return "another process"


_AT_FDCWD: Final = -100
_RENAME_EXCHANGE: Final = 2


def check_output(output: Path, *, overwrite: bool) -> None:
    """Check that an index may be written at `output`.

    Raises:
        IndexExistsError: something at the path must not be replaced.
        IndexerError: the path cannot be read.
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
def new_index_folder(output: Path, *, overwrite: bool, resume: bool = False) -> Iterator[Path]:
    """Yield a folder to build in, and move it to `output` if the block ends without an error.

    The folder is hidden and next to `output`, so publishing is a rename. If a build is killed at
    any time, `output` has either its old content or the complete new index. Leftover folders of
    killed builds of the same output are removed, or reused with `resume`. If an index will be
    replaced, it stays locked until then.

    Raises:
        IndexExistsError: something at the path must not be replaced.
        IndexBusyError: another process is changing the index that will be replaced.
        IndexerError: the disk is full, or the system denies the write.
    """
    output = Path(os.path.realpath(output))
    check_output(output, overwrite=overwrite)
    with ExitStack() as stack:
        is_locked = _lock_index(output, stack)
        with writing_to(output.parent):
            output.parent.mkdir(parents=True, exist_ok=True)
            folder = stack.enter_context(workplace(output, resume=resume))
        yield folder
        if resume:
            shutil.rmtree(folder / SCRATCH_FOLDER, ignore_errors=True)
        check_output(output, overwrite=overwrite)
        if not is_locked:  # another index has appeared at the path since
            _lock_index(output, stack)
        _publish(folder, output, overwrite=overwrite)


def _lock_index(output: Path, stack: ExitStack) -> bool:
    """Lock the index that will be replaced, if there is one. Return whether it is locked."""
    if not output.is_dir() or not any(output.iterdir()):
        return False
    with suppress(NoLocksError):  # without file locks, no writer can change the index either
        stack.enter_context(writer_lock(output, "build --overwrite"))
    return True


def write_file(path: Path, content: memoryview | bytes, *, durable: bool = True) -> None:
    """Write a file, and create the folders above it.

    Args:
        path: path of the file.
        content: complete content.
        durable: whether to wait until the content is on disk.

    Raises:
        IndexerError: the disk is full, or the system denies the write.
    """
    with writing_to(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("wb") as file:
            file.write(content)
            if durable:
                file.flush()
                os.fsync(file.fileno())


def write_array(path: Path, array: NDArray[Any], *, durable: bool = True) -> FileRecord:
    """Write an array's elements to a file, as `write_file` does; return the file's record."""
    content = np.ascontiguousarray(array).reshape(-1).view(np.uint8).data
    write_file(path, content, durable=durable)
    return FileRecord.of(content)


def write_columns(path: Path, columns: Iterable[NDArray[Any]]) -> FileRecord:
    """Write the elements of arrays to a file, one array after another; return the file's record.

    Args:
        path: path of the file, in an existing folder.
        columns: contiguous arrays. They may be mapped, and are not held in memory.

    Raises:
        IndexerError: the disk is full, or the system denies the write.
    """
    with writing_to(path):
        with path.open("wb") as file:
            for column in columns:
                file.write(column.data)
            file.flush()
            os.fsync(file.fileno())
        return FileRecord.of_file(path)


def move_folder(folder: Path, place: Path) -> None:
    """Move a folder within a file system. It replaces any folder at the new path.

    Raises:
        IndexerError: the disk is full, or the system denies the write.
    """
    with writing_to(place):
        place.parent.mkdir(parents=True, exist_ok=True)
        shutil.rmtree(place, ignore_errors=True)
        folder.rename(place)


def _publish(folder: Path, output: Path, *, overwrite: bool) -> None:
    try:
        for path, _, _ in os.walk(folder):
            sync_folder(path)
        _put_in_place(folder, output, overwrite=overwrite)
        sync_folder(output.parent)
    except OSError as error:
        raise IndexerError(f"cannot put the index at {output}: {error.strerror}") from error


def _put_in_place(folder: Path, output: Path, *, overwrite: bool) -> None:
    """Rename a folder; if an index at the new path may be replaced, swap them."""
    try:
        folder.rename(output)
    except OSError as error:
        if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
            raise
        if not overwrite:  # another build has just published at this path
            raise _exists(output) from error
        if not _exchange(folder, output):
            _move_aside(folder, output)


def _exchange(first: Path, second: Path) -> bool:
    """Swap two folders in one step, if the system and file system support it."""
    rename = getattr(ctypes.CDLL(None), "renameat2", None)
    if rename is None:
        return False
    paths = (_AT_FDCWD, os.fsencode(first), _AT_FDCWD, os.fsencode(second))
    return bool(rename(*paths, _RENAME_EXCHANGE) == 0)


def _move_aside(folder: Path, output: Path) -> None:
    """Swap in steps. If killed after the first step, the old index stays under a hidden name."""
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
            f"the previous one is intact, but now at {old}"
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
