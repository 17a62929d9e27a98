"""Drafts: grow a tree from what databases find, and learn from the tokens that follow.

A step commits tokens to some sequences and drafts for each. The kernel does all of it in one call
(`kernels.entries.step_sequences`), except for databases without a stage: those are queried between
two calls. Several threads share the sequences of one tenant and one corpus, because a draft writes
only to scratch memory and its own sequence. Each thread takes the next free sequence, so trees do
not depend on the number of threads.
"""

import math
import struct
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Final, NamedTuple, Self
from weakref import ref

import numpy as np
from numpy.typing import NDArray

from retriever.drafter import NO_TOKENS, DraftRequest, TokenIds
from retriever.kernels.entries import APPEND, CHECK, DRAFT, OUTCOME, check_steps, step_sequences
from retriever.kernels.layout import BOUNDS, MAX_POSITIONS, PRIOR, Scratch, Shared, pack
from retriever.predict.databases import DATABASES, Databases
from retriever.predict.generations import live_table
from retriever.predict.pool import DraftedFrom
from retriever.predict.running import NOTHING_RUNS
from retriever.predict.searched_corpus import no_outcomes
from retriever.predict.step_record import (
    ANSWER,
    ANSWER_AT,
    ASKED,
    ASKED_AT,
    MOST_TOKENS,
    TREE_AT,
    StepRecord,
)
from retriever.tree import NODE_BYTES, BlockTree, DraftTree

LEAST_SEQUENCES: Final = 4
"""Fewest sequences per thread in a step; with fewer, waking a thread takes as long as it saves."""

_NO_LIVE: Final = live_table(0)
_COMMIT: Final = OUTCOME + APPEND
_WHOLE: Final = CHECK + _COMMIT + DRAFT


@dataclass(frozen=True, slots=True)
class Prior:
    """Relative weights of rows of evidence, before mixing.

    The weight of each database is in `databases.DATABASES`.

    Attributes:
        backoff: count at which a match of one token takes half of the probability that longer
            matches leave; a match of k tokens needs 1/k of this count.
        escape: weight of tokens that no row predicts, at every node.
        rate: learning rate.
    """

    backoff: float = 32.0
    escape: float = 0.03
    rate: float = 0.001

    def to_kernel(self) -> NDArray[Any]:
        """Return PRIOR[1], with the trust of all registered databases."""
        record = np.zeros(1, PRIOR)
        record["backoff"], record["escape"] = self.backoff, self.escape
        for kind in DATABASES:
            record["trust"][0, kind.source] = kind.trust
        return record


DEFAULT_PRIOR: Final = Prior()


Asked = tuple[Databases, DraftRequest]
"""A sequence of a step, and its request with new tokens as int32[n]."""


class RefusedStepError(Exception):
    """A step is refused before any part of it is done.

    Attributes:
        place: index of the first sequence that does not fit.
    """

    def __init__(self, place: int) -> None:
        super().__init__(f"sequence {place} of the step does not fit")
        self.place = place


class Counted(NamedTuple):
    """Counts of drafts whose outcome is known; see `Shared`.

    Attributes:
        by_source: int64[2, MAX_SOURCES].
        by_accepted: int64[MAX_POSITIONS + 2].
    """

    by_source: NDArray[np.int64]
    by_accepted: NDArray[np.int64]

    @classmethod
    def none(cls) -> Self:
        """Return counts that are all zero."""
        return cls(no_outcomes(), np.zeros(MAX_POSITIONS + 2, np.int64))


class Predictor:
    """Grows draft trees from databases; owns the scratch memory, so not thread-safe.

    Args:
        max_budget: most nodes of any tree.
        prior: weights before learning.
        num_threads: number of threads that share a step of many sequences.

    Attributes:
        bounds: int64[3], the bounds that steps are checked against, with the fields of `BOUNDS`.
        counted: counts of drafts whose outcome is known.
        scratch: scratch memory of the last draft; holds its candidates until the next draft.
        num_rows: number of evidence rows of the last draft.
    """

    def __init__(self, max_budget: int, prior: Prior = DEFAULT_PRIOR, num_threads: int = 1) -> None:
        self.bounds = np.full(BOUNDS.SIZE, np.iinfo(np.int64).max)
        self.bounds[BOUNDS.NODES] = self._max_budget = max_budget
        self.counted = Counted.none()
        self._prior = prior.to_kernel()
        self.scratch = Scratch(max_depth=max_budget, prior=self._prior)
        self.num_rows = 0
        self._rate = prior.rate
        # The sequence of the draft in `scratch`; weak, so that an ended sequence can be freed.
        self._last: ref[Databases] | None = None
        self._turn = np.zeros(1, np.int64)
        self._ahead: tuple[Scratch, StepRecord] | None = None
        self._num_threads = num_threads
        self._threads: ThreadPoolExecutor | None = None
        self._scratches: list[Scratch] = []

    def step(self, databases: Databases, request: DraftRequest) -> DraftTree:
        """Commit tokens to a sequence and draft for it, usually in one kernel call.

        Raises:
            RefusedStepError: the request does not fit; nothing is done.
            TypeError: a value is not a number; nothing is done. `struct.error` means the same.
        """
        _, tokens, length, budget, min_probability, _ = request
        step, num_tokens = databases.step, len(tokens)
        is_quick = (
            databases.appends
            and databases.forced is None
            and 0 < budget <= step.most_nodes
            and length > 0
        )
        if not is_quick or num_tokens > MOST_TOKENS:
            return self.step_all([(databases, request)])[0]
        last = self._last
        is_last = last is not None and last() is databases
        rate = self._rate if is_last and databases.learns else 0.0
        # Inlined: right after a model's forward pass, each call would take three microseconds.
        memory = step.memory
        step.tokens[:num_tokens] = tokens
        ASKED.pack_into(
            memory, ASKED_AT, _WHOLE, 0, step.tokens_at, num_tokens, length, budget,
            min_probability, rate,
        )  # fmt: skip
        step_sequences(self._shared(databases), self.scratch.address, step.alone, self._turn)
        refusal, size, self.num_rows, learned = ANSWER.unpack_from(memory, ANSWER_AT)
        if refusal:  # perhaps there is no room; `step_all` makes room
            return self.step_all([(databases, request)])[0]
        databases.pool.learned += learned
        if not is_last:
            self._last = ref(databases)
        return BlockTree(memory[TREE_AT : TREE_AT + NODE_BYTES * budget], size)

    def step_all(self, asked: Sequence[Asked]) -> list[DraftTree]:
        """Commit the tokens of each sequence, then draft; return the trees in order.

        The result is as if each sequence called `commit`, and then each called `draft`.

        Raises:
            RefusedStepError: one of the requests does not fit; nothing is done.
        """
        if any(databases.forced is not None for databases, _ in asked):
            return self._step_forced(asked)
        return self._step_all(asked)

    def _step_forced(self, asked: Sequence[Asked]) -> list[DraftTree]:
        """Do what `step_all` does, for sequences whose grammars forbid or force some tokens."""
        wider = [
            (databases, request._replace(budget_nodes=self._nodes_to_ask(databases, request)))
            for databases, request in asked
        ]
        trees = self._step_all(wider)
        for place, (databases, request) in enumerate(asked):
            if databases.forced is not None and request.budget_nodes > 0:
                output = databases.context.last(len(databases.context) - databases.forced.begins)
                drafts, most = databases.forced.drafts, request.budget_nodes
                trees[place] = drafts.improved(trees[place], output, most)
        return trees

    def _nodes_to_ask(self, databases: Databases, request: DraftRequest) -> int:
        budget = request.budget_nodes
        if databases.forced is None or not 0 < budget <= self._max_budget:
            return budget
        return min(databases.forced.drafts.nodes_to_ask(budget), self._max_budget)

    def _step_all(self, asked: Sequence[Asked]) -> list[DraftTree]:
        if not asked:
            return []
        is_alike = self._ask_all(asked)
        steps = _addresses(asked)
        refused = check_steps(self.bounds, steps)
        if refused >= 0:  # perhaps there is no room; make room now
            for databases, request in asked[refused:]:
                databases.context.ensure_room(len(request.new_tokens))
            refused = check_steps(self.bounds, steps)
            if refused >= 0:
                raise RefusedStepError(refused)
        self._learn_first(asked)
        if is_alike:
            trees = self._draft_together(asked, steps)
            self._last = ref(asked[-1][0])
            return trees
        trees = [DraftTree.empty()] * len(asked)
        # The group of the last sequence comes last, because the last draft is learned from.
        for numbers, members in sorted(self._units(asked), key=_last_number):
            databases, request = members[-1]
            if databases.is_compiled:
                drafted = self._draft_together(members, _addresses(members))
            else:
                budget = request.budget_nodes
                drafted = [self._grow(databases, databases.step, self.scratch, budget)]
            self._last = ref(databases)
            for number, tree in zip(numbers, drafted, strict=True):
                trees[number] = tree
        return trees

    def _ask_all(self, asked: Sequence[Asked]) -> bool:
        """Write each sequence's request: its commit and, if a kernel can do both, its draft.

        Returns:
            Whether one kernel call can do all, usually because they share a tenant and a corpus.

        Raises:
            RefusedStepError: a value is not a number, or a budget is too large.
        """
        first, is_alike, place = asked[0][0], True, 0
        pool, corpus, most = first.pool, first.corpus, self._max_budget
        try:
            for place, (databases, request) in enumerate(asked):
                _, tokens, length, budget, min_probability, _ = request
                is_whole = databases.appends and budget > 0 and length > 0
                is_of_them = databases.pool is pool and databases.corpus is corpus
                is_alike = is_alike and is_whole and is_of_them
                stages = _COMMIT + DRAFT if is_whole else _COMMIT
                if budget > most:
                    raise RefusedStepError(place)  # noqa: TRY301  (a call per sequence costs more)
                databases.step.ask(stages, tokens, length, budget, min_probability, 0.0)
        except (struct.error, TypeError, RefusedStepError) as error:
            raise RefusedStepError(place) from error
        return is_alike

    def learns_from(self, databases: Databases) -> bool:
        """Return whether to learn from a sequence's next tokens, because it had the last draft."""
        return databases.learns and self._last is not None and self._last() is databases

    def draft(self, databases: Databases, budget: int, min_probability: float) -> DraftTree:
        """Return the most probable tree of at most `budget` nodes."""
        if budget == 0 or len(databases.context) == 0:
            return DraftTree.empty()
        self._check_budget(budget)
        databases.step.ask(DRAFT, NO_TOKENS, 0, budget, min_probability, 0.0)
        tree = self._grow(databases, databases.step, self.scratch, budget)
        self._last = ref(databases)
        return tree

    def commit(self, databases: Databases, tokens: TokenIds) -> None:
        """Append tokens, int32[n]; count the draft's outcome; learn if it was the last draft."""
        databases.context.ensure_room(len(tokens))
        self._follow(databases, tokens, _COMMIT)
        databases.committed(tokens)

    def note(self, databases: Databases, tokens: TokenIds) -> None:
        """Count and learn from the next tokens, int32[n], like `commit`, but append nothing."""
        self._follow(databases, tokens, OUTCOME)

    def suppose(
        self, databases: Databases, tokens: TokenIds, budget: int, min_probability: float
    ) -> DraftTree:
        """Return the tree after tokens that may come, int32[n]; nothing is learned from it."""
        if budget == 0:
            return DraftTree.empty()
        if self._ahead is None:
            self._ahead = Scratch(self._max_budget, prior=self._prior), StepRecord()
        scratch, step = self._ahead
        with databases.supposing(tokens):
            self._check_budget(budget)
            step.follow(databases.context.address)
            step.join(databases.lane.address)
            step.ask(DRAFT, NO_TOKENS, 0, budget, min_probability, 0.0)
            step.forget_match()
            return self._grow(databases, step, scratch, budget)

    def _learn_first(self, asked: Sequence[Asked]) -> None:
        """Learn from the last draft if its sequence is in the step, before the weights are used."""
        last = None if self._last is None else self._last()
        for databases, request in asked if last is not None and last.learns else ():
            if databases is last and len(request.new_tokens):
                self._last = None
                databases.step.learn_at(self._rate)
                stages = databases.step.ask_again(OUTCOME)
                self._call(databases, databases.step, self.scratch)
                databases.step.learn_at(0.0)
                databases.step.ask_again(stages)

    def _units(self, asked: Sequence[Asked]) -> Iterable[tuple[list[int], list[Asked]]]:
        """Return the groups of sequences that are drafted for together, with their numbers.

        Sequences with empty trees are omitted. If a kernel cannot append a sequence's tokens while
        it drafts for others, they are committed now.
        """
        units: dict[Any, tuple[list[int], list[Asked]]] = {}
        for number, each in enumerate(asked):
            databases, request = each
            is_drafted = request.budget_nodes > 0 and request.length > 0
            if not (is_drafted and databases.appends):
                self._call(databases, databases.step, self.scratch)
                databases.committed(request.new_tokens)
                databases.step.ask_again(DRAFT)
            if is_drafted:
                shared = (id(databases.pool), id(databases.corpus))
                key = shared if databases.is_compiled else number
                numbers, members = units.setdefault(key, ([], []))
                numbers.append(number)
                members.append(each)
        return units.values()

    def _draft_together(
        self, members: Sequence[Asked], steps: NDArray[np.int64]
    ) -> list[DraftTree]:
        """Run the requests of sequences of one tenant and one corpus."""
        shared, turn = self._shared(members[0][0]), self._turn
        turn[0] = 0
        helping = [
            self._helpers.submit(step_sequences, shared, each.address, steps, turn)
            for each in self._helping(len(members))
        ]
        last = step_sequences(shared, self.scratch.address, steps, turn)
        latest = [last, *(each.result() for each in helping)]
        place = latest.index(len(members) - 1)
        if place:  # the scratch of the last sequence stays, to learn from it
            self._scratches[place - 1], self.scratch = self.scratch, self._scratches[place - 1]
        self.num_rows = members[-1][0].step.answer()[2]
        return [databases.step.drafted(each.budget_nodes) for databases, each in members]

    def _grow(
        self, databases: Databases, step: StepRecord, scratch: Scratch, budget: int
    ) -> DraftTree:
        """Query all databases of a sequence; those without a stage come between kernel calls."""
        row = size = 0
        for stages, then in databases.runs:
            step.ask_again(stages, row)
            size = self._call(databases, step, scratch)
            if then is not None:
                row = then.collect(databases.question(budget, scratch), self.num_rows)
        return step.tree(size, budget)

    def _follow(self, databases: Databases, tokens: TokenIds, stages: int) -> None:
        """Count and learn from the tokens, int32[n], that follow a sequence."""
        rate = 0.0
        if len(tokens) and self.learns_from(databases):
            self._last = None
            rate = self._rate
        databases.step.ask(stages, tokens, 0, 0, 0.0, rate)
        self._call(databases, databases.step, self.scratch)

    def _check_budget(self, budget: int) -> None:
        """Refuse a tree that is too large for the scratch memory.

        Raises:
            RefusedStepError: it would have too many nodes.
        """
        if budget > self._max_budget:
            raise RefusedStepError(0)

    def _call(self, databases: Databases, step: StepRecord, scratch: Scratch) -> int:
        """Run the kernel on a sequence's request; return the size of the tree."""
        step_sequences(self._shared(databases), scratch.address, step.alone, self._turn)
        return self._answered(databases, step)

    def _answered(self, databases: Databases, step: StepRecord) -> int:
        """Read a kernel's answer; return the size of the tree."""
        refusal, size, self.num_rows, learned = step.answer()
        if refusal:
            raise RefusedStepError(0)
        databases.pool.learned += learned
        return size

    def _shared(self, databases: Databases) -> NDArray[Any]:
        """Return `Shared`, packed, for a sequence; rebuilt if it has changed."""
        pool, corpus, known = databases.pool, databases.corpus, databases.pool.drafted_from
        if pool.generations.expires_at_s < math.inf:
            pool.generations.leave_out_expired()
        running = NOTHING_RUNS if pool.running is None else pool.running.packed
        if (
            known is None
            or known.arrays is not pool.generations.arrays
            or known.running is not running
            or known.corpus is not corpus
            or known.bounds is not self.bounds
            or known.shared.weights is not pool.weights
        ):
            arrays = pool.generations.arrays
            shared = Shared(
                self.bounds, *self.counted, corpus.outcomes, *arrays, running,
                corpus.packed_segments, corpus.packed_tables, pool.weights,
            )  # fmt: skip
            known = DraftedFrom(arrays, running, corpus, self.bounds, shared, pack(shared))
            pool.drafted_from = known
        oldest = databases.lane.oldest_version
        if oldest and pool.generations.has_older(oldest):
            # The live table does not distinguish versions: it is omitted while it counts outputs
            # of versions that are too old.
            return pack(known.shared._replace(live=_NO_LIVE))
        return known.packed

    @property
    def _helpers(self) -> ThreadPoolExecutor:
        if self._threads is None:
            self._threads = ThreadPoolExecutor(self._num_threads - 1, "foredraft-step")
        return self._threads

    def _helping(self, num_sequences: int) -> list[Scratch]:
        """Return the scratch memory of each helper thread that saves time."""
        wanted = min(self._num_threads, num_sequences // LEAST_SEQUENCES) - 1
        while len(self._scratches) < wanted:
            self._scratches.append(Scratch(self._max_budget, prior=self._prior))
        return self._scratches[: max(0, wanted)]


def _addresses(asked: Iterable[Asked]) -> NDArray[np.int64]:
    return np.array([databases.step.address for databases, _ in asked], np.int64)


def _last_number(unit: tuple[list[int], list[Asked]]) -> int:
    return unit[0][-1]
