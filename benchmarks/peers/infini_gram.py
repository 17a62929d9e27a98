"""The infinity-gram (Liu et al. 2024, https://arxiv.org/abs/2401.17377), made to draft.

The rule: what follows the longest end of the context that occurs in the corpus, of whatever length,
is the distribution of the next token. The layout: tokens of two bytes and a suffix array of
`POINTER_BYTES` each, searched by bisection from end to end; nothing else.

Where we are kinder than the paper: it gives one token's distribution, we read on after every
occurrence and draft the most frequent nodes, as REST's rule does; generations are searched, too;
all is in memory. Of more than `MAX_OCCURRENCES` occurrences we read an even sample, as its engine
does with `max_support`.
"""

from collections.abc import Sequence
from typing import Final

from benchmarks.peers.datastore import Datastore
from benchmarks.peers.longest_match import LongestMatch, Reading
from indexer.reader import Index
from retriever.drafter import TokenIds

POINTER_BYTES: Final = 5
"""As published, for corpora of up to 2**40 bytes."""

MAX_OCCURRENCES: Final = 1000
"""The published engine's default support."""

MAX_DEPTH: Final = 10
"""Tokens read after each occurrence."""

MAX_QUERY: Final = 500
"""Tokens of the context that are looked for; the published engine's default."""


class InfiniGram(LongestMatch):
    """Drafts what followed the longest match, however long it is.

    Args:
        indexes: the corpus.
        outputs: int32[n] each, asked as well.
    """

    def __init__(self, indexes: Sequence[Index], outputs: Sequence[TokenIds]) -> None:
        datastore = Datastore(indexes, outputs, POINTER_BYTES)
        super().__init__(datastore, Reading(MAX_QUERY, MAX_DEPTH, MAX_OCCURRENCES))

    @property
    def num_bytes(self) -> int:
        """Size of the layout."""
        return sum(text.num_bytes for text in self.datastore.texts)
