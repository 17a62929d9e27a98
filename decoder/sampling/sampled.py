"""Draft trees with nodes that were drawn at random from a draft model's distributions."""

from dataclasses import dataclass
from typing import Final, Self

import numpy as np
import torch
from numpy.typing import NDArray

from retriever.tree import DraftTree

CERTAIN: Final = -1
"""Row of a node that was not drawn: the drafter always proposes it here."""


@dataclass(frozen=True, slots=True, eq=False)
class SampledTree(DraftTree):
    """A draft tree with the distributions its nodes were drawn from, for exact verification.

    Siblings of one row were drawn from it without replacement, in the order of their nodes.
    Whether a node is drafted, and where it stands, may depend on its ancestors and its earlier
    siblings, never on its own token: draws that are selected by their value are no longer
    distributed as the row says. So probabilities of drawn nodes are estimates made before their
    tokens were known.

    A certain node would be in the tree whatever was drawn among its ancestors' other children. A
    token that is both drawn and certain below one parent is one node, a drawn one.

    Attributes:
        proposals: float32[rows, vocabulary], the distributions drawn from, each summing to one.
        rows: int32[N], the row of `proposals` that a node was drawn from, or `CERTAIN`.
    """

    proposals: torch.Tensor
    rows: NDArray[np.int32]

    def prefix(self, num_nodes: int) -> Self:
        """Return the tree of the first `num_nodes` nodes: the best one of that size."""
        if num_nodes >= len(self):
            return self
        return self.among(np.arange(len(self)) < num_nodes)

    def among(self, kept: NDArray[np.bool_]) -> Self:
        """Return the tree of the kept nodes, bool[N], whose parents are kept, too."""
        tree = DraftTree.among(self, kept)
        return type(self)(
            tree.token_ids,
            tree.parents,
            tree.probabilities,
            tree.sources,
            self.proposals,
            self.rows[kept],
        )
