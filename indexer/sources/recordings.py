"""Reads recorded conversations for replays, estimates and measurements, without an index."""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final, TypeVar

from indexer.build_report import BuildTally, ConversationTally
from indexer.errors import RefusedFileError, SourceError, UnusableError, reason_of
from indexer.sources.blocks import FileForm, SourceFile, format_of, name_of, text_format_of
from indexer.sources.chats.conversations import Conversation, conversation_of
from indexer.sources.chats.sessions import MOST_TURNS, Record
from indexer.sources.columns import listed_keys, with_fields
from indexer.sources.record_documents import no_conversation
from indexer.sources.record_reading import max_record_characters, pieces_of, records_of
from indexer.sources.source_options import NOT_TEXT, TOO_LARGE, SourceOptions

EXPECTED: Final = (
    "expected keys are `messages`, `conversations`, `prompt` and `output`, `instruction` and "
    "`output`, `question` and `answer`, or `request` and `response`; if the keys differ, name the "
    "text or the turns with --field"
)
"""End of a message about a record without a conversation."""

_OPTIONS: Final = SourceOptions(field="", whole_records=True)
_REMEDIES: Final = {
    TOO_LARGE: (
        f"a record has at most {max_record_characters(_OPTIONS):,} characters: leave it out, or "
        "write one record per line, as .jsonl"
    ),
    NOT_TEXT: "save the file as UTF-8",
}
"""Remedies for records that no option of `build` can fix."""

_Taken = TypeVar("_Taken")


@dataclass(slots=True)
class RecordingTally(BuildTally):
    """Counts of what was found and skipped in recorded files, with places and remedies.

    Attributes:
        field: expression that names the text, texts or turns in a record, as in `SourceOptions`.
    """

    field: str = ""

    def take(
        self,
        record: object,
        path: Path,
        kind: str,
        taken_of: Callable[[Conversation], Iterable[_Taken]],
    ) -> list[_Taken]:
        """Return the selected items of a record's conversation, and count the conversation.

        Args:
            record: record of the file.
            path: path of the file.
            kind: kind of the selected items, in words: "outputs".
            taken_of: selects items from a conversation.

        Raises:
            UnusableError: the record has no conversation, or too many turns.
        """
        found = conversation_of(record, self.field)
        if found is None:
            keys: dict[str, Any] = record if isinstance(record, dict) else {}
            said = f"its keys are {listed_keys(keys)}: {EXPECTED}{with_fields(keys)}"
            raise no_conversation(record) or UnusableError("no conversation", said)
        if len(found.turns) > MOST_TURNS:
            raise UnusableError(f"more than {MOST_TURNS:,} turns", "cut such conversations")
        taken = list(taken_of(found))
        counted = ConversationTally(kind, 1, len(taken), Counter(found.left_out))
        self.count_conversation(name_of(path), found.shape, counted)
        return taken

    def describe(self) -> list[str]:
        """Return lines that say what was recognised and what was skipped, if anything."""
        skipped = [f"skipped: {self.describe_skipped()}"] if self.skipped else []
        return [*self.describe_conversations(), *skipped]

    def why_nothing(self) -> str:
        """Return why files had nothing usable: what they contained, or what is expected."""
        return "; ".join(self.describe()) or EXPECTED


def read_records(
    path: Path, tally: RecordingTally, *, with_lines: bool = False
) -> Iterator[Record]:
    """Yield the name and value of each record of a file. A damaged file is read up to the damage.

    Args:
        path: path of a file of JSON lines, JSON, CSV, Parquet or Arrow, as its suffix says. A file
            with any other suffix is read as JSON lines.
        tally: counts unreadable records (`num_dropped`), with reasons, places and remedies. Its
            `field` is applied.
        with_lines: whether a file with another suffix may also have lines of plain text. Then a
            line that starts with a brace is a record, and any other line is yielded unchanged.

    Raises:
        SourceError: the file cannot be opened, or is a table without conversations.
    """
    options = replace(_OPTIONS, field=tally.field)
    file = _file(path, FileForm.TEXT_LINES if with_lines else FileForm.LINES)
    return _read(file, options, tally)


def _read(file: SourceFile, options: SourceOptions, tally: RecordingTally) -> Iterator[Record]:
    tally.remedies = {**_REMEDIES, **tally.remedies}
    try:
        pieces = pieces_of(file, replace(options, block_bytes=max(file.num_bytes, 1)))
    except RefusedFileError as error:
        is_known = str(error).startswith("no column")
        said = EXPECTED if is_known else f"{error}: {error.remedy}"
        raise SourceError(f"{file.path} has no conversations: {said}") from error
    except UnusableError as unusable:
        tally.drop(str(unusable), file.name, unusable.remedy)
        return
    for piece in pieces:
        yield from records_of(piece, options, tally)


def _file(path: Path, otherwise: FileForm) -> SourceFile:
    """Return a file with its format; if its format is a text form, `otherwise` replaces it.

    Raises:
        SourceError: the file cannot be opened.
    """
    named = format_of(path.name) or text_format_of(path.name)
    if named.is_text:
        named = replace(named, form=otherwise)
    if not path.is_file():
        said = "it is a folder: name a file" if path.is_dir() else "there is no such file"
        raise SourceError(f"cannot read {path}: {said}")
    try:
        with path.open("rb"):
            return SourceFile(path, name_of(path), named, "", path.stat().st_size)
    except OSError as error:
        raise SourceError(f"cannot read {path}: {reason_of(error)}") from error
