"""Drafts for many sequences of one step, divided over threads.

Kernels run without the interpreter's lock, and a draft writes to scratch memory and to its own
sequence alone. Each thread has scratch memory, and takes the next sequence that has not been taken.
So trees do not depend on the number of threads, and the last sequence is the last one that its
thread drafts for: what was considered for it is still there to be learned from.
"""

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from retriever.drafter import TokenIds
from retriever.kernels.entries import draft_sequences
from retriever.kernels.layout import Scratch
from retriever.predict.databases import Databases, first_nodes, packed_for
from retriever.tree import DraftTree

LEAST_SEQUENCES: Final = 4
"""Sequences of a step for each thread: with fewer, waking a thread costs what it saves."""


class Asked(NamedTuple):
    """A sequence of a step.

    Attributes:
        databases: of the sequence.
        tokens: int32[n], committed to it before it is drafted for.
        budget: most nodes of its tree.
        min_probability: less probable nodes are left out.
    """

    databases: Databases
    tokens: TokenIds
    budget: int
    min_probability: float


class Drafted(NamedTuple):
    """What came of a step.

    Attributes:
        trees: one for each sequence, in order: views of arrays of the whole step.
        num_rows: rows of evidence of the last sequence, in the first scratch memory.
    """

    trees: list[DraftTree]
    num_rows: int


class Threads:
    """Threads that draft for the sequences of a step together with the calling one.

    Args:
        num_threads: the calling one included.
        max_budget: most nodes of any tree.
        prior: PRIOR[1], weights before mixing.

    Attributes:
        num_threads: as given.
    """

    def __init__(self, num_threads: int, max_budget: int, prior: NDArray[np.void]) -> None:
        self.num_threads = num_threads
        self._max_budget, self._prior = max_budget, prior
        self._helpers: ThreadPoolExecutor | None = None
        self._scratches: list[Scratch] = []

    def draft(self, asked: Sequence[Asked], first: Scratch) -> tuple[Drafted, Scratch]:
        """Commit to sequences of one tenant and one corpus, and draft for them.

        Args:
            asked: at least one, each of at least one token then and with a budget of at least one.
                One kernel call asks its databases, and its tokens can be appended.
            first: scratch memory of the calling thread.

        Returns:
            The trees, and the scratch memory in which the last sequence was drafted for: `first` is
            kept for a helper if it is another.
        """
        shared = packed_for(asked[0].databases.pool, asked[0].databases.corpus)
        numbers, end = [], 0
        for databases, tokens, budget, _ in asked:
            begin, end = end, end + len(tokens)
            addresses = databases.context.address, databases.lane.address
            numbers.append((*addresses, databases.in_corpus.longest, budget, begin, end))
        least = np.array([each.min_probability for each in asked], np.float64)
        shape = (len(asked), max(each.budget for each in asked))
        grown = (
            np.empty(shape, np.int32),
            np.empty(shape, np.int32),
            np.empty(shape, np.float32),
            np.empty(shape, np.uint8),
        )
        found, turn = np.empty((len(asked), 3), np.int64), np.zeros(1, np.int64)
        scratches = [first, *self._helping(len(asked))]
        new_tokens = np.concatenate([each.tokens for each in asked])
        arguments = (np.array(numbers, np.int64), least, new_tokens, turn, found, *grown)
        helping = [
            self._executor.submit(draft_sequences, shared, each.address, *arguments)
            for each in scratches[1:]
        ]
        last = draft_sequences(shared, first.address, *arguments)
        latest = [last, *(each.result() for each in helping)]
        place = latest.index(len(asked) - 1)
        if place:
            self._scratches[place - 1], first = first, self._scratches[place - 1]
        sizes, rows, matches = found.T.tolist()
        for each, match in zip(asked, matches, strict=True):
            each.databases.committed(len(each.tokens), match)
        trees = [
            first_nodes(size, ids, parents, probabilities, sources)
            for ids, parents, probabilities, sources, size in zip(*grown, sizes, strict=True)
        ]
        return Drafted(trees, rows[-1]), first

    @property
    def _executor(self) -> ThreadPoolExecutor:
        if self._helpers is None:
            self._helpers = ThreadPoolExecutor(self.num_threads - 1, "foredraft-step")
        return self._helpers

    def _helping(self, num_sequences: int) -> list[Scratch]:
        """Return scratch memories of as many helpers as are worth it."""
        wanted = min(self.num_threads, num_sequences // LEAST_SEQUENCES) - 1
        while len(self._scratches) < wanted:
            self._scratches.append(Scratch(self._max_budget, prior=self._prior))
        return self._scratches[: max(0, wanted)]
