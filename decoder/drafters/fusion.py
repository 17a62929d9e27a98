"""One draft tree from several drafters, and from what the target found likely before.

Trees are merged by longest prefix, as in RASD (arXiv:2503.03434): paths that two of them share are
one path, and what one has beyond that is grafted there. At every node, all sources that know it
say how probable its children are, and a logistic model, which learns from every token that comes,
makes one probability of that; so shared nodes gain, those that a sure source lacks lose, and the
tree is cut to the budget as one.
"""

from collections.abc import Sequence
from typing import Final, Self

import numpy as np

from decoder.drafters.fused_sequence import FusedSequence, Parts
from decoder.drafters.kernels.forest import Forest, plant
from decoder.drafters.kernels.growth import Growth, grow
from decoder.drafters.kernels.recycled import Table
from decoder.drafters.kernels.siblings import Siblings
from decoder.drafters.kernels.stacking import learn
from decoder.drafters.learning import Verified
from decoder.drafters.recycling import NUM_LIKELY, RecycledLogits
from decoder.drafters.session import DraftLimits
from decoder.drafters.weights import RATE, SourceWeights
from retriever.drafter import Drafter, DraftRequest, TokenIds
from retriever.errors import SessionExistsError, UnknownSessionError
from retriever.tree import DraftTree, Source

MAX_NODES: Final = 256
"""Most nodes of a fused tree, and of each tree that goes into it."""

_LEAST_PROBABILITY: Final = 1e-4
_NO_TABLE: Final = Table.of(4, NUM_LIKELY)


class FusedDrafter:
    """Merges the trees of other drafters into one; a `Drafter` that learns from logits.

    A drafter that fails costs its own part of the tree. Not safe to call from several threads.

    Args:
        drafters: those that answer in microseconds, such as retrieval.
        models: those that take passes of a model: asked while the others answer, and not at all
            where they would bring less than they take.
        recycled: what the target found likely before; `None` to do without.
        limits: which tokens target and drafters know.
    """

    def __init__(
        self,
        drafters: Sequence[Drafter],
        limits: DraftLimits,
        *,
        models: Sequence[Drafter] = (),
        recycled: RecycledLogits | None = None,
    ) -> None:
        self._parts = Parts(tuple(drafters), tuple(models), limits)
        self._recycled = recycled
        self._sequences: dict[str, FusedSequence] = {}
        num_trees = len(drafters) + len(models)
        self._weights = SourceWeights(num_trees)
        self._forest = Forest.of(num_trees, MAX_NODES)
        self._siblings = Siblings.of(num_trees)
        self._growth = Growth.of(num_trees, MAX_NODES)
        self._planted: Sequence[DraftTree] = ()

    def open(self, session: str, prompt: TokenIds, *, remember: bool = True) -> None:
        """Begin a sequence; see `Drafter.open`."""
        if session in self._sequences:
            raise SessionExistsError(f"session {session!r} is open already")
        self._sequences[session] = FusedSequence(self._parts, prompt, remember=remember)

    def draft(self, requests: Sequence[DraftRequest]) -> list[DraftTree]:
        """Ask all drafters and fuse what they say; see `Drafter.draft`."""
        return [self._draft(self._get(request.session), request) for request in requests]

    def learn(self, session: str, verified: Verified) -> None:
        """Learn from a pass over the session's last draft what each source is worth."""
        sequence = self._get(session)
        came = [*verified.tree.token_ids[verified.path].tolist(), verified.next_token]
        sequence.learn(verified)
        self._learn_weights(sequence, np.array(came, np.int32))
        if self._recycled is not None:
            sequence.hints = self._recycled.learn(verified, sequence.context())

    def close(self, session: str, new_tokens: TokenIds | None = None) -> None:
        """End a sequence; see `Drafter.close`."""
        sequence = self._get(session)
        del self._sequences[session]
        sequence.close(() if new_tokens is None else new_tokens.tolist())

    def shut_down(self) -> None:
        """End the thread that asks the quick drafters while models run. They go on living."""
        self._parts.shut_down()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.shut_down()

    def num_failures(self, session: str) -> int:
        """Return how many drafts of its parts a session could not have."""
        return self._get(session).num_failures

    def _get(self, session: str) -> FusedSequence:
        try:
            return self._sequences[session]
        except KeyError:
            raise UnknownSessionError(f"no session {session!r} is open: open it first") from None

    def _table(self) -> Table:
        return _NO_TABLE if self._recycled is None else self._recycled.table

    def _draft(self, sequence: FusedSequence, request: DraftRequest) -> DraftTree:
        budget = min(request.budget_nodes, MAX_NODES)
        sequence.extend(request)
        sequence.ask(budget)
        self._plant(sequence.trees)
        growth = self._growth
        growth.places[0] = np.arange(len(sequence.trees))
        growth.contexts[0] = sequence.context()
        size = grow(
            growth,
            self._siblings,
            self._forest,
            self._table(),
            self._weights.values,
            sequence.hints,
            budget,
            max(request.min_probability, _LEAST_PROBABILITY),
            int(Source.MODEL),
        )
        return DraftTree(
            growth.tokens[:size].copy(),
            growth.parents[:size].copy(),
            growth.probabilities[:size].copy(),
            growth.sources[:size].copy(),
        )

    def _plant(self, trees: Sequence[DraftTree]) -> None:
        """Enter trees into the forest, unless it holds these already."""
        if trees is self._planted:
            return
        self._planted, start = trees, len(trees)
        for number, tree in enumerate(trees):
            start = plant(
                self._forest,
                number,
                start,
                tree.token_ids,
                tree.parents,
                tree.probabilities,
                tree.sources,
            )

    def _learn_weights(self, sequence: FusedSequence, came: TokenIds) -> None:
        """Learn from the tokens that came after a draft."""
        if not sequence.has_drafted:
            return
        self._plant(sequence.trees)
        num_trees = len(sequence.trees)
        places = np.zeros((2, num_trees), np.int32)
        places[0] = np.arange(num_trees)
        learn(
            self._siblings,
            self._forest,
            self._table(),
            self._weights.values,
            self._weights.curvature,
            places,
            sequence.context(),
            sequence.hints,
            came,
            RATE,
        )
