"""Similarity of the text before an occurrence to the recent context."""

from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from retriever.kernels.compiling import kernel
from retriever.kernels.layout import RECENT_SIZE

WINDOW: Final = 16
"""Number of tokens compared before an occurrence."""


@kernel()
def mark_recent(
    query: NDArray[np.int32],
    rarity: NDArray[np.float32],
    recent: NDArray[np.float32],
    marked: NDArray[np.int32],
) -> None:
    """Write the rarity of the context's last tokens, replacing those of the previous call.

    Args:
        query: int32[q], the last tokens, at most MAX_MATCH.
        rarity: float32[vocabulary]; tokens beyond it get 0.5.
        recent: float32[RECENT_SIZE], updated.
        marked: int32[MAX_MATCH], the tokens of the previous call; updated.
    """
    for token in marked:
        recent[token & (RECENT_SIZE - 1)] = 0.0
    for index, token in enumerate(query):
        marked[index] = token
        known = token < rarity.shape[0]
        recent[token & (RECENT_SIZE - 1)] = rarity[token] if known else np.float32(0.5)


@kernel()
def similarity_of(
    tokens: NDArray[Any],
    mask: int,
    end: int,
    oldest: int,
    separator: int,
    recent: NDArray[np.float32],
) -> float:
    """Return the similarity of the text before an occurrence to the recent context.

    We take the last 16 tokens before the occurrence, and sum the rarity of those that are also in
    the context.

    Args:
        tokens: integers[capacity], a ring or, with a mask of -1, an array.
        mask: capacity less one, or -1.
        end: position after the last token to compare.
        oldest: position of the first token that may be read.
        separator: token between documents.
        recent: float32[RECENT_SIZE], rarity of the context's last tokens by id.

    Returns:
        1 or more: the square of one plus the sum, so that a few rare tokens weigh heavily.
    """
    overlap = np.float32(1.0)
    for position in range(end - 1, max(oldest, end - WINDOW) - 1, -1):
        token = np.int64(tokens[position & mask])
        if token == separator:
            break
        overlap += recent[token & (RECENT_SIZE - 1)]
    return overlap * overlap
