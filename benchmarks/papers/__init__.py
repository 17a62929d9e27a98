"""Our own readings of drafting rules that others publish, behind the `Drafter` protocol.

They are readings of rules and not the programs of their authors: what a draft costs in microseconds
is what our reading of it costs. Each module says where its rule stands, and where ours is kinder to
it. Nodes of rules that give no probabilities bear 1.

`DRAFTERS` has the rules that draft from texts alone: they need no model and load no torch. In a
checkout `foredraft replay --drafter NAME` and `foredraft estimate --drafter NAME` find them, and
`foredraft bench --contender NAME` finds those of `contenders.py`.
"""

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Final

from benchmarks.papers.hierarchy import HierarchyDrafting
from benchmarks.papers.longest_match import InfiniGram, Rest
from benchmarks.papers.sam_decoding import SamDecoding
from benchmarks.papers.suffix_decoding import (
    BEST_PATH,
    BEST_TREE,
    Settings,
    SuffixDecoding,
    documents_of,
)
from decoder.plugins.contenders.drafting_rules import PublishedRule
from indexer.reader import Index
from retriever.drafter import TokenIds


def _rest(indexes: Sequence[Index], outputs: Sequence[TokenIds], _max_nodes: int) -> Rest:
    return Rest(indexes, outputs)


def _infini_gram(
    indexes: Sequence[Index], outputs: Sequence[TokenIds], _max_nodes: int
) -> InfiniGram:
    return InfiniGram(indexes, outputs)


def _sam(indexes: Sequence[Index], outputs: Sequence[TokenIds], _max_nodes: int) -> SamDecoding:
    return SamDecoding(indexes, outputs)


def _suffix(
    indexes: Sequence[Index], outputs: Sequence[TokenIds], max_nodes: int, *, settings: Settings
) -> SuffixDecoding:
    return SuffixDecoding([*documents_of(indexes), *outputs], max_nodes, settings)


DRAFTERS: Final[Mapping[str, PublishedRule]] = {
    "rest": PublishedRule(
        "REST: the commonest of what followed the longest match in --index and earlier answers",
        "arXiv:2311.08252",
        _rest,
    ),
    "hd": PublishedRule(
        "Hierarchy Drafting: drafts of 4 tokens from the context, the model's answers and --index",
        "arXiv:2502.05609",
        HierarchyDrafting,
    ),
    "hd-3": PublishedRule(
        "the same with drafts of 3 tokens, better on chat",
        "arXiv:2502.05609",
        partial(HierarchyDrafting, draft_tokens=3),
    ),
    "hd-16": PublishedRule(
        "the same with drafts of 16 tokens, better on edits",
        "arXiv:2502.05609",
        partial(HierarchyDrafting, draft_tokens=16),
    ),
    "suffix": PublishedRule(
        "SuffixDecoding: the better tree of this sequence's suffix tree and that of all answers",
        "arXiv:2411.04975",
        partial(_suffix, settings=BEST_TREE),
    ),
    "suffix-path": PublishedRule(
        "the same, a path of the commonest children",
        "arXiv:2411.04975",
        partial(_suffix, settings=BEST_PATH),
    ),
    "sam": PublishedRule(
        "SAM-Decoding without a draft model: what followed the longest match anywhere, a path",
        "arXiv:2411.10666",
        _sam,
    ),
    "infini-gram": PublishedRule(
        "what followed the longest match of whatever length in --index and earlier answers",
        "arXiv:2401.17377",
        _infini_gram,
    ),
}
"""Rules by the names that commands take."""
