"""Sequences whose tokens are kept, for servers that have missed some of them."""

from array import array
from collections.abc import Iterable
from typing import NamedTuple

import numpy as np

from retriever.drafter import DraftRequest, TokenIds


class TrackedSequence:
    """A sequence with all its tokens.

    Args:
        prompt: int32[n], what it begins with.
        remember: whether its output may serve later sequences.

    Attributes:
        prompt: as given.
        remember: as given.
    """

    def __init__(self, prompt: TokenIds, *, remember: bool) -> None:
        self.prompt = prompt
        self.remember = remember
        self._output = array("i")

    def __len__(self) -> int:
        return len(self.prompt) + len(self._output)

    def extend(self, ids: Iterable[int]) -> None:
        """Append token ids, integers of 31 bits, to the output."""
        self._output.extend(ids)

    def shorten(self, length: int) -> None:
        """Take back the output beyond so many tokens of the sequence."""
        del self._output[length - len(self.prompt) :]

    def without_prompt(self) -> "TrackedSequence":
        """Return the output alone, as a sequence; both have it together."""
        alone = TrackedSequence(self.prompt[:0].copy(), remember=self.remember)
        alone._output = self._output
        return alone

    def output(self, begin: int, end: int) -> TokenIds:
        """Return int32[end - begin] of the output; places are those in the sequence."""
        first = len(self.prompt)
        return np.array(self._output[begin - first : end - first], np.int32)

    def output_ids(self, begin: int, end: int) -> list[int]:
        """Return what `output` does, in a list."""
        first = len(self.prompt)
        return self._output[begin - first : end - first].tolist()


class TrackedStep(NamedTuple):
    """One sequence's part of a step, its new tokens taken into the sequence already.

    Attributes:
        request: as it came.
        sequence: whose it is.
    """

    request: DraftRequest
    sequence: TrackedSequence

    def since(self, begin: int) -> DraftRequest:
        """Return the request for a server that knows the tokens before `begin`."""
        request = self.request
        if begin == request.length - len(request.new_tokens):
            return request
        return DraftRequest(
            request.session,
            self.sequence.output(begin, request.length),
            request.length,
            request.budget_nodes,
            request.min_probability,
        )
