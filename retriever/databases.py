"""The databases that drafts are taken from: each tells what followed the last tokens before.

All answer one question in one form: given the end of a context, rows of evidence (`ROW`) with
what came next, after how long a match, and for how many occurrences each row stands.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from indexer.reader import Segment
from retriever.drafter import TokenIds
from retriever.kernels.chains import SEPARATOR, append_tokens, collect_chains
from retriever.kernels.layout import MAX_MATCH, Scratch
from retriever.kernels.suffixes import collect_suffixes
from retriever.phrases import PhraseCursor
from retriever.tree import Source

_MIN_CAPACITY: Final = 1024


@dataclass(frozen=True, slots=True)
class ChainLimits:
    """Which n-grams a store indexes, and how many occurrences each may add to a draft."""

    orders: tuple[int, ...]
    max_rows: tuple[int, ...]


CONTEXT_LIMITS: Final = ChainLimits(orders=(8, 4, 2, 1), max_rows=(16, 16, 32, 64))
GENERATIONS_LIMITS: Final = ChainLimits(orders=(8, 4, 2), max_rows=(32, 64, 128))


class ChainStore:
    """Tokens in a ring with hash chains over their n-grams; the oldest are overwritten.

    Args:
        capacity: most tokens to hold; rounded up to a power of two.
        limits: the n-grams to index.
        source: what rows of this store are marked with.
    """

    def __init__(self, capacity: int, limits: ChainLimits, source: Source) -> None:
        size = 1 << (max(capacity, _MIN_CAPACITY) - 1).bit_length()
        self._orders = np.array(limits.orders, np.int64)
        self._max_rows = np.array(limits.max_rows, np.int64)
        self._source = int(source)
        self._tokens = np.zeros(size, np.int32)
        self._heads = np.full((len(limits.orders), size // 2), -1, np.int64)
        self._links = np.zeros((len(limits.orders), size), np.int32)
        self._state = np.zeros(2, np.int64)

    def __len__(self) -> int:
        """Tokens appended so far, overwritten ones and separators included."""
        return int(self._state[0])

    @property
    def capacity(self) -> int:
        """Tokens that the ring holds."""
        return len(self._tokens)

    @property
    def num_bytes(self) -> int:
        """Memory of the arrays, in bytes."""
        return self._tokens.nbytes + self._heads.nbytes + self._links.nbytes

    def append(self, tokens: TokenIds) -> None:
        """Append int32[n] to the current document."""
        append_tokens(self._tokens, self._heads, self._links, self._orders, self._state, tokens)

    def last(self, num_tokens: int) -> TokenIds:
        """Return a view of the last tokens; only for a ring that has not wrapped."""
        end = len(self)
        return self._tokens[max(0, end - num_tokens) : end]

    def collect(self, query: TokenIds, depth: int, scratch: Scratch, row: int) -> int:
        """Write rows of evidence from `row` on; return the first free row."""
        return int(
            collect_chains(
                self._tokens,
                self._heads,
                self._links,
                self._orders,
                self._max_rows,
                self._state,
                query,
                self._source,
                self._source == Source.CONTEXT,
                depth,
                scratch.rows,
                scratch.continuations,
                row,
            )
        )


class Context:
    """The sequence itself: prompt and output so far, in a store that grows with it."""

    def __init__(self, prompt: TokenIds) -> None:
        self._store = self._store_for(2 * len(prompt))
        self._store.append(prompt)

    def __len__(self) -> int:
        return len(self._store)

    def append(self, tokens: TokenIds) -> None:
        """Append int32[n], committed tokens."""
        if len(self) + len(tokens) > self._store.capacity:
            grown = self._store_for(2 * (len(self) + len(tokens)))
            grown.append(self.last(len(self)))
            self._store = grown
        self._store.append(tokens)

    def last(self, num_tokens: int) -> TokenIds:
        """Return the last tokens, at most `num_tokens`."""
        return self._store.last(num_tokens)

    def collect(self, query: TokenIds, depth: int, scratch: Scratch, row: int) -> int:
        """Write rows of evidence from `row` on; return the first free row."""
        return self._store.collect(query, depth, scratch, row)

    @staticmethod
    def _store_for(capacity: int) -> ChainStore:
        return ChainStore(capacity, CONTEXT_LIMITS, Source.CONTEXT)


class Generations:
    """Recent outputs, the newest `capacity` tokens of them."""

    def __init__(self, capacity: int) -> None:
        self._store = ChainStore(capacity, GENERATIONS_LIMITS, Source.GENERATIONS)

    @property
    def num_bytes(self) -> int:
        """Memory of the store, in bytes."""
        return self._store.num_bytes

    def add(self, output: TokenIds) -> None:
        """Remember int32[n], the output of one sequence."""
        if len(output):
            self._store.append(np.append(output, np.int32(SEPARATOR)))

    def collect(self, query: TokenIds, depth: int, scratch: Scratch, row: int) -> int:
        """Write rows of evidence from `row` on; return the first free row."""
        return self._store.collect(query, depth, scratch, row)


@dataclass(slots=True)
class Corpus:
    """Everything indexed: the segments of all indexes.

    Attributes:
        segments: as the indexer's reader opened them.
        samples: most occurrences to read for each match length in a segment.
        enough: shorter matches are not asked once a length occurs this often.
    """

    segments: Sequence[Segment]
    samples: int = 128
    enough: int = 16

    def collect(
        self, query: TokenIds, depth: int, scratch: Scratch, row: int, longest: int
    ) -> tuple[int, int]:
        """Write rows of evidence; return the first free row and the longest match.

        Args:
            query: int32[q], the last tokens of the context.
            depth: most tokens to copy for each occurrence.
            scratch: written.
            row: first free row.
            longest: a length beyond which nothing can match, from the last draft's.
        """
        found = 0
        for segment in self.segments:
            row, match = collect_suffixes(
                segment.tokens,
                segment.suffixes,
                segment.starts,
                query,
                longest,
                self.samples,
                self.enough,
                int(Source.CORPUS),
                depth,
                scratch.rows,
                scratch.continuations,
                row,
            )
            found = max(found, match)
        return int(row), int(found)


@dataclass(slots=True)
class Databases:
    """What one sequence is drafted from.

    Attributes:
        context: the sequence.
        generations: shared with other sequences.
        corpus: shared with other sequences.
        longest_match: no match in the corpus is longer than this many tokens.
        phrases: where the sequence stands in the listed phrases; None where none are listed.
    """

    context: Context
    generations: Generations
    corpus: Corpus
    longest_match: int = MAX_MATCH
    phrases: PhraseCursor | None = None

    def commit(self, tokens: TokenIds) -> None:
        """Append int32[n] to the sequence."""
        if len(tokens):
            self.context.append(tokens)
            if self.phrases is not None:
                self.phrases.commit(tokens)
            self.longest_match = min(MAX_MATCH, self.longest_match + len(tokens))

    def collect(self, depth: int, scratch: Scratch) -> int:
        """Write rows of evidence for what comes next; return how many."""
        query = self.context.last(MAX_MATCH)
        row = self.context.collect(query, depth, scratch, 0)
        row = self.generations.collect(query, depth, scratch, row)
        if self.phrases is not None:
            row = self.phrases.collect(depth, scratch, row)
        row, self.longest_match = self.corpus.collect(
            query, depth, scratch, row, self.longest_match
        )
        return row
