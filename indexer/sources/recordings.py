"""Recorded conversations for replaying and estimating: the readers of sources, without an index."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Final

from indexer.build_report import BuildTally, ConversationTally
from indexer.errors import SourceError, reason_of
from indexer.sources.blocks import (
    FileForm,
    SourceFile,
    SourcePiece,
    format_of,
    name_of,
    text_format_of,
)
from indexer.sources.conversations import Conversation, conversation_of
from indexer.sources.lines import line_records
from indexer.sources.planning import pieces_of_file
from indexer.sources.record_documents import TableError, listed_keys
from indexer.sources.record_files import Record, csv_records, json_records
from indexer.sources.source_options import SourceOptions
from indexer.sources.tables import DamagedTableError, table_records
from indexer.sources.texts import DAMAGED

EXPECTED: Final = (
    "expected are `messages`, `conversations`, `prompt` and `output`, `instruction` and `output`, "
    "`question` and `answer`, or `request` and `response`"
)
"""Ends a sentence about a record that holds no conversation."""


def is_table(path: Path) -> bool:
    """Return whether a file's name says that it holds records, and not a line for each."""
    found = format_of(path.name)
    return found is not None and found.form not in {FileForm.TEXT, FileForm.LINES}


def read_records(path: Path, tally: BuildTally) -> Iterator[Record]:
    """Yield the name and the value of each record of a file, streamed.

    Args:
        path: of JSON lines, JSON, CSV, Parquet or Arrow by its name; any other holds JSON lines.
        tally: counts what cannot be read (`num_dropped`), with reasons, places and remedies.

    Raises:
        SourceError: the file cannot be read at all.
    """
    options = SourceOptions(field="")  # conversations only
    try:
        for piece in _pieces(path, options):
            yield from _records(piece, options, tally)
    except DAMAGED as error:
        raise SourceError(
            f"{path} cannot be read to its end: its compression is damaged"
        ) from error
    except UnicodeError as error:
        raise SourceError(f"{path} is not text in UTF-8") from error
    except DamagedTableError as error:
        raise SourceError(f"{path} cannot be read: {error}") from error
    except TableError as error:
        raise SourceError(f"{path} has no conversations: {_told(error)}") from error
    except OSError as error:
        raise SourceError(f"cannot read {path}: {reason_of(error)}") from error


def read_recorded(path: Path) -> Iterator[tuple[object, str]]:
    """Yield the value and the name of each record of a file, streamed.

    Raises:
        SourceError: the file, or a part of it, cannot be read.
    """
    tally = BuildTally()
    for name, record in read_records(path, tally):
        _check_whole(path, tally)
        yield record, name
    _check_whole(path, tally)


def _check_whole(path: Path, tally: BuildTally) -> None:
    if tally.num_dropped:
        raise SourceError(f"{path} cannot be read: {tally.describe_skipped()}")


def read_conversations(path: Path, tally: BuildTally) -> Iterator[tuple[str, Conversation]]:
    """Yield the name of each record and its conversation, streamed; count the other records.

    Args:
        path: see `read_records`.
        tally: counts conversations by shape, and what is left out of them; see `read_records`.

    Raises:
        SourceError: the file cannot be read at all.
    """
    for name, record in read_records(path, tally):
        found = conversation_of(record)
        if found is None:
            keys = listed_keys(record) if isinstance(record, dict) else "none"
            tally.drop("no conversation", name, f"its keys are {keys}: {EXPECTED}")
            continue
        counted = ConversationTally("turns", 1, len(found.turns))
        counted.left_out.update(found.left_out)
        tally.count_conversation((name_of(path), str(found.shape)), counted)
        yield name, found


def _told(error: TableError) -> str:
    """Return what to do; of tables without a known column, which are known."""
    return EXPECTED if error.reason.startswith("no column") else str(error)


def _pieces(path: Path, options: SourceOptions) -> list[SourcePiece]:
    if not path.is_file():
        raise SourceError(f"cannot read {path}: there is no such file")
    named = format_of(path.name) or text_format_of(path.name)
    if named.form == FileForm.TEXT:
        named = replace(named, form=FileForm.LINES)
    file = SourceFile(path, name_of(path), named, "", path.stat().st_size)
    whole = [SourcePiece(file, file.num_bytes)]
    return whole if named.form == FileForm.LINES else pieces_of_file(file, options)


def _records(piece: SourcePiece, options: SourceOptions, tally: BuildTally) -> Iterator[Record]:
    if piece.file.format.form == FileForm.CSV:
        return csv_records(piece, options, tally)
    if piece.file.format.is_table:
        return table_records(piece, options)
    if piece.file.format.form == FileForm.LINES:
        return line_records(piece, options, tally)
    return json_records(piece, options, tally)
