"""Weighing the evidence, and growing the most probable tree from it."""

from typing import Any, Final

import numpy as np
from numba import njit
from numpy.typing import NDArray

_MULTIPLIER: Final = 40503


@njit(cache=True, nogil=True)
def weigh_rows(
    rows: NDArray[Any],
    num_rows: int,
    trust: NDArray[np.float64],
    escape: float,
    counts: NDArray[np.float64],
) -> None:
    """Set the rows' weights by interpolating match lengths, the longest first.

    A length k with the trusted count N takes the share N / (N + escape / k) of what longer matches
    left, and divides it among its rows: Witten-Bell's back-off with an escape that shrinks as
    matches grow.

    Args:
        rows: ROW[max_rows], the evidence.
        num_rows: rows in use.
        trust: float64[sources], what one occurrence in each database counts.
        escape: count at which a match of one token takes half of what is left.
        counts: float64[longest match + 1], scratch.
    """
    counts[:] = 0.0
    for index in range(num_rows):
        row = rows[index]
        row.weight = row.count * trust[row.source]
        counts[row.match] += row.weight
    left = 1.0
    for match in range(counts.shape[0] - 1, 0, -1):
        if counts[match] > 0:
            scale = left / (counts[match] + escape / match)
            left -= scale * counts[match]
            counts[match] = scale
    for index in range(num_rows):
        rows[index].weight *= counts[rows[index].match]


@njit(cache=True, nogil=True)
def grow_tree(
    rows: NDArray[Any],
    continuations: NDArray[np.int32],
    num_rows: int,
    doubt: float,
    budget: int,
    min_probability: float,
    nodes: NDArray[Any],
    heap: NDArray[np.int32],
    slots: NDArray[np.int32],
    token_ids: NDArray[np.int32],
    parents: NDArray[np.int32],
    probabilities: NDArray[np.float32],
    sources: NDArray[np.uint8],
) -> int:
    """Grow a tree best-first: take the most probable candidate, then consider its children.

    Rows agree with a node while their continuations are its path. A child's probability given its
    parent is the weight of its rows over the parent's weight and a constant doubt. Only the rows
    of taken nodes are read, so depth costs nothing until it pays. Of equals the candidate that
    was considered first is taken.

    Args:
        rows: ROW[max_rows], weighed evidence; `next` is overwritten.
        continuations: int32[max_rows, max_depth].
        num_rows: rows in use.
        doubt: weight that stands for whatever no row predicts.
        budget: most nodes to take.
        min_probability: candidates below it are not considered.
        nodes: NODE[max_nodes], scratch; once it is full no further candidates are considered.
        heap: int32[max_nodes], scratch.
        slots: int32[power of two, over max_rows], scratch, all -1; left so.
        token_ids: int32[budget], the tree's tokens; written.
        parents: int32[budget], the tree's parents; written.
        probabilities: float32[budget], written.
        sources: uint8[budget], written.

    Returns:
        The number of nodes taken.
    """
    _plant(rows, num_rows, nodes)
    num_nodes, heap_size, size, current = 1, 0, 0, 0
    while size < budget:
        first_child = num_nodes
        num_nodes = _consider(rows, continuations, nodes, current, num_nodes, slots)
        certainty = nodes[current].probability / (nodes[current].weight + doubt)
        for child in range(first_child, num_nodes):
            nodes[child].probability = certainty * nodes[child].weight
            slots[nodes[child].slot] = -1
            if nodes[child].probability >= min_probability:
                _push(heap, heap_size, nodes, child)
                heap_size += 1
        if heap_size == 0:
            break
        current = _pop(heap, heap_size, nodes)
        heap_size -= 1
        nodes[current].place = size
        token_ids[size] = nodes[current].token
        parents[size] = nodes[nodes[current].parent].place
        probabilities[size] = nodes[current].probability
        sources[size] = nodes[current].source
        size += 1
    return size


@njit(cache=True, nogil=True, inline="always")
def _plant(rows: NDArray[Any], num_rows: int, nodes: NDArray[Any]) -> None:
    """Make candidate 0 the root, with all rows."""
    root = nodes[0]
    root.depth, root.place, root.parent = 0, -1, 0
    root.probability, root.weight = 1.0, 0.0
    root.first_row = 0 if num_rows > 0 else -1
    for index in range(num_rows):
        rows[index].next = index + 1 if index + 1 < num_rows else -1
        root.weight += rows[index].weight


@njit(cache=True, nogil=True, inline="always")
def _consider(
    rows: NDArray[Any],
    continuations: NDArray[np.int32],
    nodes: NDArray[Any],
    parent: int,
    num_nodes: int,
    slots: NDArray[np.int32],
) -> int:
    """Divide a node's rows among its children by their next token; return the node count."""
    depth = nodes[parent].depth
    index = nodes[parent].first_row
    while index >= 0:
        following = rows[index].next
        if depth < rows[index].length:
            token = continuations[index, depth]
            slot = _find_slot(slots, nodes, token)
            child = slots[slot]
            if child < 0 and num_nodes < nodes.shape[0]:
                child = num_nodes
                num_nodes += 1
                slots[slot] = child
                _sprout(nodes[child], token, parent, depth + 1, slot)
            if child >= 0:
                _join(rows, index, nodes[child])
        index = following
    return num_nodes


@njit(cache=True, nogil=True, inline="always")
def _find_slot(slots: NDArray[np.int32], nodes: NDArray[Any], token: int) -> int:
    """Return where the sibling with this token stands, or the free slot for it."""
    mask = slots.shape[0] - 1
    slot = (token * _MULTIPLIER) & mask
    while slots[slot] >= 0 and nodes[slots[slot]].token != token:
        slot = (slot + 1) & mask
    return slot


@njit(cache=True, nogil=True, inline="always")
def _sprout(node: Any, token: int, parent: int, depth: int, slot: int) -> None:
    node.token, node.parent, node.depth, node.slot = token, parent, depth, slot
    node.first_row, node.last_row = -1, -1
    node.weight, node.heaviest = 0.0, -1.0


@njit(cache=True, nogil=True, inline="always")
def _join(rows: NDArray[Any], index: int, node: Any) -> None:
    """Append a row to a node."""
    row = rows[index]
    row.next = -1
    if node.first_row < 0:
        node.first_row = index
    else:
        rows[node.last_row].next = index
    node.last_row = index
    node.weight += row.weight
    if row.weight > node.heaviest:
        node.heaviest = row.weight
        node.source = row.source


@njit(cache=True, nogil=True, inline="always")
def _precedes(nodes: NDArray[Any], one: int, other: int) -> bool:
    if nodes[one].probability != nodes[other].probability:
        return nodes[one].probability > nodes[other].probability
    return one < other


@njit(cache=True, nogil=True, inline="always")
def _push(heap: NDArray[np.int32], size: int, nodes: NDArray[Any], node: int) -> None:
    """Add a candidate to a heap of `size`."""
    place = size
    while place > 0 and _precedes(nodes, node, heap[(place - 1) >> 1]):
        heap[place] = heap[(place - 1) >> 1]
        place = (place - 1) >> 1
    heap[place] = node


@njit(cache=True, nogil=True, inline="always")
def _pop(heap: NDArray[np.int32], size: int, nodes: NDArray[Any]) -> int:
    """Take the most probable candidate from a heap of `size`."""
    best, last = heap[0], heap[size - 1]
    place = 0
    while 2 * place + 1 < size - 1:
        child = 2 * place + 1
        if child + 1 < size - 1 and _precedes(nodes, heap[child + 1], heap[child]):
            child += 1
        if not _precedes(nodes, heap[child], last):
            break
        heap[place] = heap[child]
        place = child
    heap[place] = last
    return best
