"""Draft trees to lay out, and what must come of them."""

import numpy as np

from decoder.plugins.experimental_sglang.corpus import lay_out, masks_of
from retriever.tree import ROOT, DraftTree, Source
from tests.decoder.plugins.experimental_sglang.tree_verification import Ints


def random_tree(random: np.random.Generator, max_nodes: int, num_tokens: int) -> DraftTree:
    """Of few tokens, so that trees are bushy; siblings differ."""
    tokens: list[int] = []
    parents: list[int] = []
    for _ in range(int(random.integers(0, max_nodes + 1))):
        parent, token = int(random.integers(-1, len(tokens))), int(random.integers(num_tokens))
        if (parent, token) not in zip(parents, tokens, strict=True):
            parents.append(parent)
            tokens.append(token)
    probabilities = np.linspace(1, 0.1, len(tokens))
    return DraftTree.checked(tokens, parents, probabilities, [Source.CONTEXT] * len(tokens))


def row_of(tree: DraftTree, last_token: int, width: int) -> tuple[Ints, Ints]:
    """int64[width], tokens; int64[width, width], mask."""
    tokens, parents = lay_out([tree], [last_token], width)
    return tokens[0], masks_of(parents)[0]


def greedy_path(tree: DraftTree, target: Ints) -> list[int]:
    """Which nodes a verifier must accept, node 0 being the root: children that were chosen."""
    path, found = [0], True
    while found:
        parent = path[-1] - 1 if path[-1] else ROOT
        children = np.flatnonzero(tree.parents == parent)
        chosen = children[tree.token_ids[children] == target[path[-1]]]
        found = len(chosen) > 0
        path += [int(node) + 1 for node in chosen]
    return path
