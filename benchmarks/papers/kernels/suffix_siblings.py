"""The nodes of a counting suffix tree, and the order of siblings by falling count.

Siblings of equal count form a group, whose first member is known, so that counting a node once more
moves it in constant time.
"""

from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from retriever.kernels.compiling import kernel

NODE: Final = np.dtype(
    [
        ("count", np.int32),
        ("start", np.int32),
        ("length", np.int32),
        ("parent", np.int32),
        ("first", np.int32),  # child of the highest count, or NONE
        ("last", np.int32),  # child of the lowest count, or NONE
        ("next", np.int32),
        ("previous", np.int32),
        ("group", np.int32),  # of the siblings of equal count
        ("head", np.int32),  # first member of the group that has this node's number
    ]
)
NONE: Final = -1
ROOT_NODE: Final = 0

# what stands where in the state of a tree, int64[3]
NUM_NODES: Final = 0
NUM_GROUPS: Final = 1
FREE_GROUP: Final = 2


@kernel(allocates=True)
def make_root(nodes: NDArray[Any], state: NDArray[np.int64]) -> None:
    """Make the tree of the empty text."""
    root = nodes[ROOT_NODE]
    root.count, root.start, root.length, root.parent = 0, 0, 0, NONE
    root.first, root.last, root.next, root.previous, root.group = NONE, NONE, NONE, NONE, NONE
    state[NUM_NODES], state[NUM_GROUPS], state[FREE_GROUP] = 1, 0, NONE


@kernel(allocates=True)
def new_group(nodes: NDArray[Any], state: NDArray[np.int64], head: int) -> int:
    """Return the number of a new group of one node."""
    group = state[FREE_GROUP]
    if group == NONE:
        group = state[NUM_GROUPS]
        state[NUM_GROUPS] += 1
    else:
        state[FREE_GROUP] = nodes[group].head
    nodes[group].head = head
    return group


@kernel(allocates=True)
def _leave_group(nodes: NDArray[Any], state: NDArray[np.int64], node: int) -> None:
    group, after = nodes[node].group, nodes[node].next
    if nodes[group].head != node:
        return
    if after != NONE and nodes[after].group == group:
        nodes[group].head = after
    else:
        nodes[group].head = state[FREE_GROUP]
        state[FREE_GROUP] = group


@kernel(allocates=True)
def _move_before(nodes: NDArray[Any], node: int, other: int) -> None:
    """Move a node before an earlier sibling."""
    parent, before, after = nodes[node].parent, nodes[node].previous, nodes[node].next
    nodes[before].next = after
    if after != NONE:
        nodes[after].previous = before
    else:
        nodes[parent].last = before
    ahead = nodes[other].previous
    nodes[node].previous, nodes[node].next = ahead, other
    nodes[other].previous = node
    if ahead != NONE:
        nodes[ahead].next = node
    else:
        nodes[parent].first = node


@kernel(allocates=True)
def count_once_more(nodes: NDArray[Any], state: NDArray[np.int64], node: int) -> None:
    """Add one to a node's count and move it before those that it overtakes or draws level with."""
    count = nodes[node].count + 1
    _leave_group(nodes, state, node)
    before = nodes[node].previous
    if before != NONE and nodes[before].count <= count:
        group = nodes[before].group
        _move_before(nodes, node, nodes[group].head)
    nodes[node].count = count
    before, after = nodes[node].previous, nodes[node].next
    if before != NONE and nodes[before].count == count:
        nodes[node].group = nodes[before].group
    elif after != NONE and nodes[after].count == count:
        nodes[node].group = nodes[after].group
        nodes[nodes[node].group].head = node
    else:
        nodes[node].group = new_group(nodes, state, node)
