"""What became of a draft, told from the tokens that were committed after it."""

from dataclasses import dataclass
from typing import Self

import numpy as np
from numpy.typing import NDArray

from retriever.drafter import TokenIds
from retriever.tree import ROOT, DraftTree


@dataclass(frozen=True, slots=True, eq=False)
class Outcome:
    """A draft and what was committed after it, whatever part of it was verified.

    Attributes:
        tree: the draft, N nodes.
        num_committed: tokens committed after it, at least one.
        path: int64[k], the nodes that came true.
        is_known: bool[N], false for nodes deeper than what was committed that may come true yet.
    """

    tree: DraftTree
    num_committed: int
    path: NDArray[np.int64]
    is_known: NDArray[np.bool_]

    @classmethod
    def of(cls, tree: DraftTree, committed: TokenIds) -> Self:
        """Compare a draft with the tokens committed after it, int32[n], at least one."""
        path = tree.follow(committed)
        is_known = np.ones(len(tree), np.bool_)
        if len(path) == len(committed):
            below = {int(path[-1])}
            for node in range(int(path[-1]) + 1, len(tree)):
                if int(tree.parents[node]) in below:
                    below.add(node)
                    is_known[node] = False
        return cls(tree, len(committed), path, is_known)

    def decided_parents(self) -> list[int]:
        """Return the root and the nodes on the path of which the next token is known."""
        return [ROOT, *self.path.tolist()][: self.num_committed]
