"""Parquet files: row groups, decoded a few rows at a time."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Final

from indexer.sources.blocks import SourceFile, SourcePiece
from indexer.sources.columns import wanted_columns
from indexer.sources.options import SourceOptions

if TYPE_CHECKING:
    from pyarrow import RecordBatch
    from pyarrow.parquet import ParquetFile

_BATCH_BYTES: Final = 4 << 20
_MAX_BATCH_ROWS: Final = 64
_BUFFER_BYTES: Final = 1 << 20


def row_counts(file: SourceFile, options: SourceOptions) -> list[int]:
    """Return how many rows each row group has.

    Raises:
        TableError: there is no column of texts.
        ValueError: the file is damaged.
    """
    with _opened(file) as table:
        wanted_columns(table.schema_arrow, options)
        groups = range(table.num_row_groups)
        counts = [int(table.metadata.row_group(group).num_rows) for group in groups]
        if sum(counts) != table.metadata.num_rows:
            raise ValueError("row groups do not add up")
        return counts


def batches(piece: SourcePiece, options: SourceOptions) -> Iterator["RecordBatch"]:
    """Yield the rows of a piece's row groups, so few at a time that they take little memory.

    Raises:
        ValueError: the file is damaged: a row group holds fewer rows than it says.
    """
    with _opened(piece.file) as table:
        schema = table.schema_arrow
        columns = [schema.names[number] for number in wanted_columns(schema, options)]
        for group in range(piece.start, piece.end):
            missing = table.metadata.row_group(group).num_rows
            num_rows = _batch_rows(table, group)
            for batch in table.iter_batches(num_rows, [group], columns, use_threads=False):
                missing -= batch.num_rows
                yield batch
            if missing:
                raise ValueError("rows are missing")


def _batch_rows(table: "ParquetFile", group: int) -> int:
    size = table.metadata.row_group(group)
    mean_bytes = max(size.total_byte_size // max(size.num_rows, 1), 1)
    return int(min(max(_BATCH_BYTES // mean_bytes, 1), _MAX_BATCH_ROWS))


@contextmanager
def _opened(file: SourceFile) -> Iterator["ParquetFile"]:
    from pyarrow import OSFile  # noqa: PLC0415  (not everybody has tables)
    from pyarrow.parquet import ParquetFile  # noqa: PLC0415  (likewise)

    settings: dict[str, Any] = {"pre_buffer": False, "page_checksum_verification": True}
    with (
        OSFile(os.fsencode(file.path)) as source,
        ParquetFile(source, buffer_size=_BUFFER_BYTES, **settings) as table,
    ):
        yield table
