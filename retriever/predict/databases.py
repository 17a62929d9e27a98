"""The databases that drafts are taken from: each tells what followed the last tokens before.

All answer one question in one form: given the end of a context, rows of evidence (`ROW`) with
what came next, after how long a match, and for how many occurrences each row stands.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from indexer.reader import COUNT_VALUES, Index, PhraseTables, Segment, sum_tables, token_dtype
from retriever.drafter import TokenIds
from retriever.kernels.entries import collect_segment
from retriever.kernels.layout import MAX_MATCH, Chains, Scratch, SegmentArrays, Tables, lend
from retriever.predict.phrases import PhraseCursor
from retriever.predict.pool import Pool
from retriever.predict.stores import CONTEXT_LIMITS, ChainStore
from retriever.tree import Source

_FREQUENT: Final = 4.0  # natural logarithm of how rare a token is that counts as not rare at all
_RARE: Final = 12.0  # and of one that counts as rare as can be


def tables_of(indexes: Sequence[Index]) -> Tables:
    """Return the phrase tables of indexes of one vocabulary as kernels read them.

    Those of a single index stay mapped. Those of several are added up, in a temporary file that is
    mapped as well unless they are small.

    Raises:
        indexer.errors.IndexerError: they cannot be added up.
    """
    if not indexes:
        return to_kernel(PhraseTables.empty(0, np.dtype(token_dtype(0))))
    if len(indexes) == 1:
        return to_kernel(indexes[0].phrases)
    return to_kernel(sum_tables([index.phrases for index in indexes]))


def to_kernel(tables: PhraseTables) -> Tables:
    """Add each token's share in the corpus, and how rare it is."""
    occurrences = COUNT_VALUES[tables.counts[0]].astype(np.float64) + 1.0
    shares = occurrences / max(occurrences.sum(), 1.0)
    rarity = (-np.log(shares) - _FREQUENT) / (_RARE - _FREQUENT)
    starts1, starts2, starts3 = tables.starts
    _, tokens2, tokens3, tokens4 = tables.tokens
    counts1, counts2, counts3, counts4 = tables.counts
    return Tables(
        starts1=starts1,
        starts2=starts2,
        starts3=starts3,
        tokens2=tokens2,
        tokens3=tokens3,
        tokens4=tokens4,
        counts1=counts1,
        counts2=counts2,
        counts3=counts3,
        counts4=counts4,
        values=COUNT_VALUES,
        shares=shares.astype(np.float32),
        rarity=np.clip(rarity, 0.0, 1.0).astype(np.float32),
    )


SHORTEST_MATCH: Final = 3
"""Shorter matches in the corpus are left to the phrase tables."""

_CORPUS: Final = int(Source.CORPUS)


class Context:
    """The sequence itself: prompt and output so far, in a store that grows with it."""

    def __init__(self, prompt: TokenIds) -> None:
        self._store = self._store_for(2 * len(prompt))
        self._store.append(prompt)
        self._cursor = np.array([-1, 0], np.int64)

    def __len__(self) -> int:
        return len(self._store)

    def append(self, tokens: TokenIds) -> None:
        """Append int32[n], committed tokens."""
        if len(self) + len(tokens) > self._store.capacity:
            grown = self._store_for(2 * (len(self) + len(tokens)))
            grown.append(self.last(len(self)))
            self._store = grown
        self._store.extend(tokens, self._cursor)

    def clear(self) -> None:
        """Overwrite the tokens: the sequence has ended, and nothing of it may be left."""
        self._store.chains.tokens[:] = 0

    def last(self, num_tokens: int) -> TokenIds:
        """Return the last tokens, at most `num_tokens`."""
        return self._store.last(num_tokens)

    def collect(
        self, query: TokenIds, rarity: NDArray[np.float32], depth: int, scratch: Scratch
    ) -> int:
        """Write the first rows of evidence; return how many. See `ChainStore.collect_own`."""
        return self._store.collect_own(query, self._cursor, rarity, depth, scratch)

    @property
    def num_bytes(self) -> int:
        """Memory of the store, in bytes."""
        return self._store.num_bytes

    @property
    def chains(self) -> Chains:
        """The arrays that kernels read."""
        return self._store.chains

    @property
    def lent(self) -> NDArray[Any]:
        """The same, lent to kernels."""
        return self._store.lent

    @staticmethod
    def _store_for(capacity: int) -> ChainStore:
        return ChainStore(capacity, CONTEXT_LIMITS, Source.CONTEXT)


@dataclass(slots=True)
class Corpus:
    """Everything indexed: the segments of all indexes.

    Attributes:
        segments: as the indexer's reader opened them.
        tables: phrase tables of all indexes.
        samples: most occurrences to read for each match length in a segment.
        shortest: matches shorter than this are not asked: the tables know them.
        enough: shorter matches are not asked once a length occurs this often.
        lent_tables: the tables, lent to kernels.
        lent_segments: the segments likewise.
    """

    segments: Sequence[Segment]
    tables: Tables
    samples: int = 32
    enough: int = 16
    shortest: int = SHORTEST_MATCH
    lent_tables: NDArray[Any] = field(init=False)
    lent_segments: list[NDArray[Any]] = field(init=False)

    def __post_init__(self) -> None:
        self.lent_tables = lend(self.tables)
        self.lent_segments = [
            lend(SegmentArrays(each.tokens, each.suffixes, each.starts)) for each in self.segments
        ]

    def collect(
        self, query: TokenIds, depth: int, scratch: Scratch, row: int, longest: int
    ) -> tuple[int, int]:
        """Write rows of evidence; return the first free row and how long a match can be.

        Args:
            query: int32[q], the last tokens of the context.
            depth: most tokens to copy for each occurrence.
            scratch: written.
            row: first free row.
            longest: a length beyond which nothing can match, from the last draft's.
        """
        found = 0  # shorter matches than `shortest` are not looked for
        for segment in self.lent_segments:
            row, match = collect_segment(
                segment,
                query,
                scratch.recent,
                longest,
                self.shortest,
                self.samples,
                self.enough,
                _CORPUS,
                depth,
                scratch.rows,
                scratch.continuations,
                row,
            )
            found = max(found, match)
        return row, max(found, self.shortest - 1)


@dataclass(slots=True)
class Databases:
    """What one sequence is drafted from.

    Attributes:
        context: the sequence.
        pool: recent outputs and what was learned, shared with the tenant's other sequences.
        corpus: shared with all other sequences.
        learns: whether what comes next may change the pool's weights.
        longest_match: no match in the corpus is longer than this many tokens.
        phrases: where the sequence stands in the listed phrases; None where none are listed.
    """

    context: Context
    pool: Pool
    corpus: Corpus
    learns: bool = True
    longest_match: int = MAX_MATCH
    phrases: PhraseCursor | None = None

    def turn_to(self, corpus: Corpus) -> None:
        """Draft from this corpus from now on."""
        if corpus is not self.corpus:
            self.corpus = corpus
            self.longest_match = MAX_MATCH

    def commit(self, tokens: TokenIds) -> None:
        """Append int32[n] to the sequence."""
        if len(tokens):
            self.context.append(tokens)
            if self.phrases is not None:
                self.phrases.commit(tokens)
            self.longest_match = min(MAX_MATCH, self.longest_match + len(tokens))

    def collect(self, query: TokenIds, depth: int, scratch: Scratch) -> int:
        """Write rows of evidence for what comes after int32[q]; return how many."""
        row = self.context.collect(query, self.corpus.tables.rarity, depth, scratch)
        row = self.pool.generations.collect(query, depth, scratch, row)
        if self.phrases is not None:
            row = self.phrases.collect(depth, scratch, row)
        row, self.longest_match = self.corpus.collect(
            query, depth, scratch, row, self.longest_match
        )
        return row
