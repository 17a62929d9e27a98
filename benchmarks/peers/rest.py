"""REST: retrieval-based speculative decoding (He et al. 2024, https://arxiv.org/abs/2311.08252).

The rule: find the longest end of the sequence, of `MAX_SPAN` tokens or fewer, that occurs in the
datastore, read what followed each occurrence, and draft the most frequent nodes of the trie of all
that was read. The datastore is searched by suffix array.

Where we are kinder than the reference (https://github.com/FasterDecoding/REST): of more than
`MAX_OCCURRENCES` occurrences it reads the lexicographically first, we an even sample; it needs a
match of two tokens, we of one; its cut of the tree to the budget may leave much of the budget
unused, ours fills it; the outputs of finished sequences join the datastore.
"""

from collections.abc import Sequence
from typing import Final

import numpy as np

from benchmarks.peers.counting import most_frequent
from benchmarks.peers.datastore import (
    Datastore,
    continuations,
    longest_match,
)
from benchmarks.peers.sequences import SequenceDrafter, TokenSequence
from indexer.reader import Index
from retriever.drafter import TokenIds
from retriever.tree import DraftTree, Source

MAX_SPAN: Final = 16
"""Longest match that is looked for, in tokens."""

MAX_DEPTH: Final = 10
"""Tokens read after each occurrence."""

MAX_OCCURRENCES: Final = 5000
"""Occurrences read in each array."""


class Rest(SequenceDrafter[TokenSequence]):
    """Drafts what followed the longest match in indexes and outputs.

    Args:
        indexes: the datastore.
        outputs: int32[n] each, more of the datastore.
        depth: tokens to read after each occurrence.
    """

    def __init__(
        self, indexes: Sequence[Index], outputs: Sequence[TokenIds], depth: int = MAX_DEPTH
    ) -> None:
        super().__init__()
        self._depth = depth
        self._datastore = Datastore(indexes, outputs)

    def _begin(self, prompt: TokenIds, *, remember: bool) -> TokenSequence:
        return TokenSequence(prompt, remember=remember)

    def _commit(self, state: TokenSequence, tokens: TokenIds) -> None:
        state.append(tokens)

    def _propose(self, state: TokenSequence, budget: int) -> DraftTree:
        texts = self._datastore.texts
        query = state.tokens[-MAX_SPAN:]
        length = max(longest_match(text, query) for text in texts)
        if length == 0:
            return DraftTree.empty()
        pattern = query[len(query) - length :]
        rows = np.concatenate(
            [continuations(text, pattern, self._depth, MAX_OCCURRENCES) for text in texts]
        )
        return most_frequent(rows, budget, Source.CORPUS)

    def _end(self, state: TokenSequence) -> None:
        if state.remember:
            self._datastore.remember(state.output)
