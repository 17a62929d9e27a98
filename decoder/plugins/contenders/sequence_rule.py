"""Common code of drafting rules: sessions, requests and the checks of the `Drafter` protocol."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Generic, TypeVar

import numpy as np

from retriever.drafter import DEFAULT, DraftRequest, SequenceOptions, TokenIds
from retriever.sequences import OpenSessions, TokenSequence, check_step, checked_options
from retriever.tree import ROOT, DraftTree, Source

State = TypeVar("State", bound=TokenSequence)


class SequenceRule(ABC, Generic[State]):
    """A `Drafter` for a rule that looks at one sequence at a time; it has four abstract methods."""

    def __init__(self) -> None:
        self._states: OpenSessions[str, State] = OpenSessions()

    def open(self, session: str, prompt: TokenIds, options: SequenceOptions = DEFAULT) -> None:
        """Start a sequence; see `Drafter.open`."""
        self._states.check_free(session)
        options = checked_options(options).without_predictions
        self._states.add(session, self._begin(np.asarray(prompt, np.int32), options))

    def draft(self, requests: Sequence[DraftRequest]) -> list[DraftTree]:
        """Return one tree for each request; see `Drafter.draft`."""
        return [self._answer(request) for request in requests]

    def close(self, session: str, new_tokens: TokenIds | None = None) -> None:
        """End a sequence; see `Drafter.close`."""
        state = self._states.remove(session)
        if new_tokens is not None and len(new_tokens):
            self._commit(state, new_tokens)
        self._end(state)

    def _answer(self, request: DraftRequest) -> DraftTree:
        state = self._states.get(request.session)
        check_step(request, len(state), len(request.new_tokens))
        if len(request.new_tokens):
            self._commit(state, request.new_tokens)
        if request.budget_nodes == 0 or len(state) == 0:
            return DraftTree.empty()
        tree = self._propose(state, request.budget_nodes)
        return tree.prefix(int(np.sum(tree.probabilities >= request.min_probability)))

    @abstractmethod
    def _begin(self, prompt: TokenIds, options: SequenceOptions) -> State:
        """Return the state of a new sequence."""

    @abstractmethod
    def _commit(self, state: State, tokens: TokenIds) -> None:
        """Add the next tokens of the sequence, int32[n] with n > 0."""

    @abstractmethod
    def _propose(self, state: State, budget: int) -> DraftTree:
        """Return a tree of at most `budget` nodes; `budget` is above 0."""

    @abstractmethod
    def _end(self, state: State) -> None:
        """Forget a sequence; the rule may store its output if `state.options.remember` is set."""


def chain(tokens: TokenIds, source: Source) -> DraftTree:
    """Return tokens, int32[n], as a single path; all probabilities are 1, as the rule has none."""
    return DraftTree(
        np.array(tokens, np.int32),
        np.arange(ROOT, len(tokens) - 1, dtype=np.int32),
        np.ones(len(tokens), np.float32),
        np.full(len(tokens), int(source), np.uint8),
    )
