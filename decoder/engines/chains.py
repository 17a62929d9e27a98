"""Chains for engines that verify no trees."""

import numpy as np

from retriever.tree import DraftTree


def chain_for(tree: DraftTree, max_tokens: int, model_vocabulary: int) -> DraftTree:
    """Return the best chain of a tree, up to the first token that a model does not have.

    Args:
        tree: a draft.
        max_tokens: most tokens of the chain.
        model_vocabulary: how many tokens the model has; an engine may end at any other.
    """
    chain = tree.best_chain(max_tokens)
    unknown = np.flatnonzero((chain.token_ids < 0) | (chain.token_ids >= model_vocabulary))
    return chain.prefix(int(unknown[0])) if len(unknown) else chain
