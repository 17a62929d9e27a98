"""What drafters may learn from a pass of the target, beyond which tokens were committed."""

from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import numpy as np
import torch
from numpy.typing import NDArray

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
