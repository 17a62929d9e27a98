"""Prompt lookup, as in transformers.

This is the rule of `PromptLookupCandidateGenerator` (transformers,
`generation/candidate_generator.py`; Saxena 2023,
https://github.com/apoorvumang/prompt-lookup-decoding). It takes the last n tokens of the sequence,
with n decreasing from `max_matching_ngram_size` to 1. It finds their leftmost earlier occurrence in
the sequence, and drafts the tokens that followed it.
"""

from typing import Any, Final

from numpy.typing import NDArray

from decoder.plugins.contenders.sequence_rule import SequenceRule, chain
from retriever.drafter import SequenceOptions, TokenIds
from retriever.kernels.compiling import kernel
from retriever.sequences import TokenSequence
from retriever.tree import DraftTree, Source

MAX_MATCHING_NGRAM_SIZE: Final = 32
"""Longest suffix to search for. The default of transformers is 2; a larger value drafts better in
copied text, and no worse in other text."""


class PromptLookup(SequenceRule[TokenSequence]):
    """Drafts one path from the sequence itself, up to the budget.

    Args:
        max_matching_ngram_size: longest suffix of the sequence to search for, in tokens.
    """

    def __init__(self, max_matching_ngram_size: int = MAX_MATCHING_NGRAM_SIZE) -> None:
        super().__init__()
        self._max_size = max_matching_ngram_size

    def _begin(self, prompt: TokenIds, options: SequenceOptions) -> TokenSequence:
        return TokenSequence(prompt, options=options)

    def _commit(self, state: TokenSequence, tokens: TokenIds) -> None:
        state.extend(tokens)

    def _propose(self, state: TokenSequence, budget: int) -> DraftTree:
        _, start = longest_repeat(state.tokens, self._max_size)
        return chain(state.tokens[start : start + budget], Source.CONTEXT)

    def _end(self, state: TokenSequence) -> None:
        """Store nothing: drafts come only from the sequence itself."""


@kernel(allocates=True)
def longest_repeat(tokens: NDArray[Any], max_length: int) -> tuple[int, int]:
    """Find the longest suffix of a sequence that also occurred earlier.

    Args:
        tokens: int32[n], the sequence.
        max_length: length of the longest suffix to search for.

    Returns:
        The length of the suffix, and the position after its first occurrence; 0 and n if there is
        no such suffix.
    """
    total = len(tokens)
    best, best_end = 0, total
    for end in range(1, total):
        length, most = 0, min(end, max_length)
        while length < most and tokens[end - 1 - length] == tokens[total - 1 - length]:
            length += 1
        if length > best:
            best, best_end = length, end
    return best, best_end
