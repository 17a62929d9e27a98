"""The databases that drafts are taken from: each tells what followed the last tokens before.

All answer one `Question` in one form: given the end of a context, rows of evidence (`ROW`) with
what came next, after how long a match, and for how many occurrences each row stands. `DATABASES`
lists them. To add one, write it in a file of its own with its number (`Source.register`), and list
it here.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from indexer.reader import COUNT_VALUES, Index, PhraseTables, Segment, sum_tables, token_dtype
from retriever.drafter import TokenIds
from retriever.kernels.entries import collect_segment
from retriever.kernels.layout import (
    MAX_MATCH,
    SEGMENT_LIMITS,
    Chains,
    Scratch,
    SegmentArrays,
    Tables,
    pack,
)
from retriever.predict.phrases import PhraseCursor
from retriever.predict.pool import Pool
from retriever.predict.question import Database, Question
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


class Context:
    """The sequence itself: prompt and output so far, in a store that grows with it."""

    def __init__(self, prompt: TokenIds) -> None:
        self._store = ChainStore(2 * len(prompt), CONTEXT_LIMITS, Source.CONTEXT)
        self._store.append(prompt)

    def __len__(self) -> int:
        return len(self._store)

    def commit(self, tokens: TokenIds) -> None:
        """Append int32[n], committed tokens."""
        size = len(self) + len(tokens)
        if size > self._store.capacity:
            cursor = self._store.cursor
            grown = ChainStore(2 * size, CONTEXT_LIMITS, Source.CONTEXT, cursor=cursor)
            grown.append(self.last(len(self)))
            self._store = grown
        self._store.extend(tokens)

    def clear(self) -> None:
        """Overwrite the tokens: the sequence has ended, and nothing of it may be left."""
        self._store.chains.tokens[:] = 0

    def last(self, num_tokens: int) -> TokenIds:
        """Return the last tokens, at most `num_tokens`."""
        return self._store.last(num_tokens)

    def collect(self, question: Question, row: int) -> int:
        """Write rows of evidence; see `ChainStore.collect_own`."""
        return self._store.collect_own(question, row)

    @property
    def num_bytes(self) -> int:
        """Memory of the store, in bytes."""
        return self._store.num_bytes

    @property
    def chains(self) -> Chains:
        """The arrays that kernels read."""
        return self._store.chains

    @property
    def packed(self) -> NDArray[Any]:
        """The same, packed for kernels."""
        return self._store.packed


@dataclass(slots=True)
class Corpus:
    """Everything indexed: the segments of all indexes.

    Attributes:
        segments: as the indexer's reader opened them.
        tables: phrase tables of all indexes.
        samples: most occurrences to read for each match length in a segment.
        shortest: matches shorter than this are not asked: the tables know them.
        enough: shorter matches are not asked once a length occurs this often.
        packed_tables: the tables, packed for kernels.
        packed_segments: the segments likewise.
    """

    segments: Sequence[Segment]
    tables: Tables
    samples: int = 32
    enough: int = 16
    shortest: int = SHORTEST_MATCH
    packed_tables: NDArray[Any] = field(init=False)
    packed_segments: list[NDArray[Any]] = field(init=False)
    _arrays: list[SegmentArrays] = field(init=False)

    def __post_init__(self) -> None:
        limits = np.array(
            [(int(Source.CORPUS), self.shortest, self.samples, self.enough)], SEGMENT_LIMITS
        )
        self.packed_tables = pack(self.tables)
        self._arrays = [
            SegmentArrays(each.tokens, each.suffixes, each.starts, limits) for each in self.segments
        ]
        self.packed_segments = [pack(each) for each in self._arrays]

    def search(self, question: Question, longest: int, row: int) -> tuple[int, int]:
        """Write rows of evidence; return the first free row and how long a match can be.

        Args:
            question: what is asked.
            longest: a length beyond which nothing can match, from the last draft's.
            row: first free row.
        """
        query, _, depth, scratch = question
        found = 0  # shorter matches than `shortest` are not looked for
        for segment in self.packed_segments:
            row, match = collect_segment(segment, query, longest, depth, scratch.packed, row)
            found = max(found, match)
        return row, max(found, self.shortest - 1)


class CorpusCursor:
    """Where one sequence stands in the corpus.

    Args:
        corpus: shared with all other sequences.
    """

    def __init__(self, corpus: Corpus) -> None:
        self.corpus = corpus
        self._longest = MAX_MATCH  # no match is longer than this many tokens

    def turn_to(self, corpus: Corpus) -> None:
        """Search this corpus from now on."""
        if corpus is not self.corpus:
            self.corpus, self._longest = corpus, MAX_MATCH

    def commit(self, tokens: TokenIds) -> None:
        """Go on by int32[n]: a match may be longer by so many."""
        self._longest = min(MAX_MATCH, self._longest + len(tokens))

    def collect(self, question: Question, row: int) -> int:
        """Write rows of evidence; see `Corpus.search`."""
        row, self._longest = self.corpus.search(question, self._longest, row)
        return row


class Databases:
    """What one sequence is drafted from.

    Args:
        context: the sequence.
        pool: generations and what was learned, shared with the tenant's other sequences.
        corpus: shared with all other sequences.
        learns: whether what comes next may change the pool's weights.
        phrases: where the sequence stands in the listed phrases; None where none are listed.

    Attributes:
        in_corpus: where the sequence stands in the corpus.
    """

    def __init__(
        self,
        context: Context,
        pool: Pool,
        corpus: Corpus,
        *,
        learns: bool = True,
        phrases: PhraseCursor | None = None,
    ) -> None:
        self.context = context
        self.pool = pool
        self.learns = learns
        self.phrases = phrases
        self.in_corpus = CorpusCursor(corpus)
        opened = (kind.open(self) for kind in DATABASES)
        self._opened: list[Database] = [each for each in opened if each is not None]

    @property
    def corpus(self) -> Corpus:
        """The corpus that is drafted from now."""
        return self.in_corpus.corpus

    def turn_to(self, corpus: Corpus) -> None:
        """Draft from this corpus from now on."""
        self.in_corpus.turn_to(corpus)

    def commit(self, tokens: TokenIds) -> None:
        """Append int32[n] to the sequence."""
        if len(tokens):
            for database in self._opened:
                database.commit(tokens)

    def find(self, depth: int, scratch: Scratch) -> int:
        """Write rows of evidence for what comes next, from all databases; return how many.

        Args:
            depth: most tokens to copy of what followed an occurrence.
            scratch: written.
        """
        rarity = self.in_corpus.corpus.tables.rarity
        question = Question(self.context.last(MAX_MATCH), rarity, depth, scratch)
        row = 0
        for database in self._opened:
            row = database.collect(question, row)
        return row


@dataclass(frozen=True, slots=True)
class DatabaseKind:
    """A database in the list of all.

    Attributes:
        source: what its rows are marked with.
        trust: what one of its occurrences counts beside those of others, before they are mixed.
        open: given the other databases of a sequence, returns this one as the sequence asks it;
            None where the sequence does without. Those before it in the list are open by then.
    """

    source: Source
    trust: float
    open: Callable[[Databases], Database | None]


# The sequence itself says more of what comes next than what others wrote, and what somebody listed
# is meant to be written again. Learned weights correct it: trust twice or half as large changed
# tokens per step by less than 0.2% (docs/decisions/2026-11-21-mixing.md).
DATABASES: Final = [
    DatabaseKind(Source.CONTEXT, 6.0, lambda all_: all_.context),
    DatabaseKind(Source.GENERATIONS, 0.6, lambda all_: all_.pool.generations),
    DatabaseKind(Source.PHRASES, 12.0, lambda all_: all_.phrases),
    DatabaseKind(Source.CORPUS, 0.35, lambda all_: all_.in_corpus),
]
"""All databases, in the order in which they are asked: the sequence itself first, which marks what
is recent for those after it."""


def register(kind: DatabaseKind) -> None:
    """Add a database, before any drafter is made.

    Raises:
        ValueError: another database has its source.
    """
    if any(kind.source == other.source for other in DATABASES):
        raise ValueError(f"a database with the source {kind.source.label} is registered already")
    DATABASES.append(kind)
