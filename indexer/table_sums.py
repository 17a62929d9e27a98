"""Adding up large phrase tables in a process of its own.

That takes seconds and several times their size in memory, and much of it holds the interpreter's
lock. Who drafts meanwhile must not wait, nor keep that memory; so the sum comes back in a temporary
file, whose pages the system may take back as those of an index.
"""

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from mmap import ACCESS_READ, mmap
from tempfile import TemporaryFile
from typing import Any, BinaryIO, Final

import numpy as np
from numpy.typing import NDArray

from indexer.errors import DamagedIndexError, IndexerError
from indexer.phrases import PhraseTables
from indexer.tables import merge_tables

SMALL_BYTES: Final = 1 << 20
"""Tables of no more than this together are added up at once and kept in memory."""

_ALIGNMENT: Final = 64
_DAMAGED: Final = 10  # a status that Python itself does not end with
_PRIORITY: Final = 10

Layout = list[tuple[str, str, int]]
"""Name, dtype and elements of arrays in a file, one after the other."""


def sum_tables(tables: Sequence[PhraseTables], small_bytes: int = SMALL_BYTES) -> PhraseTables:
    """Return one set of tables for several corpora; see `indexer.tables.merge_tables`.

    Raises:
        DamagedIndexError: the entries of one do not divide the next level.
        IndexerError: there is no room in memory or for temporary files.
    """
    if len(tables) == 1 or sum(each.num_bytes for each in tables) <= small_bytes:
        return merge_tables(tables)
    try:
        with TemporaryFile() as terms, TemporaryFile() as result:
            layouts = [_write(terms, each) for each in tables]
            return _map(result, [_add_up(terms, layouts, result)])[0]
    except OSError as error:
        raise IndexerError(
            f"phrase tables cannot be added up: {error.strerror}; TMPDIR says where "
            "temporary files go"
        ) from error


def _add_up(terms: BinaryIO, layouts: list[Layout], result: BinaryIO) -> Layout:
    """Have a child read the terms and write the result; return its layout."""
    files = (terms.fileno(), result.fileno())
    command = [sys.executable, "-m", __name__, *map(str, files), json.dumps(layouts)]
    path = os.pathsep.join(filter(None, sys.path))
    done = subprocess.run(  # noqa: S603  (our own module)
        command,
        capture_output=True,
        text=True,
        pass_fds=files,
        env={**os.environ, "PYTHONPATH": path},
        check=False,
    )
    if done.returncode == _DAMAGED:
        raise DamagedIndexError(done.stdout.strip())
    if done.returncode != 0:
        reason = (done.stderr.strip().splitlines() or [f"status {done.returncode}"])[-1]
        raise IndexerError(f"phrase tables could not be added up: {reason}")
    return [(name, dtype, size) for name, dtype, size in json.loads(done.stdout)]


def _write(file: BinaryIO, tables: PhraseTables) -> Layout:
    """Append arrays to a file."""
    arrays = tables.files()
    for array in arrays.values():
        file.write(np.ascontiguousarray(array).view(np.uint8).data)
        file.write(bytes(-array.nbytes % _ALIGNMENT))
    file.flush()
    return [(name, array.dtype.str, array.size) for name, array in arrays.items()]


def _map(file: BinaryIO, layouts: Sequence[Layout]) -> list[PhraseTables]:
    """Return the tables that were written to a file."""
    content = mmap(file.fileno(), 0, access=ACCESS_READ)
    tables, begin = [], 0
    for layout in layouts:
        arrays: dict[str, NDArray[Any]] = {}
        for name, dtype, size in layout:
            arrays[name] = np.frombuffer(content, dtype, size, begin)
            begin += arrays[name].nbytes + -arrays[name].nbytes % _ALIGNMENT
        tables.append(PhraseTables.of_files(arrays))
    return tables


def _main(terms: str, result: str, layouts: str) -> int:
    os.nice(_PRIORITY)  # drafts go first
    with os.fdopen(int(terms), "rb") as terms_file, os.fdopen(int(result), "wb") as result_file:
        try:
            added = merge_tables(_map(terms_file, json.loads(layouts)))
        except DamagedIndexError as error:
            print(error)  # noqa: T201  (to the parent)
            return _DAMAGED
        print(json.dumps(_write(result_file, added)))  # noqa: T201  (likewise)
    return 0


if __name__ == "__main__":
    sys.exit(_main(*sys.argv[1:]))
