"""A strict drafter that knows what comes, and is now and then wrong about it."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

from retriever.drafter import DEFAULT, DraftRequest, SequenceOptions, TokenIds
from retriever.errors import (
    DrafterUnavailableError,
    OutOfSequenceError,
    SessionExistsError,
    UnknownSessionError,
)
from retriever.tree import DraftTree, Source

Continuation = Callable[[list[int], int], list[int]]
"""Takes a sequence and a number, and returns so many tokens that come after it, or fewer."""


@dataclass
class ScriptedDrafter:
    """Drafts what a script says.

    Attributes:
        continuation: the script.
        wrong_at: of so many drafted tokens one is another than the script's; 0 for none.
        vocabulary_size: of the tokens it is wrong with.
        is_away: whether it fails.
        failure: what it fails with.
        sessions: the tokens of each open session.
        told: tokens of prompts and steps that it was told.
        outputs: what was generated in each session that was closed.
    """

    continuation: Continuation
    wrong_at: int = 0
    vocabulary_size: int = 64
    is_away: bool = False
    failure: Exception = field(default_factory=lambda: DrafterUnavailableError("away"))
    sessions: dict[str, list[int]] = field(default_factory=dict)
    prompts: dict[str, int] = field(default_factory=dict)
    told: int = 0
    outputs: list[list[int]] = field(default_factory=list)
    num_drafted: int = 0

    def open(self, session: str, prompt: TokenIds, options: SequenceOptions = DEFAULT) -> None:
        assert options.remember
        self._check()
        if session in self.sessions:
            raise SessionExistsError(session)
        self.sessions[session] = prompt.tolist()
        self.prompts[session] = len(prompt)
        self.told += len(prompt)

    def draft(self, requests: Sequence[DraftRequest]) -> list[DraftTree]:
        self._check()
        return [self.tree(request) for request in requests]

    def close(self, session: str, new_tokens: TokenIds | None = None) -> None:
        self._check()
        if session not in self.sessions:
            raise UnknownSessionError(session)
        tokens = self.sessions.pop(session) + ([] if new_tokens is None else new_tokens.tolist())
        self.outputs.append(tokens[self.prompts.pop(session) :])

    def _check(self) -> None:
        if self.is_away:
            raise self.failure

    def tree(self, request: DraftRequest) -> DraftTree:
        """Take in a request's tokens and answer it."""
        tokens = self.sessions[request.session]
        tokens.extend(request.new_tokens.tolist())
        self.told += len(request.new_tokens)
        if len(tokens) != request.length:
            raise OutOfSequenceError(request.session)
        return chain_tree([self._spoilt(each) for each in self.continuation(tokens, 8)])

    def _spoilt(self, token: int) -> int:
        self.num_drafted += 1
        if self.wrong_at and self.num_drafted % self.wrong_at == 0:
            return 2 + (token + 1) % (self.vocabulary_size - 2)
        return token


def chain_tree(tokens: Sequence[int]) -> DraftTree:
    """Return a path as a tree."""
    size = len(tokens)
    probabilities = np.full(size, 0.9) ** np.arange(1, size + 1)
    return DraftTree.checked(
        tokens, np.arange(-1, size - 1), probabilities, [Source.CONTEXT] * size
    )
