"""Trees of drafts."""

import numpy as np

from retriever.tree import DraftTree, Source


def chain(*tokens: int) -> DraftTree:
    size = len(tokens)
    probabilities = np.linspace(0.9, 0.1, size)
    return DraftTree.checked(
        tokens, np.arange(-1, size - 1), probabilities, [Source.CONTEXT] * size
    )
