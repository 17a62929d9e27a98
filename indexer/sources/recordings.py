"""Recorded conversations for replaying, estimating and measuring: sources read without an index."""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final, TypeVar

from indexer.build_report import BuildTally, ConversationTally
from indexer.errors import SourceError, reason_of
from indexer.sources.blocks import (
    FileForm,
    SourceFile,
    SourcePiece,
    UnusableError,
    format_of,
    name_of,
    text_format_of,
)
from indexer.sources.conversations import Conversation, conversation_of
from indexer.sources.envelopes import Record, sessions
from indexer.sources.lines import line_records, text_lines
from indexer.sources.planning import COPY_AGAIN, pieces_of_file
from indexer.sources.record_documents import TableError, listed_keys, no_conversation
from indexer.sources.record_files import (
    csv_records,
    json_of,
    json_records,
    max_record_characters,
)
from indexer.sources.source_options import NOT_TEXT, TOO_LARGE, SourceOptions
from indexer.sources.tables import DamagedTableError, table_records
from indexer.sources.texts import DAMAGED

__all__ = ["EXPECTED", "RecordingTally", "UnusableError", "read_entries", "read_records"]

EXPECTED: Final = (
    "expected are `messages`, `conversations`, `prompt` and `output`, `instruction` and `output`, "
    "`question` and `answer`, or `request` and `response`"
)
"""Ends a sentence about a record that holds no conversation."""

_OPTIONS: Final = SourceOptions(field="")  # conversations only
_REMEDIES: Final = {
    TOO_LARGE: (
        f"a record has at most {max_record_characters(_OPTIONS):,} characters: leave it out, or "
        "write one record a line, as .jsonl, is"
    ),
    NOT_TEXT: "save the file as UTF-8",
}
"""What to do about records where no option of `build` helps."""

_Taken = TypeVar("_Taken")


@dataclass(slots=True)
class RecordingTally(BuildTally):
    """What was found in recorded files, and what of them was skipped, with places and remedies."""

    def take(
        self,
        record: object,
        path: Path,
        kind: str,
        taken_of: Callable[[Conversation], Iterable[_Taken]],
    ) -> list[_Taken]:
        """Return what is taken of the conversation in a record, and count both.

        Args:
            record: of the file.
            path: of the file.
            kind: of what is taken, in words: "outputs".
            taken_of: what is taken.

        Raises:
            UnusableError: the record holds no conversation.
        """
        found = conversation_of(record)
        if found is None:
            keys = listed_keys(record) if isinstance(record, dict) else "none"
            raise no_conversation(record) or UnusableError(
                "no conversation", f"its keys are {keys}: {EXPECTED}"
            )
        taken = list(taken_of(found))
        counted = ConversationTally(kind, 1, len(taken), Counter(found.left_out))
        self.count_conversation(name_of(path), found.shape, counted)
        return taken

    def describe(self) -> list[str]:
        """Return lines that say what was recognised, and what was skipped if anything was."""
        skipped = [f"skipped: {self.describe_skipped()}"] if self.skipped else []
        return [*self.describe_conversations(), *skipped]

    def why_nothing(self) -> str:
        """Return why files held nothing to use: what was found in them, or what is expected."""
        return "; ".join(self.describe()) or EXPECTED


def read_records(path: Path, tally: BuildTally) -> Iterator[Record]:
    """Yield the name and the value of each record of a file, streamed; of a damaged one, the first.

    Args:
        path: of JSON lines, JSON, CSV, Parquet or Arrow by its name; any other holds JSON lines.
        tally: counts what cannot be read (`num_dropped`), with reasons, places and remedies.

    Raises:
        SourceError: the file cannot be opened, or is a table without conversations.
    """
    pieces = _pieces(path, tally)
    found = (each for piece in pieces for each in _records(piece, tally))
    return _read(path, sessions(found), tally)


def read_entries(path: Path, tally: BuildTally) -> Iterator[Record]:
    """Yield what `read_records` does; of a file of other names the text of each line that is none.

    There a line that begins with a brace is a record.

    Raises:
        SourceError: see `read_records`.
    """
    found = format_of(path.name)
    if found is not None and found.form != FileForm.TEXT:
        return read_records(path, tally)
    pieces = _pieces(path, tally)
    entries = (each for piece in pieces for each in _entries(piece, tally))
    return _read(path, sessions(entries), tally)


def _entries(piece: SourcePiece, tally: BuildTally) -> Iterator[Record]:
    remedy = "a line that begins with { is a record: mend or remove such lines"
    for name, line in text_lines(piece, _OPTIONS, tally):
        text = line.strip()
        try:
            yield name, json_of(text, remedy) if text.startswith("{") else text
        except UnusableError as unusable:
            tally.drop(str(unusable), name, unusable.remedy)


def _read(path: Path, records: Iterator[_Taken], tally: BuildTally) -> Iterator[_Taken]:
    """Yield records up to the damage, if there is any, and count that."""
    tally.remedies = {**_REMEDIES, **tally.remedies}
    try:
        yield from records
    except DAMAGED:
        tally.drop("unreadable: damaged compression", name_of(path), COPY_AGAIN)
    except DamagedTableError as error:
        tally.drop(f"unreadable: {error}", name_of(path), COPY_AGAIN)
    except TableError as error:
        tally.drop(error.reason, name_of(path), error.remedy)
    except UnicodeError:
        tally.drop(NOT_TEXT, name_of(path))
    except OSError as error:
        raise SourceError(f"cannot read {path}: {reason_of(error)}") from error


def _pieces(path: Path, tally: BuildTally) -> list[SourcePiece]:
    if not path.is_file():
        raise SourceError(f"cannot read {path}: {_not_a_file(path)}")
    named = format_of(path.name) or text_format_of(path.name)
    if named.form == FileForm.TEXT:
        named = replace(named, form=FileForm.LINES)
    try:
        file = SourceFile(path, name_of(path), named, "", path.stat().st_size)
        whole = [SourcePiece(file, file.num_bytes)]
        return whole if named.form == FileForm.LINES else pieces_of_file(file, _OPTIONS)
    except DAMAGED:
        tally.drop("unreadable: damaged compression", name_of(path), COPY_AGAIN)
    except DamagedTableError as error:
        tally.drop(f"unreadable: {error}", name_of(path), COPY_AGAIN)
    except TableError as error:
        raise SourceError(f"{path} has no conversations: {_told(error)}") from error
    except OSError as error:
        raise SourceError(f"cannot read {path}: {reason_of(error)}") from error
    return []


def _not_a_file(path: Path) -> str:
    return "it is a folder: name a file" if path.is_dir() else "there is no such file"


def _told(error: TableError) -> str:
    """Return what to do; of tables without a known column, which are known."""
    return EXPECTED if error.reason.startswith("no column") else str(error)


def _records(piece: SourcePiece, tally: BuildTally) -> Iterator[Record]:
    if piece.file.format.form == FileForm.CSV:
        return csv_records(piece, _OPTIONS, tally)
    if piece.file.format.is_table:
        return table_records(piece, _OPTIONS)
    if piece.file.format.form == FileForm.LINES:
        return line_records(piece, _OPTIONS, tally)
    return json_records(piece, _OPTIONS, tally)
