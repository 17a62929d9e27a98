"""Trees in the form in which SGLang's EAGLE builds them.

Its kernel takes, for each row, the numbers of the chosen nodes, and for each group of `topk`
numbers that of the node above them: number n is in group n // topk, and group 0 is below the last
committed token. So any tree of `width - 1` nodes has this form, with a `topk` of `width - 1` and a
depth of 2: group 0 for the root's children, group i + 1 for those of node i, `width` groups in all.

A row must be full, and each node below another: what a tree lacks is filled up with children of the
root that have tokens of their own, or with a chain below the last token of a chain. They are bad
guesses, and verified like any.

Source: sglang 0.5.23, `build_tree_efficient` in `speculative/eagle.cuh`, `organize_draft_results`.
"""

from collections.abc import Sequence
from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from retriever.tree import ROOT, DraftTree

DEPTH: Final = 2
"""The depth with which a tree of any depth is built: it only states the length of a row."""

Ints = NDArray[np.int64]


class Topology(NamedTuple):
    """Trees of a step as the kernel takes them.

    Attributes:
        parent_list: int64[rows, width], the number of the node above each group.
        selected: int64[rows, width - 1], the number of each node.
        tokens: int64[rows, width - 1].
    """

    parent_list: Ints
    selected: Ints
    tokens: Ints


class Nodes(NamedTuple):
    """The nodes of one row.

    Attributes:
        tokens: int64[n].
        parents: int64[n], of a node an earlier one or `ROOT`.
    """

    tokens: Ints
    parents: Ints

    @classmethod
    def of(cls, tree: DraftTree) -> "Nodes":
        """Return the nodes of a draft, in its order."""
        return cls(tree.token_ids.astype(np.int64), tree.parents.astype(np.int64))


def filled(nodes: Nodes, num_nodes: int, *, is_chain: bool = False) -> Nodes:
    """Return a row with exactly so many nodes.

    Args:
        nodes: at most so many; a longer row is cut.
        num_nodes: wanted.
        is_chain: whether the row is a chain, and stays one.
    """
    tokens, parents = nodes.tokens[:num_nodes], nodes.parents[:num_nodes]
    missing = num_nodes - len(tokens)
    if missing == 0:
        return Nodes(tokens, parents)
    if is_chain:
        return Nodes(np.append(tokens, np.zeros(missing, np.int64)), np.arange(-1, num_nodes - 1))
    taken = set(tokens[parents == ROOT].tolist())
    free = [token for token in range(missing + len(taken)) if token not in taken][:missing]
    below_root = np.full(missing, ROOT, np.int64)
    return Nodes(np.append(tokens, free), np.append(parents, below_root))


def topology_of(rows: Sequence[Nodes]) -> Topology:
    """Return rows of equal length, at least two nodes each, in the kernel's form."""
    num_nodes = len(rows[0].tokens)
    selected = np.empty((len(rows), num_nodes), np.int64)
    parent_list = np.full((len(rows), num_nodes + 1), -1, np.int64)
    for row, nodes in enumerate(rows):
        ranks: dict[int, int] = {}
        for node, parent in enumerate(nodes.parents.tolist()):
            rank = ranks.get(parent, 0)
            ranks[parent] = rank + 1
            selected[row, node] = (parent + 1) * num_nodes + rank
    parent_list[:, 1:] = selected
    return Topology(parent_list, selected, np.stack([nodes.tokens for nodes in rows]))


def nodes_of(
    tokens: Sequence[int], selected: Sequence[int], parent_list: Sequence[int], topk: int
) -> Nodes:
    """Return one row of the engine's own tree.

    Args:
        tokens: of the nodes.
        selected: their numbers, rising.
        parent_list: the number of the node above each group.
        topk: numbers in a group.

    Raises:
        ValueError: a node is below one that is not there, or that comes later.
    """
    places = {number: node for node, number in enumerate(selected)}
    parents = np.full(len(selected), ROOT, np.int64)
    for node, number in enumerate(selected):
        group = number // topk
        if group > 0:
            parents[node] = places.get(parent_list[group], node)
            if parents[node] >= node:
                raise ValueError(f"node {node} of the engine's tree has no parent before it")
    return Nodes(np.asarray(tokens, np.int64), parents)
