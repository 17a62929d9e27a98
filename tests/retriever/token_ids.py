"""Token ids as drafters take them."""

import numpy as np

from retriever.drafter import TokenIds


def ids(*tokens: int) -> TokenIds:
    return np.array(tokens, np.int32)
