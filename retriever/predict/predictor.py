"""The predictor: grows draft trees from the evidence of all databases.

A draft collects rows of evidence from all databases, weighs them, and grows a tree best-first; the
next commit learns from the tokens that followed.
"""

from dataclasses import dataclass
from typing import Any, Final
from weakref import ref

import numpy as np
from numpy.typing import NDArray

from retriever.drafter import TokenIds
from retriever.kernels.entries import learn
from retriever.kernels.layout import PRIOR, Scratch
from retriever.predict.databases import DATABASES, Databases
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

    Attributes:
        scratch: of the last draft; holds its candidates until the next one.
        num_rows: rows of evidence of the last draft.
    """

    def __init__(self, max_budget: int, prior: Prior = DEFAULT_PRIOR) -> None:
        self._prior = prior.to_kernel()
        self.scratch = Scratch(max_depth=max_budget, prior=self._prior)
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
        grown, self.num_rows = databases.draft(self.scratch, budget, min_probability)
        self._last = ref(databases)
        return DraftTree(*grown)

    def suppose(
        self, databases: Databases, tokens: TokenIds, budget: int, min_probability: float
    ) -> DraftTree:
        """Return the tree after int32[n] that may come; nothing is learned from it."""
        if budget == 0:
            return DraftTree.empty()
        if self._supposed is None:
            self._supposed = Scratch(max_depth=self._max_budget, prior=self._prior)
        with databases.supposing(tokens):
            grown, _ = databases.draft(self._supposed, budget, min_probability)
        return DraftTree(*grown)

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
