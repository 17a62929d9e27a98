"""SAM-Decoding (Hu et al. 2024, https://arxiv.org/abs/2411.10666), without a draft model.

The rule (https://github.com/hyx1999/SAM-Decoding): a suffix automaton of this sequence gives the
longest end of it that occurred before, and one of earlier texts the longest end that occurs there.
The sequence speaks unless the other match is more than `LENGTH_BIAS` tokens longer. The draft is
what followed the first occurrence.

Instead of automata we scan the sequence and search the texts by suffix array: slower, and the
answers are the same. Where we are kinder than the reference: its drafts have a fixed length, ours
fill the budget; finished outputs join the texts. What it does with a draft model where matches are
short is left out, as for all peers.
"""

from collections.abc import Sequence
from typing import Final

from benchmarks.papers.datastore import Datastore, continuation, first_occurrence, longest_match
from decoder.plugins.contenders.prompt_lookup import longest_repeat
from decoder.plugins.contenders.sequence_rule import SequenceRule, chain
from indexer.reader import Index
from retriever.drafter import SequenceOptions, TokenIds
from retriever.sequences import TokenSequence
from retriever.tree import DraftTree, Source

LENGTH_BIAS: Final = 0
"""By how many tokens a match elsewhere must be longer than one in the sequence to be preferred; the
reference has 5 with a draft model, but without one 0 drafts better, on chat and on code edits."""

MAX_MATCH: Final = 512
"""Longest match that is told from longer ones, in tokens."""


class SamDecoding(SequenceRule[TokenSequence]):
    """Drafts one path from the sequence or from earlier texts, after the longer match.

    Args:
        indexes: earlier texts.
        outputs: int32[n] each, more of them.
        length_bias: see `LENGTH_BIAS`.
    """

    def __init__(
        self,
        indexes: Sequence[Index],
        outputs: Sequence[TokenIds],
        length_bias: int = LENGTH_BIAS,
    ) -> None:
        super().__init__()
        self._bias = length_bias
        self._datastore = Datastore(indexes, outputs)

    def _begin(self, prompt: TokenIds, options: SequenceOptions) -> TokenSequence:
        return TokenSequence(prompt, options=options)

    def _commit(self, state: TokenSequence, tokens: TokenIds) -> None:
        state.extend(tokens)

    def _propose(self, state: TokenSequence, budget: int) -> DraftTree:
        own, end = longest_repeat(state.tokens, MAX_MATCH)
        query = state.tokens[-MAX_MATCH:]
        lengths = [longest_match(text, query) for text in self._datastore.texts]
        longest = max(lengths)
        if longest - self._bias <= own:
            return chain(state.tokens[end : end + budget], Source.CONTEXT)
        text = self._datastore.texts[lengths.index(longest)]
        begin = first_occurrence(text, query[len(query) - longest :]) + longest
        return chain(continuation(text, begin, budget), Source.CORPUS)

    def _end(self, state: TokenSequence) -> None:
        if state.options.remember:
            self._datastore.remember(state.output)
