"""The most frequent nodes of the trie of many continuations."""

import numpy as np
from numpy.typing import NDArray

from benchmarks.peers.kernels.peer_counting import grow
from retriever.tree import DraftTree, Source


def most_frequent(rows: NDArray[np.int32], budget: int, source: Source) -> DraftTree:
    """Return the nodes of the rows' trie that most rows pass through.

    Of equally frequent nodes those nearer to the root come first.

    Args:
        rows: int32[n, depth], continuations, filled up with `END`.
        budget: most nodes.
        source: what the nodes are marked with.
    """
    token_ids, parents = np.empty(budget, np.int32), np.empty(budget, np.int32)
    shares = np.empty(budget, np.float32)
    size = grow(rows, token_ids, parents, shares)
    sources = np.full(size, int(source), np.uint8)
    return DraftTree(token_ids[:size], parents[:size], shares[:size], sources)
