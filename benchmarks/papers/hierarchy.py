"""Hierarchy Drafting (Cho et al. 2025, https://arxiv.org/abs/2502.05609).

The rule: three databases hold short drafts by the token before them, and are asked in this order
until there are enough drafts.

- context-dependent: the n-grams of this sequence; of each token the least recently seen make room.
- model-dependent: the n-grams of the model's own outputs, the most frequent first.
- statistics-dependent: what followed the last two tokens in a corpus, then what followed the last
  one, the most frequent first.

The published settings are seven drafts of four tokens, 28 rows. Drafts that begin alike share nodes
in a tree, so we take drafts until the tree holds the budget, which is more drafts in as many rows,
and let each token keep as many drafts as could be needed.

Where we are kinder than the reference (https://github.com/zomss/Hierarchy_Drafting): it drafts the
oldest and least frequent first, we the newest and most frequent; every n-gram of the sequence
enters its database, not those of accepted drafts only; finished outputs join the model's. Where we
are poorer: the reference also enters n-grams that the model makes by parallel decoding, which a
recording does not hold.
"""

from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Final

import numpy as np

from benchmarks.papers.datastore import SortedText, continuations, texts_of
from decoder.plugins.contenders.sequence_rule import SequenceRule
from indexer.reader import Index
from retriever.drafter import SequenceOptions, TokenIds
from retriever.sequences import TokenSequence
from retriever.tree import ROOT, DraftTree, Source

DRAFT_TOKENS: Final = 4
"""Tokens of a draft, as published."""

MAX_OCCURRENCES: Final = 5000
"""Occurrences read in each segment of the corpus."""

Draft = tuple[int, ...]


class ContextSequence(TokenSequence):
    """A sequence with its context-dependent database.

    Args:
        prompt: int32[n], what the sequence begins with.
        draft_tokens: tokens of a draft.
        max_drafts: drafts that each token keeps.
        options: say whether its output may serve later sequences.
    """

    def __init__(
        self, prompt: TokenIds, draft_tokens: int, max_drafts: int, options: SequenceOptions
    ) -> None:
        self._draft_tokens = draft_tokens
        self._max_drafts = max_drafts
        self._drafts: dict[int, dict[Draft, None]] = {}
        super().__init__(prompt, options=options)
        self._enter_from(0)

    def commit(self, tokens: TokenIds) -> None:
        """Append int32[n]; the n-grams that they end enter the database."""
        begin = max(0, len(self) - self._draft_tokens)
        self.extend(tokens)
        self._enter_from(begin)

    def drafts(self) -> Iterator[Draft]:
        """Yield the drafts of the last token, the most recent first."""
        yield from reversed(self._drafts.get(int(self.tokens[-1]), {}))

    def _enter_from(self, begin: int) -> None:
        for key, draft in ngrams(self.tokens[begin:], self._draft_tokens):
            self._enter(key, draft)

    def _enter(self, key: int, draft: Draft) -> None:
        kept = self._drafts.setdefault(key, {})
        kept.pop(draft, None)
        kept[draft] = None
        if len(kept) > self._max_drafts:
            del kept[next(iter(kept))]


class ModelDatabase:
    """Drafts from outputs, by the token before them; a draft counts once for each output.

    Args:
        draft_tokens: tokens of a draft.
    """

    def __init__(self, draft_tokens: int) -> None:
        self._draft_tokens = draft_tokens
        self._counts: dict[int, Counter[Draft]] = {}
        self._ranked: dict[int, list[Draft]] = {}

    def add(self, output: TokenIds) -> None:
        """Add int32[n], one output."""
        for key, draft in dict.fromkeys(ngrams(output, self._draft_tokens)):
            self._counts.setdefault(key, Counter())[draft] += 1
            self._ranked.pop(key, None)

    def drafts(self, key: int) -> list[Draft]:
        """Return the drafts of a token, the most frequent first."""
        if key not in self._ranked:
            counts = self._counts.get(key, Counter[Draft]())
            self._ranked[key] = [draft for draft, _ in counts.most_common()]
        return self._ranked[key]


class StatisticsDatabase:
    """Drafts from a corpus by the last two tokens, then by the last; found once for each key.

    Args:
        texts: the corpus.
        draft_tokens: tokens of a draft.
        max_drafts: drafts that each key keeps.
    """

    def __init__(self, texts: Sequence[SortedText], draft_tokens: int, max_drafts: int) -> None:
        self._texts = texts
        self._draft_tokens = draft_tokens
        self._max_drafts = max_drafts
        self._found: dict[Draft, list[Draft]] = {}

    def drafts(self, last: TokenIds) -> Iterator[Draft]:
        """Yield drafts for the last tokens, int32[1 or 2]."""
        for begin in range(len(last)):
            key = tuple(last[begin:].tolist())
            if key not in self._found:
                self._found[key] = self._look_up(last[begin:])
            yield from self._found[key]

    def _look_up(self, pattern: TokenIds) -> list[Draft]:
        counts: Counter[Draft] = Counter()
        for text in self._texts:
            for draft, count in _counted(text, pattern, self._draft_tokens):
                counts[draft] += count
        return [draft for draft, _ in counts.most_common(self._max_drafts)]


class HierarchyDrafting(SequenceRule[ContextSequence]):
    """Asks the three databases in order until the tree is full.

    Args:
        indexes: of the statistics-dependent database.
        outputs: int32[n] each, of the model-dependent database.
        max_budget: most nodes of any tree.
        draft_tokens: tokens of a draft.
    """

    def __init__(
        self,
        indexes: Sequence[Index],
        outputs: Sequence[TokenIds],
        max_budget: int,
        draft_tokens: int = DRAFT_TOKENS,
    ) -> None:
        super().__init__()
        self._draft_tokens = draft_tokens
        self._max_budget = max_budget
        self._model = ModelDatabase(draft_tokens)
        for output in outputs:
            self._model.add(output)
        self._statistics = StatisticsDatabase(texts_of(indexes), draft_tokens, max_budget)

    def _begin(self, prompt: TokenIds, options: SequenceOptions) -> ContextSequence:
        return ContextSequence(prompt, self._draft_tokens, self._max_budget, options)

    def _commit(self, state: ContextSequence, tokens: TokenIds) -> None:
        state.commit(tokens)

    def _propose(self, state: ContextSequence, budget: int) -> DraftTree:
        tree = _Tree(budget)
        last = state.tokens[-2:]
        for source, drafts in (
            (Source.CONTEXT, state.drafts()),
            (Source.GENERATIONS, iter(self._model.drafts(int(last[-1])))),
            (Source.CORPUS, self._statistics.drafts(last)),
        ):
            for draft in drafts:
                if not tree.add(draft, source):
                    return tree.as_draft()
        return tree.as_draft()

    def _end(self, state: ContextSequence) -> None:
        if state.options.remember:
            self._model.add(state.output)


class _Tree:
    """A tree in the making, of at most `budget` nodes."""

    def __init__(self, budget: int) -> None:
        self._budget = budget
        self._nodes: dict[tuple[int, int], int] = {}
        self._sources: list[int] = []

    def add(self, draft: Draft, source: Source) -> bool:
        """Add as much of a draft as there is room for; return whether there is more room."""
        node: int = ROOT
        for token in draft:
            child = self._nodes.get((node, token))
            if child is None:
                if len(self._nodes) == self._budget:
                    return False
                child = self._nodes[node, token] = len(self._nodes)
                self._sources.append(int(source))
            node = child
        return len(self._nodes) < self._budget

    def as_draft(self) -> DraftTree:
        pairs = np.array(list(self._nodes), np.int32).reshape(-1, 2)
        ones = np.ones(len(pairs), np.float32)
        return DraftTree(pairs[:, 1], pairs[:, 0], ones, np.array(self._sources, np.uint8))


def ngrams(tokens: TokenIds, draft_tokens: int) -> Iterator[tuple[int, Draft]]:
    """Yield each token of int32[n] with the `draft_tokens` that follow it, where so many do."""
    listed = tokens.tolist()
    for begin in range(len(listed) - draft_tokens):
        yield listed[begin], tuple(listed[begin + 1 : begin + 1 + draft_tokens])


def _counted(text: SortedText, pattern: TokenIds, draft_tokens: int) -> Iterator[tuple[Draft, int]]:
    """Yield what followed a pattern, and how often; rows stand sorted, so that equal ones meet."""
    rows = continuations(text, pattern, draft_tokens, MAX_OCCURRENCES)
    if len(rows) == 0:
        return
    changes = np.flatnonzero(np.any(rows[1:] != rows[:-1], axis=1)) + 1
    firsts = np.concatenate([[0], changes])
    counts = np.diff(np.append(firsts, len(rows)))
    for row, count in zip(rows[firsts].tolist(), counts.tolist(), strict=True):
        draft = tuple(token for token in row if token >= 0)
        if draft:
            yield draft, count
