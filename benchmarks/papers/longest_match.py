"""REST and the infini-gram: drafts of what followed the longest match, most frequent first.

REST (He et al. 2024, https://arxiv.org/abs/2311.08252): find the longest end of the sequence, of
`MAX_SPAN` tokens or fewer, that occurs in the datastore, read what followed each occurrence, and
draft the most frequent nodes of the trie of all that was read. The datastore is searched by suffix
array.

Where we are kinder than its reference (https://github.com/FasterDecoding/REST): of more than
`MAX_OCCURRENCES` occurrences it reads the lexicographically first, we an even sample; it needs a
match of two tokens, we of one; its cut of the tree to the budget may leave much of the budget
unused, ours fills it; the outputs of finished sequences join the datastore.

The infini-gram (Liu et al. 2024, https://arxiv.org/abs/2401.17377), made to draft: what follows the
longest end of the context that occurs in the corpus, of whatever length, is the distribution of the
next token. The layout: tokens of two bytes and a suffix array of `POINTER_BYTES` each, searched by
bisection from end to end; nothing else.

Where we are kinder than that paper: it gives one token's distribution, we read on after every
occurrence and draft the most frequent nodes, as REST's rule does; generations are searched, too;
all is in memory. Of more than `MAX_SUPPORT` occurrences we read an even sample, as its engine does
with `max_support`.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from benchmarks.papers.datastore import Datastore, continuations, longest_match
from benchmarks.papers.kernels.trie_counting import grow
from decoder.plugins.contenders.sequence_rule import SequenceRule
from indexer.reader import Index
from retriever.drafter import SequenceOptions, TokenIds
from retriever.sequences import TokenSequence
from retriever.tree import DraftTree, Source

MAX_SPAN: Final = 16
"""Longest match that REST looks for, in tokens."""

MAX_DEPTH: Final = 10
"""Tokens read after each occurrence."""

MAX_OCCURRENCES: Final = 5000
"""Occurrences that REST reads in each array."""

POINTER_BYTES: Final = 5
"""Of the infini-gram as published, for corpora of up to 2**40 bytes."""

MAX_SUPPORT: Final = 1000
"""Occurrences that the infini-gram reads, by its published engine's default."""

MAX_QUERY: Final = 500
"""Tokens of the context that the infini-gram looks for; its published engine's default."""


@dataclass(frozen=True, slots=True)
class Reading:
    """How much is looked for and read.

    Attributes:
        max_query: longest match that is looked for, in tokens.
        max_depth: tokens read after each occurrence.
        max_occurrences: occurrences read in each array; of more an even sample.
    """

    max_query: int
    max_depth: int
    max_occurrences: int


class LongestMatch(SequenceRule[TokenSequence]):
    """Drafts the most frequent of what followed the longest match.

    Args:
        datastore: where to look; the outputs of finished sequences join it.
        reading: how much is read.
    """

    def __init__(self, datastore: Datastore, reading: Reading) -> None:
        super().__init__()
        self.datastore = datastore
        self._reading = reading

    def _begin(self, prompt: TokenIds, options: SequenceOptions) -> TokenSequence:
        return TokenSequence(prompt, options=options)

    def _commit(self, state: TokenSequence, tokens: TokenIds) -> None:
        state.extend(tokens)

    def _propose(self, state: TokenSequence, budget: int) -> DraftTree:
        texts, reading = self.datastore.texts, self._reading
        query = state.tokens[-reading.max_query :]
        length = max(longest_match(text, query) for text in texts)
        if length == 0:
            return DraftTree.empty()
        pattern = query[len(query) - length :]
        rows = [
            continuations(text, pattern, reading.max_depth, reading.max_occurrences)
            for text in texts
        ]
        return most_frequent(np.concatenate(rows), budget, Source.CORPUS)

    def _end(self, state: TokenSequence) -> None:
        if state.options.remember:
            self.datastore.remember(state.output)


class Rest(LongestMatch):
    """Drafts what followed the longest match in indexes and outputs.

    Args:
        indexes: the datastore.
        outputs: int32[n] each, more of the datastore.
        depth: tokens to read after each occurrence.
    """

    def __init__(
        self, indexes: Sequence[Index], outputs: Sequence[TokenIds], depth: int = MAX_DEPTH
    ) -> None:
        super().__init__(Datastore(indexes, outputs), Reading(MAX_SPAN, depth, MAX_OCCURRENCES))


class InfiniGram(LongestMatch):
    """Drafts what followed the longest match, however long it is.

    Args:
        indexes: the corpus.
        outputs: int32[n] each, asked as well.
    """

    def __init__(self, indexes: Sequence[Index], outputs: Sequence[TokenIds]) -> None:
        datastore = Datastore(indexes, outputs, POINTER_BYTES)
        super().__init__(datastore, Reading(MAX_QUERY, MAX_DEPTH, MAX_SUPPORT))

    @property
    def num_bytes(self) -> int:
        """Size of the layout."""
        return sum(text.num_bytes for text in self.datastore.texts)


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
