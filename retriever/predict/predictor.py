"""The predictor: one estimate of what comes next, from every database at once."""

from dataclasses import dataclass
from typing import Final

import numpy as np

from retriever.drafter import TokenIds
from retriever.kernels.entries import grow_tree, learn
from retriever.kernels.layout import MAX_MATCH, Scratch
from retriever.predict.databases import Databases
from retriever.predict.pool import Pool
from retriever.tree import DraftTree, Source


@dataclass(frozen=True, slots=True)
class Prior:
    """What the rows of evidence are worth beside one another, before they are mixed.

    Attributes:
        context: what an occurrence in the sequence itself counts.
        generations: what an occurrence in recent outputs counts.
        phrases: what the beginning of a listed phrase counts.
        corpus: what an occurrence in the corpus counts.
        escape: count at which a match of one token takes half of the probability that longer
            matches left; a match of k tokens needs a k-th of it.
        doubt: weight of whatever no row predicts, at every node.
        rate: size of a learning step.
    """

    context: float = 6.0
    generations: float = 0.6
    phrases: float = 12.0
    corpus: float = 0.35
    escape: float = 32.0
    doubt: float = 0.03
    rate: float = 0.001

    def trust(self) -> np.ndarray[tuple[int], np.dtype[np.float64]]:
        """Return float64[sources], what one occurrence counts by source."""
        trust = np.zeros(len(Source))
        trust[Source.CONTEXT] = self.context
        trust[Source.GENERATIONS] = self.generations
        trust[Source.PHRASES] = self.phrases
        trust[Source.CORPUS] = self.corpus
        return trust


DEFAULT_PRIOR: Final = Prior()


class Predictor:
    """Grows draft trees from databases; owns the scratch memory, so one thread at a time.

    Args:
        max_budget: most nodes of any tree.
        prior: what evidence is worth.

    Attributes:
        scratch: where the last tree grew; what it considered stands there until the next draft.
        num_rows: rows of evidence that it grew from.
    """

    def __init__(self, max_budget: int, prior: Prior = DEFAULT_PRIOR) -> None:
        self.scratch = Scratch(max_depth=max_budget)
        self.num_rows = 0
        self._trust = prior.trust()
        self._prior = prior
        self._last: Databases | None = None  # whose draft the scratch memory holds

    def commit(self, databases: Databases, tokens: TokenIds) -> None:
        """Append int32[n] to a sequence, and learn from it if its draft was the last one."""
        if len(tokens) and databases is self._last:
            self._last = None
            if databases.learns:
                self.learn(databases.pool, tokens)
        databases.commit(tokens)

    def learn(self, pool: Pool, tokens: TokenIds) -> None:
        """Learn from the last draft: int32[n], at least one, came next."""
        pool.learned += learn(pool.weights, self.scratch.lent, tokens, self._prior.rate)

    def draft(self, databases: Databases, budget: int, min_probability: float) -> DraftTree:
        """Return the most probable tree of at most `budget` nodes."""
        if budget == 0 or len(databases.context) == 0:
            return DraftTree.empty()
        query = databases.context.last(MAX_MATCH)
        num_rows = self.num_rows = databases.collect(query, budget, self.scratch)
        self._last = databases
        return self._grow(databases, query, num_rows, budget, float(min_probability))

    def _grow(
        self,
        databases: Databases,
        query: TokenIds,
        num_rows: int,
        budget: int,
        min_probability: float,
    ) -> DraftTree:
        token_ids, parents = np.empty(budget, np.int32), np.empty(budget, np.int32)
        probabilities, sources = np.empty(budget, np.float32), np.empty(budget, np.uint8)
        size = grow_tree(
            self.scratch.rows,
            self.scratch.continuations,
            num_rows,
            self._trust,
            self._prior.escape,
            self.scratch.counts,
            query,
            databases.corpus.lent_tables,
            databases.pool.generations.live,
            databases.context.lent,
            databases.pool.weights,
            self._prior.doubt,
            budget,
            min_probability,
            self.scratch.lent,
            token_ids,
            parents,
            probabilities,
            sources,
        )
        tree = DraftTree(token_ids, parents, probabilities, sources)
        return tree.prefix(size)
