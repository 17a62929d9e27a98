"""Token Recycling (Luo et al. 2024, https://arxiv.org/abs/2408.08696).

The rule: a matrix holds for each token of the vocabulary the eight likeliest tokens after it, by
the target's logits where it was last seen, in drafts that were rejected too. From the last token a
tree of fixed shape is read off the matrix, 80 nodes to a depth of six: a node's k-th child is the
k-th of its token's row. The matrix is kept from sequence to sequence.

Where we depart from the reference (https://github.com/Luowaterbi/TokenRecycling): its shape has 80
nodes and no other size; of smaller budgets we take the nodes that are likeliest by the ranks on
their paths (`SHARES`), of larger ones no more than 80. Where a token occurs several times in a
pass, the row of the last one is kept, by chance there. The prompt's own rows are not seen, but its
last one.
"""

from typing import Final

import numpy as np
from numpy.typing import NDArray

from decoder.drafters.following import Verified
from decoder.drafters.recycling import likeliest
from decoder.plugins.contenders.sequence_rule import SequenceRule
from retriever.drafter import SequenceOptions, TokenIds
from retriever.sequences import TokenSequence
from retriever.tree import ROOT, DraftTree, Source

NUM_KEPT: Final = 8
"""Tokens that are kept after each token, as published."""

SHARES: Final = (0.36, 0.11, 0.06, 0.04, 0.03, 0.02, 0.02, 0.01)
"""A rough guess of how often the token of each rank comes. It orders the shape's nodes for smaller
budgets, and a measured budget begins with it; published is the shape alone."""

_CHILDREN: Final[tuple[dict[tuple[int, ...], int], ...]] = (
    {(): 8},
    dict(zip([(rank,) for rank in range(8)], (8, 4, 3, 2, 1, 1, 1, 1), strict=True)),
    {
        **dict(zip([(0, rank) for rank in range(8)], (8, 3, 2, 1, 1, 1, 1, 1), strict=True)),
        (1, 0): 2,
        (1, 1): 1,
        (2, 0): 1,
        (3, 0): 1,
        (4, 0): 1,
        (5, 0): 1,
    },
    {
        **dict(zip([(0, 0, rank) for rank in range(5)], (5, 2, 1, 1, 1), strict=True)),
        **dict.fromkeys([(0, 1, 0), (0, 2, 0), (1, 0, 0), (2, 0, 0), (3, 0, 0)], 1),
    },
    {
        (0, 0, 0, 0): 3,
        **dict.fromkeys([(0, 0, 0, 1), (0, 0, 0, 2), (0, 0, 1, 0), (0, 1, 0, 0), (1, 0, 0, 0)], 1),
    },
    {(0, 0, 0, 0, 0): 2, (0, 0, 0, 1, 0): 1},
)
"""The published shape: how many children each inner node has, by the ranks on its path."""

_NONE: Final = -1


class TokenRecycling(SequenceRule[TokenSequence]):
    """Drafts a tree of fixed shape from the likeliest tokens last seen after each token.

    Args:
        vocabulary_size: of the target.
    """

    def __init__(self, vocabulary_size: int) -> None:
        super().__init__()
        self._matrix = np.full((vocabulary_size, NUM_KEPT), _NONE, np.int32)
        self._parents, self._ranks, self._probabilities = _shape()

    def learn(self, session: str, verified: Verified) -> None:  # noqa: ARG002  one matrix for all
        """Keep the likeliest tokens of each row of a pass under the row's own token."""
        columns, _ = likeliest(verified.logits, min(NUM_KEPT, verified.logits.shape[-1]))
        rows = np.concatenate([[verified.last_token], verified.tree.token_ids])
        self._matrix[rows, : columns.shape[1]] = columns

    def _begin(self, prompt: TokenIds, options: SequenceOptions) -> TokenSequence:
        return TokenSequence(prompt, options=options)

    def _commit(self, state: TokenSequence, tokens: TokenIds) -> None:
        state.extend(tokens)

    def _propose(self, state: TokenSequence, budget: int) -> DraftTree:
        size = min(budget, len(self._parents))
        tokens = np.full(size + 1, _NONE, np.int32)
        tokens[ROOT] = state.tokens[-1]  # the last place stands for the root
        for node in range(size):
            token = tokens[self._parents[node]]
            tokens[node] = self._matrix[token, self._ranks[node]] if token != _NONE else _NONE
        whole = DraftTree(
            tokens[:size],
            self._parents[:size],
            self._probabilities[:size],
            np.full(size, int(Source.MODEL), np.uint8),
        )
        return whole.among(tokens[:size] != _NONE)

    def _end(self, state: TokenSequence) -> None:
        """Remember nothing but the matrix."""


def _shape() -> tuple[NDArray[np.int32], NDArray[np.int32], NDArray[np.float32]]:
    """Return parents, ranks and probabilities of the shape's nodes, the likeliest first."""
    paths = [
        (*parent, rank)
        for level in _CHILDREN
        for parent, num_children in level.items()
        for rank in range(num_children)
    ]
    probability = {path: float(np.prod([SHARES[rank] for rank in path])) for path in paths}
    paths.sort(key=lambda path: -probability[path])
    place = {path: number for number, path in enumerate(paths)} | {(): ROOT}
    return (
        np.array([place[path[:-1]] for path in paths], np.int32),
        np.array([path[-1] for path in paths], np.int32),
        np.array([probability[path] for path in paths], np.float32),
    )
