"""What drafts for the sequence of a decoding loop, and what it may learn from a pass."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import numpy as np
import torch
from numpy.typing import NDArray

from retriever.drafter import DraftRequest, TokenIds
from retriever.follower import DraftLimits, Followers
from retriever.sequences import TokenSequence
from retriever.tree import DraftTree


@dataclass(frozen=True, slots=True, eq=False)
class Verified:
    """A pass of the target over a tree, and what came of it.

    Attributes:
        last_token: the last committed token, which the tree's first tokens follow.
        tree: what was verified, N nodes.
        logits: [1 + N, vocabulary], the target's after the last token and after each node, on its
            device. They are the target's own: no temperature, no penalty.
        path: int64[k], the nodes that were accepted.
        next_token: the target's choice after them.
    """

    last_token: int
    tree: DraftTree
    logits: torch.Tensor
    path: NDArray[np.int64]
    next_token: int


class SequenceDrafter(Protocol):
    """What drafts for one sequence: a `Follower`, or what a drafter has in its place.

    It shares the loop's sequence, so that nobody tells it what is committed.
    """

    @property
    def num_failures(self) -> int:
        """Drafts that could not be had."""
        ...

    def draft(self, budget_nodes: int, min_probability: float = 0.0) -> DraftTree:
        """Draft for the sequence as it is; see `Follower.draft`."""
        ...

    def learn(self, verified: Verified) -> None:
        """Take in a pass over the last draft, or over a part of it, before it is committed."""
        ...

    def close(self) -> None:
        """End the sequence as it is; see `Follower.close`."""
        ...


@runtime_checkable
class FollowingDrafter(Protocol):
    """A drafter that follows sequences by itself, as one that is made of others does."""

    def follow(self, sequence: TokenSequence, limits: DraftLimits | None = None) -> SequenceDrafter:
        """Return what drafts for a sequence.

        Args:
            sequence: what is committed; its owner extends it.
            limits: which tokens the model and the drafter know, within the drafter's own.

        Raises:
            InvalidRequestError: a prompt is refused.
        """
        ...


def follow(
    followers: Followers, sequence: TokenSequence, limits: DraftLimits | None = None
) -> SequenceDrafter:
    """Return what drafts for a sequence, with its session open; see `FollowingDrafter.follow`."""
    if isinstance(followers.drafter, FollowingDrafter):
        return followers.drafter.follow(sequence, followers.limits.within(limits))
    follower = followers.follow(sequence, limits=limits)
    followers.open([follower])
    return follower


class NoDrafter:
    """A drafter that never guesses: decoding with it is plain decoding."""

    def open(self, session: str, prompt: TokenIds, *, remember: bool = True) -> None:
        """Begin a sequence; nothing is kept of it."""

    def draft(self, requests: Sequence[DraftRequest]) -> list[DraftTree]:
        """Return an empty tree for each request."""
        return [DraftTree.empty() for _ in requests]

    def close(self, session: str, new_tokens: TokenIds | None = None) -> None:
        """End a sequence."""
