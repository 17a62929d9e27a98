"""What REST and the infinity-gram have in common: drafts of what followed the longest match."""

from dataclasses import dataclass

import numpy as np

from benchmarks.peers.counting import most_frequent
from benchmarks.peers.datastore import Datastore, continuations, longest_match
from decoder.contenders.sequence_drafter import SequenceDrafter
from retriever.drafter import TokenIds
from retriever.sequences import TokenSequence
from retriever.tree import DraftTree, Source


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


class LongestMatch(SequenceDrafter[TokenSequence]):
    """Drafts the most frequent of what followed the longest match.

    Args:
        datastore: where to look; the outputs of finished sequences join it.
        reading: how much is read.
    """

    def __init__(self, datastore: Datastore, reading: Reading) -> None:
        super().__init__()
        self.datastore = datastore
        self._reading = reading

    def _begin(self, prompt: TokenIds, *, remember: bool) -> TokenSequence:
        return TokenSequence(prompt, remember=remember)

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
        if state.remember:
            self.datastore.remember(state.output)
