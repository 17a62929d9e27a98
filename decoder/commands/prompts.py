"""Files of prompts."""

import gzip
import json
import zlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import chain, islice, zip_longest
from pathlib import Path
from typing import BinaryIO, TextIO

from decoder.errors import InvalidPromptError, PromptFileError
from indexer.errors import reason_of

DEFAULT_CATEGORY = "prompts"


@dataclass(frozen=True, slots=True)
class Prompt:
    """One prompt of a file.

    Attributes:
        category: the kind of task that it stands for.
        text: a user's message.
        line: where it stands, from 1.
    """

    category: str
    text: str
    line: int = field(default=0, compare=False)


def read_prompts(
    path: Path, limit: int | None = None, per_category: int | None = None
) -> list[Prompt]:
    """Read a file of prompts, which may be compressed with gzip (`.gz`).

    Args:
        path: JSON lines in the format of Spec-Bench's questions (Xia et al., 2024,
            arXiv:2401.07851), `{"question_id", "category", "turns"}`, of which the first turn
            is used; or one prompt a line.
        limit: most prompts to return, spread evenly over the categories.
        per_category: most prompts of each category.

    Raises:
        PromptFileError: the file cannot be read, holds no prompt, or a line is malformed.
    """
    try:
        with _opened(path) as lines:
            numbered = list(enumerate(map(str.strip, lines), start=1))
    except UnicodeDecodeError as error:
        raise PromptFileError(f"{path} is not text in UTF-8") from error
    except (OSError, EOFError, zlib.error) as error:
        raise PromptFileError(f"cannot read {path}: {reason_of(error)}") from error
    prompts = [_parsed(line, path, number) for number, line in numbered if line]
    if not prompts:
        raise PromptFileError(f"{path} holds no prompt")
    return list(islice(_spread(prompts, per_category), limit))


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


def _parsed(line: str, path: Path, number: int) -> Prompt:
    if not line.startswith("{"):
        return Prompt(DEFAULT_CATEGORY, line, number)
    place = f"{path}:{number}"
    try:
        question = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise PromptFileError(f"{place} is not JSON: {reason_of(error)}") from error
    try:
        category, text = question["category"], question["turns"][0]
    except (KeyError, IndexError, TypeError) as error:
        raise PromptFileError(f'{place}: expected {{"category": …, "turns": [TEXT, …]}}') from error
    if not all(isinstance(value, str) and value.strip() for value in (category, text)):
        raise PromptFileError(f"{place}: the category and the first turn must be texts")
    return Prompt(category, text, number)
