"""The Drafter protocol: what a decoding loop asks of a source of draft tokens."""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from retriever.tree import DraftTree

TokenIds = NDArray[np.int32]
"""int32[n], token ids of one sequence in order."""


@dataclass(frozen=True, slots=True)
class DraftRequest:
    """One sequence's part of a decoding step.

    Attributes:
        session: name of a session opened before.
        new_tokens: int32[n], tokens committed since the session's last request (or since it
            was opened).
        length: tokens in the whole sequence, prompt and `new_tokens` included; detects lost and
            repeated requests.
        budget_nodes: most nodes that the tree may have.
        min_probability: nodes less probable than this are not worth sending.
    """

    session: str
    new_tokens: TokenIds
    length: int
    budget_nodes: int
    min_probability: float = 0.0


class Keeping(IntEnum):
    """Where an output is kept, by the number on the wire."""

    NOTHING = 1
    MEMORY = 2
    DISK = 3
    DISK_REFUSED = 4


@dataclass(slots=True, eq=False)
class Fate:
    """What became of an output.

    Attributes:
        keeping: in memory, until it has been written or refused.
    """

    keeping: Keeping = Keeping.MEMORY

    def settle(self, *, is_kept: bool) -> None:
        """Note whether the disk has taken it."""
        self.keeping = Keeping.DISK if is_kept else Keeping.DISK_REFUSED


class Drafter(Protocol):
    """Drafts continuations of many sequences at once; keeps a session for each.

    Embedded drafters, remote clients, draft models and fusions of these implement it.
    """

    def open(self, session: str, prompt: TokenIds, *, remember: bool = True) -> None:
        """Begin a sequence.

        Args:
            session: a name that no open session has.
            prompt: int32[n], the tokens committed so far.
            remember: whether its output joins the generations when it is closed.

        Raises:
            SessionExistsError: the name is taken.
            InvalidRequestError: a token is outside the vocabulary, or a limit is exceeded.
        """
        ...

    def draft(self, requests: Sequence[DraftRequest]) -> list[DraftTree]:
        """Return one tree for each request, in order: one call for a whole decoding step.

        Raises:
            UnknownSessionError: a session is not open.
            OutOfSequenceError: a stated length does not fit; nothing of the request is kept.
            DrafterUnavailableError: no answer in time; the loop continues without drafts.
        """
        ...

    def close(self, session: str, new_tokens: TokenIds | None = None) -> None:
        """End a sequence with the tokens committed since its last request.

        Raises:
            UnknownSessionError: the session is not open.
        """
        ...
