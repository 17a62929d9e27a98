"""Tables, a document a row: Parquet files and Arrow files, both read with pyarrow."""

import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace

from indexer.sources import arrow, parquet
from indexer.sources.blocks import SourceDocument, SourceFile, SourcePiece, UnusableError
from indexer.sources.columns import Rows, TableError
from indexer.sources.formats import Form
from indexer.sources.options import SourceOptions
from indexer.tally import Tally


class DamagedTableError(Exception):
    """What follows in a table cannot be read."""


def cut_table(file: SourceFile, options: SourceOptions) -> list[SourcePiece]:
    """Cut a table into pieces of about `block_bytes`, each of whole row groups or batches.

    Raises:
        TableError: pyarrow is not installed, or there is no column of the name `options.field`.
        DamagedTableError: the file is damaged, or not what its suffix says.
        OSError: the file cannot be read.
    """
    with _translated(file):
        if file.format.form == Form.PARQUET:
            return _pieces(file, parquet.row_counts(file, options), options.block_bytes)
        counts = arrow.row_counts(file, options) or [0]
    *others, last = _pieces(file, counts, options.block_bytes)
    return [*others, replace(last, end=sys.maxsize)]  # and what is damaged, so that it is counted


def read_table(
    piece: SourcePiece, options: SourceOptions, tally: Tally
) -> Iterator[SourceDocument]:
    """Yield the documents of a piece; count the rows that are none.

    Raises:
        TableError: as `cut_table` does.
        DamagedTableError: what follows is damaged.
        OSError: the file cannot be read.
    """
    batches = parquet.batches if piece.file.format.form == Form.PARQUET else arrow.batches
    row = piece.first
    with _translated(piece.file):
        for batch in batches(piece, options):
            rows = Rows(batch, piece.file, options)
            for number in range(batch.num_rows):
                name = f"{piece.file.name}:{row + number}"
                try:
                    yield rows.document(number, name)
                except UnusableError as unusable:
                    tally.skip(str(unusable), name)
            row += batch.num_rows


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
        from pyarrow import ArrowException  # noqa: PLC0415  (not everybody has tables)
    except ImportError as error:
        extra = "parquet" if form == Form.PARQUET else "datasets"
        raise TableError(
            f"reading {form} takes pyarrow", f"run `pip install '.[{extra}]'`"
        ) from error
    try:
        yield
    except OSError as error:
        if error.errno:
            raise OSError(error.errno, os.strerror(error.errno)) from error
        raise DamagedTableError(f"damaged {form}") from error
    except (ArrowException, ArithmeticError, LookupError, ValueError) as error:
        raise DamagedTableError(f"damaged {form}") from error
