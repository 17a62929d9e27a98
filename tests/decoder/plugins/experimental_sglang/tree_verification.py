"""SGLang's tree verification, spelt out: what its kernels do, node by node."""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

Ints = NDArray[np.int64]


class Links(NamedTuple):
    positions: Ints
    next_token: Ints
    next_sibling: Ints


Verify = Callable[[Ints, Links, Ints], list[int]]


def links_of(mask: Ints) -> Links:
    """`reconstructIndicesFromTreeMask`, for one row: mask is int64[width, width]."""
    width = len(mask)
    above = [[j for j in range(i) if mask[i, j]] for i in range(width)]
    parents = [max(nodes, default=-1) for nodes in above]
    next_token = [next((k for k in range(i + 1, width) if mask[k, i]), -1) for i in range(width)]
    next_sibling = [
        next((k for k in range(i + 1, width) if parents[i] != -1 and parents[k] == parents[i]), -1)
        for i in range(width)
    ]
    depths = [len(nodes) for nodes in above]
    return Links(np.array(depths), np.array(next_token), np.array(next_sibling))


def verify_greedy(tokens: Ints, links: Links, target: Ints) -> list[int]:
    """`VerifyTreeGreedy`: the accepted nodes, from node 0; target is the choice at each node."""
    path = [0]
    while True:
        node = int(links.next_token[path[-1]])
        while node != -1 and tokens[node] != target[path[-1]]:
            node = int(links.next_sibling[node])
        if node == -1:
            return path
        path.append(node)


def sampled(tokens: Ints, links: Links, node: int, target: Sequence[float]) -> NDArray[np.float64]:
    """The distribution of the token behind a node by `TreeSpeculativeSamplingTargetOnly`.

    One coin decides among all children: the first one up to which the target's probabilities add
    up to more than it. Where none does, a token is drawn from what the target has left.
    """
    drawn, left = np.zeros(len(target)), np.array(target, np.float64)
    reached, child = 0.0, int(links.next_token[node])
    while child != -1:
        token = int(tokens[child])
        share = min(1.0, reached + target[token]) - min(1.0, reached)
        drawn[token] += share
        reached, left[token] = reached + target[token], 0.0
        child = int(links.next_sibling[child])
    rest = max(0.0, 1.0 - reached)
    return drawn + (rest * left / left.sum() if left.sum() > 0 else 0.0)
