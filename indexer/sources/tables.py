"""Reads Parquet and Arrow tables with pyarrow, one document per row.

Saved datasets consist of Arrow files. Their record batches form a stream, or a file with an index.
Arrow files are mapped into memory, as in the `datasets` library, so only the used columns are read.
A mapped file must not be truncated; it may be removed.
"""

import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from itertools import islice
from typing import TYPE_CHECKING, Any, Final

from indexer.build_report import BuildTally
from indexer.errors import RefusedFileError, UnusableError
from indexer.sources.blocks import FileForm, SourceFile, SourcePiece
from indexer.sources.chats.sessions import Record
from indexer.sources.columns import record_columns
from indexer.sources.file_streams import COPY_AGAIN
from indexer.sources.source_options import (
    NAME_ENCODING,
    NOT_TEXT,
    RAISE_LIMIT,
    TOO_LARGE,
    SourceOptions,
)

if TYPE_CHECKING:
    from pyarrow import Array, RecordBatch, Schema
    from pyarrow.parquet import ParquetFile


def wanted_columns(schema: "Schema", options: SourceOptions) -> list[int]:
    """Return the numbers of the columns with texts, conversations or licences.

    Raises:
        RefusedFileError: no column has texts or conversations.
    """
    names = list(schema.names)
    return [names.index(name) for name in record_columns(names, options)]


def _checked(column: "Array") -> "Array":
    """Return a column with checked offsets. Strings become bytes, so that errors stay per row."""
    import pyarrow as pa  # noqa: PLC0415  (only for tables)

    bytes_of = {
        pa.string(): pa.binary(),
        pa.large_string(): pa.large_binary(),
        pa.string_view(): pa.binary_view(),
    }
    if column.type in bytes_of:
        column = column.view(bytes_of[column.type])
    column.validate(full=True)
    return column


_INDEXED_MAGIC: Final = b"ARROW1"


def arrow_row_counts(file: SourceFile, options: SourceOptions) -> list[int]:
    """Return the number of rows of each record batch. A damaged file is read up to the damage.

    Raises:
        RefusedFileError: no column has texts.
    """
    from pyarrow import ArrowException  # noqa: PLC0415  (only for tables)

    counts: list[int] = []
    with _opened_arrow(file, options) as found:
        try:
            counts.extend(batch.num_rows for batch in found)
        except (ArrowException, OSError, ValueError):
            return counts
    return counts


def arrow_batches(piece: SourcePiece, options: SourceOptions) -> Iterator["RecordBatch"]:
    """Yield the record batches of a piece."""
    with _opened_arrow(piece.file, options) as found:
        yield from islice(found, piece.start, piece.end)


@contextmanager
def _opened_arrow(file: SourceFile, options: SourceOptions) -> Iterator[Iterator["RecordBatch"]]:
    from pyarrow import ipc, memory_map  # noqa: PLC0415  (only for tables)

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


_BATCH_BYTES: Final = 4 << 20
"""Size of the rows to read at a time, estimated from the row group's mean row size. It is small, so
that memory stays low even if row sizes differ a lot."""

_MAX_BATCH_ROWS: Final = 64
"""Most rows of a batch. This bounds memory if some rows are far longer than the mean."""

_BUFFER_BYTES: Final = 1 << 20
"""Bytes to read at a time: enough for a disk's full speed."""


def parquet_row_counts(file: SourceFile, options: SourceOptions) -> list[int]:
    """Return the number of rows of each row group.

    Raises:
        RefusedFileError: no column has texts.
        ValueError: the file is damaged.
    """
    with _opened_parquet(file) as table:
        wanted_columns(table.schema_arrow, options)
        groups = range(table.num_row_groups)
        counts = [int(table.metadata.row_group(group).num_rows) for group in groups]
        if sum(counts) != table.metadata.num_rows:
            raise ValueError("row groups do not add up")
        return counts


def parquet_batches(piece: SourcePiece, options: SourceOptions) -> Iterator["RecordBatch"]:
    """Yield the rows of a piece's row groups, a few at a time to bound memory.

    Raises:
        ValueError: the file is damaged: a row group has fewer rows than its header states.
    """
    with _opened_parquet(piece.file) as table:
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
def _opened_parquet(file: SourceFile) -> Iterator["ParquetFile"]:
    from pyarrow import OSFile  # noqa: PLC0415  (only for tables)
    from pyarrow.parquet import ParquetFile  # noqa: PLC0415  (as above)

    settings: dict[str, Any] = {"pre_buffer": False, "page_checksum_verification": True}
    with (
        OSFile(os.fsencode(file.path)) as source,
        ParquetFile(source, buffer_size=_BUFFER_BYTES, **settings) as table,
    ):
        yield table


def cut_table(file: SourceFile, options: SourceOptions) -> list[SourcePiece]:
    """Cut a table into pieces of about `block_bytes`, each of whole row groups or batches.

    Raises:
        RefusedFileError: pyarrow is not installed, or there is no column to read.
        UnusableError: the file is damaged, or does not have the type that its suffix implies.
        OSError: the file cannot be read.
    """
    with _translated(file):
        if file.format.form == FileForm.PARQUET:
            return _pieces(file, parquet_row_counts(file, options), options.block_bytes)
        counts = arrow_row_counts(file, options) or [0]
    *others, last = _pieces(file, counts, options.block_bytes)
    return [
        *others,
        replace(last, end=sys.maxsize),
    ]  # the last piece includes damaged rows, so that they are counted


def table_records(
    piece: SourcePiece, options: SourceOptions, tally: BuildTally
) -> Iterator[Record]:
    """Yield the rows of a piece as mappings, one by one; count damaged rows.

    Raises:
        RefusedFileError: as for `cut_table`.
        UnusableError: the rest of the file is damaged.
        OSError: the file cannot be read.
    """
    row, form = piece.first, piece.file.format.form
    batches = parquet_batches if form == FileForm.PARQUET else arrow_batches
    with _translated(piece.file):
        for batch in batches(piece, options):
            names = batch.schema.names
            columns = {name: _checked(batch.column(n)) for n, name in enumerate(names)}
            for number in range(batch.num_rows):
                name = f"{piece.file.name}:{row + number}"
                with tally.dropping(name):
                    cells = {key: column[number] for key, column in columns.items()}
                    yield name, {key: _value(cells[key], key, options) for key in cells}
            row += batch.num_rows


def _value(cell: Any, column: str, options: SourceOptions) -> Any:
    """Return the value of a cell.

    Raises:
        UnusableError: the text is too long, or does not have the expected encoding.
    """
    value = getattr(cell, "value", cell)  # if the column is dictionary-encoded
    content = value.as_buffer() if hasattr(value, "as_buffer") else None
    if content is None:
        return cell.as_py()
    if content.size > options.max_document_bytes:
        raise UnusableError(TOO_LARGE, RAISE_LIMIT)
    try:
        return bytes(content).decode(options.encoding)
    except UnicodeError:
        if column != options.field and options.whole_records:
            return None  # for instance, an image
        raise UnusableError(NOT_TEXT, NAME_ENCODING) from None


def _pieces(file: SourceFile, num_rows: Sequence[int], block_bytes: int) -> list[SourcePiece]:
    pieces = []
    total = max(sum(num_rows), 1)
    start = first = row = 0
    for end, count in enumerate(num_rows, 1):
        row += count
        num_bytes = file.num_bytes * row // total - file.num_bytes * first // total
        if num_bytes >= block_bytes or end == len(num_rows):
            pieces.append(SourcePiece(file, num_bytes, start, end, first))
            start, first = end, row
    return pieces


@contextmanager
def _translated(file: SourceFile) -> Iterator[None]:
    form = file.format.form
    try:
        from pyarrow import ArrowException  # noqa: PLC0415  (only for tables)
    except ImportError as error:
        raise RefusedFileError(
            f"reading {form} needs pyarrow", "run `pip install 'foredraft[index]'`"
        ) from error
    damaged = UnusableError(f"unreadable: damaged {form}", COPY_AGAIN)
    try:
        yield
    except OSError as error:
        if error.errno:
            raise OSError(error.errno, os.strerror(error.errno)) from error
        raise damaged from error
    except (ArrowException, ArithmeticError, LookupError, ValueError) as error:
        raise damaged from error
