"""The predictor: grows draft trees from the evidence of all databases.

A draft collects rows of evidence from all databases, weighs them, and grows a tree best-first; the
next commit learns from the tokens that followed.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Final
from weakref import ref

import numpy as np
from numpy.typing import NDArray

from retriever.drafter import TokenIds
from retriever.kernels.entries import learn
from retriever.kernels.layout import PRIOR, Scratch
from retriever.predict.databases import DATABASES, Databases, Outcome
from retriever.predict.parallel import Asked, Threads
from retriever.predict.pool import Pool
from retriever.tree import DraftTree


@dataclass(frozen=True, slots=True)
class Prior:
    """Relative weights of rows of evidence, before mixing.

    The weight by database is in `databases.DATABASES`.

    Attributes:
        backoff: count at which a match of one token takes half of the probability left by longer
            matches; a match of k tokens needs 1/k of it.
        escape: weight of tokens that no row predicts, at every node.
        rate: size of a learning step.
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


class Predictor:
    """Grows draft trees from databases; owns the scratch memory, so not thread-safe.

    Args:
        max_budget: most nodes of any tree.
        prior: weights before learning.
        num_threads: over which a step of many sequences is divided.

    Attributes:
        in_one_call: whether steps may be done by `step`; not in a class that looks at, or changes,
            what stands between a commit and a draft.
        scratch: of the last draft; holds its candidates until the next one.
        num_rows: rows of evidence of the last draft.
    """

    in_one_call = True

    def __init__(self, max_budget: int, prior: Prior = DEFAULT_PRIOR, num_threads: int = 1) -> None:
        self._prior = prior.to_kernel()
        self.scratch = Scratch(max_depth=max_budget, prior=self._prior)
        self._threads = Threads(num_threads, max_budget, self._prior)
        self._max_budget = max_budget
        self._supposed: Scratch | None = None  # of drafts ahead: the last draft is learned from
        self.num_rows = 0
        self._rate = prior.rate
        # Of the draft in the scratch memory; weak, so that an ended sequence leaves memory.
        self._last: ref[Databases] | None = None

    def draft(self, databases: Databases, budget: int, min_probability: float) -> DraftTree:
        """Return the most probable tree of at most `budget` nodes."""
        if budget == 0 or len(databases.context) == 0:
            return DraftTree.empty()
        tree, self.num_rows = databases.draft(self.scratch, budget, min_probability)
        self._last = ref(databases)
        return tree

    def step(
        self,
        databases: Databases,
        tokens: TokenIds,
        budget: int,
        min_probability: float,
        outcome: Outcome,
    ) -> tuple[DraftTree, int]:
        """Do as `commit` and then `draft` do, in one call of a kernel; see `Databases.step`.

        Returns:
            The tree, and how many of the tokens the last draft of the sequence contained.
        """
        rate = 0.0
        if self._last is None or self._last() is not databases:
            self._last = ref(databases)
        elif databases.learns:
            rate = self._rate
        tree, self.num_rows, depth = databases.step(
            tokens, budget, min_probability, outcome, self.scratch, rate
        )
        return tree, depth

    def draft_each(self, asked: Sequence[Asked]) -> list[DraftTree]:
        """Commit the tokens of all sequences of a step, then draft: the tree of each, in order.

        That is as one `commit` after the other, and then one `draft` after the other. Sequences
        that one kernel call can draft for are divided over threads.
        """
        self._learn_first(asked)
        trees = [DraftTree.empty()] * len(asked)
        # The unit of the last sequence comes last: that one is learned from.
        for numbers, members in sorted(self._units(asked), key=_last_number):
            if len(members) == 1 and not len(members[0].tokens):
                ((databases, _, budget, min_probability),) = members
                drafted = [self.draft(databases, budget, min_probability)]
            else:
                (drafted, self.num_rows), self.scratch = self._threads.draft(members, self.scratch)
                self._last = ref(members[-1].databases)
            for number, tree in zip(numbers, drafted, strict=True):
                trees[number] = tree
        return trees

    def _learn_first(self, asked: Sequence[Asked]) -> None:
        """Learn from the last draft, if it is of a step's sequence, before others read weights."""
        last = self._last() if self._last is not None else None
        for databases, tokens, _, _ in asked:
            if databases is last:
                self.note(databases, tokens)

    def _units(self, asked: Sequence[Asked]) -> Iterable[tuple[list[int], list[Asked]]]:
        """Return sequences, with their numbers, that are drafted for together.

        Those with empty trees are left out. Tokens that no kernel can append while it drafts for
        other sequences are committed now.
        """
        units: dict[Any, tuple[list[int], list[Asked]]] = {}
        for number, each in enumerate(asked):
            databases, tokens, budget, _ = each
            appended = len(tokens)
            if budget == 0 or not databases.can_append(appended):
                self.commit(databases, tokens)
                each, appended = each._replace(tokens=tokens[:0]), 0  # noqa: PLW2901
            if budget > 0 and len(databases.context) + appended > 0:
                shared = (id(databases.pool), id(databases.corpus))
                key = shared if databases.is_compiled else number
                numbers, members = units.setdefault(key, ([], []))
                numbers.append(number)
                members.append(each)
        return units.values()

    def suppose(
        self, databases: Databases, tokens: TokenIds, budget: int, min_probability: float
    ) -> DraftTree:
        """Return the tree after int32[n] that may come; nothing is learned from it."""
        if budget == 0:
            return DraftTree.empty()
        if self._supposed is None:
            self._supposed = Scratch(max_depth=self._max_budget, prior=self._prior)
        with databases.supposing(tokens):
            tree, _ = databases.draft(self._supposed, budget, min_probability)
        return tree

    def commit(self, databases: Databases, tokens: TokenIds) -> None:
        """Append int32[n] to a sequence, and learn if the last draft was for it."""
        if len(tokens):
            was_last = self._last is not None and self._last() is databases
            if was_last:
                self._last = None
            learned_from = self.scratch if was_last and databases.learns else None
            databases.learn_and_commit(tokens, learned_from, self._rate)

    def note(self, databases: Databases, tokens: TokenIds) -> None:
        """Learn from int32[n], tokens that follow a sequence, if the last draft was for it."""
        if len(tokens) and self._last is not None and self._last() is databases:
            self._last = None
            if databases.learns:
                self.learn(databases.pool, tokens)

    def learn(self, pool: Pool, tokens: TokenIds) -> None:
        """Learn from the last draft and int32[n], n at least 1, the tokens that followed it."""
        pool.learned += learn(pool.weights, self.scratch.packed, tokens, self._rate)


def _last_number(unit: tuple[list[int], list[Asked]]) -> int:
    return unit[0][-1]
