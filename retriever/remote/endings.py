"""What a server is still to be told of sequences that have ended."""

from collections import deque
from collections.abc import Iterable
from itertools import islice
from typing import Final

from retriever.tracking import TrackedSequence
from retriever.v1 import retriever_pb2 as pb

MAX_BACKLOG_TOKENS: Final = 1 << 20
"""Outputs that wait for a server, in tokens; the oldest are given up for newer ones."""

EACH_TOKENS: Final = 64
"""An output counts for so many tokens more: what it takes in memory beside its own."""

_MAX_AT_ONCE: Final = 256
_MAX_TOKENS_AT_ONCE: Final = 1 << 14  # a step that brings them is not a millisecond longer


class Endings:
    """Sessions to close, and outputs that a server has not been told of, oldest first."""

    def __init__(self) -> None:
        self._closings: deque[tuple[pb.CloseSessionRequest, TrackedSequence | None]] = deque()
        self._outputs: deque[TrackedSequence] = deque()
        self._num_tokens = 0

    def __len__(self) -> int:
        return len(self._closings) + len(self._outputs)

    def close(
        self, wire_name: str, new_tokens: Iterable[int] = (), told: TrackedSequence | None = None
    ) -> None:
        """Close a session.

        Args:
            wire_name: its name.
            new_tokens: tokens that the server has not been told of.
            told: the sequence whose output is kept with that; None to keep nothing.
        """
        closing = pb.CloseSessionRequest(
            session_id=wire_name, new_token_ids=new_tokens, forget=told is None
        )
        self._closings.append((closing, told))

    def tell(self, sequence: TrackedSequence) -> None:
        """Tell the whole output of a sequence, if it may be remembered and is not empty."""
        if not sequence.remember or len(sequence) == len(sequence.prompt):
            return
        self._outputs.append(sequence.without_prompt())
        self._num_tokens += _size(sequence)
        while self._num_tokens > MAX_BACKLOG_TOKENS:
            self._num_tokens -= _size(self._outputs.popleft())

    def lose(self) -> None:
        """The sessions are gone: what they would have kept is told as outputs."""
        closings, self._closings = self._closings, deque()
        for _, told in closings:
            if told is not None:
                self.tell(told)

    def add_closings(self, message: pb.DraftStreamRequest) -> list[TrackedSequence]:
        """Move closings to a message; return the outputs that are lost if it is."""
        told = []
        for _ in range(min(len(self._closings), _MAX_AT_ONCE)):
            closing, sequence = self._closings.popleft()
            message.closings.append(closing)
            if sequence is not None:
                told.append(sequence)
        return told

    def add_outputs(
        self, message: pb.DraftStreamRequest, wire_names: Iterable[str], fingerprint: str
    ) -> list[TrackedSequence]:
        """Move outputs to a message, each as a session that begins and ends; return them."""
        told: list[TrackedSequence] = []
        num_tokens = 0
        for name in islice(wire_names, min(len(self._outputs), _MAX_AT_ONCE)):
            num_tokens += _size(self._outputs[0])
            if told and num_tokens > _MAX_TOKENS_AT_ONCE:
                break
            sequence = self._outputs.popleft()
            self._num_tokens -= _size(sequence)
            message.openings.add(session_id=name, vocabulary_fingerprint=fingerprint)
            tokens = sequence.output_ids(len(sequence.prompt), len(sequence))
            message.closings.add(session_id=name, new_token_ids=tokens)
            told.append(sequence)
        return told


def _size(sequence: TrackedSequence) -> int:
    """Return what an output counts for, in tokens."""
    return len(sequence) - len(sequence.prompt) + EACH_TOKENS
