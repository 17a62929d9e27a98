"""The ways of drafting that are replayed side by side: our own, and the rules of others."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import numpy as np

from decoder.contenders.prompt_lookup import PromptLookup
from decoder.contenders.suffix_decoding import BEST_TREE, SuffixDecoding, documents_of
from indexer.reader import Index, Vocabulary
from retriever.drafter import Drafter, DraftRequest
from retriever.sessions.embedded import EmbeddedDrafter

OWN: Final = "foredraft"
PROMPT_LOOKUP: Final = "prompt lookup"
SUFFIX_DECODING: Final = "SuffixDecoding"


@dataclass(frozen=True, slots=True)
class DraftingRule:
    """A way of drafting.

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

    @contextmanager
    def prompt_lookup(_max_nodes: int) -> Iterator[Drafter]:
        warm(PromptLookup())
        yield PromptLookup()

    @contextmanager
    def suffix_decoding(max_nodes: int) -> Iterator[Drafter]:
        warm(SuffixDecoding([], max_nodes, BEST_TREE))
        with ExitStack() as stack:
            opened = [
                stack.enter_context(Index.open(path, vocabulary=vocabulary)) for path in indexes
            ]
            drafter = SuffixDecoding(documents_of(opened), max_nodes, BEST_TREE)
        yield drafter

    return [
        DraftingRule(OWN, own),
        DraftingRule(PROMPT_LOOKUP, prompt_lookup),
        DraftingRule(SUFFIX_DECODING, suffix_decoding),
    ]


def warm(drafter: Drafter) -> None:
    """Compile what a drafter runs, by a sequence that repeats itself; it is not used after."""
    tokens = np.array([1, 2, 3, 1, 2, 3], np.int32)
    drafter.open("warm", tokens)
    for step in range(2):
        drafter.draft([DraftRequest("warm", tokens[:step], len(tokens) + step, 4)])
    drafter.close("warm", tokens[:1])
