"""Compiled loops of forced drafts: ordering a tree for the grammar check, and merging strings."""

from functools import cache
from typing import Final

import numpy as np
from numpy.typing import NDArray

from retriever.kernels.compiling import kernel
from retriever.tree import ROOT

MOST_FORBIDDEN: Final = np.float32(0.9)
"""Largest share of forbidden children that is reassigned; other shares grow tenfold at most."""


@kernel()
def order_paths(
    parents: NDArray[np.int32], order: NDArray[np.int32], paths: NDArray[np.int32]
) -> int:
    """Order a tree depth first, and split it into paths; each path starts at a branch.

    Args:
        parents: int32[n], the parent of each node; a parent comes before its children.
        order: int32[n], output: the nodes; each node is followed by its first child.
        paths: int32[2, n + 1], output: where each path starts in `order`, and the depth of its
            first node (0 for children of the root). `paths[0]` also holds the end of the last path.

    Returns:
        The number of paths, equal to the number of leaves.
    """
    size = len(parents)
    child, sibling = paths[0], paths[1]  # scratch space for first children and next siblings
    newest = np.int64(-1)
    for node in range(size):
        child[node] = -1
    for step in range(size):
        node = size - 1 - step
        parent = parents[node]
        sibling[node] = newest if parent == ROOT else child[parent]
        if parent == ROOT:
            newest = np.int64(node)
        else:
            child[parent] = node
    number, at = np.int64(0), newest
    while at >= 0:
        order[number] = at
        number += 1
        following = np.int64(child[at])
        while following < 0 and at >= 0:
            following = np.int64(sibling[at])
            at = np.int64(parents[at])
        at = following
    return _divide(parents, order, paths)


@kernel()
def _divide(parents: NDArray[np.int32], order: NDArray[np.int32], paths: NDArray[np.int32]) -> int:
    """Fill in the paths of the ordered nodes."""
    count, depth = np.int64(0), np.int64(0)
    for place in range(len(order)):
        parent = parents[order[place]]
        if place > 0 and parent == order[place - 1]:
            depth += 1
            continue
        depth = np.int64(0)
        while parent != ROOT:
            depth += 1
            parent = parents[parent]
        paths[0, count], paths[1, count] = place, depth
        count += 1
    paths[0, count] = len(order)
    return int(count)


@kernel()
def merge_forced(  # noqa: C901, PLR0913, PLR0917  (a kernel takes plain arrays)
    nodes: NDArray[np.int32],
    shares: NDArray[np.float32],
    sources: NDArray[np.uint8],
    size: int,
    strings: NDArray[np.int32],
    tokens: NDArray[np.int32],
    probabilities: NDArray[np.float32],
    source: int,
    made: NDArray[np.int32],
    made_shares: NDArray[np.float32],
    made_sources: NDArray[np.uint8],
) -> int:
    """Add strings to a tree without its forbidden nodes, and fill in the nodes by probability.

    A forced token leaves its siblings almost no probability. The alternatives of a choice, however,
    share the probability that the drafted siblings leave. Allowed siblings get the share of
    forbidden siblings.

    Args:
        nodes: int32[4, m]. The first n columns hold the tree: tokens, parents, and 1 for forbidden
            nodes. The fourth row is scratch space. m is n plus the length of all strings.
        shares: float32[2, m]. The first n values are the tree's probabilities; the second row is
            scratch space.
        sources: uint8[m]; the first n are the tree's sources.
        size: n.
        strings: int32[k, 3], for each string: the node before it or `ROOT`, the index in `tokens`
            where it ends, and which of its tokens is a choice (-1: none).
        tokens: int32[t], the tokens of all strings.
        probabilities: float32[t], the probability of each token after the tokens before it.
        source: source of the added nodes.
        made: int32[2, m], output: tokens and parents of the new tree.
        made_shares: float32[m], output: probabilities of the new tree.
        made_sources: uint8[m], output: sources of the new tree.

    Returns:
        The number of nodes of the new tree.
    """
    ids, parents, forbidden, order = nodes[0], nodes[1], nodes[2], nodes[3]
    found = shares[1]
    _divide_shares(parents, forbidden, shares[0], found, size)
    total, begin = np.int64(size), np.int64(0)
    for string in range(strings.shape[0]):
        node = np.int64(strings[string, 0])
        for place in range(begin, strings[string, 1]):
            share = probabilities[place]
            is_choice = place - begin == strings[string, 2]
            known, mass = np.int64(-1), np.float32(0.0)
            for other in range(int(node) + 1, int(total)):
                if parents[other] != node or forbidden[other]:
                    continue
                if ids[other] == tokens[place]:
                    known = np.int64(other)
                elif not is_choice:
                    found[other] *= np.float32(1.0) - share
                if other < size:
                    mass += found[other]
            if is_choice:
                share *= max(np.float32(1.0) - mass, np.float32(0.0))
            if known < 0:
                known = total
                ids[known], parents[known], forbidden[known] = tokens[place], node, 0
                found[known], sources[known] = share, source
                total += 1
            else:
                found[known] = max(found[known], share)
            node = known
        begin = np.int64(strings[string, 1])
    count = _ordered(parents, forbidden, found, order, int(total))
    places = forbidden  # `forbidden` is no longer needed
    for place in range(count):
        node = np.int64(order[place])
        places[node] = place
        made[0, place] = ids[node]
        made[1, place] = ROOT if parents[node] == ROOT else places[parents[node]]
        made_shares[place], made_sources[place] = found[node], sources[node]
    return int(count)


@kernel()
def _divide_shares(
    parents: NDArray[np.int32],
    forbidden: NDArray[np.int32],
    given: NDArray[np.float32],
    found: NDArray[np.float32],
    size: int,
) -> None:
    """Turn path probabilities into probabilities given the parent, among allowed children."""
    for node in range(size):
        before = np.float32(1.0) if parents[node] == ROOT else given[parents[node]]
        found[node] = min(given[node] / max(before, np.float32(1e-9)), np.float32(1.0))
    for node in range(size):
        lost = np.float32(0.0)
        for other in range(size):
            if forbidden[other] and parents[other] == parents[node]:
                lost += found[other]
        if lost > 0 and not forbidden[node]:
            left = np.float32(1.0) - min(lost, MOST_FORBIDDEN)
            found[node] = min(found[node] / left, np.float32(1.0))


@kernel()
def _ordered(
    parents: NDArray[np.int32],
    forbidden: NDArray[np.int32],
    found: NDArray[np.float32],
    order: NDArray[np.int32],
    total: int,
) -> int:
    """Compute path probabilities of the allowed nodes, and order the nodes by them."""
    count = np.int64(0)
    for node in range(total):
        if forbidden[node]:
            continue
        if parents[node] != ROOT:
            found[node] *= found[parents[node]]
        place = count
        while place > 0 and found[order[place - 1]] < found[node]:
            order[place] = order[place - 1]
            place -= 1
        order[place] = node
        count += 1
    return int(count)


@cache
def warm() -> None:
    """Compile or load these kernels now, so that no draft waits for it: two seconds at worst."""
    one, share = np.zeros((5, 2), np.int32), np.zeros((3, 2), np.float32)
    tokens, source = np.zeros(1, np.int32), np.zeros(2, np.uint8)
    order_paths(np.full(1, ROOT, np.int32), one[0, :1], np.zeros((2, 2), np.int32))
    string = np.array([[ROOT, 1, -1]], np.int32)
    merge_forced(
        one[:4], share[:2], source, 0, string, tokens, share[2, :1], 0, one[3:], share[2], source
    )
