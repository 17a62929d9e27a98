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

from benchmarks.peers.datastore import Datastore
from benchmarks.peers.longest_match import LongestMatch, Reading
from indexer.reader import Index
from retriever.drafter import TokenIds

MAX_SPAN: Final = 16
"""Longest match that is looked for, in tokens."""

MAX_DEPTH: Final = 10
"""Tokens read after each occurrence."""

MAX_OCCURRENCES: Final = 5000
"""Occurrences read in each array."""


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
