"""Tables, a document a row: Parquet files and Arrow files, both read with pyarrow.

Arrow files, which saved datasets consist of, hold record batches in a stream or with an index. They
are mapped into memory, as the `datasets` library does, so only the columns that are used are read.
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
from indexer.sources.blocks import FileForm, SourceDocument, SourceFile, SourcePiece, UnusableError
from indexer.sources.envelopes import Record
from indexer.sources.licences import licence_in
from indexer.sources.record_documents import TableError, documents_of, record_columns
from indexer.sources.source_options import (
    NAME_ENCODING,
    NOT_TEXT,
    RAISE_LIMIT,
    TOO_LARGE,
    SourceOptions,
)

if TYPE_CHECKING:
    from pyarrow import Array, RecordBatch, Scalar, Schema


def wanted_columns(schema: "Schema", options: SourceOptions) -> list[int]:
    """Return the numbers of the columns of texts or of conversations, and of licences.

    Raises:
        TableError: there is neither a column of texts nor any of conversations.
    """
    names = list(schema.names)
    return [names.index(name) for name in record_columns(names, options)]


class Rows:
    """The rows of a batch as documents.

    Raises:
        pyarrow.ArrowInvalid: the batch is damaged: its offsets lead outside of it.
    """

    def __init__(self, batch: "RecordBatch", file: SourceFile, options: SourceOptions) -> None:
        names = batch.schema.names
        batch.validate()
        self._texts = _checked(batch.column(names.index(options.field)))
        self._licences: Array | None = None
        if options.licence_field in names and not options.licence:
            self._licences = batch.column(names.index(options.licence_field))
            self._licences.validate(full=True)
        self._file = file
        self._options = options

    def document(self, number: int, name: str) -> SourceDocument:
        """Return the document in a row, under a name.

        Raises:
            UnusableError: it holds no text, or too much of it.
        """
        own = "" if self._licences is None else licence_in(self._licences[number].as_py())
        licence = self._options.licence or own or self._file.licence
        return SourceDocument(name, licence, self._text(self._texts[number]))

    def _text(self, scalar: "Scalar") -> str:
        value = getattr(scalar, "value", scalar)  # where a dictionary encodes the column
        content = value.as_buffer() if hasattr(value, "as_buffer") else None
        if content is None:
            raise UnusableError(
                f"no text in field {self._options.field!r}",
                "it is null or another type: name another column with --field",
            )
        if content.size > self._options.max_document_bytes:
            raise UnusableError(TOO_LARGE, RAISE_LIMIT)
        try:
            return bytes(content).decode(self._options.encoding)
        except UnicodeError:
            raise UnusableError(NOT_TEXT, NAME_ENCODING) from None


def _checked(column: "Array") -> "Array":
    """Return a column with sound offsets; strings as bytes, so that each may be wrong alone."""
    import pyarrow as pa  # noqa: PLC0415  (for tables alone)

    bytes_of = {
        pa.string(): pa.binary(),
        pa.large_string(): pa.large_binary(),
        pa.string_view(): pa.binary_view(),
    }
    if column.type in bytes_of:
        column = column.view(bytes_of[column.type])
    column.validate(full=True)
    return column


if TYPE_CHECKING:
    from pyarrow import RecordBatch

_INDEXED_MAGIC: Final = b"ARROW1"


def arrow_row_counts(file: SourceFile, options: SourceOptions) -> list[int]:
    """Return how many rows each record batch has; of a damaged file, those before the damage.

    Raises:
        TableError: there is no column of texts.
    """
    from pyarrow import ArrowException  # noqa: PLC0415  (for tables alone)

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
    from pyarrow import ipc, memory_map  # noqa: PLC0415  (for tables alone)

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


if TYPE_CHECKING:
    from pyarrow import RecordBatch
    from pyarrow.parquet import ParquetFile

_BATCH_BYTES: Final = 4 << 20
"""Size of the rows that are read together, by the mean of their group: little memory, even where
rows differ much."""

_MAX_BATCH_ROWS: Final = 64
"""Bounds a batch whose rows are far longer than the mean of their group."""

_BUFFER_BYTES: Final = 1 << 20
"""Bytes that are read at once: large enough for a disk's full speed."""


def parquet_row_counts(file: SourceFile, options: SourceOptions) -> list[int]:
    """Return how many rows each row group has.

    Raises:
        TableError: there is no column of texts.
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
    """Yield the rows of a piece's row groups, so few at a time that they take little memory.

    Raises:
        ValueError: the file is damaged: a row group holds fewer rows than it says.
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
    from pyarrow import OSFile  # noqa: PLC0415  (for tables alone)
    from pyarrow.parquet import ParquetFile  # noqa: PLC0415  (as above)

    settings: dict[str, Any] = {"pre_buffer": False, "page_checksum_verification": True}
    with (
        OSFile(os.fsencode(file.path)) as source,
        ParquetFile(source, buffer_size=_BUFFER_BYTES, **settings) as table,
    ):
        yield table


class DamagedTableError(Exception):
    """The rest of a table cannot be read."""


def cut_table(file: SourceFile, options: SourceOptions) -> list[SourcePiece]:
    """Cut a table into pieces of about `block_bytes`, each of whole row groups or batches.

    Raises:
        TableError: pyarrow is not installed, or there is no column of the name `options.field`.
        DamagedTableError: the file is damaged, or not what its suffix says.
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
    ]  # the last piece reads on into damaged rows, which counts them


def read_table(
    piece: SourcePiece, options: SourceOptions, tally: BuildTally
) -> Iterator[SourceDocument]:
    """Yield the documents of a piece; count the rows that are none; see `table_records`."""
    row = piece.first
    for batch in _batches(piece, options):
        if _holds_texts(batch, options):
            yield from _texts_in(batch, row, piece.file, options, tally)
        else:
            yield from _conversations_in(batch, row, piece.file, options, tally)
        row += batch.num_rows


def table_records(piece: SourcePiece, options: SourceOptions) -> Iterator[Record]:
    """Yield the rows of a piece as mappings.

    Raises:
        TableError: as `cut_table` does.
        DamagedTableError: the rest is damaged.
        OSError: the file cannot be read.
    """
    row = piece.first
    for batch in _batches(piece, options):
        for number, record in enumerate(_records_in(batch)):
            yield f"{piece.file.name}:{row + number}", record
        row += batch.num_rows


def _batches(piece: SourcePiece, options: SourceOptions) -> Iterator["RecordBatch"]:
    batches = parquet_batches if piece.file.format.form == FileForm.PARQUET else arrow_batches
    with _translated(piece.file):
        yield from batches(piece, options)


def _holds_texts(batch: "RecordBatch", options: SourceOptions) -> bool:
    from pyarrow import types  # noqa: PLC0415  (for tables alone)

    names = batch.schema.names
    if options.field not in names:
        return False
    return not types.is_nested(batch.schema.field(options.field).type)


def _texts_in(
    batch: "RecordBatch", row: int, file: SourceFile, options: SourceOptions, tally: BuildTally
) -> Iterator[SourceDocument]:
    with _translated(file):
        rows = Rows(batch, file, options)
        for number in range(batch.num_rows):
            name = f"{file.name}:{row + number}"
            try:
                yield rows.document(number, name)
            except UnusableError as unusable:
                tally.drop(str(unusable), name, unusable.remedy)


def _conversations_in(
    batch: "RecordBatch", row: int, file: SourceFile, options: SourceOptions, tally: BuildTally
) -> Iterator[SourceDocument]:
    with _translated(file):
        for number, record in enumerate(_records_in(batch), row):
            name = f"{file.name}:{number}"
            try:
                yield from documents_of(record, name, file, options, tally)
            except UnusableError as unusable:
                tally.drop(str(unusable), name, unusable.remedy)


def _records_in(batch: "RecordBatch") -> Iterator[dict[str, Any]]:
    """Yield the rows of a batch, each made when it is its turn.

    Raises:
        pyarrow.ArrowInvalid: the batch is damaged: its offsets lead outside of it.
    """
    batch.validate(full=True)
    names = batch.schema.names
    for number in range(batch.num_rows):
        yield {name: batch.column(place)[number].as_py() for place, name in enumerate(names)}


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
        from pyarrow import ArrowException  # noqa: PLC0415  (for tables alone)
    except ImportError as error:
        raise TableError(
            f"reading {form} takes pyarrow", "run `pip install 'foredraft[index]'`"
        ) from error
    try:
        yield
    except OSError as error:
        if error.errno:
            raise OSError(error.errno, os.strerror(error.errno)) from error
        raise DamagedTableError(f"damaged {form}") from error
    except (ArrowException, ArithmeticError, LookupError, ValueError) as error:
        raise DamagedTableError(f"damaged {form}") from error
