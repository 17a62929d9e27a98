"""Rules that draft from texts alone: our own, prompt lookup, and those that other modules name.

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

from decoder.plugins.contenders.prompt_lookup import PromptLookup
from indexer.reader import Index, Vocabulary
from retriever.commands.factories import OWN, DrafterFactory, find_factory
from retriever.drafter import Drafter, DraftRequest, TokenIds
from retriever.sessions.embedded import EmbeddedDrafter

PROMPT_LOOKUP: Final = "prompt-lookup"


@dataclass(frozen=True, slots=True)
class PublishedRule:
    """A drafting rule of others, as read here: a `DrafterFactory` that can be listed.

    Attributes:
        summary: what it drafts, in a few words.
        paper: where it is published.
        make: gives its drafter, from open indexes, outputs and the most nodes of a draft.
    """

    summary: str
    paper: str
    make: DrafterFactory

    def __call__(
        self, indexes: Sequence[Index], outputs: Sequence[TokenIds], max_nodes: int
    ) -> Drafter:
        """Return its drafter; see `DrafterFactory`."""
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
"""Published rules of this package by name; see `find_factory`."""


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
    indexes: Sequence[Path] = (),
    vocabulary: Vocabulary | None = None,
    others: Sequence[str] = (PROMPT_LOOKUP,),
) -> list[DraftingRule]:
    """Return our own drafter and rules of others, in this order.

    Args:
        indexes: that they draft from, besides outputs.
        vocabulary: of the token ids; an index of another is refused.
        others: their names; see `find_factory`.

    Raises:
        UnknownDrafterError: there is none of a name.
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
    """Have a drafter that has seen no output, compiled, during the block.

    Args:
        make: gives it.
        indexes: that it drafts from, if it draws on a corpus.
        vocabulary: of the token ids; an index of another is refused.
        max_nodes: most nodes of a draft.

    Raises:
        IndexerError: an index cannot be opened or was built for another tokenizer.
    """
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
