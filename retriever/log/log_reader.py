"""Reads an LMDB file to its end, and copies its records to a new file.

This is a separate program, `log_reader.py SOURCE [TARGET]`, because LMDB can crash on a damaged
file. It loads only lmdb, to start quickly. The copy is necessary because writers rely on free pages
and on the free room in pages, which reading does not check. We tested 1,425 damaged files that
could be read to the end: 1 crashed the process that wrote to it, and 1 had other contents
afterwards. None of their copies did.
"""

import sys
from collections.abc import Iterable
from contextlib import closing
from itertools import islice
from pathlib import Path
from typing import Any, Final

import lmdb

DAMAGED: Final = 10
"""Exit status for a file that cannot be read to its end; Python itself does not use it."""

NO_COPY: Final = 11
"""Exit status for a file that was read but not copied, because there was no room."""

_AT_ONCE: Final = 1000  # records in a transaction: an output has about a kilobyte
_MIN_MAP_BYTES: Final = 1 << 24


def read_whole(source: Path, target: Path | None) -> int:
    """Read all records of `source`, and write them to the new file `target`; return the status.

    Raises:
        OSError: the source cannot be opened; this does not mean damage.
        lmdb.MemoryError: there is too little memory; this does not mean damage either.
    """
    source.open("rb").close()
    try:
        if not source.stat().st_size:
            raise lmdb.CorruptedError("it is empty")
        with closing(_open(source)) as environment, environment.begin() as transaction:
            _check(transaction.cursor(), environment.stat()["entries"])
            if target is None or _is_copied(transaction.cursor(), target, source.stat().st_size):
                return 0
            return NO_COPY
    except lmdb.MemoryError:
        raise
    except lmdb.Error as error:
        sys.stderr.write(str(error))
        return DAMAGED


def _open(source: Path) -> Any:
    return lmdb.open(str(source), subdir=False, readonly=True, lock=False, create=False)


def _check(records: Iterable[tuple[bytes, bytes]], num_entries: int) -> None:
    """Read all records; raise an LMDB error if they are out of order or incomplete."""
    last, num_read = b"", 0
    for key, _ in records:
        if key <= last:
            raise lmdb.CorruptedError("its records are out of order")
        last, num_read = key, num_read + 1
    if num_read != num_entries:
        raise lmdb.CorruptedError(f"{num_read} of its {num_entries} records can be reached")


def _is_copied(records: Iterable[tuple[bytes, bytes]], target: Path, num_bytes: int) -> bool:
    """Write records to a new file and sync it; if there is no room, remove it and return False."""
    try:
        with closing(_new_file(target, num_bytes)) as copy:
            rest = iter(records)
            while part := list(islice(rest, _AT_ONCE)):
                with copy.begin(write=True) as transaction:
                    transaction.cursor().putmulti(part, append=True)
            copy.sync(True)
    except (lmdb.Error, OSError):
        target.unlink(missing_ok=True)
        return False
    return True


def _new_file(target: Path, num_bytes: int) -> Any:
    map_bytes = max(4 * num_bytes, _MIN_MAP_BYTES)
    return lmdb.open(
        str(target), subdir=False, lock=False, sync=False, map_size=map_bytes, mode=0o600
    )


if __name__ == "__main__":
    sys.exit(read_whole(Path(sys.argv[1]), Path(sys.argv[2]) if sys.argv[2:] else None))
