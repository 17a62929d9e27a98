"""SuffixDecoding (Oliaro et al. 2025, https://arxiv.org/abs/2411.04975), as Snowflake ships it.

The rule of `SuffixDecodingCache` (https://github.com/snowflakedb/ArcticInference): two suffix trees
of depth 64 count occurrences, one of the prompt and output of this sequence, one of all outputs,
this one included. For every length of match, from 1 to the longest, each tree is asked for a draft
of up to `max_spec_factor * length + max_spec_offset` tokens: a tree, the most probable node first,
or the path of the most frequent children; a node's probability is its count by that of the node
where the match ends. The draft with the highest sum of probabilities is made.

Where we are kinder than the reference: of equally probable nodes those nearer to the root come
first, which drafts better than its order; documents of an index join the outputs.

The reference keeps its trees minimal, ours does not merge nodes as a sequence grows: counts are the
same, but after long matches its drafts take a fraction of our time.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from benchmarks.papers.kernels.speculation import speculate
from benchmarks.papers.suffix_tree import OpenSequence, SuffixTree
from decoder.plugins.contenders.sequence_rule import SequenceRule
from indexer.reader import Index
from retriever.drafter import SequenceOptions, TokenIds
from retriever.sequences import TokenSequence
from retriever.tree import DraftTree, Source

MAX_DEPTH: Final = 64
"""Depth of the trees, in tokens."""


@dataclass(frozen=True, slots=True)
class Settings:
    """What `SuffixDecodingCache.speculate` is asked with; its own defaults are 1, 0 and 0.1.

    Attributes:
        max_spec_factor: nodes of a draft for each token of the match.
        max_spec_offset: nodes beyond those.
        min_token_prob: less probable nodes are left out.
        use_tree_spec: draft a tree and not a path.
    """

    max_spec_factor: float = 1.0
    max_spec_offset: float = 0.0
    min_token_prob: float = 0.1
    use_tree_spec: bool = False


BEST_TREE: Final = Settings(0.0, float(1 << 20), 0.01, use_tree_spec=True)
"""The best of a search on chat and code edits: drafts fill the budget after any match."""

BEST_PATH: Final = Settings(0.0, float(1 << 20), 0.01, use_tree_spec=False)
"""Likewise, for paths."""


class SuffixSequence(TokenSequence):
    """A sequence with its own tree, and its places in both trees.

    Args:
        prompt: int32[n], what the sequence begins with.
        shared: the tree of all outputs.
        options: say whether its output enters that tree.
    """

    def __init__(self, prompt: TokenIds, shared: SuffixTree, options: SequenceOptions) -> None:
        super().__init__(prompt, options=options)
        self.tree = SuffixTree(MAX_DEPTH)
        self._shared = shared
        self._own_end = self.tree.begin(prompt)
        self._shared_end = OpenSequence(np.zeros(MAX_DEPTH, np.int32))

    def commit(self, tokens: TokenIds) -> None:
        """Append int32[n] to both trees."""
        self.extend(tokens)
        self.tree.append(self._own_end, tokens)
        if self.options.remember:
            self._shared.append(self._shared_end, tokens)


class SuffixDecoding(SequenceRule[SuffixSequence]):
    """Drafts the better of two trees' best drafts.

    Args:
        outputs: int32[n] each, what the shared tree begins with.
        max_budget: most nodes of any tree.
        settings: how to speculate.
    """

    def __init__(self, outputs: Iterable[TokenIds], max_budget: int, settings: Settings) -> None:
        super().__init__()
        self._settings = settings
        self._shared = SuffixTree(MAX_DEPTH)
        self._shared.add_all(outputs)
        self._token_ids = np.empty((2, max_budget), np.int32)
        self._parents = np.empty((2, max_budget), np.int32)
        self._probabilities = np.empty((2, max_budget), np.float32)

    def _begin(self, prompt: TokenIds, options: SequenceOptions) -> SuffixSequence:
        return SuffixSequence(prompt, self._shared, options)

    def _commit(self, state: SuffixSequence, tokens: TokenIds) -> None:
        state.commit(tokens)

    def _propose(self, state: SuffixSequence, budget: int) -> DraftTree:
        own, own_score = self._speculate(state.tree, state, budget, Source.CONTEXT)
        shared, score = self._speculate(self._shared, state, budget, Source.GENERATIONS)
        return own if own_score >= score else shared

    def _speculate(
        self, tree: SuffixTree, state: SuffixSequence, budget: int, source: Source
    ) -> tuple[DraftTree, float]:
        size, score = speculate(
            tree.nodes,
            tree.text,
            tree.keys,
            tree.children,
            state.tokens[-MAX_DEPTH:],
            budget,
            self._settings.max_spec_factor,
            self._settings.max_spec_offset,
            self._settings.min_token_prob,
            self._settings.use_tree_spec,
            self._token_ids,
            self._parents,
            self._probabilities,
        )
        draft = DraftTree(
            self._token_ids[0, :size].copy(),
            self._parents[0, :size].copy(),
            self._probabilities[0, :size].copy(),
            np.full(size, int(source), np.uint8),
        )
        return draft, score

    def _end(self, state: SuffixSequence) -> None:
        """The output is in the shared tree already."""


def documents_of(indexes: Sequence[Index]) -> Iterator[TokenIds]:
    """Yield the documents of indexes, int32[n] each."""
    for index in indexes:
        for segment in index.segments:
            separator = np.iinfo(segment.tokens.dtype).max
            begin = 0
            for end in np.flatnonzero(segment.tokens == separator).tolist():
                yield segment.tokens[begin:end].astype(np.int32)
                begin = end + 1
