"""Our own readings of drafting rules that others ship or publish, behind our `Drafter` protocol.

They are here to be replayed on the same recordings at the same budget of nodes. They are readings
of rules and not the programs of their authors: what a draft costs in microseconds is what our
reading of it costs. Each module says where its rule stands, and where ours is kinder to it. Nodes
of rules that give no probabilities bear 1. Those that `foredraft estimate` replays, too, stand in
`decoder.contenders`.
"""

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Final

from benchmarks.peers.hierarchy import HierarchyDrafting
from benchmarks.peers.infini_gram import InfiniGram
from benchmarks.peers.rest import Rest
from benchmarks.peers.sam_decoding import SamDecoding
from decoder.contenders.prompt_lookup import PromptLookup
from decoder.contenders.suffix_decoding import BEST_PATH, BEST_TREE, SuffixDecoding, documents_of
from indexer.reader import Index
from retriever.commands.factories import DrafterFactory
from retriever.drafter import TokenIds


def _prompt_lookup(
    _indexes: Sequence[Index], _outputs: Sequence[TokenIds], _max_budget: int
) -> PromptLookup:
    return PromptLookup()


def _rest(indexes: Sequence[Index], outputs: Sequence[TokenIds], _max_budget: int) -> Rest:
    return Rest(indexes, outputs)


def _infini_gram(
    indexes: Sequence[Index], outputs: Sequence[TokenIds], _max_budget: int
) -> InfiniGram:
    return InfiniGram(indexes, outputs)


def _sam_decoding(
    indexes: Sequence[Index], outputs: Sequence[TokenIds], _max_budget: int
) -> SamDecoding:
    return SamDecoding(indexes, outputs)


def _suffix_decoding_path(
    indexes: Sequence[Index], outputs: Sequence[TokenIds], max_budget: int
) -> SuffixDecoding:
    return SuffixDecoding([*documents_of(indexes), *outputs], max_budget, BEST_PATH)


def _suffix_decoding_tree(
    indexes: Sequence[Index], outputs: Sequence[TokenIds], max_budget: int
) -> SuffixDecoding:
    return SuffixDecoding([*documents_of(indexes), *outputs], max_budget, BEST_TREE)


DRAFTERS: Final[Mapping[str, DrafterFactory]] = {
    "prompt-lookup": _prompt_lookup,
    "rest": _rest,
    "infini-gram": _infini_gram,
    "hd": HierarchyDrafting,
    "hd-3": partial(HierarchyDrafting, draft_tokens=3),
    "hd-16": partial(HierarchyDrafting, draft_tokens=16),
    "suffix-decoding-path": _suffix_decoding_path,
    "suffix-decoding-tree": _suffix_decoding_tree,
    "sam-decoding": _sam_decoding,
}
"""Factories by the names that `foredraft replay --drafter` takes. Drafts of 3 tokens are
better for HD on chat than the published 4, and of 16 on edits."""
