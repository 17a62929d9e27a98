"""The rules that draft from texts alone, by name: those of others, as read here, and our own.

They need no model, so recordings can be replayed with them: `foredraft replay --drafter NAME` and
`foredraft estimate` do. `foredraft bench --contender NAME` decodes with them.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Final

import numpy as np

from decoder.contenders.hierarchy import HierarchyDrafting
from decoder.contenders.longest_match import InfiniGram, Rest
from decoder.contenders.prompt_lookup import PromptLookup
from decoder.contenders.sam_decoding import SamDecoding
from decoder.contenders.suffix_decoding import (
    BEST_PATH,
    BEST_TREE,
    Settings,
    SuffixDecoding,
    documents_of,
)
from indexer.reader import Index, Vocabulary
from retriever.commands.factories import DrafterFactory
from retriever.drafter import Drafter, DraftRequest, TokenIds
from retriever.sessions.embedded import EmbeddedDrafter

OWN: Final = "foredraft"
PROMPT_LOOKUP: Final = "prompt lookup"
SUFFIX_DECODING: Final = "SuffixDecoding"


@dataclass(frozen=True, slots=True)
class PublishedRule:
    """A drafting rule of others, as read here.

    Attributes:
        name: by which it is chosen.
        summary: what it drafts, in a few words.
        paper: where it is published.
        make: gives its drafter, from open indexes, outputs and the most nodes of a draft.
    """

    name: str
    summary: str
    paper: str
    make: DrafterFactory


def _prompt_lookup(
    _indexes: Sequence[Index], _outputs: Sequence[TokenIds], _max_nodes: int
) -> PromptLookup:
    return PromptLookup()


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


PUBLISHED_RULES: Final = (
    PublishedRule(
        "prompt-lookup",
        "what followed the last tokens earlier in the sequence",
        "github.com/apoorvumang/prompt-lookup-decoding",
        _prompt_lookup,
    ),
    PublishedRule(
        "rest",
        "REST: the commonest of what followed the longest match in --index and earlier answers",
        "arXiv:2311.08252",
        _rest,
    ),
    PublishedRule(
        "hd",
        "Hierarchy Drafting: drafts of 4 tokens from the context, the model's answers and --index",
        "arXiv:2502.05609",
        HierarchyDrafting,
    ),
    PublishedRule(
        "hd-3",
        "the same with drafts of 3 tokens, better on chat",
        "arXiv:2502.05609",
        partial(HierarchyDrafting, draft_tokens=3),
    ),
    PublishedRule(
        "hd-16",
        "the same with drafts of 16 tokens, better on edits",
        "arXiv:2502.05609",
        partial(HierarchyDrafting, draft_tokens=16),
    ),
    PublishedRule(
        "suffix",
        "SuffixDecoding: the better tree of this sequence's suffix tree and that of all answers",
        "arXiv:2411.04975",
        partial(_suffix, settings=BEST_TREE),
    ),
    PublishedRule(
        "suffix-path",
        "the same, a path of the commonest children",
        "arXiv:2411.04975",
        partial(_suffix, settings=BEST_PATH),
    ),
    PublishedRule(
        "sam",
        "SAM-Decoding without a draft model: what followed the longest match anywhere, a path",
        "arXiv:2411.10666",
        _sam,
    ),
    PublishedRule(
        "infini-gram",
        "what followed the longest match of whatever length in --index and earlier answers",
        "arXiv:2401.17377",
        _infini_gram,
    ),
)

DRAFTERS: Final[Mapping[str, DrafterFactory]] = {rule.name: rule.make for rule in PUBLISHED_RULES}
"""Factories by the names that `foredraft replay --drafter` takes."""


@dataclass(frozen=True, slots=True)
class DraftingRule:
    """A way of drafting that `foredraft estimate` replays.

    Attributes:
        name: in reports.
        opened: gives a drafter that has seen nothing, compiled, for at most so many nodes.
    """

    name: str
    opened: Callable[[int], AbstractContextManager[Drafter]]


def drafting_rules(
    indexes: Sequence[Path] = (), vocabulary: Vocabulary | None = None
) -> list[DraftingRule]:
    """Return our own drafter, prompt lookup and SuffixDecoding, in this order.

    Args:
        indexes: that our own drafter and SuffixDecoding draft from, besides outputs.
        vocabulary: of the token ids; an index of another is refused.
    """

    @contextmanager
    def own(_max_nodes: int) -> Iterator[Drafter]:
        drafter = EmbeddedDrafter.open_indexes(indexes, vocabulary=vocabulary)
        try:
            drafter.warm()
            yield drafter
        finally:
            drafter.shut_down()

    return [
        DraftingRule(OWN, own),
        DraftingRule(PROMPT_LOOKUP, partial(opened, "prompt-lookup", indexes, vocabulary)),
        DraftingRule(SUFFIX_DECODING, partial(opened, "suffix", indexes, vocabulary)),
    ]


@contextmanager
def opened(
    name: str, indexes: Sequence[Path], vocabulary: Vocabulary | None, max_nodes: int
) -> Iterator[Drafter]:
    """Have a published rule's drafter that has seen no output, compiled, during the block.

    Args:
        name: one of `DRAFTERS`.
        indexes: that it drafts from, if it draws on a corpus.
        vocabulary: of the token ids; an index of another is refused.
        max_nodes: most nodes of a draft.

    Raises:
        IndexerError: an index cannot be opened or was built for another tokenizer.
    """
    make = DRAFTERS[name]
    warm(make((), (), max_nodes))
    with ExitStack() as stack:
        indexed = [stack.enter_context(Index.open(path, vocabulary=vocabulary)) for path in indexes]
        yield make(indexed, (), max_nodes)


def warm(drafter: Drafter) -> None:
    """Compile what a drafter runs, by a sequence that repeats itself; it is not used after."""
    tokens = np.array([1, 2, 3, 1, 2, 3], np.int32)
    drafter.open("warm", tokens)
    for step in range(2):
        drafter.draft([DraftRequest("warm", tokens[:step], len(tokens) + step, 4)])
    drafter.close("warm", tokens[:1])
