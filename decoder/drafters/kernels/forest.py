"""Several draft trees of one sequence as arrays for kernels, with a common node numbering."""

from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from retriever.kernels.compiling import kernel

NOWHERE: Final = -1
"""Used instead of a node's number if a tree lacks the node."""

LEAST_SHARE: Final = 1e-4
MOST_SHARE: Final = 0.9995
"""A node's share of its parent's probability is clipped to these bounds. So log-odds lie between
-9.2 and 7.6, and other sources can outweigh a source that is confident but wrong."""


class Forest(NamedTuple):
    """Draft trees with a common numbering: first each tree's root, then the nodes tree by tree.

    Attributes:
        tokens: int32[M], token id of each node.
        log_odds: float32[M], log-odds of each node given its parent.
        first_child: int32[M], number of each node's first child; -1 for none.
        next_sibling: int32[M], number of each node's next sibling; -1 for none.
        sources: uint8[M], the `Source` of each node.
    """

    tokens: NDArray[np.int32]
    log_odds: NDArray[np.float32]
    first_child: NDArray[np.int32]
    next_sibling: NDArray[np.int32]
    sources: NDArray[np.uint8]

    @classmethod
    def of(cls, num_trees: int, max_nodes: int) -> "Forest":
        """Allocate a forest for `num_trees` trees of up to `max_nodes` nodes each."""
        size = num_trees * (1 + max_nodes)
        return cls(
            np.zeros(size, np.int32),
            np.zeros(size, np.float32),
            np.zeros(size, np.int32),
            np.zeros(size, np.int32),
            np.zeros(size, np.uint8),
        )


@kernel()
def plant(
    forest: Forest,
    tree: int,
    start: int,
    tokens: NDArray[np.int32],
    parents: NDArray[np.int32],
    probabilities: NDArray[np.float32],
    sources: NDArray[np.uint8],
) -> int:
    """Enter a tree's nodes at the numbers from `start` on; return the number after the last one."""
    forest.first_child[tree] = -1
    for node in range(len(tokens)):
        place = start + node
        parent, above = tree, 1.0
        if parents[node] >= 0:
            parent, above = start + parents[node], np.float64(probabilities[parents[node]])
        share = probabilities[node] / max(above, LEAST_SHARE)
        share = min(max(share, LEAST_SHARE), MOST_SHARE)
        forest.tokens[place] = tokens[node]
        forest.log_odds[place] = np.log(share / (1.0 - share))
        forest.sources[place] = sources[node]
        forest.first_child[place] = -1
        forest.next_sibling[place] = forest.first_child[parent]
        forest.first_child[parent] = place
    return start + len(tokens)


@kernel()
def step_down(
    forest: Forest, places: NDArray[np.int32], below: NDArray[np.int32], token: int
) -> None:
    """In each tree, find the node's child that has a given token.

    Args:
        forest: the trees.
        places: int32[trees], the node's number in each tree, or `NOWHERE`.
        below: int32[trees], set to the child's number in each tree, or `NOWHERE`.
        token: token id of the child.
    """
    for tree in range(len(places)):
        child = NOWHERE
        if places[tree] != NOWHERE:
            child = forest.first_child[places[tree]]
            while child >= 0 and forest.tokens[child] != token:
                child = forest.next_sibling[child]
        below[tree] = child
