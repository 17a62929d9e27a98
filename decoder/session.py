"""One sequence's side of the Drafter protocol."""

import time
import uuid
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress

import numpy as np

from retriever.drafter import Drafter, DraftRequest, TokenIds
from retriever.errors import (
    DrafterUnavailableError,
    InvalidTreeError,
    UnknownSessionError,
)
from retriever.tree import DraftTree

_RETRY_AFTER = 19
"""A failing drafter is left alone for so many times as long as its failure took."""


class NoDrafter:
    """A drafter that never guesses: decoding with it is plain decoding."""

    def open(self, session: str, prompt: TokenIds, *, remember: bool = True) -> None:
        """Begin a sequence; nothing is kept of it."""

    def draft(self, requests: Sequence[DraftRequest]) -> list[DraftTree]:
        """Return an empty tree for each request."""
        return [DraftTree.empty() for _ in requests]

    def close(self, session: str, new_tokens: TokenIds | None = None) -> None:
        """End a sequence."""


class DraftSession:
    """Keeps a drafter up to date with one sequence, and lives without it when it fails.

    A drafter that fails costs drafts, never the sequence. Its session is given up, as nobody
    knows what it has noted; later the whole sequence is opened anew. The longer the failure
    took, the later: waiting for a drafter that hangs takes at most a twentieth of the time.

    Args:
        drafter: whom to ask.
        prompt: int32[n], the sequence so far.
        vocabulary_size: drafted tokens must lie below it.
        remember: whether what is generated may serve later sequences.

    Attributes:
        num_failures: drafts that could not be had.

    Raises:
        InvalidRequestError: the drafter refuses the prompt.
    """

    def __init__(
        self, drafter: Drafter, prompt: TokenIds, vocabulary_size: int, *, remember: bool = True
    ) -> None:
        self._drafter = drafter
        self._tokens: list[int] = prompt.tolist()
        self._vocabulary_size = vocabulary_size
        self._remember = remember
        self._name = ""
        self._num_sent = 0
        self._retry_at = 0.0
        self.num_failures = 0
        with self._failing_open():
            self._open()

    def draft(self, budget_nodes: int) -> DraftTree:
        """Ask for a tree of at most `budget_nodes` nodes; empty where there is none to be had.

        Raises:
            InvalidTreeError: the tree holds tokens that the model lacks.
            InvalidRequestError: the drafter finds the request at fault.
        """
        if time.monotonic() < self._retry_at:
            self.num_failures += 1
            return DraftTree.empty()
        with self._failing_open():
            return self._checked(self._ask(budget_nodes))
        return DraftTree.empty()

    def extend(self, tokens: Sequence[int]) -> None:
        """Take in committed tokens; they travel with the next request."""
        self._tokens.extend(tokens)

    def close(self) -> None:
        """End the session with the tokens that the drafter has not seen yet."""
        if self._name:
            with self._failing_open():
                self._drafter.close(self._name, self._unsent())
            self._name = ""

    @contextmanager
    def _failing_open(self) -> Iterator[None]:
        """Go on after the block where the drafter could not be had, and count it."""
        start = time.monotonic()
        try:
            yield
        except (DrafterUnavailableError, UnknownSessionError):
            self._give_up()
            self.num_failures += 1
            now = time.monotonic()
            self._retry_at = now + _RETRY_AFTER * (now - start)

    def _give_up(self) -> None:
        """End a session that may be gone already; the next request opens another."""
        if self._name:
            with suppress(DrafterUnavailableError, UnknownSessionError):
                self._drafter.close(self._name)
        self._name = ""
        self._num_sent = 0

    def _open(self) -> None:
        name = uuid.uuid4().hex
        self._drafter.open(name, self._unsent(), remember=self._remember)
        self._name = name
        self._num_sent = len(self._tokens)

    def _ask(self, budget_nodes: int) -> DraftTree:
        if not self._name:
            self._open()
        request = DraftRequest(self._name, self._unsent(), len(self._tokens), budget_nodes)
        tree = self._drafter.draft([request])[0]
        self._num_sent = len(self._tokens)
        return tree

    def _checked(self, tree: DraftTree) -> DraftTree:
        """Refuse tokens that the model's embedding has no row for."""
        if len(tree) and not 0 <= tree.token_ids.min() <= tree.token_ids.max() < (
            self._vocabulary_size
        ):
            raise InvalidTreeError(
                f"the drafter proposes token {tree.token_ids.max()}, but the model's vocabulary "
                f"ends at {self._vocabulary_size}: it was built for another tokenizer"
            )
        return tree

    def _unsent(self) -> TokenIds:
        return np.array(self._tokens[self._num_sent :], np.int32)
