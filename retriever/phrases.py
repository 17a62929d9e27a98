"""Listed phrases: what a team writes verbatim, found by its beginning at the end of a context."""

from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, Final, Self

import ahocorasick
import numpy as np

from retriever.drafter import TokenIds
from retriever.kernels.layout import Scratch
from retriever.kernels.phrases import NO_BEGINNING, collect_phrases
from retriever.phrase_files import Encode, Phrase, PhraseReader, Problem, Track
from retriever.tree import Source

MAX_PHRASE_ROWS: Final = 32
"""Most phrases that go into one draft."""

# The automaton looks through a node's children one by one, and the root has one for every token
# that begins a phrase. So a token is two symbols, of ranges apart, and no node has many children.
_SYMBOL_BITS: Final = 8
_LOW: Final = (1 << _SYMBOL_BITS) - 1
_HIGH: Final = 1 << _SYMBOL_BITS

_MIB: Final = 2**20
_MAX_SHOWN: Final = 10


def _untracked(items: Sequence[Any], description: str) -> Iterable[Any]:
    del description
    return items


class ListedPhrases:
    """Phrases to draft from as soon as a context ends with their beginning; immutable.

    An Aho-Corasick automaton (Aho and Corasick, 1975) holds every beginning of every phrase, so
    that a token more at the end of a context costs one step, however many phrases there are.

    Args:
        phrases: token ids of each; single tokens have no beginning and are never found.
        problems: lines of files that were left out.
        track: shows progress.

    Attributes:
        problems: as given.
    """

    def __init__(
        self,
        phrases: Iterable[Phrase],
        problems: Sequence[Problem] = (),
        track: Track = _untracked,
    ) -> None:
        listed = sorted(set(phrases))
        self.problems = list(problems)
        self._tokens = np.array([token for phrase in listed for token in phrase], np.int32)
        self._starts = np.cumsum([0, *map(len, listed)], dtype=np.int64)
        self._automaton = ahocorasick.Automaton(ahocorasick.STORE_INTS, ahocorasick.KEY_SEQUENCE)
        first_phrases, last_phrases, lengths = self._add_beginnings(track(listed, "listing"))
        self._first_phrases = np.array(first_phrases, np.int32)
        self._last_phrases = np.array(last_phrases, np.int32)
        self._lengths = np.array(lengths, np.int32)
        self.longest_beginning = max(lengths, default=0)
        self._automaton.make_automaton()
        shorter = self._shorter_beginnings(track(listed, "linking") if lengths else ())
        self._shorter = np.array(shorter, np.int32)

    @classmethod
    def load(
        cls,
        paths: Iterable[Path | str],
        encode: Encode | None,
        vocabulary_size: int | None,
        *,
        track: Track = _untracked,
    ) -> Self:
        """Load the phrases of files; see `retriever.phrase_files` for what they hold.

        Args:
            paths: the files.
            encode: the tokenizer of the model that is drafted for; without one, lines of text
                are left out.
            vocabulary_size: token ids must be below it; None where it is not known.
            track: shows progress.

        Raises:
            PhrasesError: a file cannot be read. Lines that cannot be read are left out and
                listed in `problems`.
        """
        problems: list[Problem] = []
        reader = PhraseReader(encode, vocabulary_size, problems)
        phrases = [phrase for path in paths for phrase in reader.read(Path(path), track)]
        return cls(phrases, problems, track)

    def __len__(self) -> int:
        """Return how many phrases there are, variants of one text counted apart."""
        return len(self._starts) - 1

    @property
    def num_tokens(self) -> int:
        """Tokens in all phrases."""
        return len(self._tokens)

    @property
    def highest_token(self) -> int:
        """The highest token id of all phrases, -1 where there is none."""
        return int(self._tokens.max(initial=-1))

    @property
    def num_bytes(self) -> int:
        """Memory of the phrases and of the automaton, in bytes."""
        beginnings = 4 * self._lengths.nbytes  # four arrays have a number for each
        nodes: int = self._automaton.get_stats()["total_size"]
        return self._tokens.nbytes + self._starts.nbytes + beginnings + nodes

    def summary(self) -> Iterator[str]:
        """Say in a few lines what was loaded and what was not."""
        for problem in self.problems[:_MAX_SHOWN]:
            yield f"warning: {problem}"
        if len(self.problems) > _MAX_SHOWN:
            yield f"warning: {len(self.problems) - _MAX_SHOWN} more lines were left out"
        size = f"{self.num_tokens} tokens, {self.num_bytes / _MIB:.1f} MiB"
        yield f"listed phrases: {len(self)} ({size})"

    def cursor(self, prompt: TokenIds) -> "PhraseCursor":
        """Return a cursor at the end of int32[n], a sequence's first tokens."""
        cursor = PhraseCursor(self)
        cursor.commit(prompt)
        return cursor

    def search(self) -> Any:
        """Return a new search of the automaton; None where there is nothing to find."""
        return self._automaton.iter(()) if len(self._lengths) else None

    def collect(self, longest: int, depth: int, scratch: Scratch, row: int) -> int:
        """Write rows of evidence from `row` on; return the first free row.

        Args:
            longest: the longest beginning that a context ends with, or `NO_BEGINNING`.
            depth: most tokens to copy of each phrase.
            scratch: written.
            row: first free row.
        """
        return int(
            collect_phrases(
                self._tokens,
                self._starts,
                self._first_phrases,
                self._last_phrases,
                self._lengths,
                self._shorter,
                longest,
                MAX_PHRASE_ROWS,
                int(Source.PHRASES),
                depth,
                scratch.rows,
                scratch.continuations,
                row,
            )
        )

    def warm(self) -> None:
        """Compile or load the kernel now, so that no draft waits for it."""
        self.collect(NO_BEGINNING, 1, Scratch(max_depth=1, max_rows=1, max_nodes=1), 0)

    def _add_beginnings(self, listed: Iterable[Phrase]) -> tuple[list[int], list[int], list[int]]:
        """Add the beginnings of sorted phrases to the automaton, numbered as they come.

        Returns:
            Of each beginning the first and the last phrase that go on from it, and its length.
        """
        first_phrases: list[int] = []
        last_phrases: list[int] = []
        lengths: list[int] = []
        open_numbers: list[int] = []  # of the last phrase's beginnings, the shortest first
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

    def _shorter_beginnings(self, listed: Iterable[Phrase]) -> list[int]:
        """Return of each beginning the longest shorter one that it ends with."""
        shorter = [NO_BEGINNING] * len(self._lengths)
        for phrase in listed:
            at, beginning = -1, NO_BEGINNING
            # At each end the longest comes first, which is the phrase's own.
            for end, number in self._automaton.iter(_symbols(phrase[:-1])):
                if end != at:
                    at, beginning = end, number
                elif shorter[beginning] == NO_BEGINNING:
                    shorter[beginning] = number
        return shorter


class PhraseCursor:
    """Where one sequence stands in the automaton; one thread at a time.

    Args:
        phrases: what is searched for.
    """

    def __init__(self, phrases: ListedPhrases) -> None:
        self._phrases = phrases
        self._search = phrases.search()
        self._longest = NO_BEGINNING

    def commit(self, tokens: TokenIds) -> None:
        """Go on by int32[n]. Tokens too far from the end to matter are not looked at."""
        if self._search is None:
            return
        for token in tokens[-self._phrases.longest_beginning :].tolist():
            self._search.set((_HIGH + (token >> _SYMBOL_BITS), token & _LOW))
            found = list(self._search)  # to the end: what is left over would come with the next
            self._longest = found[0][1] if found else NO_BEGINNING

    def collect(self, depth: int, scratch: Scratch, row: int) -> int:
        """Write rows of evidence from `row` on; return the first free row."""
        if self._longest == NO_BEGINNING:
            return row
        return self._phrases.collect(self._longest, depth, scratch, row)


def _symbols(tokens: Phrase) -> tuple[int, ...]:
    return tuple(
        symbol for token in tokens for symbol in (_HIGH + (token >> _SYMBOL_BITS), token & _LOW)
    )


def _num_common(one: Phrase, other: Phrase) -> int:
    """Return how many tokens two phrases have in common from the start."""
    pairs = zip(one, other, strict=False)
    return next((at for at, (a, b) in enumerate(pairs) if a != b), min(len(one), len(other)))
