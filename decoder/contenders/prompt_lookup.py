"""Prompt lookup, as transformers has it.

The rule of `PromptLookupCandidateGenerator` (transformers, `generation/candidate_generator.py`;
Saxena 2023, https://github.com/apoorvumang/prompt-lookup-decoding): take the last n tokens of the
sequence, n falling from `max_matching_ngram_size` to 1, find their first occurrence in the sequence
from the left that is followed by anything, and draft what followed.
"""

from typing import Final

from decoder.contenders.kernels.scanning import longest_repeat
from decoder.contenders.sequence_drafter import SequenceDrafter, chain
from retriever.drafter import TokenIds
from retriever.sequences import TokenSequence
from retriever.tree import DraftTree, Source

MAX_MATCHING_NGRAM_SIZE: Final = 32
"""The default of transformers is 2; more is better at copying and no worse elsewhere."""


class PromptLookup(SequenceDrafter[TokenSequence]):
    """Drafts one path from the sequence itself, as long as the budget allows.

    Args:
        max_matching_ngram_size: longest end of the sequence to look for, in tokens.
    """

    def __init__(self, max_matching_ngram_size: int = MAX_MATCHING_NGRAM_SIZE) -> None:
        super().__init__()
        self._max_size = max_matching_ngram_size

    def _begin(self, prompt: TokenIds, *, remember: bool) -> TokenSequence:
        return TokenSequence(prompt, remember=remember)

    def _commit(self, state: TokenSequence, tokens: TokenIds) -> None:
        state.extend(tokens)

    def _propose(self, state: TokenSequence, budget: int) -> DraftTree:
        _, start = longest_repeat(state.tokens, self._max_size)
        return chain(state.tokens[start : start + budget], Source.CONTEXT)

    def _end(self, state: TokenSequence) -> None:
        """Remember nothing: each sequence is drafted from itself."""
