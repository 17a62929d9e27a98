"""Constraints on what may be generated: state machines that walk along with a path."""

from typing import Generic, Protocol, TypeVar

import numpy as np
import torch

from decoder.sampling.verification import Place
from retriever.drafter import TokenIds

State = TypeVar("State")


class Constraint(Protocol[State]):
    """Says which tokens may come next; begins where the prompt ends.

    States are values: advancing one leaves it as it was, because a tree's paths share their
    beginnings and most of them are given up.
    """

    def start(self) -> State:
        """Return the state in which nothing is generated yet."""
        ...

    def advance(self, state: State, token: int) -> State:
        """Return the state after one more token, which the state allows."""
        ...

    def allowed(self, state: State) -> torch.Tensor:
        """Return bool[n], whether each token may come next; those from n on may not."""
        ...


class ConstraintMemory(Generic[State]):
    """Follows a constraint from step to step, so that each token is taken in once.

    Args:
        constraint: whose states these are.
    """

    def __init__(self, constraint: Constraint[State]) -> None:
        self.constraint = constraint
        self._known: TokenIds = np.empty(0, np.int32)
        self._state = constraint.start()

    def state(self, place: Place) -> State:
        """Return the state after all that is committed."""
        generated = place.generated
        known = len(self._known)
        if known > len(generated) or not np.array_equal(generated[:known], self._known):
            self._state, known = self.constraint.start(), 0
        for token in generated[known:].tolist():
            self._state = self.constraint.advance(self._state, token)
        self._known = generated.copy()
        return self._state


def masked(scores: torch.Tensor, allowed: torch.Tensor) -> torch.Tensor:
    """Return [1, vocabulary], the logits with -inf for the tokens that are not allowed.

    Args:
        scores: [1, vocabulary].
        allowed: bool[n]; tokens from n on are not allowed.
    """
    size = scores.shape[-1]
    mask = torch.zeros(size, dtype=torch.bool, device=scores.device)
    mask[: len(allowed)] = allowed[:size].to(scores.device)
    return scores.masked_fill(~mask, float("-inf"))
