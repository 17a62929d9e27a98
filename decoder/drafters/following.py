"""Drafting for the sequences of a decoding loop, and learning from its passes."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final, Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from decoder.drafters.kernels.likely_outcomes import LOOKED_AT, Found, Nodes, find_outcomes
from decoder.drafters.kernels.recycled import Table
from retriever.drafter import NUM_FOUND, Drafter, DraftRequest, TokenIds
from retriever.follower import DraftLimits, Follower, Followers
from retriever.sequences import TokenSequence
from retriever.tree import DraftTree

if TYPE_CHECKING:  # drafters inside engines without torch learn from passes, too
    import torch

    from decoder.model.states import States
    from decoder.sampling.verification import Choices


@dataclass(frozen=True, slots=True, eq=False)
class Verified:
    """A pass of the target over a tree, and its outcome.

    Attributes:
        last_token: the last committed token, which the tree's first tokens follow.
        tree: the tree that was verified, N nodes.
        logits: [1 + N, vocabulary], the target's after the last token and after each node, on its
            device. They are the target's own: no temperature, no penalty.
        path: int64[k], the nodes that were accepted.
        next_token: the target's choice after them.
        states: that the drafter asked for: [1 + N, hidden size] each, a row for the last token and
            for each node; in a sequence's first pass a row for every token of the prompt.
        choices: what the pass found with its logits, if it did.
    """

    last_token: int
    tree: DraftTree
    logits: "torch.Tensor | NDArray[np.float32]"
    path: NDArray[np.int64]
    next_token: int
    states: "States" = field(default_factory=dict)
    choices: "Choices | None" = None


class SequenceDrafter(Protocol):
    """A drafter of one sequence: a `Follower`, or a drafter's own class of the same form.

    It shares the loop's sequence, and so sees the committed tokens without being told.
    """

    @property
    def num_failures(self) -> int:
        """Drafts that failed or were refused."""
        ...

    def draft(self, budget_nodes: int, min_probability: float = 0.0) -> DraftTree:
        """Draft for the committed sequence; see `Follower.draft`."""
        ...

    def learn(self, verified: Verified) -> None:
        """Learn from a pass over the last draft or a part of it, before its path is committed."""
        ...

    def close(self) -> None:
        """End the sequence; see `Follower.close`."""
        ...


@runtime_checkable
class FollowingDrafter(Protocol):
    """A drafter that makes its own sequence drafters, as one that combines drafters does."""

    @property
    def states(self) -> frozenset[int]:
        """Numbers of the target's states that it learns from; see `decoder.model.states`."""
        ...

    def follow(self, sequence: TokenSequence, limits: DraftLimits | None = None) -> SequenceDrafter:
        """Return the drafter of one sequence.

        Args:
            sequence: the committed tokens; its owner extends it.
            limits: which tokens the model and the drafter know, within the drafter's own.

        Raises:
            InvalidRequestError: a prompt is refused.
        """
        ...

    def draft_together(self, asked: Sequence[tuple[Any, int]]) -> list[DraftTree]:
        """Return a tree for each of several sequences, in order; empty where there is none.

        Args:
            asked: distinct drafters that `follow` made, with the most nodes of their trees.
        """
        ...


NO_TABLE: Final = Table.of(4, NUM_FOUND)
"""In place of recycled logits, where there are none."""


class PassUnderWay:
    """One sequence's part in a pass of the target that is under way: what may come of it.

    Args:
        tokens: int32[n], what is committed, at least one token; a view that does not change.
        proposed: the tree that its drafter proposed.
        verified: what is verified: any tree.
        most: outcomes to find.
        max_tokens: of each.
        table: recycled logits. They may be written to meanwhile: what is found is a guess.
    """

    def __init__(  # noqa: PLR0913, PLR0917  (what outcomes depend on)
        self,
        tokens: TokenIds,
        proposed: DraftTree,
        verified: DraftTree,
        most: int,
        max_tokens: int,
        table: Table = NO_TABLE,
    ) -> None:
        self._tokens = tokens
        self._proposed, self._verified = proposed, verified
        self._most, self._max_tokens = most, max_tokens
        self._table = table
        self._outcomes: list[TokenIds] | None = None

    def recalling(self, table: Table) -> "PassUnderWay":
        """Return the same pass, with what the target found likely earlier."""
        parts = self._tokens, self._proposed, self._verified, self._most, self._max_tokens
        return PassUnderWay(*parts, table)

    def outcomes(self) -> list[TokenIds]:
        """Return int32[k] each, k at least 1: what may come, the likeliest first.

        An outcome is an accepted path of the verified tree and a token that does not go on in it.
        Called in another thread than the loop's, so that the pass does not wait for it.
        """
        if self._outcomes is None:
            self._outcomes = self._find()
        return self._outcomes

    def _find(self) -> list[TokenIds]:
        proposed, verified = self._proposed, self._verified
        found = Found.of(self._most, len(proposed), len(verified), self._table)
        count = find_outcomes(
            found,
            self._tokens[-LOOKED_AT:],
            self._table,
            Nodes(proposed.token_ids, proposed.parents, proposed.probabilities),
            Nodes(verified.token_ids, verified.parents, verified.probabilities),
            self._max_tokens,
        )
        ends = zip(found.nodes[:count].tolist(), found.tokens[:count].tolist(), strict=True)
        return [np.array([*self._path_to(node), token], np.int32) for node, token in ends]

    def _path_to(self, node: int) -> list[int]:
        path: list[int] = self._verified.token_ids[self._verified.path_to(node)].tolist()
        return path


def prepare_outcomes() -> None:
    """Compile or load what finds outcomes, so that no pass is over before it is there."""
    PassUnderWay(np.zeros(1, np.int32), DraftTree.empty(), DraftTree.empty(), 1, 1).outcomes()


Likely = tuple[Any, int, PassUnderWay]
"""A drafter of one sequence, the most nodes of each tree, and what they are drafts after."""


def states_of(drafter: Drafter) -> frozenset[int]:
    """Return the numbers of the target's states that a drafter learns from."""
    return drafter.states if isinstance(drafter, FollowingDrafter) else frozenset()


def follow(
    followers: Followers, sequence: TokenSequence, limits: DraftLimits | None = None
) -> SequenceDrafter:
    """Return the drafter of one sequence, with its session open; see `FollowingDrafter.follow`."""
    if isinstance(followers.drafter, FollowingDrafter):
        return followers.drafter.follow(sequence, followers.limits.within(limits))
    follower = followers.follow(sequence, limits=limits)
    followers.open([follower])
    return follower


def draft_together(
    followers: Followers, asked: Sequence[tuple[SequenceDrafter, int]]
) -> list[DraftTree]:
    """Return a tree for each of several sequences, with one call of their drafter.

    Args:
        followers: of the drafter.
        asked: what `follow` made for each, with the most nodes of its tree.
    """
    if isinstance(followers.drafter, FollowingDrafter):
        return followers.drafter.draft_together(asked)
    return followers.draft([(each, nodes) for each, nodes in asked if isinstance(each, Follower)])


@runtime_checkable
class AskedAhead(Protocol):
    """A `FollowingDrafter` whose parts may answer ahead."""

    def ask_ahead(self, asked: Sequence[Likely], busy_s: float) -> None:
        """Have the parts answer for what may come; see `Followers.ask_ahead`."""
        ...


def ask_ahead(followers: Followers, asked: Sequence[Likely], busy_s: float) -> None:
    """Have a drafter answer for what may come, while the caller runs a pass of the target.

    The next `draft_together` takes the answers for what came; see `Followers.ask_ahead`.

    Args:
        followers: of the drafter.
        asked: what `follow` made for each sequence, the most nodes of each tree, and the
            sequence's part in the pass.
        busy_s: about how long the caller will not draft, in seconds.
    """
    if isinstance(followers.drafter, AskedAhead):
        followers.drafter.ask_ahead(asked, busy_s)
        return
    of_sequences = [
        (each, nodes, under_way.outcomes)
        for each, nodes, under_way in asked
        if isinstance(each, Follower)
    ]
    followers.ask_ahead(of_sequences, busy_s)


class NoDrafter:
    """A drafter whose trees are empty: decoding with it is plain decoding."""

    def open(self, session: str, prompt: TokenIds, *, remember: bool = True) -> None:
        """Begin a sequence; keeps nothing."""

    def draft(self, requests: Sequence[DraftRequest]) -> list[DraftTree]:
        """Return an empty tree for each request."""
        return [DraftTree.empty() for _ in requests]

    def close(self, session: str, new_tokens: TokenIds | None = None) -> None:
        """End a sequence."""
