"""The database of listed phrases: texts that a team writes verbatim, read from files.

A phrase is drafted as soon as a context ends with the phrase's beginning. A file has one phrase per
line. A `.jsonl` file holds JSON lines, `{"text": "…"}` or `{"ids": […]}`; any other file is text in
UTF-8. Both can be compressed (`.gz`). Invalid lines are reported and skipped.
"""

import gzip
import json
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Final, NamedTuple, Self

import ahocorasick
import numpy as np
from numpy.typing import ArrayLike

from indexer.errors import reason_of
from retriever.drafter import TokenIds
from retriever.errors import InvalidRequestError, PhrasesError
from retriever.kernels.entries import collect_phrases
from retriever.kernels.layout import PhraseArrays, Scratch, pack
from retriever.kernels.phrase_matching import NO_BEGINNING
from retriever.limits import checked_tokens
from retriever.predict.question import Question
from retriever.tree import Source

MAX_PHRASE_TOKENS: Final = 1024
"""Longest phrase, in tokens; loading takes time quadratic in a phrase's length."""

_JSON_LINES: Final = ".jsonl"
_LINE_BREAK: Final = "\n"
_CANNOT_BE_READ: Final = (OSError, EOFError, zlib.error)

Encode = Callable[[str], Sequence[int]]
"""Converts text to token ids, without special tokens around them."""

Track = Callable[[Sequence[Any], str], Iterable[Any]]
"""Yields items, and shows progress under a description."""

Phrase = tuple[int, ...]
"""The token ids of one phrase."""


class Problem(NamedTuple):
    """A skipped line.

    Attributes:
        path: the file.
        line: line number, from 1.
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
        encode: the target model's tokenizer; None without a tokenizer.
        vocabulary_size: token ids must be below it; None if unknown.
        problems: lines skipped so far; appended to.
    """

    encode: Encode | None
    vocabulary_size: int | None
    problems: list[Problem]

    def read(self, path: Path, track: Track) -> Iterator[Phrase]:
        """Yield the phrases of a file, each in all its variants.

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
            raise ValueError("a single token: nothing is left to draft after it")
        yield from variants

    def _encoded(self, text: str) -> Iterator[Sequence[int]]:
        """Yield the encodings of a text as given, after a space, and after a line break."""
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
        """The encoded line break; computed at the first text, because tokenizers load slowly."""
        return list(self.encode(_LINE_BREAK)) if self.encode is not None else []

    def _checked(self, ids: ArrayLike) -> Phrase:
        phrase = tuple(checked_tokens(ids, self.vocabulary_size).tolist())
        if not phrase:
            raise ValueError("empty")
        if len(phrase) > MAX_PHRASE_TOKENS:
            raise ValueError(f"{len(phrase)} tokens: a phrase has at most {MAX_PHRASE_TOKENS}")
        return phrase


def read_lines(path: Path) -> list[bytes]:
    """Return the lines of a file, without line ends.

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
    """Refuse lone surrogates: JSON can contain them, but a tokenizer cannot encode them."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ValueError("invalid text: it contains a lone surrogate") from error


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


MAX_PHRASE_ROWS: Final = 32
"""Most phrases in one draft; more would cost time, and rows that other databases need."""

# The automaton searches a node's children linearly, and the root has one for every first token of a
# phrase. So each token is split into two symbols of disjoint ranges, and no node has many children.
_SYMBOL_BITS: Final = 8
_LOW: Final = (1 << _SYMBOL_BITS) - 1
_HIGH: Final = 1 << _SYMBOL_BITS

_SOURCE: Final = int(Source.PHRASES)
_MIB: Final = 2**20
_MAX_SHOWN: Final = 10


def _untracked(items: Sequence[Any], description: str) -> Iterable[Any]:
    del description
    return items


class ListedPhrases:
    """The automaton of all listed phrases; immutable.

    An Aho-Corasick automaton (Aho and Corasick, 1975) holds every beginning of every phrase. So a
    new token costs one step, whatever the number of phrases.

    Args:
        phrases: token ids of each phrase. A phrase of one token has no beginning and is never
            found.
        problems: skipped lines of files.
        track: shows progress.

    Attributes:
        problems: skipped lines of files.
    """

    def __init__(
        self,
        phrases: Iterable[Phrase],
        problems: Sequence[Problem] = (),
        track: Track = _untracked,
    ) -> None:
        listed = sorted(set(phrases))
        self.problems = list(problems)
        tokens = np.array([token for phrase in listed for token in phrase], np.int32)
        starts = np.cumsum([0, *map(len, listed)], dtype=np.int64)
        self._automaton = ahocorasick.Automaton(ahocorasick.STORE_INTS, ahocorasick.KEY_SEQUENCE)
        first_phrases, last_phrases, lengths = self._add_beginnings(track(listed, "listing"))
        self.longest_beginning = max(lengths, default=0)
        self._automaton.make_automaton()
        shorter = self._shorter_beginnings(
            track(listed, "linking") if lengths else (), len(lengths)
        )
        self._arrays = PhraseArrays(
            tokens,
            starts,
            np.array(first_phrases, np.int32),
            np.array(last_phrases, np.int32),
            np.array(lengths, np.int32),
            np.array(shorter, np.int32),
        )
        self._packed = pack(self._arrays)

    @classmethod
    def load(
        cls,
        paths: Iterable[Path | str],
        encode: Encode | None,
        vocabulary_size: int | None,
        *,
        track: Track = _untracked,
    ) -> Self:
        """Load the phrases of files; see `retriever.predict.phrases` for the format.

        Args:
            paths: the files.
            encode: the target model's tokenizer; without one, lines of text are skipped.
            vocabulary_size: token ids must be below it; None if unknown.
            track: shows progress.

        Raises:
            PhrasesError: a file cannot be read. Invalid lines are skipped and listed in `problems`.
        """
        problems: list[Problem] = []
        reader = PhraseReader(encode, vocabulary_size, problems)
        phrases = [phrase for path in paths for phrase in reader.read(Path(path), track)]
        return cls(phrases, problems, track)

    def __len__(self) -> int:
        """Return the number of phrases; variants of a text count separately."""
        return len(self._arrays.starts) - 1

    @property
    def num_tokens(self) -> int:
        """Tokens in all phrases."""
        return len(self._arrays.tokens)

    @property
    def highest_token(self) -> int:
        """The highest token id of all phrases, -1 without phrases."""
        return int(self._arrays.tokens.max(initial=-1))

    @property
    def num_bytes(self) -> int:
        """Memory of the phrases and of the automaton, in bytes."""
        nodes: int = self._automaton.get_stats()["total_size"]
        return sum(array.nbytes for array in self._arrays) + nodes

    def summary(self) -> Iterator[str]:
        """Yield a few lines about loaded and skipped phrases."""
        for problem in self.problems[:_MAX_SHOWN]:
            yield f"warning: {problem}"
        if len(self.problems) > _MAX_SHOWN:
            yield f"warning: {len(self.problems) - _MAX_SHOWN} more lines were left out"
        size = f"{self.num_tokens} tokens, {self.num_bytes / _MIB:.1f} MiB"
        yield f"listed phrases: {len(self)} ({size})"

    def cursor(self, prompt: TokenIds) -> "PhraseCursor":
        """Return a cursor after a sequence's first tokens, int32[n]."""
        cursor = PhraseCursor(self)
        cursor.commit(prompt)
        return cursor

    def search(self) -> Any:
        """Return a new search of the automaton; None without phrases."""
        return self._automaton.iter(()) if len(self._arrays.lengths) else None

    def longest_at_end(self, tokens: TokenIds) -> int:
        """Return the longest beginning at the end of tokens, int32[n], or `NO_BEGINNING`."""
        search = self.search()
        if search is None:
            return NO_BEGINNING
        symbols = _symbols(tuple(tokens[-self.longest_beginning :].tolist()))
        search.set(symbols)
        end = len(symbols) - 1
        return next((number for at, number in search if at == end), NO_BEGINNING)

    def search_from(self, longest: int, depth: int, scratch: Scratch, row: int) -> int:
        """Write rows of evidence from `row` on; return the first free row.

        Args:
            longest: the longest beginning at the end of a context, or `NO_BEGINNING`.
            depth: most tokens to copy of each phrase.
            scratch: written.
            row: first free row.
        """
        end: int = collect_phrases(
            self._packed, _SOURCE, longest, MAX_PHRASE_ROWS, depth, scratch.packed, row
        )
        return end

    def warm(self) -> None:
        """Compile or load the kernel now, so that no draft waits for it."""
        self.search_from(NO_BEGINNING, 1, Scratch(max_depth=1, max_rows=1, max_nodes=1), 0)

    def _add_beginnings(self, listed: Iterable[Phrase]) -> tuple[list[int], list[int], list[int]]:
        """Add the beginnings of sorted phrases to the automaton, numbered in order.

        Returns:
            For each beginning: the first and the last phrase that continue it, and its length.
        """
        first_phrases: list[int] = []
        last_phrases: list[int] = []
        lengths: list[int] = []
        open_numbers: list[int] = []  # the last phrase's beginnings, shortest first
        before: Phrase = ()
        for number, phrase in enumerate(listed):
            del open_numbers[_num_common(before, phrase) :]
            for beginning in open_numbers:
                last_phrases[beginning] = number
            symbols = _symbols(phrase)
            for length in range(len(open_numbers) + 1, len(phrase)):
                open_numbers.append(len(lengths))
                self._automaton.add_word(symbols[: 2 * length], len(lengths))
                first_phrases.append(number)
                last_phrases.append(number)
                lengths.append(length)
            before = phrase
        return first_phrases, last_phrases, lengths

    def _shorter_beginnings(self, listed: Iterable[Phrase], num_beginnings: int) -> list[int]:
        """Return for each beginning the longest shorter beginning that is its suffix."""
        shorter = [NO_BEGINNING] * num_beginnings
        for phrase in listed:
            at, beginning = -1, NO_BEGINNING
            # Of matches with the same end, the phrase's own beginning is longest and comes first.
            for end, number in self._automaton.iter(_symbols(phrase[:-1])):
                if end != at:
                    at, beginning = end, number
                elif shorter[beginning] == NO_BEGINNING:
                    shorter[beginning] = number
        return shorter


class PhraseCursor:
    """The state of one sequence in the automaton. Not thread-safe.

    Args:
        phrases: the phrases to search for.
    """

    def __init__(self, phrases: ListedPhrases) -> None:
        self._phrases = phrases
        self._search = phrases.search()
        self._longest = NO_BEGINNING

    def commit(self, tokens: TokenIds) -> None:
        """Append tokens, int32[n]; those too far from the end to matter are skipped."""
        if self._search is None:
            return
        for token in tokens[-self._phrases.longest_beginning :].tolist():
            self._search.set((_HIGH + (token >> _SYMBOL_BITS), token & _LOW))
            found = list(self._search)  # the iterator must end before the next tokens
            self._longest = found[0][1] if found else NO_BEGINNING

    @contextmanager
    def supposing(self, tokens: TokenIds, last: TokenIds) -> Iterator[None]:  # noqa: ARG002
        """See `SupposingDatabase`; searches only as much text as a beginning can cover."""
        longest, self._longest = self._longest, self._phrases.longest_at_end(last)
        try:
            yield
        finally:
            self._longest = longest

    def collect(self, question: Question, row: int) -> int:
        """Write rows of evidence from `row` on; return the first free row."""
        if self._longest == NO_BEGINNING:
            return row
        return self._phrases.search_from(self._longest, question.depth, question.scratch, row)


def _symbols(tokens: Phrase) -> tuple[int, ...]:
    return tuple(
        symbol for token in tokens for symbol in (_HIGH + (token >> _SYMBOL_BITS), token & _LOW)
    )


def _num_common(one: Phrase, other: Phrase) -> int:
    """Return how many tokens two phrases have in common at their start."""
    pairs = zip(one, other, strict=False)
    return next((at for at, (a, b) in enumerate(pairs) if a != b), min(len(one), len(other)))
