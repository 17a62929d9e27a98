"""Files of listed phrases: text or token ids, one phrase a line.

A file named `.jsonl` holds JSON lines, `{"text": "…"}` or `{"ids": […]}`; any other file holds text
in UTF-8, each line a phrase. Both may be compressed (`.gz`). What is wrong with a line is reported
and the line left out: one bad phrase must not cost the others.
"""

import gzip
import json
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Final, NamedTuple

from numpy.typing import ArrayLike

from indexer.errors import reason_of
from retriever.errors import InvalidRequestError, PhrasesError
from retriever.limits import checked_tokens

MAX_PHRASE_TOKENS: Final = 1024
"""Longest phrase; loading one takes time with the square of its length."""

_JSON_LINES: Final = ".jsonl"
_LINE_BREAK: Final = "\n"
_CANNOT_BE_READ: Final = (OSError, EOFError, zlib.error)

Encode = Callable[[str], Sequence[int]]
"""Text to token ids, without special tokens around it."""

Track = Callable[[Sequence[Any], str], Iterable[Any]]
"""Passes items through one by one and shows how far it is, under a description."""

Phrase = tuple[int, ...]
"""Token ids of one phrase."""


class Problem(NamedTuple):
    """A line that was left out.

    Attributes:
        path: the file.
        line: its line, counted from 1.
        reason: what is wrong with it.
    """

    path: Path
    line: int
    reason: str

    def __str__(self) -> str:
        return f"{self.path}, line {self.line}: {self.reason}"


@dataclass(frozen=True)
class PhraseReader:
    """Reads phrases.

    Attributes:
        encode: the tokenizer of the model that is drafted for; None where there is none.
        vocabulary_size: token ids must be below it; None where it is not known.
        problems: lines left out so far; added to.
    """

    encode: Encode | None
    vocabulary_size: int | None
    problems: list[Problem]

    def read(self, path: Path, track: Track) -> Iterator[Phrase]:
        """Read the phrases of a file, each in all its variants.

        Raises:
            PhrasesError: the file cannot be read.
        """
        is_json = _JSON_LINES in path.suffixes[-2:]
        for number, line in enumerate(track(read_lines(path), f"reading {path.name}"), start=1):
            try:
                yield from self._variants(_parsed(line) if is_json else {"text": _decoded(line)})
            except (ValueError, RecursionError, InvalidRequestError) as error:
                self.problems.append(Problem(path, number, str(error)))

    def _variants(self, phrase: dict[str, Any]) -> Iterator[Phrase]:
        if "ids" in phrase:
            variants = {self._checked(phrase["ids"])}
        else:
            variants = {self._checked(ids) for ids in self._encoded(phrase["text"])}
        if max(map(len, variants)) == 1:
            raise ValueError("a single token: nothing would be left of it to draft")
        yield from variants

    def _encoded(self, text: str) -> Iterator[Sequence[int]]:
        """Encode a text as it stands, after a space, and at the beginning of a line."""
        if self.encode is None:
            raise ValueError("text needs a tokenizer: name one, or list token ids")
        if not text.strip():
            raise ValueError("empty")
        _encodable(text)
        yield self.encode(text)
        yield self.encode(f" {text}")
        after_break = list(self.encode(_LINE_BREAK + text))
        if after_break[: len(self._line_break)] == self._line_break:
            yield after_break[len(self._line_break) :]

    @cached_property
    def _line_break(self) -> list[int]:
        """Encoded when the first text comes: tokenizers take seconds to load."""
        return list(self.encode(_LINE_BREAK)) if self.encode is not None else []

    def _checked(self, ids: ArrayLike) -> Phrase:
        phrase = tuple(checked_tokens(ids, self.vocabulary_size).tolist())
        if not phrase:
            raise ValueError("empty")
        if len(phrase) > MAX_PHRASE_TOKENS:
            raise ValueError(f"{len(phrase)} tokens: a phrase has at most {MAX_PHRASE_TOKENS}")
        return phrase


def read_lines(path: Path) -> list[bytes]:
    """Return the lines of a file, without their ends.

    Raises:
        PhrasesError: the file cannot be read.
    """
    try:
        with gzip.open(path) if path.suffix == ".gz" else path.open("rb") as file:
            return [line.rstrip(b"\r\n") for line in file]
    except _CANNOT_BE_READ as error:
        raise PhrasesError(f"phrases in {path} cannot be read: {reason_of(error)}") from error


def _decoded(line: bytes) -> str:
    try:
        return line.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise ValueError("not UTF-8") from error


def _encodable(text: str) -> None:
    """Refuse halves of characters, which JSON can hold and a tokenizer cannot take."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ValueError("no text: it holds half of a surrogate pair") from error


def _parsed(line: bytes) -> dict[str, Any]:
    text = _decoded(line)
    if not text.strip():
        raise ValueError("empty")
    phrase = json.loads(text)
    if (
        not isinstance(phrase, dict)
        or ("ids" in phrase) == ("text" in phrase)
        or not isinstance(phrase.get("text", ""), str)
    ):
        raise ValueError('neither {"text": "…"} nor {"ids": […]}')
    return phrase
