"""LMDB environments of published catalogs, each opened once and shared by its readers."""

import os
import threading
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import lmdb

from indexer.errors import DamagedIndexError
from indexer.format import CATALOG_FILE
from indexer.same_folder import is_at


@dataclass(slots=True)
class _Shared:
    environment: Any
    num_users: int


# LMDB refuses to open an environment twice in one process, so readers of one index share it. The
# key is the file's identity and not its path, because an index may be replaced under its readers.
# A child process may use what it inherits: without locks and writes an environment is no more than
# a file mapped into memory.
_SHARED: Final[dict[tuple[int, int], _Shared]] = {}
_SHARED_LOCK: Final = threading.Lock()


def acquire(folder: Path) -> tuple[tuple[int, int], Any]:
    """Return the environment in `folder` and the key to release it by.

    Raises:
        lmdb.Error: LMDB cannot open it.
        OSError: its file is missing or unreadable.
        DamagedIndexError: another one took its place meanwhile.
    """
    # While the file is open, no other one gets its number from the file system.
    with _SHARED_LOCK, (folder / CATALOG_FILE).open("rb") as file:
        status = os.fstat(file.fileno())
        key = (status.st_dev, status.st_ino)
        if key not in _SHARED:
            _SHARED[key] = _Shared(_open(folder, file.fileno()), 0)
        _SHARED[key].num_users += 1
        return key, _SHARED[key].environment


def release(key: tuple[int, int]) -> None:
    """Let go of an environment; the last one to do so closes it."""
    with _SHARED_LOCK:
        shared = _SHARED[key]
        shared.num_users -= 1
        if shared.num_users == 0:
            del _SHARED[key]
            shared.environment.close()


def _open(folder: Path, descriptor: int) -> Any:
    # A published catalog never changes, so that readers need no locks and can read from disks
    # that they cannot write to.
    environment = lmdb.open(str(folder), readonly=True, lock=False, create=False, readahead=False)
    if not is_at(folder / CATALOG_FILE, descriptor):
        environment.close()
        raise DamagedIndexError(f"the catalog {folder} was replaced while it was opened")
    return environment
