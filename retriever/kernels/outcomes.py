"""What became of a draft, counted."""

import numpy as np
from numpy.typing import NDArray

from retriever.kernels.compiling import kernel


@kernel()
def count_outcome(
    token_ids: NDArray[np.int32],
    parents: NDArray[np.int32],
    sources: NDArray[np.uint8],
    tokens: NDArray[np.int32],
    counts: NDArray[np.int64],
) -> int:
    """Count the nodes of a tree, and those on the longest path that came true.

    Args:
        token_ids: int32[N], the tree's tokens.
        parents: int32[N], their parents, each before its children; -1 for the root.
        sources: uint8[N], which database spoke for each.
        tokens: int32[n], what came after the last committed token.
        counts: int64[2, sources], nodes and those that came true by source; updated.

    Returns:
        How many of the tokens the tree had.
    """
    node, depth = -1, 0
    for each in range(token_ids.shape[0]):
        counts[0, sources[each]] += 1
        if depth < tokens.shape[0] and parents[each] == node and token_ids[each] == tokens[depth]:
            counts[1, sources[each]] += 1
            node = each
            depth += 1
    return depth
