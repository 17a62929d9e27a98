"""Arrow files, as saved datasets consist of: record batches, in a stream or with an index.

Files are mapped into memory, as the `datasets` library does: of a batch only what is looked at is
read. They must not be cut short while they are mapped; to be removed does no harm.
"""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import islice
from typing import TYPE_CHECKING, Any, Final

from indexer.sources.blocks import SourceFile, SourcePiece
from indexer.sources.columns import wanted_columns
from indexer.sources.options import SourceOptions

if TYPE_CHECKING:
    from pyarrow import RecordBatch

_INDEXED_MAGIC: Final = b"ARROW1"


def row_counts(file: SourceFile, options: SourceOptions) -> list[int]:
    """Return how many rows each record batch has; of a damaged file, those before the damage.

    Raises:
        TableError: there is no column of texts.
    """
    from pyarrow import ArrowException  # noqa: PLC0415  (not everybody has tables)

    counts: list[int] = []
    with _opened(file, options) as found:
        try:
            counts.extend(batch.num_rows for batch in found)
        except (ArrowException, OSError, ValueError):
            return counts
    return counts


def batches(piece: SourcePiece, options: SourceOptions) -> Iterator["RecordBatch"]:
    """Yield the record batches of a piece."""
    with _opened(piece.file, options) as found:
        yield from islice(found, piece.start, piece.end)


@contextmanager
def _opened(file: SourceFile, options: SourceOptions) -> Iterator[Iterator["RecordBatch"]]:
    from pyarrow import ipc, memory_map  # noqa: PLC0415  (not everybody has tables)

    with memory_map(os.fsencode(file.path)) as source:
        is_indexed = source.read(len(_INDEXED_MAGIC)) == _INDEXED_MAGIC
        opening: Any = ipc.open_file if is_indexed else ipc.open_stream
        source.seek(0)
        with opening(source) as reader:
            columns = wanted_columns(reader.schema, options)
        source.seek(0)
        settings = ipc.IpcReadOptions(included_fields=columns, use_threads=False)
        with opening(source, options=settings) as reader:
            yield map(reader.get_batch, range(reader.num_record_batches)) if is_indexed else reader
