"""Copies the readable records of an LMDB file into a new one.

A separate program, `salvage.py SOURCE TARGET`, because LMDB can crash on a damaged file. It loads
only lmdb, to start quickly. The exit status is a `Verdict`; after a crash it is the system's, and
the target holds the records read until then.
"""

import os
import sys
from collections.abc import Generator, Iterator
from contextlib import closing
from enum import IntEnum
from itertools import islice
from pathlib import Path
from typing import Any, Final

import lmdb

_BATCH: Final = 100  # records lost at most by a crash; larger batches copy faster
_MIN_MAP_BYTES: Final = 1 << 24


class Verdict(IntEnum):
    """The result of a salvage; exit statuses that Python itself does not use."""

    WHOLE = 0
    DAMAGED = 10
    NO_ROOM = 11


class _NoRoomError(Exception):
    """The target cannot be written."""


def salvage(source: Path, target: Path) -> Verdict:
    """Copy all readable records of `source` to the new file `target`.

    A truncated source is extended with zeros. Where the target cannot be written, the source is
    still read to its end.
    """
    try:
        _copy(source, target)
    except _NoRoomError:
        return Verdict.NO_ROOM if _is_readable(source) else Verdict.DAMAGED
    except (lmdb.Error, OSError):
        return Verdict.DAMAGED
    return Verdict.WHOLE


def _copy(source: Path, target: Path) -> None:
    with closing(_records(source)) as records, closing(_new_file(target, source)) as copy:
        while True:
            batch, error = _read_batch(records)
            _write_batch(copy, batch)
            if error is not None:
                raise error
            if not batch:
                return


def _read_batch(
    records: Iterator[tuple[bytes, bytes]],
) -> tuple[list[tuple[bytes, bytes]], lmdb.Error | None]:
    """Return a batch of records, and the error that ended it."""
    batch: list[tuple[bytes, bytes]] = []
    try:
        batch.extend(islice(records, _BATCH))
    except lmdb.Error as error:
        return batch, error
    return batch, None


def _write_batch(copy: Any, batch: list[tuple[bytes, bytes]]) -> None:
    try:
        with copy.begin(write=True) as transaction:
            transaction.cursor().putmulti(batch)
        if not batch:
            copy.sync(True)
    except (lmdb.Error, OSError) as error:
        raise _NoRoomError from error


def _records(source: Path) -> Generator[tuple[bytes, bytes]]:
    with closing(_open(source)) as environment, environment.begin() as transaction:
        yield from transaction.cursor()


def _is_readable(source: Path) -> bool:
    try:
        for _ in _records(source):
            pass
    except lmdb.Error:
        return False
    return True


def _open(source: Path) -> Any:
    environment = lmdb.open(str(source), subdir=False, readonly=True, lock=False, create=False)
    # Reads of a map beyond the file's end crash; zeros are recognised by LMDB as damage.
    needed = (environment.info()["last_pgno"] + 1) * environment.stat()["psize"]
    with source.open("rb+") as file:
        os.posix_fallocate(file.fileno(), 0, needed)  # never shortens the file
    return environment


def _new_file(target: Path, source: Path) -> Any:
    map_bytes = max(4 * source.stat().st_size, _MIN_MAP_BYTES)
    try:
        return lmdb.open(
            str(target), subdir=False, lock=False, sync=False, map_size=map_bytes, mode=0o600
        )
    except (lmdb.Error, OSError) as error:
        raise _NoRoomError from error


if __name__ == "__main__":
    sys.exit(salvage(Path(sys.argv[1]), Path(sys.argv[2])))
