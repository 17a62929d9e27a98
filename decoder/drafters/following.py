"""The loop's interface to drafters: they draft for sequences and learn from passes."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final, Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from decoder.drafters.kernels.likely_outcomes import LOOKED_AT, LikelyOutcomes, Nodes, find_outcomes
from decoder.drafters.kernels.recycled import Table
from retriever.drafter import DEFAULT, NUM_FOUND, Drafter, DraftRequest, SequenceOptions, TokenIds
from retriever.follower import DraftLimits, Follower, Followers
from retriever.sequences import TokenSequence
from retriever.tree import DraftTree

if TYPE_CHECKING:  # engines without torch also let drafters learn
    import torch

    from decoder.model.states import States
    from decoder.sampling.verification import Choices


@dataclass(frozen=True, slots=True, eq=False)
class Verified:
    """A pass of the target over a draft tree, and the pass's outcome.

    Attributes:
        last_token: the last committed token before the tree.
        tree: the verified tree, N nodes.
        logits: [1 + N, vocabulary], the target's logits after the last token and after each node,
            on the target's device; raw, without temperature or penalties.
        path: int64[k], the accepted nodes, from the root down.
        next_token: the target's token after the accepted nodes.
        states: the hidden states that the drafter needs, each [1 + N, hidden size]: a row for the
            last token and for each node. In a sequence's first pass: a row for each prompt token.
        choices: the tokens that the pass itself chose from its logits, if any.
    """

    last_token: int
    tree: DraftTree
    logits: "torch.Tensor | NDArray[np.float32]"
    path: NDArray[np.int64]
    next_token: int
    states: "States" = field(default_factory=dict)
    choices: "Choices | None" = None


class SequenceDrafter(Protocol):
    """The drafter of one sequence: a `Follower`, or a drafter's own class with the same methods.

    It shares the loop's sequence object, so it sees the committed tokens.
    """

    @property
    def num_failures(self) -> int:
        """Number of drafts that failed or were refused."""
        ...

    def draft(self, budget_nodes: int, min_probability: float = 0.0) -> DraftTree:
        """Draft for the committed sequence; see `Follower.draft`."""
        ...

    def learn(self, verified: Verified) -> None:
        """Learn from a pass over the last draft or a part of it, before the path is committed."""
        ...

    def close(self) -> None:
        """End the sequence; see `Follower.close`."""
        ...


NO_TABLE: Final = Table.of(4, NUM_FOUND)
"""Empty table, used if there are no recycled logits."""


@dataclass(slots=True, eq=False)
class PendingPass:
    """One sequence's part in a running pass of the target, and the pass's likely outcomes.

    Attributes:
        tokens: int32[n], the committed tokens, n at least 1; a view that does not change.
        proposed: the tree that the sequence's drafter proposed.
        verified: the tree that the pass verifies; any tree.
        most: largest number of outcomes to find.
        max_tokens: most tokens of each outcome.
        table: recycled logits. Another thread may write to them, so the outcomes are only guesses.
    """

    tokens: TokenIds
    proposed: DraftTree
    verified: DraftTree
    most: int
    max_tokens: int
    table: Table = NO_TABLE
    _outcomes: list[TokenIds] | None = field(default=None, init=False)

    def outcomes(self) -> list[TokenIds]:
        """Return likely outcomes, int32[k] each with k at least 1, the likeliest first.

        An outcome is a path of the verified tree that may be accepted, and a next token that is not
        in the tree. This method is called outside the loop's thread, so the pass does not wait for
        it.
        """
        if self._outcomes is None:
            self._outcomes = self._find()
        return self._outcomes

    def _find(self) -> list[TokenIds]:
        proposed, verified = self.proposed, self.verified
        found = LikelyOutcomes.of(self.most, len(proposed), len(verified), self.table)
        count = find_outcomes(
            found,
            self.tokens[-LOOKED_AT:],
            self.table,
            Nodes(proposed.token_ids, proposed.parents, proposed.probabilities),
            Nodes(verified.token_ids, verified.parents, verified.probabilities),
            self.max_tokens,
        )
        paths = (
            verified.token_ids[verified.path_to(node)] for node in found.nodes[:count].tolist()
        )
        tokens = found.tokens[:count].tolist()
        return [np.append(path, np.int32(end)) for path, end in zip(paths, tokens, strict=True)]


def prepare_outcomes() -> None:
    """Compile or load the kernel that finds outcomes, so that no pass waits for a compiler."""
    PendingPass(np.zeros(1, np.int32), DraftTree.empty(), DraftTree.empty(), 1, 1).outcomes()


Likely = tuple[Any, int, PendingPass]
"""The drafter of one sequence, the most nodes of each tree, and the running pass to draft after."""


@runtime_checkable
class FollowingDrafter(Protocol):
    """Creates a drafter for each sequence: the interface that a decoding loop uses for any drafter.

    Drafters composed of other drafters implement it; `following` adapts any other drafter.
    """

    @property
    def states(self) -> frozenset[int]:
        """Numbers of the hidden states that the drafter needs; see `decoder.model.states`."""
        ...

    def follow(self, sequence: TokenSequence, limits: DraftLimits | None = None) -> SequenceDrafter:
        """Return the drafter of one sequence, with its sessions open.

        Args:
            sequence: the sequence of committed tokens, which its owner extends.
            limits: vocabulary sizes of the model and the drafter, in addition to the drafter's own
                limits.

        Raises:
            InvalidRequestError: the drafter refuses the prompt.
        """
        ...

    def draft_together(self, asked: Sequence[tuple[Any, int]]) -> list[DraftTree]:
        """Return a tree for each of several sequences, in order; empty if there is no draft.

        Args:
            asked: distinct drafters that `follow` returned, each with the most nodes of its tree.
        """
        ...

    def ask_ahead(self, asked: Sequence[Likely], busy_s: float) -> None:
        """Draft for likely outcomes while the caller runs a pass of the target.

        The next `draft_together` uses the draft for the actual outcome; see `Followers.ask_ahead`.

        Args:
            asked: for each sequence, the drafter that `follow` returned, the most nodes of each
                tree, and the sequence's part in the pass.
            busy_s: estimated seconds until the caller drafts again.
        """
        ...


class FollowedDrafter:
    """A `FollowingDrafter` that sends each sequence's tokens to a drafter that needs them.

    Args:
        followers: followers of the drafter; users with the same followers share its back-off.
    """

    states: frozenset[int] = frozenset()

    def __init__(self, followers: Followers) -> None:
        self._followers = followers

    def follow(self, sequence: TokenSequence, limits: DraftLimits | None = None) -> Follower:
        """Return the drafter of one sequence; see `FollowingDrafter.follow`."""
        follower = self._followers.follow(sequence, limits=limits)
        self._followers.open([follower])
        return follower

    def draft_together(self, asked: Sequence[tuple[Follower, int]]) -> list[DraftTree]:
        """Return a tree for each of several sequences; see `Followers.draft`."""
        return self._followers.draft(asked)

    def ask_ahead(self, asked: Sequence[Likely], busy_s: float) -> None:
        """Let the drafter draft for likely outcomes; see `Followers.ask_ahead`."""
        outcomes = [(each, nodes, pending.outcomes) for each, nodes, pending in asked]
        self._followers.ask_ahead(outcomes, busy_s)


def following(followers: Followers) -> FollowingDrafter:
    """Return the drafter itself if it is a `FollowingDrafter`, else an adapter for it."""
    drafter = followers.drafter
    return drafter if isinstance(drafter, FollowingDrafter) else FollowedDrafter(followers)


def states_of(drafter: Drafter) -> frozenset[int]:
    """Return the numbers of the target's hidden states that a drafter learns from."""
    return following(Followers(drafter)).states


class NoDrafter:
    """A drafter whose trees are always empty: decoding with it is plain decoding."""

    def open(self, session: str, prompt: TokenIds, options: SequenceOptions = DEFAULT) -> None:
        """Begin a sequence; this does nothing."""

    def draft(self, requests: Sequence[DraftRequest]) -> list[DraftTree]:
        """Return an empty tree for each request."""
        return [DraftTree.empty() for _ in requests]

    def close(self, session: str, new_tokens: TokenIds | None = None) -> None:
        """End a sequence; this does nothing."""
