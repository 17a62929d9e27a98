"""Merges the trees of several drafters for one sequence into one.

The drafters share some evidence (the sequence, generations), and each has some of its own (a part
of a corpus). Shared evidence must not count twice, so probabilities are not multiplied. A drafter
with a match is confident and one without is vague, so the arithmetic mean would hide the match. A
power mean lies between the mean and the maximum, and maps equal trees to themselves.
docs/decisions/2026-11-21-sharding.md has the measurements.
"""

from collections.abc import Iterator, Sequence
from typing import Final

import numpy as np
from numpy.typing import NDArray

from retriever.tree import ROOT, DraftTree

EXPONENT: Final = 3.0
"""Exponent of the power mean: 1 is the arithmetic mean, infinity the maximum. Measured in
docs/decisions/2026-11-21-sharding.md."""

ABSENT_SHARE: Final = 0.5
"""Assumed probability of a node that a full tree lacks, relative to the tree's last node, whose
probability is an upper bound."""

_Node = tuple[int, int]


def merge_trees(
    trees: Sequence[DraftTree], budget_nodes: int, min_probability: float = 0.0
) -> DraftTree:
    """Merge trees that were grown for one sequence with one budget and one threshold.

    The probability of a path is the power mean of its probabilities in the trees. Its node takes
    the source from the tree in which it is most probable; on a tie, from the first.

    Args:
        trees: trees to merge; a tree is empty if its drafter found nothing.
        budget_nodes: most nodes of each tree and of the merged tree.
        min_probability: least probability of a node, in the trees and in the result.
    """
    trees = [tree.prefix(budget_nodes) for tree in trees]
    if sum(len(tree) > 0 for tree in trees) == 0:
        return DraftTree.empty()
    if len(trees) == 1:
        return trees[0]
    union: dict[_Node, int] = {}
    places = [np.array(list(_join(tree, union)), np.int64) for tree in trees]
    beliefs = np.empty((len(union), len(trees)))
    sources = np.empty((len(union), len(trees)), np.uint8)
    for column, (tree, nodes) in enumerate(zip(trees, places, strict=True)):
        beliefs[:, column] = _absent(tree, budget_nodes, min_probability)
        beliefs[nodes, column] = tree.probabilities
        sources[nodes, column] = tree.sources
    return _best(union, beliefs, sources, budget_nodes, min_probability)


def _join(tree: DraftTree, union: dict[_Node, int]) -> Iterator[int]:
    """Add a tree's nodes to the union, parents first; yield their indices in it."""
    places: list[int] = []
    pairs = zip(tree.parents.tolist(), tree.token_ids.tolist(), strict=True)
    for parent, token in pairs:
        node = (ROOT if parent == ROOT else places[parent], token)
        places.append(union.setdefault(node, len(union)))
        yield places[-1]


def _absent(tree: DraftTree, budget_nodes: int, min_probability: float) -> float:
    """Return the probability that a tree implies for nodes that it lacks."""
    if 0 < len(tree) == budget_nodes:
        return ABSENT_SHARE * float(tree.probabilities[-1])
    return ABSENT_SHARE * min_probability


def _best(
    union: dict[_Node, int],
    beliefs: NDArray[np.float64],
    sources: NDArray[np.uint8],
    budget_nodes: int,
    min_probability: float,
) -> DraftTree:
    """Return the most probable nodes of a union, given float64[nodes, trees] of probabilities."""
    means = np.mean(beliefs**EXPONENT, axis=1) ** (1 / EXPONENT)
    pooled = means.astype(np.float32).tolist()
    parents, token_ids = zip(*union, strict=True)
    for node, parent in enumerate(parents):  # rounding can lift a child above its parent
        if parent != ROOT:
            pooled[node] = min(pooled[node], pooled[parent])
    probabilities = np.array(pooled, np.float32)
    order = np.argsort(-probabilities, kind="stable")[:budget_nodes]
    order = order[probabilities[order] >= min_probability]
    places = np.full(len(union) + 1, ROOT, np.int32)  # the last entry is the root
    places[order] = np.arange(len(order))
    return DraftTree(
        np.array(token_ids, np.int32)[order],
        places[np.array(parents, np.int64)[order]],
        probabilities[order],
        sources[order, np.argmax(beliefs[order], axis=1)],
    )
