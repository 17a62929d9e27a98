"""What every peer shares: sessions, requests and the bookkeeping of the `Drafter` protocol."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Generic, TypeVar

import numpy as np

from retriever.drafter import DraftRequest, TokenIds
from retriever.errors import OutOfSequenceError, SessionExistsError, UnknownSessionError
from retriever.tree import ROOT, DraftTree, Source

NO_TOKENS = np.empty(0, np.int32)


class TokenSequence:
    """The tokens of one sequence, in an array that grows.

    Args:
        prompt: int32[n], what the sequence begins with.
        remember: whether its output may serve later sequences.
    """

    def __init__(self, prompt: TokenIds, *, remember: bool = True) -> None:
        self.remember = remember
        self.prompt_length = len(prompt)
        self._buffer = np.empty(max(1024, 2 * len(prompt)), np.int32)
        self._length = 0
        self.append(prompt)

    def __len__(self) -> int:
        return self._length

    @property
    def tokens(self) -> TokenIds:
        """A view of the tokens so far, int32[n]."""
        return self._buffer[: self._length]

    @property
    def output(self) -> TokenIds:
        """A view of what came after the prompt, int32[n]."""
        return self._buffer[self.prompt_length : self._length]

    def append(self, tokens: TokenIds) -> None:
        """Append int32[n]."""
        end = self._length + len(tokens)
        if end > len(self._buffer):
            self._buffer = np.concatenate([self.tokens, np.empty(end, np.int32)])
        self._buffer[self._length : end] = tokens
        self._length = end


State = TypeVar("State", bound=TokenSequence)


class SequenceDrafter(ABC, Generic[State]):
    """A `Drafter` whose rule looks at one sequence at a time; a rule fills in four methods."""

    def __init__(self) -> None:
        self._states: dict[str, State] = {}

    def open(self, session: str, prompt: TokenIds, *, remember: bool = True) -> None:
        """Begin a sequence; see `Drafter.open`."""
        if session in self._states:
            raise SessionExistsError(f"session {session!r} is open already")
        self._states[session] = self._begin(np.asarray(prompt, np.int32), remember=remember)

    def draft(self, requests: Sequence[DraftRequest]) -> list[DraftTree]:
        """Return one tree for each request; see `Drafter.draft`."""
        return [self._answer(request) for request in requests]

    def close(self, session: str, new_tokens: TokenIds | None = None) -> None:
        """End a sequence; see `Drafter.close`."""
        state = self._state(session)
        if new_tokens is not None and len(new_tokens):
            self._commit(state, new_tokens)
        del self._states[session]
        self._end(state)

    def _answer(self, request: DraftRequest) -> DraftTree:
        state = self._state(request.session)
        if len(state) + len(request.new_tokens) != request.length:
            raise OutOfSequenceError(
                f"session {request.session!r} has {len(state)} tokens and the request brings "
                f"{len(request.new_tokens)}, but states a length of {request.length}"
            )
        if len(request.new_tokens):
            self._commit(state, request.new_tokens)
        if request.budget_nodes == 0 or len(state) == 0:
            return DraftTree.empty()
        tree = self._propose(state, request.budget_nodes)
        return tree.prefix(int(np.sum(tree.probabilities >= request.min_probability)))

    def _state(self, session: str) -> State:
        try:
            return self._states[session]
        except KeyError:
            raise UnknownSessionError(f"no session {session!r} is open: open it first") from None

    @abstractmethod
    def _begin(self, prompt: TokenIds, *, remember: bool) -> State:
        """Return the state of a new sequence."""

    @abstractmethod
    def _commit(self, state: State, tokens: TokenIds) -> None:
        """Take in int32[n], n > 0, tokens that the sequence went on with."""

    @abstractmethod
    def _propose(self, state: State, budget: int) -> DraftTree:
        """Return a tree of at most `budget` nodes, `budget` > 0."""

    @abstractmethod
    def _end(self, state: State) -> None:
        """Let go of a sequence; its output may be remembered where `state.remember`."""


def chain(tokens: TokenIds, source: Source) -> DraftTree:
    """Return int32[n] as a tree that is one path, by a rule that gives no probabilities: all 1."""
    return DraftTree(
        np.array(tokens, np.int32),
        np.arange(ROOT, len(tokens) - 1, dtype=np.int32),
        np.ones(len(tokens), np.float32),
        np.full(len(tokens), int(source), np.uint8),
    )
