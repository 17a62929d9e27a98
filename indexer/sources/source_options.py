"""Options for finding and reading sources."""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Annotated, ClassVar, Final

import jmespath
from jmespath.exceptions import JMESPathError
from pathspec import GitIgnoreSpec

from indexer.errors import SourceError
from indexer.launch import FIELD_HELP, Flag
from indexer.sources.chats.conversations import Turns
from indexer.sources.chats.shapes import is_expression

EXCLUDED: Final = "excluded by a pattern"
NOT_INCLUDED: Final = "not included by a pattern"


def check_field(field: str) -> None:
    """Check that a field is a possible key or a valid expression.

    Raises:
        SourceError: it looks like an expression but is not a valid one.
    """
    if not is_expression(field):
        return
    try:
        jmespath.compile(field)
    except JMESPathError as error:
        said = " ".join(str(error).split())
        raise SourceError(
            f"--field {field!r} is neither a plain key nor an expression of JMESPath: {said}; a "
            f"key with such characters needs quotes, as in '\"a.b\"'"
        ) from error


class Patterns:
    """Files to include and to exclude, by patterns as in `.gitignore`.

    Raises:
        SourceError: a pattern is malformed.
    """

    def __init__(self, include: Sequence[str], exclude: Sequence[str]) -> None:
        self._include = _compiled("--include", include) if include else None
        self._exclude = _compiled("--exclude", exclude)

    @property
    def choose(self) -> bool:
        """Whether files are taken because of a pattern, not because of their suffix."""
        return self._include is not None

    def excludes_folder(self, path: str) -> bool:
        """Return whether everything below a folder is excluded.

        Args:
            path: path below the source, with slashes.
        """
        return self._exclude.match_file(f"{path}/")

    def objection(self, path: str) -> str | None:
        """Return why a file is excluded, or None if it is not."""
        if self._exclude.match_file(path):
            return EXCLUDED
        if self._include is not None and not self._include.match_file(path):
            return NOT_INCLUDED
        return None


def _compiled(option: str, patterns: Sequence[str]) -> GitIgnoreSpec:
    try:
        return GitIgnoreSpec.from_lines(patterns)
    except ValueError as error:
        raise SourceError(
            f"{option}: {error}: give patterns like those in .gitignore, such as '*.md' or 'docs/'"
        ) from error


DEFAULT_FIELD: Final = "text"
DEFAULT_MAX_DOCUMENT_BYTES: Final = 10 << 20
"""Longer files are mostly dumps and generated code. Tokenising takes up to 200 bytes of memory per
byte of a piece, and twelve per byte of the longest document."""

DEFAULT_BLOCK_BYTES: Final = 16 << 20
"""Source bytes of one task: seconds of tokenising, so that workers stay busy to the end and
starting a task costs little."""


STANDARD_INPUT: Final = "-"
"""The source name for standard input."""

TOO_LARGE: Final = "too large"
NOT_TEXT: Final = "not text"
RAISE_LIMIT: Final = "raise the limit with --max-document-bytes"
NAME_ENCODING: Final = "name the encoding with --encoding"


class Git(StrEnum):
    """Whether to ask git for the tracked files of a repository."""

    AUTO = "auto"
    NEVER = "never"


class StdinFormat(StrEnum):
    """The content of standard input: documents in JSON lines, or one plain text document."""

    JSONL = "jsonl"
    TEXT = "text"


class Markup(StrEnum):
    """The part of an HTML page to read."""

    SOURCE = "source"
    TEXT = "text"


@dataclass(frozen=True, slots=True)
class ChatTemplate:
    """The chat template of a tokenizer; can be pickled, unlike the tokenizer.

    Attributes:
        source: Jinja source of the template.
        special_tokens: names and texts of the tokens that it uses.
    """

    source: str
    special_tokens: tuple[tuple[str, str], ...] = ()


@dataclass(frozen=True, slots=True)
class SourceOptions:
    """How sources are found and read; every value has a default that fits most corpora.

    Attributes:
        field: names the text, texts or turns in a record: a key, a column, or a JMESPath
            expression, which may also give an object of a known shape. Records without it are read
            as conversations.
        turns: turns of conversations that become documents: each assistant turn, each user turn, or
            all turns of a conversation together.
        include: patterns of files in folders to take exclusively, regardless of their suffix.
            Patterns are those of `.gitignore`, matched against the path below the source.
        exclude: patterns of files in folders to skip; takes precedence over `include`.
        git: whether only the tracked files of a repository are taken.
        licence: licence of every document; empty to detect it.
        licence_field: key or column with a document's licence; empty if there is none.
        encoding: encoding of text without a byte order mark.
        stdin_format: content of standard input.
        max_document_bytes: documents beyond this size are skipped, and only this much of them is
            read.
        template: writes all turns of a conversation as one text; without a template, their texts
            are joined by empty lines.
        notebook_outputs: whether to also read texts that a notebook's code printed.
        html: whether to read the source of HTML pages or the text that a reader sees.
        block_bytes: approximate size of a block on disk.
        whole_records: whether more of a record is needed than its documents.

    Raises:
        SourceError: a pattern, the field or the encoding is malformed, or a limit is below 1.
    """

    flags_title: ClassVar[str] = "Sources"

    field: Annotated[str, Flag(FIELD_HELP, metavar="KEY")] = DEFAULT_FIELD
    turns: Annotated[
        Turns,
        Flag(
            "For conversations, index each turn of the assistant, each of the user, or "
            "all turns of one together: as the tokenizer's chat template writes them, if it has "
            "one, else with empty lines between them."
        ),
    ] = Turns.ASSISTANT
    include: Annotated[
        tuple[str, ...],
        Flag(
            "In folders, take only what matches, whatever its suffix: a pattern as in "
            ".gitignore, against the path below the folder. May be given several times.",
            metavar="GLOB",
        ),
    ] = ()
    exclude: Annotated[
        tuple[str, ...],
        Flag("In folders, leave out what matches. May be given several times.", metavar="GLOB"),
    ] = ()
    git: Annotated[
        Git,
        Flag("Whether to take only the tracked files of a git repository."),
    ] = Git.AUTO
    licence: Annotated[
        str,
        Flag(
            "The licence of every document. Without it: the field, the file's "
            "SPDX-License-Identifier, or the nearest licence file of its folder.",
            metavar="TEXT",
        ),
    ] = ""
    licence_field: Annotated[str, Flag("Key or column of a document's licence.", metavar="KEY")] = (
        ""
    )
    encoding: Annotated[
        str,
        Flag("Encoding of text without a byte order mark.", metavar="NAME"),
    ] = "utf-8"
    stdin_format: Annotated[
        StdinFormat,
        Flag("What standard input holds: JSON lines, or one document of text."),
    ] = StdinFormat.JSONL
    max_document_bytes: Annotated[
        int, Flag("Skip longer documents; they are counted.", least=1)
    ] = DEFAULT_MAX_DOCUMENT_BYTES
    notebook_outputs: Annotated[
        bool, Flag("Also read the texts that the code of notebooks printed.")
    ] = False
    html: Annotated[
        Markup, Flag("For HTML pages, read the source, or the text that a reader sees.")
    ] = Markup.SOURCE
    template: ChatTemplate | None = None
    block_bytes: int = DEFAULT_BLOCK_BYTES
    whole_records: bool = False

    def __post_init__(self) -> None:
        Patterns(self.include, self.exclude)
        check_field(self.field)
        for name in ("max_document_bytes", "block_bytes"):
            if getattr(self, name) < 1:
                raise SourceError(f"{name} is {getattr(self, name)}: give 1 or more")
        try:
            "\n".encode(self.encoding)
        except (LookupError, ValueError) as error:
            raise SourceError(
                f"there is no encoding {self.encoding!r}: give one that Python knows, "
                "such as utf-8 or latin-1"
            ) from error
