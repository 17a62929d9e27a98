"""A compressed suffix tree of bounded depth that counts occurrences, in plain arrays.

Nodes stand in `NODE[capacity]`, the root first. The edge into a node is `length` tokens of the text
from `start` on; `count` suffixes pass through its end. A hash table finds children by their first
token.
"""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from benchmarks.papers.kernels.suffix_siblings import (
    NONE,
    NUM_NODES,
    ROOT_NODE,
    count_once_more,
    new_group,
)
from retriever.kernels.compiling import kernel


@kernel(allocates=True)
def _slot(keys: NDArray[np.int64], parent: int, token: int) -> int:
    """Return where the child of a node stands in the table, or would."""
    key = (np.int64(parent) << 32) | np.int64(token)
    mask = len(keys) - 1
    slot = np.int64((np.uint64(key) * np.uint64(0x9E3779B97F4A7C15)) >> np.uint64(20)) & mask
    while keys[slot] != key and keys[slot] != NONE:
        slot = (slot + 1) & mask
    return slot


@kernel(allocates=True)
def _enter(
    keys: NDArray[np.int64], children: NDArray[np.int32], parent: int, token: int, child: int
) -> None:
    slot = _slot(keys, parent, token)
    keys[slot] = (np.int64(parent) << 32) | np.int64(token)
    children[slot] = child


@kernel(allocates=True)
def find_child(
    keys: NDArray[np.int64], children: NDArray[np.int32], parent: int, token: int
) -> int:
    """Return the child whose edge begins with a token, or `NONE`."""
    slot = _slot(keys, parent, token)
    return children[slot] if keys[slot] != NONE else NONE


@kernel(allocates=True)
def enter_all(
    nodes: NDArray[Any],
    state: NDArray[np.int64],
    text: NDArray[np.int32],
    keys: NDArray[np.int64],
    children: NDArray[np.int32],
) -> None:
    """Fill an empty table (`keys` all `NONE`) with all nodes."""
    for node in range(1, state[NUM_NODES]):
        _enter(keys, children, nodes[node].parent, text[nodes[node].start], node)


@kernel(allocates=True)
def _new_leaf(
    nodes: NDArray[Any],
    state: NDArray[np.int64],
    text: NDArray[np.int32],
    keys: NDArray[np.int64],
    children: NDArray[np.int32],
    parent: int,
    start: int,
    length: int,
) -> int:
    node = state[NUM_NODES]
    state[NUM_NODES] += 1
    new, last = nodes[node], nodes[parent].last
    new.count, new.start, new.length, new.parent = 1, start, length, parent
    new.first, new.last, new.next, new.previous = NONE, NONE, NONE, last
    nodes[parent].last = node
    if last != NONE:
        nodes[last].next = node
    else:
        nodes[parent].first = node
    if last != NONE and nodes[last].count == 1:
        new.group = nodes[last].group
    else:
        new.group = new_group(nodes, state, node)
    _enter(keys, children, parent, text[start], node)
    return node


@kernel(allocates=True)
def _split(
    nodes: NDArray[Any],
    state: NDArray[np.int64],
    text: NDArray[np.int32],
    keys: NDArray[np.int64],
    children: NDArray[np.int32],
    child: int,
    length: int,
) -> int:
    """Put a node into the edge of a child, after `length` tokens, and return it."""
    node = state[NUM_NODES]
    state[NUM_NODES] += 1
    upper, lower = nodes[node], nodes[child]
    upper.count, upper.start, upper.length, upper.parent = (
        lower.count,
        lower.start,
        length,
        lower.parent,
    )
    upper.next, upper.previous, upper.group = lower.next, lower.previous, lower.group
    upper.first, upper.last = child, child
    if upper.previous != NONE:
        nodes[upper.previous].next = node
    else:
        nodes[upper.parent].first = node
    if upper.next != NONE:
        nodes[upper.next].previous = node
    else:
        nodes[upper.parent].last = node
    if nodes[upper.group].head == child:
        nodes[upper.group].head = node
    _enter(keys, children, upper.parent, text[upper.start], node)
    lower.start, lower.length, lower.parent = lower.start + length, lower.length - length, node
    lower.next, lower.previous = NONE, NONE
    lower.group = new_group(nodes, state, child)
    _enter(keys, children, node, text[lower.start], child)
    return node


@kernel(allocates=True)
def insert_document(
    nodes: NDArray[Any],
    state: NDArray[np.int64],
    text: NDArray[np.int32],
    keys: NDArray[np.int64],
    children: NDArray[np.int32],
    begin: int,
    stop: int,
    end: int,
    max_depth: int,
) -> None:
    """Insert the suffixes of `text[begin:end]` that start before `stop`, cut to the depth."""
    for suffix in range(begin, stop):
        node, position, limit = ROOT_NODE, suffix, min(suffix + max_depth, end)
        nodes[ROOT_NODE].count += 1
        while position < limit:
            child = find_child(keys, children, node, text[position])
            if child == NONE:
                _new_leaf(nodes, state, text, keys, children, node, position, limit - position)
                break
            matched, most = 1, min(nodes[child].length, limit - position)
            start = nodes[child].start
            while matched < most and text[start + matched] == text[position + matched]:
                matched += 1
            if matched < nodes[child].length:
                child = _split(nodes, state, text, keys, children, child, matched)
            count_once_more(nodes, state, child)
            node, position = child, position + matched


@kernel(allocates=True)
def append_tokens(
    nodes: NDArray[Any],
    state: NDArray[np.int64],
    text: NDArray[np.int32],
    keys: NDArray[np.int64],
    children: NDArray[np.int32],
    begin: int,
    end: int,
    active: NDArray[np.int32],
    num_active: int,
) -> int:
    """Append `text[begin:end]` to a sequence whose last suffixes end at the active nodes.

    Args:
        nodes: of the tree.
        state: of the tree.
        text: of the tree.
        keys: of the tree's table.
        children: of the tree's table.
        begin: first position to append.
        end: after the last.
        active: int32[max_depth], where the suffixes of the sequence end that can still grow, the
            longest first; written.
        num_active: how many there are.

    Returns:
        How many there are now.
    """
    for position in range(begin, end):
        if num_active == len(active):
            active[:-1] = active[1:].copy()
            num_active -= 1
        active[num_active] = ROOT_NODE
        nodes[ROOT_NODE].count += 1
        num_active += 1
        for which in range(num_active):
            active[which] = _step(nodes, state, text, keys, children, active[which], position)
    return num_active


@kernel(allocates=True)
def _step(
    nodes: NDArray[Any],
    state: NDArray[np.int64],
    text: NDArray[np.int32],
    keys: NDArray[np.int64],
    children: NDArray[np.int32],
    node: int,
    position: int,
) -> int:
    """Append one token to a suffix that ends at a node; return where it ends then."""
    if nodes[node].first == NONE and node != ROOT_NODE:
        if nodes[node].count == 1 and nodes[node].start + nodes[node].length == position:
            nodes[node].length += 1
            return node
        return _new_leaf(nodes, state, text, keys, children, node, position, 1)
    child = find_child(keys, children, node, text[position])
    if child == NONE:
        return _new_leaf(nodes, state, text, keys, children, node, position, 1)
    if nodes[child].length > 1:
        child = _split(nodes, state, text, keys, children, child, 1)
    count_once_more(nodes, state, child)
    return child
