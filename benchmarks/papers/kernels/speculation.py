"""Speculating from a suffix tree: what SuffixDecoding drafts after a match, and its score."""

from heapq import heappop, heappush
from typing import Any

import numpy as np
from numpy.typing import NDArray

from benchmarks.papers.kernels.suffix_nodes import find_child
from benchmarks.papers.kernels.suffix_siblings import NONE, ROOT_NODE
from retriever.kernels.compiling import kernel


@kernel(allocates=True)
def speculate(
    nodes: NDArray[Any],
    text: NDArray[np.int32],
    keys: NDArray[np.int64],
    children: NDArray[np.int32],
    context: NDArray[np.int32],
    budget: int,
    factor: float,
    offset: float,
    min_probability: float,
    as_tree: bool,
    token_ids: NDArray[np.int32],
    parents: NDArray[np.int32],
    probabilities: NDArray[np.float32],
) -> tuple[int, float]:
    """Write the best draft over all lengths of match; of equally good ones, of the longest.

    Args:
        nodes: of the tree.
        text: of the tree.
        keys: of the tree's table.
        children: of the tree's table.
        context: int32[c], the last tokens of the sequence, at most the tree's depth.
        budget: most nodes of a draft.
        factor: nodes of a draft for each token of the match.
        offset: nodes beyond those.
        min_probability: less probable nodes are left out.
        as_tree: grow a tree and not a path.
        token_ids: int32[2, budget], the draft in row 0, scratch in row 1.
        parents: the same.
        probabilities: float32[2, budget], the same.

    Returns:
        Nodes of the draft, and its score, which is the sum of their probabilities.
    """
    best_size, best_score = 0, 0.0
    for match in range(1, len(context)):
        node, used = _match(nodes, text, keys, children, context[len(context) - match :])
        if node == NONE:
            break
        most = max(0, min(budget, int(match * factor + offset + 1e-6)))
        draft = token_ids[1, :most], parents[1, :most], probabilities[1, :most]
        if as_tree:
            size, score = _tree(nodes, text, node, used, min_probability, draft)
        else:
            size, score = _path(nodes, text, node, used, min_probability, draft)
        if score >= best_score:
            best_size, best_score = size, score
            token_ids[0, :size] = token_ids[1, :size]
            parents[0, :size] = parents[1, :size]
            probabilities[0, :size] = probabilities[1, :size]
    return best_size, best_score


@kernel(allocates=True)
def _match(
    nodes: NDArray[Any],
    text: NDArray[np.int32],
    keys: NDArray[np.int64],
    children: NDArray[np.int32],
    pattern: NDArray[np.int32],
) -> tuple[int, int]:
    """Return the node that a pattern leads to and how much of its edge it uses, or `NONE`."""
    node, used = ROOT_NODE, 0
    for token in pattern:
        if used == nodes[node].length:
            node, used = find_child(keys, children, node, token), 1
            if node == NONE:
                return NONE, 0
        elif text[nodes[node].start + used] == token:
            used += 1
        else:
            return NONE, 0
    return node, used


@kernel(allocates=True)
def _path(
    nodes: NDArray[Any],
    text: NDArray[np.int32],
    node: int,
    used: int,
    min_probability: float,
    draft: tuple[NDArray[np.int32], NDArray[np.int32], NDArray[np.float32]],
) -> tuple[int, float]:
    """Follow the most frequent child; return nodes written and their probabilities' sum."""
    token_ids, parents, probabilities = draft
    size, score, probability = 0, 0.0, 1.0
    while size < len(token_ids) and probability >= min_probability:
        if used < nodes[node].length:
            token_ids[size], parents[size] = text[nodes[node].start + used], size - 1
            probabilities[size] = probability
            score += probability
            size, used = size + 1, used + 1
        else:
            child = nodes[node].first
            if child == NONE:
                break
            probability *= nodes[child].count / nodes[node].count
            node, used = child, 0
    return size, score


@kernel(allocates=True)
def _tree(
    nodes: NDArray[Any],
    text: NDArray[np.int32],
    node: int,
    used: int,
    min_probability: float,
    draft: tuple[NDArray[np.int32], NDArray[np.int32], NDArray[np.float32]],
) -> tuple[int, float]:
    """Take the most probable node again and again; return nodes written and their sum."""
    token_ids, parents, probabilities = draft
    size, score, pushed = 0, 0.0, 0
    heap: list[Any] = [(-1.0, pushed, np.int64(node), np.int64(used), np.int64(-1))]
    while size < len(token_ids) and len(heap) > 0:
        negative, _, node, used, parent = heappop(heap)
        if used < nodes[node].length:
            token_ids[size], parents[size] = text[nodes[node].start + used], parent
            probabilities[size] = -negative
            score -= negative
            pushed += 1
            heappush(heap, (negative, pushed, node, used + 1, np.int64(size)))
            size += 1
            continue
        child = np.int64(nodes[node].first)
        while child != NONE:
            probability = -negative * nodes[child].count / nodes[node].count
            if probability < min_probability:
                break
            pushed += 1
            heappush(heap, (-probability, pushed, child, np.int64(0), parent))
            child = np.int64(nodes[child].next)
    return size, score
