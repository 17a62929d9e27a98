"""Rules that draft only from texts: our own, prompt lookup, and rules of other modules.

They need no model, so `foredraft replay --drafter NAME` and `foredraft estimate` can replay
recordings with them. `foredraft bench --contender NAME` decodes with them.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Final

import numpy as np

from decoder.plugins.contenders.prompt_lookup import PromptLookup
from indexer.reader import Index, Vocabulary
from retriever.commands.factories import OWN, DrafterFactory, find_factory
from retriever.drafter import Drafter, DraftRequest, TokenIds
from retriever.sessions.embedded import EmbeddedDrafter

PROMPT_LOOKUP: Final = "prompt-lookup"


@dataclass(frozen=True, slots=True)
class PublishedRule:
    """Our implementation of a published drafting rule: a `DrafterFactory` with a description.

    Attributes:
        summary: short description of what the rule drafts.
        paper: publication of the rule.
        make: makes the drafter from open indexes, outputs and the largest number of nodes.
    """

    summary: str
    paper: str
    make: DrafterFactory

    def __call__(
        self, indexes: Sequence[Index], outputs: Sequence[TokenIds], max_nodes: int
    ) -> Drafter:
        """Return a drafter of this rule; see `DrafterFactory`."""
        return self.make(indexes, outputs, max_nodes)


def _prompt_lookup(
    _indexes: Sequence[Index], _outputs: Sequence[TokenIds], _max_nodes: int
) -> PromptLookup:
    return PromptLookup()


DRAFTERS: Final[Mapping[str, PublishedRule]] = {
    PROMPT_LOOKUP: PublishedRule(
        "what followed the last tokens earlier in the sequence",
        "github.com/apoorvumang/prompt-lookup-decoding",
        _prompt_lookup,
    )
}
"""Published rules in this package, by name; see `find_factory`."""


@dataclass(frozen=True, slots=True)
class DraftingRule:
    """A drafting rule that `foredraft estimate` replays.

    Attributes:
        name: name in reports.
        opened: opens a fresh, compiled drafter; the argument is its largest number of nodes.
    """

    name: str
    opened: Callable[[int], AbstractContextManager[Drafter]]


def drafting_rules(
    indexes: Sequence[Path] = (),
    vocabulary: Vocabulary | None = None,
    others: Sequence[str] = (PROMPT_LOOKUP,),
) -> list[DraftingRule]:
    """Return our own drafter and published rules, in this order.

    Args:
        indexes: indexes that the rules draft from, in addition to outputs.
        vocabulary: vocabulary of the token ids; an index with another vocabulary is refused.
        others: names of the published rules; see `find_factory`.

    Raises:
        UnknownDrafterError: a name is unknown.
    """
    return [
        DraftingRule(OWN, partial(_own, indexes, vocabulary)),
        *(
            DraftingRule(name, partial(opened, find_factory(name), indexes, vocabulary))
            for name in dict.fromkeys(others)
            if name != OWN
        ),
    ]


@contextmanager
def _own(
    indexes: Sequence[Path], vocabulary: Vocabulary | None, _max_nodes: int
) -> Iterator[Drafter]:
    drafter = EmbeddedDrafter.open_indexes(indexes, vocabulary=vocabulary)
    try:
        drafter.warm()
        yield drafter
    finally:
        drafter.shut_down()


@contextmanager
def opened(
    make: DrafterFactory, indexes: Sequence[Path], vocabulary: Vocabulary | None, max_nodes: int
) -> Iterator[Drafter]:
    """Open a fresh, compiled drafter during the block.

    Args:
        make: makes the drafter.
        indexes: indexes that the drafter uses, if it drafts from a corpus.
        vocabulary: vocabulary of the token ids; an index with another vocabulary is refused.
        max_nodes: largest number of nodes in a draft.

    Raises:
        IndexerError: an index cannot be opened or was built for another tokenizer.
    """
    warm(make((), (), max_nodes))
    with ExitStack() as stack:
        indexed = [stack.enter_context(Index.open(path, vocabulary=vocabulary)) for path in indexes]
        yield make(indexed, (), max_nodes)


def warm(drafter: Drafter) -> None:
    """Compile a drafter's kernels with a repetitive sequence; do not use it afterwards."""
    tokens = np.array([1, 2, 3, 1, 2, 3], np.int32)
    drafter.open("warm", tokens)
    for step in range(2):
        drafter.draft([DraftRequest("warm", tokens[:step], len(tokens) + step, 4)])
    drafter.close("warm", tokens[:1])
