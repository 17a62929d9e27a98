"""What a drafter is told of one sequence, and what it may learn from a pass of the target."""

import time
import uuid
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from logging import getLogger
from typing import Final, Protocol, runtime_checkable

import numpy as np
import torch
from numpy.typing import NDArray

from retriever.drafter import Drafter, DraftRequest, TokenIds
from retriever.errors import (
    DrafterUnavailableError,
    InvalidTreeError,
    LimitExceededError,
    RetrieverError,
    UnknownSessionError,
    VocabularyMismatchError,
)
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


@runtime_checkable
class LogitsLearner(Protocol):
    """A drafter that learns from the target's logits, too."""

    def learn(self, session: str, verified: Verified) -> None:
        """Take in a pass over the session's last draft, or over a part of it."""
        ...


@runtime_checkable
class FailureCounter(Protocol):
    """A drafter that goes on without some of its parts where they fail."""

    def num_failures(self, session: str) -> int:
        """Return how many drafts of its parts a session could not have."""
        ...


_log = getLogger(__name__)

_RETRY_AFTER = 19
"""A failing drafter is left alone for so many times as long as its failure took."""

_NO_DRAFT: Final = (
    DrafterUnavailableError,
    InvalidTreeError,
    LimitExceededError,
    UnknownSessionError,
)


class NoDrafter:
    """A drafter that never guesses: decoding with it is plain decoding."""

    def open(self, session: str, prompt: TokenIds, *, remember: bool = True) -> None:
        """Begin a sequence; nothing is kept of it."""

    def draft(self, requests: Sequence[DraftRequest]) -> list[DraftTree]:
        """Return an empty tree for each request."""
        return [DraftTree.empty() for _ in requests]

    def close(self, session: str, new_tokens: TokenIds | None = None) -> None:
        """End a sequence."""


class Backoff:
    """How long a drafter that failed is left alone: shared by all sequences that ask it.

    The longer the failure took, the longer: waiting for a drafter that hangs takes at most a
    twentieth of the time, however short the sequences are.
    """

    def __init__(self) -> None:
        self._until = 0.0
        self._is_known = False

    def is_over(self) -> bool:
        """Return whether the drafter may be asked."""
        return time.monotonic() >= self._until

    def begin(self, failure: RetrieverError, failure_s: float) -> None:
        """Leave the drafter alone after a failure that took so many seconds; log the first."""
        self._until = time.monotonic() + _RETRY_AFTER * failure_s
        if not self._is_known:
            self._is_known = True
            _log.warning("decoding goes on without drafts from this drafter: %s", failure)


@dataclass(frozen=True, slots=True)
class DraftLimits:
    """Which tokens the two sides know.

    Attributes:
        model_vocabulary: drafted tokens must lie below it.
        drafter_vocabulary: tokens that the drafter is told must lie below it; `None` where it
            takes all of the model's. Embeddings are often padded beyond the tokenizer's size.
    """

    model_vocabulary: int
    drafter_vocabulary: int | None = None


class DraftSession:
    """Keeps a drafter up to date with one sequence, and lives without it when it fails.

    A drafter that fails costs drafts, never the sequence. Its session is given up, as nobody
    knows what it has noted; later the whole sequence is opened anew. A token that the drafter
    cannot know ends its part in the sequence: what comes after goes on without drafts.

    Args:
        drafter: whom to ask.
        prompt: int32[n], the sequence so far.
        limits: which tokens the model and the drafter know.
        backoff: of this drafter.
        remember: whether what is generated may serve later sequences.

    Attributes:
        num_failures: drafts that could not be had; the end by an unknown token counts once.

    Raises:
        InvalidRequestError: the drafter refuses the prompt.
    """

    def __init__(
        self,
        drafter: Drafter,
        prompt: TokenIds,
        limits: DraftLimits,
        backoff: Backoff,
        *,
        remember: bool = True,
    ) -> None:
        self._drafter = drafter
        self._learner = drafter if isinstance(drafter, LogitsLearner) else None
        self._limits = limits
        self._backoff = backoff
        self._remember = remember
        self._tokens: list[int] = []
        self._name = ""
        self._num_sent = 0
        self._has_ended = False
        self.num_failures = 0
        self.extend(prompt.tolist())
        if not self._has_ended and backoff.is_over():
            with self._failing_open():
                self._open()

    def draft(self, budget_nodes: int) -> DraftTree:
        """Ask for a tree of at most `budget_nodes` nodes; empty where there is none to be had.

        Raises:
            InvalidRequestError: the drafter finds the request at fault.
        """
        if self._has_ended:
            return DraftTree.empty()
        if not self._backoff.is_over():
            self.num_failures += 1
            return DraftTree.empty()
        with self._failing_open():
            return self._ask(budget_nodes)
        return DraftTree.empty()

    def extend(self, tokens: Sequence[int]) -> None:
        """Take in committed tokens; they travel with the next request."""
        if self._has_ended:
            return
        known = self._num_known(tokens)
        self._tokens.extend(tokens[:known])
        if known < len(tokens):
            self._has_ended = True
            self.num_failures += 1
            self.close()

    def learn(self, verified: Verified) -> None:
        """Show a drafter that learns from logits what came of its last draft."""
        if self._name and self._learner is not None:
            self._learner.learn(self._name, verified)

    def close(self) -> None:
        """End the session with the tokens that the drafter has not seen yet."""
        if not self._name:
            return
        if isinstance(self._drafter, FailureCounter):
            self.num_failures += self._drafter.num_failures(self._name)
        try:
            with self._failing_open():
                self._drafter.close(self._name, self._unsent())
                self._name = ""
        finally:
            self._give_up()

    @contextmanager
    def _failing_open(self) -> Iterator[None]:
        """Go on after the block where there is no draft to be had, and count it."""
        start = time.monotonic()
        try:
            yield
        except _NO_DRAFT as error:
            self._give_up()
            self.num_failures += 1
            self._backoff.begin(error, time.monotonic() - start)

    def _give_up(self) -> None:
        """End a session that may be gone already; the next request opens another."""
        name, self._name = self._name, ""
        self._num_sent = 0
        if name:
            with suppress(RetrieverError):
                self._drafter.close(name)

    def _open(self) -> None:
        name = uuid.uuid4().hex
        self._drafter.open(name, self._unsent(), remember=self._remember)
        self._name = name
        self._num_sent = len(self._tokens)

    def _open_again(self) -> None:
        """Open the whole sequence anew; a service may have come back for another tokenizer."""
        try:
            self._open()
        except VocabularyMismatchError as error:
            raise DrafterUnavailableError(str(error)) from error

    def _ask(self, budget_nodes: int) -> DraftTree:
        if not self._name:
            self._open_again()
        request = DraftRequest(self._name, self._unsent(), len(self._tokens), budget_nodes)
        trees = self._drafter.draft([request])
        if len(trees) != 1:
            raise DrafterUnavailableError(f"the drafter sent {len(trees)} trees for one request")
        self._num_sent = len(self._tokens)
        return self._checked(trees[0])

    def _checked(self, tree: DraftTree) -> DraftTree:
        """Refuse tokens that the model's embedding has no row for."""
        end = self._limits.model_vocabulary
        if len(tree) and not 0 <= tree.token_ids.min() <= tree.token_ids.max() < end:
            raise InvalidTreeError(
                f"the drafter proposes token {tree.token_ids.max()}, but the model's vocabulary "
                f"ends at {end}: it was built for another tokenizer"
            )
        return tree

    def _num_known(self, tokens: Sequence[int]) -> int:
        """Return how many tokens come before the first that the drafter cannot know."""
        end = self._limits.drafter_vocabulary
        if end is None:
            return len(tokens)
        return next((at for at, token in enumerate(tokens) if token >= end), len(tokens))

    def _unsent(self) -> TokenIds:
        return np.array(self._tokens[self._num_sent :], np.int32)
