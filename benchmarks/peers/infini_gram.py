"""The infinity-gram (Liu et al. 2024, https://arxiv.org/abs/2401.17377), made to draft.

The rule: what follows the longest end of the context that occurs in the corpus, of whatever length,
is the distribution of the next token. The layout: tokens of two bytes and a suffix array of
`POINTER_BYTES` each, searched by bisection from end to end; nothing beside them.

Where we are kinder than the paper: it gives one token's distribution, we read on after every
occurrence and draft the most frequent nodes, as REST's rule does; recent outputs are asked too; all
is in memory. Of more than `MAX_OCCURRENCES` occurrences we read an even sample, as its engine does
with `max_support`.
"""

from collections.abc import Sequence
from typing import Final

import numpy as np

from benchmarks.peers.counting import most_frequent
from benchmarks.peers.datastore import continuations, longest_match, sorted_text, texts_of
from benchmarks.peers.sequences import SequenceDrafter, TokenSequence
from indexer.reader import Index
from retriever.drafter import TokenIds
from retriever.tree import DraftTree, Source

POINTER_BYTES: Final = 5
"""As published, for corpora of up to 2**40 bytes."""

MAX_OCCURRENCES: Final = 1000
"""The published engine's default support."""

MAX_DEPTH: Final = 10
"""Tokens read after each occurrence."""

MAX_QUERY: Final = 500
"""Tokens of the context that are looked for; the published engine's default."""


class InfiniGram(SequenceDrafter[TokenSequence]):
    """Drafts what followed the longest match, however long it is.

    Args:
        indexes: the corpus.
        outputs: int32[n] each, asked as well.
    """

    def __init__(self, indexes: Sequence[Index], outputs: Sequence[TokenIds]) -> None:
        super().__init__()
        self._outputs = [*outputs]
        self._corpus = [text.packed(POINTER_BYTES) for text in texts_of(indexes)]
        self._sort_outputs()

    @property
    def num_bytes(self) -> int:
        """Size of the layout."""
        return sum(text.num_bytes for text in self._texts)

    def _begin(self, prompt: TokenIds, *, remember: bool) -> TokenSequence:
        return TokenSequence(prompt, remember=remember)

    def _commit(self, state: TokenSequence, tokens: TokenIds) -> None:
        state.append(tokens)

    def _propose(self, state: TokenSequence, budget: int) -> DraftTree:
        query = state.tokens[-MAX_QUERY:]
        length = max(longest_match(text, query) for text in self._texts)
        if length == 0:
            return DraftTree.empty()
        pattern = query[len(query) - length :]
        rows = [continuations(text, pattern, MAX_DEPTH, MAX_OCCURRENCES) for text in self._texts]
        return most_frequent(np.concatenate(rows), budget, Source.CORPUS)

    def _end(self, state: TokenSequence) -> None:
        if state.remember:
            self._outputs.append(state.output.copy())
            self._sort_outputs()

    def _sort_outputs(self) -> None:
        """Build the layout of the outputs anew: it cannot grow."""
        self._texts = [sorted_text(self._outputs).packed(POINTER_BYTES), *self._corpus]
