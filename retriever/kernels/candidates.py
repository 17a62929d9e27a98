"""The candidates for a node's next token: one for each token that any evidence proposes."""

from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from retriever.kernels.compiling import kernel
from retriever.kernels.layout import MAX_SUCCESSORS, Evidence, Traits

UNKNOWN: Final = -2
"""Marks an entry of the phrase tables that has not been looked up yet."""

_SLOT_MULTIPLIER: Final = 40503
_FEWEST_SLOTS: Final = 256


@kernel()
def slots_for(num_rows: int) -> int:
    """Return the number of slots in a sibling table with room for a node's candidates.

    Usually there are few rows, and the table stays in the L1 cache.
    """
    num_slots = _FEWEST_SLOTS
    while num_slots < 2 * (num_rows + MAX_SUCCESSORS):
        num_slots *= 2
    return num_slots


@kernel()
def add_rows(
    rows: NDArray[Any],
    continuations: NDArray[np.int32],
    nodes: NDArray[Any],
    evidence: NDArray[np.float32],
    slots: NDArray[np.int32],
    current: int,
    num_nodes: int,
    traits: NDArray[np.float32],
) -> tuple[int, float, float]:
    """Divide a node's rows among its children; return the node count and the sums of weights."""
    node = nodes[current]
    depth = node.depth
    total, similar, longest, node.dominant = 0.0, 0.0, 0, 0
    index = node.first_row
    while index >= 0:
        row = rows[index]
        following = row.next
        similar_weight = row.weight * row.similarity
        total += row.weight
        similar += similar_weight
        if row.match > longest:
            longest, node.dominant = row.match, row.source
        if depth < row.length:
            child, num_nodes = child_with(
                np.int64(continuations[index, depth]), nodes, evidence, slots, current, num_nodes,
                np.int64(row.source),
            )  # fmt: skip
            if child >= 0:
                _join(rows, index, nodes, child)
                evidence[child, Evidence.ROWS] += row.weight
                evidence[child, Evidence.SIMILAR] += similar_weight
        index = following
    traits[Traits.MATCH] = longest + depth if longest > 0 else 0
    traits[Traits.DEPTH] = depth
    return num_nodes, total, similar


@kernel()
def child_with(
    token: int,
    nodes: NDArray[Any],
    evidence: NDArray[np.float32],
    slots: NDArray[np.int32],
    parent: int,
    num_nodes: int,
    source: int,
) -> tuple[int, int]:
    """Return the parent's child with this token, created if missing, and the node count.

    The child is -1 if there is no room left.
    """
    mask = slots.shape[0] - 1
    slot = (token * _SLOT_MULTIPLIER) & mask
    while slots[slot] >= 0 and nodes[slots[slot]].token != token:
        slot = (slot + 1) & mask
    if slots[slot] >= 0:
        return slots[slot], num_nodes
    if num_nodes == nodes.shape[0]:
        return -1, num_nodes
    slots[slot] = num_nodes
    node = nodes[num_nodes]
    node.token, node.slot, node.parent = token, slot, parent
    node.first_row, node.heaviest, node.source = -1, -1.0, source
    node.pair, node.triple = UNKNOWN, UNKNOWN
    node.place, node.end_child, node.is_called = -1, 0, 0
    evidence[num_nodes, :] = 0.0
    return num_nodes, num_nodes + 1


@kernel()
def _join(rows: NDArray[Any], index: int, nodes: NDArray[Any], child: int) -> None:
    """Append a row to a node."""
    row, node = rows[index], nodes[child]
    row.next = -1
    if node.first_row < 0:
        node.first_row = index
    else:
        rows[node.last_row].next = index
    node.last_row = index
    if row.weight > node.heaviest:
        node.heaviest = row.weight
        node.source = row.source
