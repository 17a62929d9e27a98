"""Files of prompts."""

import gzip
import json
import zlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import chain, islice, zip_longest
from pathlib import Path
from typing import Any, BinaryIO, TextIO

from decoder.errors import InvalidPromptError, PromptFileError
from indexer.errors import SourceError, reason_of
from indexer.sources.conversations import conversation_of, prompt_of
from indexer.sources.recordings import EXPECTED, is_table, read_recorded

DEFAULT_CATEGORY = "prompts"


@dataclass(frozen=True, slots=True)
class Prompt:
    """One prompt of a file.

    Attributes:
        category: the kind of task that it stands for.
        text: a user's message.
        line: where it stands: a line, from 1, or a row, from 0.
    """

    category: str
    text: str
    line: int = field(default=0, compare=False)


def read_prompts(
    path: Path, limit: int | None = None, per_category: int | None = None
) -> list[Prompt]:
    """Read a file of prompts, which may be compressed with gzip (`.gz`).

    Args:
        path: one prompt a line; or records in JSON lines, JSON, CSV or Parquet. A record is a
            question of Spec-Bench (Xia et al., 2024, arXiv:2401.07851), `{"question_id",
            "category", "turns"}`, of which the first turn is used; or a conversation as
            `conversation_of` knows it, of which all that the user says before the first answer is
            used, but no system message. Conversations in which no user speaks are passed over.
        limit: most prompts to return, spread evenly over the categories.
        per_category: most prompts of each category.

    Raises:
        PromptFileError: the file cannot be read, holds no prompt, or a record is malformed.
    """
    prompts = list(_prompts_in_table(path) if is_table(path) else _prompts_in_lines(path))
    if not prompts:
        raise PromptFileError(f"{path} holds no prompt")
    return list(islice(_spread(prompts, per_category), limit))


def _prompts_in_lines(path: Path) -> Iterator[Prompt]:
    try:
        with _opened(path) as lines:
            for number, line in enumerate(map(str.strip, lines), start=1):
                if line.startswith("{"):
                    yield from _prompts_of(_parsed(line, f"{path}:{number}"), path, number)
                elif line:
                    yield Prompt(DEFAULT_CATEGORY, line, number)
    except UnicodeDecodeError as error:
        raise PromptFileError(f"{path} is not text in UTF-8") from error
    except (OSError, EOFError, zlib.error) as error:
        raise PromptFileError(f"cannot read {path}: {reason_of(error)}") from error


def _prompts_in_table(path: Path) -> Iterator[Prompt]:
    try:
        for number, (record, _) in enumerate(read_recorded(path)):
            yield from _prompts_of(record, path, number)
    except SourceError as error:
        raise PromptFileError(str(error)) from error


def read_text(stream: BinaryIO) -> str:
    """Read a prompt to its end.

    Raises:
        PromptFileError: it is not UTF-8.
    """
    try:
        return stream.read().decode("utf-8")
    except UnicodeDecodeError as error:
        raise PromptFileError("standard input is not UTF-8") from error


def checked_text(text: str) -> str:
    """Return a prompt as it is.

    Raises:
        InvalidPromptError: it is empty.
    """
    if not text.strip():
        raise InvalidPromptError("the prompt is empty: say what to go on from")
    return text


def _opened(path: Path) -> TextIO:
    if path.suffix == ".gz":
        return gzip.open(path, "rt", encoding="utf-8")
    return path.open(encoding="utf-8")


def _spread(prompts: list[Prompt], per_category: int | None) -> Iterator[Prompt]:
    """Take the categories in turn, so that any number of prompts has them evenly."""
    categories: dict[str, list[Prompt]] = {}
    for prompt in prompts:
        categories.setdefault(prompt.category, []).append(prompt)
    members = (category[:per_category] for category in categories.values())
    rounds = chain.from_iterable(zip_longest(*members))
    return (prompt for prompt in rounds if prompt is not None)


def _parsed(line: str, place: str) -> Any:
    try:
        return json.loads(line)
    except (ValueError, RecursionError) as error:
        raise PromptFileError(f"{place} is not JSON: {reason_of(error)}") from error


def _prompts_of(record: Any, path: Path, number: int) -> Iterator[Prompt]:
    """Yield the prompt of a record, if its conversation has one.

    Raises:
        PromptFileError: the record is neither a question nor a conversation.
    """
    if isinstance(record, dict) and "turns" in record:
        yield _question(record, f"{path}:{number}", number)
        return
    conversation = conversation_of(record)
    if conversation is None:
        keys = ", ".join(map(repr, record)) if isinstance(record, dict) else ""
        raise PromptFileError(
            f'{path}:{number}: expected {{"category": …, "turns": [TEXT, …]}}, or a conversation: '
            f"{EXPECTED}; its keys are {keys or 'none'}"
        )
    said = [turn.text for turn in prompt_of(conversation) if turn.role == "user"]
    if said:
        yield Prompt(DEFAULT_CATEGORY, "\n\n".join(said), number)


def _question(question: dict[str, Any], place: str, number: int) -> Prompt:
    try:
        category, text = question["category"], question["turns"][0]
    except (KeyError, IndexError, TypeError) as error:
        raise PromptFileError(f'{place}: expected {{"category": …, "turns": [TEXT, …]}}') from error
    if not all(isinstance(value, str) and value.strip() for value in (category, text)):
        raise PromptFileError(f"{place}: the category and the first turn must be texts")
    return Prompt(category, text, number)
