"""Reads all files of an index from one folder, even if another index replaces the folder."""

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final, TypeVar

from indexer.errors import IndexerError, IndexNotFoundError

_MAX_ATTEMPTS: Final = 20
"""Attempts to read a folder that may be replaced meanwhile. Building an index takes longer than
opening it, so even two replacements in a row are rare."""


_T = TypeVar("_T")

Identity = tuple[int, int]
"""Device and inode number of a folder."""


def from_same_folder(
    path: Path, read: Callable[[], _T], discard: Callable[[_T], None] = lambda _: None
) -> _T:
    """Return the result of `read`, with all files from one folder.

    `read` opens paths file by file. If the folder at `path` is replaced during a call, its result
    or its error may mix two indexes, so `read` is called again.

    Args:
        path: directory of the index.
        read: opens and reads files under `path`.
        discard: releases a result that is not returned.

    Raises:
        IndexNotFoundError: there is no folder at `path`.
        IndexerError: the folder cannot be opened or is replaced constantly, or `read` raises it.
    """
    for _ in range(_MAX_ATTEMPTS):
        with _held(path) as folder:
            try:
                result = read()
            except IndexerError:
                if is_at(path, folder):
                    raise
                continue
            if is_at(path, folder):
                return result
            discard(result)
    raise IndexerError(f"{path} is replaced faster than it can be opened: try again")


@contextmanager
def _held(path: Path) -> Iterator[int]:
    """Open a folder, so that the file system does not reuse its inode number."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    except (FileNotFoundError, NotADirectoryError) as error:
        if path.exists():
            raise IndexNotFoundError(f"{path} is a file: an index is a folder") from error
        raise IndexNotFoundError(
            f"there is no index at {path}: build one with `foredraft build`"
        ) from error
    except OSError as error:
        raise IndexerError(f"cannot open {path}: {error.strerror}") from error
    try:
        yield descriptor
    finally:
        os.close(descriptor)


def folder_identity(path: Path) -> Identity:
    """Return a value that identifies the folder at a path, as opposed to any replacement.

    Raises:
        OSError: there is no folder.
    """
    status = path.stat()
    return status.st_dev, status.st_ino


def is_at(path: Path, descriptor: int) -> bool:
    """Return whether a path points to the file or folder that a descriptor has open."""
    try:
        return os.path.samestat(path.stat(), os.fstat(descriptor))
    except OSError:
        return False
