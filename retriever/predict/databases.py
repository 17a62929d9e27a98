"""The databases of a tenant: each finds what followed earlier occurrences of the last tokens.

All answer a `Question` in one form: for the end of a context, rows of evidence (`ROW`) with the
continuation, the match length and the number of occurrences of each row. `DATABASES` lists them. To
add one, write it in a file of its own with its number (`Source.register`), and list it here.
"""

from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import cache
from typing import Any, Final, NamedTuple, Self, cast

import numpy as np
from numpy.typing import NDArray

from indexer.reader import (
    COUNT_VALUES,
    KEY_STRIDE,
    Index,
    PhraseTables,
    Segment,
    key_bits,
    sum_tables,
    token_dtype,
)
from retriever.drafter import Kin, TokenIds
from retriever.kernels.entries import (
    CONTEXT,
    CORPUS,
    GENERATIONS,
    TREE,
    collect_segment,
    commit_tokens,
    draft_tree,
    step_sequence,
)
from retriever.kernels.layout import (
    FEW,
    MAX_MATCH,
    SEGMENT_LIMITS,
    Chains,
    Cursor,
    Scratch,
    SegmentArrays,
    Shared,
    Tables,
    pack,
)
from retriever.predict.generations import live_table
from retriever.predict.ledger import Charge
from retriever.predict.phrases import MAX_PHRASE_TOKENS, PhraseCursor
from retriever.predict.pool import Pool
from retriever.predict.predictions import Predictions
from retriever.predict.question import Database, Question, SupposingDatabase
from retriever.predict.running import NOTHING_RUNS, READER, RunningOutput, lane_fields
from retriever.predict.stores import CONTEXT_LIMITS, ChainStore, appending, store_bytes
from retriever.tree import DraftTree, Source

_FREQUENT: Final = 4.0  # -ln of a token's share: 2% of the corpus and more has rarity 0
_RARE: Final = 12.0  # 6 in a million and less has rarity 1


def tables_of(indexes: Sequence[Index]) -> Tables:
    """Return the phrase tables of indexes of one vocabulary as kernels read them.

    Those of one index stay memory-mapped. Those of several are added up, into a mapped temporary
    file unless they are small.

    Raises:
        indexer.errors.IndexerError: they cannot be added up.
    """
    if not indexes:
        return to_kernel(PhraseTables.empty(0, np.dtype(token_dtype(0))))
    if len(indexes) == 1:
        return to_kernel(indexes[0].phrases)
    return to_kernel(sum_tables([index.phrases for index in indexes]))


def to_kernel(tables: PhraseTables) -> Tables:
    """Return the tables with each token's share in the corpus and its rarity."""
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
"""Shortest match in the corpus: phrase tables cover shorter ones, up to three tokens."""


COMMITTED_AT_ONCE: Final = 1 << 14
"""Tokens that are committed to a sequence in one piece: a millisecond."""

SEQUENCE_BYTES: Final = 5 << 10
"""Memory of a session but for its tokens: some forty objects; 4.3 KB were measured over 1,900."""


def context_bytes(num_tokens: int) -> int:
    """Return the memory of a sequence that begins with, or grows to, so many tokens, in bytes."""
    return store_bytes(2 * num_tokens, CONTEXT_LIMITS, Source.CONTEXT) + SEQUENCE_BYTES


class Context:
    """The database of the sequence itself: prompt and output so far, in a growing store."""

    def __init__(self, prompt: TokenIds, charge: Charge | None = None, room_for: int = 0) -> None:
        """Begin with int32[n]; `room_for` is a number of tokens if more than those are to come."""
        self._charge = charge
        room = 2 * max(len(prompt), room_for)
        self._store = ChainStore(room, CONTEXT_LIMITS, Source.CONTEXT)
        if len(prompt):
            self._store.append(prompt)
        self.settle()

    @classmethod
    def reading(cls, prompt: TokenIds, charge: Charge | None = None) -> Generator[None, None, Self]:
        """Return the context of int32[n]; yield after each piece of work."""
        context = cls(prompt[:0], charge, room_for=len(prompt))
        yield from appending(context._store, prompt)
        return context

    def __len__(self) -> int:
        return self._store.end

    def commit(self, tokens: TokenIds) -> None:
        """Append int32[n], committed tokens."""
        if self._store.has_room(len(tokens)):
            self._store.extend(tokens)
            return
        for _ in self.committing(tokens):
            pass

    def advance(self, num_tokens: int) -> None:
        """Note that a kernel has appended tokens, for which there was room."""
        self._store.end += num_tokens

    def committing(self, tokens: TokenIds, room_for: int = 0) -> Iterator[None]:
        """Append int32[n]; yield after each piece of work. Meanwhile nobody else may append.

        There is room for `room_for` more tokens then.
        """
        size = len(self) + len(tokens) + room_for
        if size > self._store.capacity:
            cursor = self._store.cursor
            grown = ChainStore(2 * size, CONTEXT_LIMITS, Source.CONTEXT, cursor=cursor)
            yield from appending(grown, self.last(len(self)))
            self._store = grown
            self.settle()
        for begin in range(0, len(tokens), COMMITTED_AT_ONCE):
            if begin:
                yield
            self._store.extend(tokens[begin : begin + COMMITTED_AT_ONCE])

    def is_long(self, num_tokens: int) -> bool:
        """Return whether so many more tokens take longer than a piece of work."""
        size = len(self._store) + num_tokens
        return size > COMMITTED_AT_ONCE and (
            num_tokens > COMMITTED_AT_ONCE or size > self._store.capacity
        )

    def make_room(self, num_tokens: int) -> None:
        """Take the memory for more tokens, where they do not fit, before they are committed.

        Called with the drafter's lock held.

        Raises:
            LimitExceededError: there is no room for it.
        """
        if not self._store.has_room(num_tokens) and self._charge is not None:
            size = len(self) + num_tokens
            needed = self._store.num_bytes + context_bytes(size)  # both while it is copied
            self._charge.add(max(0, needed - self._charge.num_bytes))

    def settle(self) -> None:
        """Give back memory that was taken and is not needed."""
        if self._charge is not None:
            self._charge.settle(self._store.num_bytes + SEQUENCE_BYTES)

    def clear(self) -> None:
        """Overwrite the tokens: an ended sequence leaves nothing in memory."""
        self._store.chains.tokens[:] = 0

    def last(self, num_tokens: int) -> TokenIds:
        """Return the last tokens, at most `num_tokens`."""
        return self._store.last(num_tokens)

    def has_room(self, num_tokens: int) -> bool:
        """Return whether so many more tokens can be supposed."""
        return self._store.has_room(num_tokens)

    def supposing(self, tokens: TokenIds, last: TokenIds) -> AbstractContextManager[None]:  # noqa: ARG002
        """Have the sequence end with int32[n] during the block; there is room for them."""
        return self._store.supposing(tokens)

    def collect(self, question: Question, row: int) -> int:
        """Write rows of evidence; see `ChainStore.collect_own`."""
        return self._store.collect_own(question, row)

    @property
    def num_bytes(self) -> int:
        """Memory of the store, in bytes."""
        return self._store.num_bytes

    @property
    def touched_bytes(self) -> int:
        """Memory of the sequence that takes pages by now, in bytes."""
        return self._store.touched_bytes

    @property
    def chains(self) -> Chains:
        """The arrays that kernels read."""
        return self._store.chains

    @property
    def cursor(self) -> Cursor:
        """Where the sequence is being copied from, and its edits, as kernels keep them."""
        return self._store.cursor

    @property
    def address(self) -> int:
        """Where the same is packed for kernels; elsewhere once the sequence has outgrown it."""
        return self._store.address


@dataclass(slots=True)
class Corpus:
    """The database of the indexes: the segments of all of them.

    Attributes:
        segments: as the indexer's reader opened them.
        tables: phrase tables of all indexes.
        samples: most occurrences to read for each match length in a segment.
        shortest: shorter matches are not searched: the tables hold them.
        enough: once a length occurs this often in a segment, shorter matches are searched neither
            there nor in those after it; at most FEW.
        packed_tables: the tables, packed for kernels.
        packed_segments: the segments, packed for kernels: a record for each.
    """

    segments: Sequence[Segment]
    tables: Tables
    samples: int = 32
    enough: int = 16
    shortest: int = SHORTEST_MATCH
    packed_tables: NDArray[Any] = field(init=False)
    packed_segments: NDArray[Any] = field(init=False)
    _arrays: list[SegmentArrays] = field(init=False)

    def __post_init__(self) -> None:
        if self.enough > FEW:
            raise ValueError(f"enough is {self.enough}: at most {FEW} occurrences are told apart")
        bits = key_bits(len(self.tables.counts1))
        limits = np.array(
            [(int(Source.CORPUS), self.shortest, self.samples, self.enough, KEY_STRIDE, bits)],
            SEGMENT_LIMITS,
        )
        self.packed_tables = pack(self.tables)
        self._arrays = [
            SegmentArrays(each.tokens, each.suffixes, each.starts, each.keys, limits)
            for each in self.segments
        ]
        # Of one type: one vocabulary says how wide tokens are.
        packed = [pack(each) for each in self._arrays]
        self.packed_segments = np.concatenate(packed or [_no_segments(self.tables)])

    def search(self, question: Question, longest: int, row: int) -> tuple[int, int]:
        """Write rows of evidence; return the first free row and how long a match can be.

        Args:
            question: what is asked.
            longest: upper bound of the match length, from the last draft.
            row: first free row.
        """
        query, _, depth, scratch = question
        found = shortest = 0  # matches below `self.shortest` are not searched
        for place in range(len(self.packed_segments)):
            segment = self.packed_segments[place : place + 1]
            row, match, shortest = collect_segment(
                segment, query, shortest, longest, depth, scratch.packed, row
            )
            found = max(found, match)
        return row, max(found, self.shortest - 1)


def _no_segments(tables: Tables) -> NDArray[Any]:
    """Return no records of the type that segments have."""
    tokens = np.zeros(0, tables.tokens2.dtype)
    numbers, limits = np.zeros(0, np.uint32), np.zeros(0, SEGMENT_LIMITS)
    keys = np.zeros(0, np.uint64)
    return pack(SegmentArrays(tokens, numbers, numbers, keys, limits))[:0]


class CorpusCursor:
    """The search state of one sequence in the corpus.

    Args:
        corpus: shared with all other sequences.

    Attributes:
        corpus: the current one.
        longest: upper bound of the match length.
    """

    def __init__(self, corpus: Corpus) -> None:
        self.corpus = corpus
        self.longest = MAX_MATCH  # no match is longer than this many tokens

    def turn_to(self, corpus: Corpus) -> None:
        """Search this corpus from now on."""
        self.corpus, self.longest = corpus, MAX_MATCH

    def commit(self, tokens: TokenIds) -> None:
        """Append int32[n]: the match can grow by n."""
        self.longest = min(MAX_MATCH, self.longest + len(tokens))

    @contextmanager
    def supposing(self, tokens: TokenIds, last: TokenIds) -> Iterator[None]:  # noqa: ARG002
        """See `SupposingDatabase`: the match can grow by n, and its bound is put back."""
        longest = self.longest
        self.commit(tokens)
        try:
            yield
        finally:
            self.longest = longest

    def narrow(self, found: int) -> None:
        """Note the length of the longest match, 0 if there was none."""
        self.longest = max(found, self.corpus.shortest - 1)

    def collect(self, question: Question, row: int) -> int:
        """Write rows of evidence; see `Corpus.search`."""
        row, self.longest = self.corpus.search(question, self.longest, row)
        return row


def packed_for(pool: Pool, corpus: Corpus) -> NDArray[Any]:
    """Return `Shared`, packed, of sequences of a tenant and a corpus; made where it has changed."""
    generations, shared = pool.generations, pool.shared
    running = NOTHING_RUNS if pool.running is None else pool.running.packed
    generations.leave_out_expired()
    if (
        shared is None
        or pool.packed is None
        or shared.outputs is not generations.packed
        or shared.live is not generations.live
        or shared.versions is not generations.versions
        or shared.running is not running
        or shared.tables is not corpus.packed_tables
        or shared.weights is not pool.weights
    ):
        pool.shared = shared = Shared(
            generations.packed,
            generations.live,
            generations.versions,
            running,
            corpus.packed_segments,
            corpus.packed_tables,
            pool.weights,
        )
        pool.packed = pack(shared)
    return pool.packed


_NO_LIVE: Final = live_table(0)


def _without_dropped(shared: NDArray[Any], pool: Pool, oldest: int) -> NDArray[Any]:
    """Return `Shared`, packed, for a sequence that drops what is older than a version.

    The live table does not know versions: it counts nothing as long as it knows dropped ones.
    """
    if pool.shared is None or not pool.generations.has_older(oldest):
        return shared
    return pack(pool.shared._replace(live=_NO_LIVE))


Outcome = tuple[DraftTree, NDArray[np.int64], NDArray[np.int64]]
"""A sequence's last draft, and where its nodes are counted: see `kernels.entries.count_outcome`.

Without an earlier draft, it is one without nodes."""


class _Run(NamedTuple):
    """Stages of a draft that one call of a kernel does, and the database that is asked then."""

    stages: int
    then: Database | None


_INT32, _FLOAT32, _UINT8 = np.dtype(np.int32), np.dtype(np.float32), np.dtype(np.uint8)
"""Made once: from `np.int32` it takes half as long again to make an array."""


def _empty_nodes(
    budget: int,
) -> tuple[NDArray[np.int32], NDArray[np.int32], NDArray[np.float32], NDArray[np.uint8]]:
    """Return arrays of a tree, not set; one of two rows takes longer than two of one."""
    return (
        np.empty(budget, _INT32),
        np.empty(budget, _INT32),
        np.empty(budget, _FLOAT32),
        np.empty(budget, _UINT8),
    )


def first_nodes(
    size: int,
    ids: NDArray[np.int32],
    parents: NDArray[np.int32],
    probabilities: NDArray[np.float32],
    sources: NDArray[np.uint8],
) -> DraftTree:
    """Return the tree of the first nodes of arrays; mostly they are full, and need no views."""
    if size == len(ids):
        return DraftTree(ids, parents, probabilities, sources)
    return DraftTree(ids[:size], parents[:size], probabilities[:size], sources[:size])


@cache
def _supposes(kind: type) -> bool:
    """Return whether databases of a class are `SupposingDatabase`.

    Kept by class: asking a protocol for each took a tenth of the time to open a sequence.
    """
    return issubclass(kind, SupposingDatabase)


class Databases:
    """The databases of one sequence.

    Args:
        context: the sequence.
        pool: generations and learned weights, shared with the tenant's other sequences.
        corpus: shared with all other sequences.
        learns: whether committed tokens update the pool's weights.
        phrases: the sequence's cursor in the listed phrases; None without any.
        predictions: what the caller expects of the sequence; None without any.

    Attributes:
        in_corpus: the sequence's cursor in the corpus.
        lane: the sequence among the tenant's running ones.
        is_compiled: whether one call of a kernel asks all databases, in what the tenant's sequences
            share.
    """

    def __init__(  # noqa: PLR0913  (the databases, by name)
        self,
        context: Context,
        pool: Pool,
        corpus: Corpus,
        *,
        learns: bool = True,
        phrases: PhraseCursor | None = None,
        predictions: Predictions | None = None,
    ) -> None:
        self.context = context
        self.pool = pool
        self.learns = learns
        self.phrases = phrases
        self.predictions = predictions
        self.in_corpus = CorpusCursor(corpus)
        self._take_lane(READER)
        self._open_all()

    def _open_all(self) -> None:
        opened = (kind.open(self) for kind in DATABASES)
        self._opened: list[Database] = [each for each in opened if each is not None]
        supposing = [each for each in self._opened if _supposes(type(each))]
        self._supposing = cast("list[SupposingDatabase]", supposing)
        self._others = [each for each in self._opened if each is not self.context]
        self._runs = self._planned()
        self.is_compiled = len(self._runs) == 1 and not self._oldest_version
        # What others read is told before any of them is asked: no kernel does it.
        self._can_append = self.is_compiled and not self.lane.is_written

    def expect(self, predictions: Predictions) -> None:
        """Draft from these predictions from now on; they begin with those of before."""
        if self.predictions is not None:
            predictions.go_on_from(self.predictions)
        self.predictions = predictions
        self._open_all()

    def join(self, kin: Kin, *, is_shared: bool) -> None:
        """Draft as one of its kin, and serve those of its group; before the first draft.

        Without running outputs in the pool the sequence serves none.

        Args:
            kin: of the sequence.
            is_shared: whether the tenant's other sequences are served, too.
        """
        running = self.pool.running
        if kin.group and running is not None:
            fields = lane_fields(kin, running.join(), is_shared=is_shared)
            self._take_lane(RunningOutput(running, fields, self.context, len(self.context)))
            self._open_all()
        elif kin.policy_version is not None:
            self._take_lane(RunningOutput(None, lane_fields(kin)))
            self._open_all()

    def _take_lane(self, lane: RunningOutput) -> None:
        self.lane = lane
        self._lane_address, self._oldest_version = lane.address, lane.oldest_version

    def leave(self) -> None:
        """End: nothing of the sequence is left among the running ones."""
        self.lane.leave()
        self.pool.tidy()

    @property
    def num_bytes(self) -> int:
        """Memory of the sequence and its predictions, in bytes."""
        predicted = 0 if self.predictions is None else self.predictions.num_bytes
        return self.context.num_bytes + predicted

    @property
    def touched_bytes(self) -> int:
        """Memory of both that takes pages by now, in bytes."""
        predicted = 0 if self.predictions is None else self.predictions.touched_bytes
        return self.context.touched_bytes + predicted

    def clear(self) -> None:
        """Overwrite the tokens of the sequence and its predictions."""
        self.context.clear()
        if self.predictions is not None:
            self.predictions.clear()

    @property
    def corpus(self) -> Corpus:
        """The current corpus."""
        return self.in_corpus.corpus

    def turn_to(self, corpus: Corpus) -> None:
        """Draft from this corpus from now on."""
        if corpus is not self.in_corpus.corpus:
            self.in_corpus.turn_to(corpus)

    def commit(self, tokens: TokenIds) -> None:
        """Append int32[n] to the sequence."""
        if len(tokens):
            for database in self._opened:
                database.commit(tokens)

    def committing(self, tokens: TokenIds) -> Iterator[None]:
        """Append int32[n] to the sequence; yield after each piece of work."""
        for database in self._opened:
            if database is self.context:
                yield from self.context.committing(tokens)
            elif database is not self.lane:  # others read it: it is noted with the lock held
                database.commit(tokens)

    def can_suppose(self, num_tokens: int) -> bool:
        """Return whether all databases answer after so many tokens that may come."""
        return len(self._supposing) == len(self._opened) and self.context.has_room(num_tokens)

    @contextmanager
    def supposing(self, tokens: TokenIds) -> Iterator[None]:
        """Have all answer as if int32[n] were committed, during the block: `can_suppose` says so.

        Nothing of it is left behind.
        """
        with ExitStack() as supposed:
            supposed.enter_context(self.context.supposing(tokens, tokens))
            last = self.context.last(MAX_PHRASE_TOKENS)
            for database in self._supposing:
                if database is not self.context:
                    supposed.enter_context(database.supposing(tokens, last))
            yield

    def learn_and_commit(self, tokens: TokenIds, scratch: Scratch | None, rate: float) -> None:
        """Append int32[n], n at least 1, having learned from what followed a draft of the sequence.

        Args:
            tokens: what followed.
            scratch: as the draft left it; None to learn nothing.
            rate: size of a learning step.
        """
        context, pool = self.context, self.pool
        if not context.has_room(len(tokens)):
            for _ in context.committing(tokens[:0], room_for=len(tokens)):
                pass
        address = 0 if scratch is None else scratch.address
        pool.learned += commit_tokens(pool.weights, context.address, address, tokens, rate)
        context.advance(len(tokens))
        for database in self._others:
            database.commit(tokens)

    def draft(self, scratch: Scratch, budget: int, min_probability: float) -> tuple[DraftTree, int]:
        """Collect rows of evidence from all databases and grow a tree from them.

        Args:
            scratch: written.
            budget: most nodes of the tree, and most tokens to copy after an occurrence.
            min_probability: less probable nodes are left out.

        Returns:
            The tree, and the number of rows.
        """
        shared = packed_for(self.pool, self.in_corpus.corpus)
        if self._oldest_version:
            shared = _without_dropped(shared, self.pool, self._oldest_version)
        address, longest = self.context.address, self.in_corpus.longest
        ids, parents, probabilities, sources = _empty_nodes(budget)
        row = size = 0
        for stages, then in self._runs:
            size, row, found = draft_tree(
                shared, address, self._lane_address, scratch.address, stages, row, longest, budget,
                min_probability, ids, parents, probabilities, sources,
            )  # fmt: skip
            if stages & CORPUS:
                self.in_corpus.narrow(found)
            if then is not None:
                row = then.collect(self._question(budget, scratch), row)
        return first_nodes(size, ids, parents, probabilities, sources), row

    def step(  # noqa: PLR0913, PLR0917  (what a kernel takes)
        self,
        tokens: TokenIds,
        budget: int,
        min_probability: float,
        outcome: Outcome,
        scratch: Scratch,
        rate: float,
    ) -> tuple[DraftTree, int, int]:
        """Count the last draft's outcome, learn, append and draft: one call of a kernel for all.

        Args:
            tokens: int32[n], to be appended: `can_append` says so. The sequence has one then.
            budget: most nodes of the tree, at least one.
            min_probability: less probable nodes are left out.
            outcome: where to count what became of the last draft.
            scratch: as the draft that is learned from left it; written.
            rate: size of a learning step; 0 to learn nothing.

        Returns:
            The tree, the number of rows, and how many of the tokens the last draft contained.
        """
        context, (drafted, counts, by_index) = self.context, outcome
        shared = packed_for(self.pool, self.in_corpus.corpus)
        ids, parents, probabilities, sources = _empty_nodes(budget)
        size, num_rows, match, depth, learned = step_sequence(
            shared, context.address, self._lane_address, scratch.address, tokens,
            self.in_corpus.longest, rate, drafted.token_ids, drafted.parents, drafted.sources,
            counts, by_index, budget, min_probability, ids, parents, probabilities, sources,
        )  # fmt: skip
        self.pool.learned += learned
        self.committed(len(tokens), match)
        return first_nodes(size, ids, parents, probabilities, sources), num_rows, depth

    def can_append(self, num_tokens: int) -> bool:
        """Return whether a kernel can append so many tokens before it asks all databases."""
        return self._can_append and self.context.has_room(num_tokens)

    def committed(self, num_tokens: int, match: int) -> None:
        """Note that a kernel has appended tokens and asked all databases, which it can.

        Args:
            num_tokens: that it has appended.
            match: longest match in the corpus that it has found, 0 if there was none.
        """
        self.context.advance(num_tokens)
        self.in_corpus.narrow(match)

    def _question(self, depth: int, scratch: Scratch) -> Question:
        rarity = self.in_corpus.corpus.tables.rarity
        return Question(self.context.last(MAX_MATCH), rarity, depth, scratch)

    def _planned(self) -> list[_Run]:
        """Return the calls of a draft: one, but for databases without a stage of the kernel."""
        stages = {
            id(self.context): CONTEXT,
            id(self.pool.generations): GENERATIONS,
            id(self.in_corpus): CORPUS,
        }
        runs, current = [], 0
        for database in self._opened:
            if database is self.lane:  # asked with generations
                continue
            stage = stages.get(id(database), 0)
            if stage > current:  # the kernel does stages in their order
                current += stage
            else:
                runs.append(_Run(current, database))
                current = 0
        return [*runs, _Run(current + TREE, None)]


@dataclass(frozen=True, slots=True)
class DatabaseKind:
    """A database in the list of all.

    Attributes:
        source: marks its rows.
        trust: weight of one of its occurrences relative to other databases, before mixing.
        open: returns the database for a sequence, given the sequence's others; None where it has
            none. Databases earlier in the list are open by then.
    """

    source: Source
    trust: float
    open: Callable[[Databases], Database | None]


# The sequence itself predicts better than other texts, and listed phrases are meant to recur.
# Learned weights correct these values: doubling or halving a trust changed tokens per step by less
# than 0.2% (docs/decisions/2026-11-21-mixing.md).
DATABASES: Final = [
    DatabaseKind(Source.CONTEXT, 6.0, lambda all_: all_.context),
    DatabaseKind(Source.PREDICTIONS, 3.0, lambda all_: all_.predictions),
    DatabaseKind(Source.GENERATIONS, 0.6, lambda all_: all_.pool.generations),
    DatabaseKind(Source.SIBLINGS, 2.5, lambda all_: all_.lane if all_.lane.is_written else None),
    DatabaseKind(Source.PHRASES, 12.0, lambda all_: all_.phrases),
    DatabaseKind(Source.CORPUS, 0.35, lambda all_: all_.in_corpus),
]
"""All databases, in the order of queries: the sequence first, which marks its recent tokens for
those after it."""


def register(kind: DatabaseKind) -> None:
    """Add a database, before any drafter is made.

    Raises:
        ValueError: another database has its source.
    """
    if any(kind.source == other.source for other in DATABASES):
        raise ValueError(f"a database with the source {kind.source.label} is registered already")
    DATABASES.append(kind)
