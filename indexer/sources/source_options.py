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
        SourceError: the field looks like an expression but is not a valid one.
    """
    if not is_expression(field):
        return
    try:
        jmespath.compile(field)
    except JMESPathError as error:
        said = " ".join(str(error).split())
        raise SourceError(
            f"--field {field!r} is neither a plain key nor a JMESPath expression: {said}; put a "
            f"key with such characters in quotes, as in '\"a.b\"'"
        ) from error


class Patterns:
    """Files to include and to exclude, as patterns in the syntax of `.gitignore`.

    Raises:
        SourceError: a pattern is malformed.
    """

    def __init__(self, include: Sequence[str], exclude: Sequence[str]) -> None:
        self._include = _compiled("--include", include) if include else None
        self._exclude = _compiled("--exclude", exclude)

    @property
    def choose(self) -> bool:
        """Whether a pattern selects files, rather than their suffix."""
        return self._include is not None

    def excludes_folder(self, path: str) -> bool:
        """Return whether everything below a folder is excluded.

        Args:
            path: path relative to the source, with slashes.
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
byte of a piece, and twelve bytes of memory per byte of the longest document."""

DEFAULT_BLOCK_BYTES: Final = 16 << 20
"""Source bytes that one task reads. They take seconds to tokenise, so starting a task costs little
in comparison, and workers stay busy to the end."""


STANDARD_INPUT: Final = "-"
"""The source name that stands for standard input."""

TOO_LARGE: Final = "too large"
NOT_TEXT: Final = "not text"
RAISE_LIMIT: Final = "raise the limit with --max-document-bytes"
NAME_ENCODING: Final = "name the encoding with --encoding"


class Git(StrEnum):
    """Whether to ask git for the tracked files of a repository."""

    AUTO = "auto"
    NEVER = "never"


class StdinFormat(StrEnum):
    """The content of standard input: documents in JSON lines, or one document of plain text."""

    JSONL = "jsonl"
    TEXT = "text"


class Markup(StrEnum):
    """The part of an HTML page to read."""

    SOURCE = "source"
    TEXT = "text"


@dataclass(frozen=True, slots=True)
class ChatTemplate:
    """A tokenizer's chat template. It can be pickled, unlike the tokenizer.

    Attributes:
        source: Jinja source of the template.
        special_tokens: names and texts of the special tokens that the template uses.
    """

    source: str
    special_tokens: tuple[tuple[str, str], ...] = ()


@dataclass(frozen=True, slots=True)
class SourceOptions:
    """How sources are found and read. The default values fit most corpora.

    Attributes:
        field: names the text, texts or turns in a record. It is a key, a column, or a JMESPath
            expression, whose result may also be an object of a known shape. Records without the
            field are read as conversations.
        turns: turns of conversations that become documents: each assistant turn, each user turn, or
            all turns of a conversation together.
        include: patterns of files to read in folders, regardless of suffix; other files are
            skipped. Patterns have the syntax of `.gitignore` and match the path below the source.
        exclude: patterns of files to skip in folders; takes precedence over `include`.
        git: whether to read only the tracked files of a repository.
        licence: licence of every document; empty to detect it.
        licence_field: key or column with a document's licence; empty if there is none.
        encoding: encoding of text without a byte order mark.
        stdin_format: content of standard input.
        max_document_bytes: longer documents are skipped, and only this many of their bytes are
            read.
        template: chat template that writes all turns of a conversation as one text. Without a
            template, empty lines separate the turns.
        notebook_outputs: whether to also read texts that a notebook's code printed.
        html: whether to read the source of HTML pages or their visible text.
        block_bytes: approximate size of a block on disk.
        whole_records: whether to read whole records, not only their documents.

    Raises:
        SourceError: a pattern, the field or the encoding is malformed, or a limit is below 1.
    """

    flags_title: ClassVar[str] = "Sources"

    field: Annotated[str, Flag(FIELD_HELP, metavar="KEY")] = DEFAULT_FIELD
    turns: Annotated[
        Turns,
        Flag(
            "For conversations, index each assistant turn, each user turn, or all turns of a "
            "conversation as one document. The tokenizer's chat template joins all turns; "
            "without a template, empty lines separate them."
        ),
    ] = Turns.ASSISTANT
    include: Annotated[
        tuple[str, ...],
        Flag(
            "In folders, read only files that match, whatever their suffix. A pattern has the "
            "syntax of .gitignore and matches the path below the folder. May be given several "
            "times.",
            metavar="GLOB",
        ),
    ] = ()
    exclude: Annotated[
        tuple[str, ...],
        Flag("In folders, skip files that match. May be given several times.", metavar="GLOB"),
    ] = ()
    git: Annotated[
        Git,
        Flag("Whether to read only the tracked files of a git repository."),
    ] = Git.AUTO
    licence: Annotated[
        str,
        Flag(
            "The licence of every document. By default: the licence field, the file's "
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
        Flag("What standard input contains: JSON lines, or one text document."),
    ] = StdinFormat.JSONL
    max_document_bytes: Annotated[int, Flag("Skip longer documents, and count them.", least=1)] = (
        DEFAULT_MAX_DOCUMENT_BYTES
    )
    notebook_outputs: Annotated[bool, Flag("Also read what the code in notebooks printed.")] = False
    html: Annotated[Markup, Flag("For HTML pages, read the source or the visible text.")] = (
        Markup.SOURCE
    )
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
