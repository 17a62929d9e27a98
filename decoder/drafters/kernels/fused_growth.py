"""Grows one tree from the candidates of all sources, the most probable first."""

from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from decoder.drafters.kernels.forest import Forest, step_down
from decoder.drafters.kernels.readings import Readings, descend
from decoder.drafters.kernels.recycled import NUM_ORDERS, Table
from decoder.drafters.kernels.siblings import Hints, Siblings, add_readers, gather, score, set_of
from retriever.kernels.compiling import kernel
from retriever.kernels.tree_growth import candidate_of, key_of as rank_key, pop, push

MAX_CANDIDATES: Final = 1 << 13
"""Most candidates considered for one tree: 32 for each of 256 nodes. Further candidates are
dropped. These are children of the least probable nodes, because nodes are added by descending
probability."""


_LISTING: Final = 4.0
"""Coefficient for the probability that one of a node's candidates is right, given the sum of their
separate probabilities: 1 - exp(-4 sum). A node's candidates exclude each other, but each is scored
independently. With sums of 0.33, 0.5, 0.7, 0.95, 1.2 and 1.4, one candidate was right in 63, 77,
80, 95, 97 and 99% of cases. A coefficient of 2.8 fits this best; 4 yields more tokens, and so do
all greater values for sums up to one."""

_LEAST_TOTAL: Final = 1e-9
"""Lower bound of the sum, so that nothing is divided by zero."""


class Growth(NamedTuple):
    """The growing tree and the candidates considered for it.

    Attributes:
        tokens: int32[B], token id of each node.
        parents: int32[B], each node's parent, or -1.
        probabilities: float32[B], probability of each node.
        sources: uint8[B], the `Source` of each node.
        places: int32[1 + B, trees + readers], each node's number in each given tree and its row in
            each drafting model's logits; row 0 is the root.
        contexts: int32[1 + B, NUM_ORDERS], the last tokens at each node, the latest first.
        candidates: int32[C, 3], token, parent and source of each candidate.
        beliefs: float32[C], probability of each candidate.
        heap: int64[C], the heap of waiting candidates, by probability.
    """

    tokens: NDArray[np.int32]
    parents: NDArray[np.int32]
    probabilities: NDArray[np.float32]
    sources: NDArray[np.uint8]
    places: NDArray[np.int32]
    contexts: NDArray[np.int32]
    candidates: NDArray[np.int32]
    beliefs: NDArray[np.float32]
    heap: NDArray[np.int64]

    @classmethod
    def of(cls, num_trees: int, max_nodes: int, num_readers: int = 0) -> "Growth":
        """Allocate arrays for a tree of `max_nodes` nodes, grown from trees and drafting models."""
        return cls(
            np.zeros(max_nodes, np.int32),
            np.zeros(max_nodes, np.int32),
            np.zeros(max_nodes, np.float32),
            np.zeros(max_nodes, np.uint8),
            np.zeros((1 + max_nodes, num_trees + num_readers), np.int32),
            np.zeros((1 + max_nodes, NUM_ORDERS), np.int32),
            np.zeros((MAX_CANDIDATES, 3), np.int32),
            np.zeros(MAX_CANDIDATES, np.float32),
            np.zeros(MAX_CANDIDATES, np.int64),
        )


@kernel()
def grow(
    growth: Growth,
    siblings: Siblings,
    forest: Forest,
    table: Table,
    weights: NDArray[np.float64],
    hints: Hints,
    readings: Readings,
    budget: int,
    min_probability: float,
    table_source: int,
) -> int:
    """Grow a tree of at most `budget` nodes; return its number of nodes.

    The caller sets row 0 of `growth.places` and `growth.contexts`.

    Args:
        growth: arrays that are filled with the tree.
        siblings: scratch arrays for the candidates of one node.
        forest: the trees to merge.
        table: the recycled logits.
        weights: float64[NUM_SETS, S + 1, NUM_WEIGHTS], the weights of the sources.
        hints: likely tokens for the root's children.
        readings: the drafting models' logits.
        budget: most nodes of the tree.
        min_probability: least probability of a node.
        table_source: the `Source` label of candidates that only the table or a hint lists.
    """
    num_trees = growth.places.shape[1] - readings.labels.shape[1]
    nothing = Hints(hints.tokens[:0], hints.log_odds[:0])
    size, considered, waiting, above = 0, 0, 0, 1.0
    while size < budget:
        said = hints if size == 0 else nothing
        places, context = growth.places[size], growth.contexts[size]
        count = gather(siblings, forest, places[:num_trees], table, context, said, table_source)
        if num_trees < len(places):
            count = add_readers(siblings, count, readings, places[num_trees:])
        total = score(siblings, count, weights[set_of(siblings.known, readings.labels)])
        scale = above * -np.expm1(-_LISTING * total) / max(total, _LEAST_TOTAL)
        for candidate in range(count):
            belief = siblings.probabilities[candidate] * scale
            if belief < min_probability or considered == MAX_CANDIDATES:
                continue
            growth.candidates[considered, 0] = siblings.tokens[candidate]
            growth.candidates[considered, 1] = size - 1
            growth.candidates[considered, 2] = siblings.sources[candidate]
            growth.beliefs[considered] = belief
            push(growth.heap, waiting, rank_key(belief, considered))
            considered += 1
            waiting += 1
        if waiting == 0:
            break
        _take(growth, forest, readings, size, candidate_of(pop(growth.heap, waiting)))
        waiting -= 1
        above = np.float64(growth.probabilities[size])
        size += 1
    return size


@kernel()
def _take(growth: Growth, forest: Forest, readings: Readings, node: int, candidate: int) -> None:
    """Add a candidate to the tree as node `node`."""
    token, parent = growth.candidates[candidate, 0], growth.candidates[candidate, 1]
    growth.tokens[node] = token
    growth.parents[node] = parent
    growth.probabilities[node] = growth.beliefs[candidate]
    growth.sources[node] = growth.candidates[candidate, 2]
    row, above = node + 1, parent + 1
    if readings.labels.shape[1] == 0:  # passing readings is slower than this test
        step_down(forest, growth.places[above], growth.places[row], token)
    else:
        descend(forest, readings, growth.places[above], growth.places[row], token)
    growth.contexts[row, 0] = token
    for order in range(1, NUM_ORDERS):
        growth.contexts[row, order] = growth.contexts[above, order - 1]
