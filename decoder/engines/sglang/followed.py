"""SGLang's requests, and the tokens of each as far as they were shown."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from decoder.engines.sequences import TokenSequence
from retriever.drafter import TokenIds


class EngineRequest(Protocol):
    """What is read of SGLang's requests."""

    @property
    def rid(self) -> str:
        """Its name."""

    @property
    def origin_input_ids_unpadded(self) -> Sequence[int]:
        """The prompt."""

    @property
    def output_ids(self) -> Sequence[int]:
        """What was generated, as far as the scheduler knows."""


@dataclass(slots=True)
class FollowedRequest:
    """A request whose tokens are followed.

    Attributes:
        sequence: its tokens.
        offset: tokens in front of them that were never shown.
        request: whose they are, where that was shown.
    """

    sequence: TokenSequence
    offset: int
    request: EngineRequest | None

    @classmethod
    def of(cls, request: EngineRequest) -> "FollowedRequest":
        """Follow a request that is shown: its prompt, and its output so far."""
        num_prompt = len(request.origin_input_ids_unpadded)
        return cls(TokenSequence(_tokens_of(request), num_prompt, 0), 0, request)

    @classmethod
    def of_tail(cls, tail: Sequence[int], length: int) -> "FollowedRequest":
        """Follow a request of which only the last tokens and the length are known."""
        tokens = np.array(tail, np.int32)
        return cls(TokenSequence(tokens, len(tokens), 0), length - len(tokens), None)

    def go_on(self, tail: Sequence[int], length: int) -> bool:
        """Append what is new; tell whether the sequence is still the same."""
        tokens = np.array(tail, np.int32)
        num_known = len(tokens) - (length - self.offset - len(self.sequence))
        if not 0 <= num_known <= len(tokens) or num_known > len(self.sequence):
            return False
        known = self.sequence.tokens[len(self.sequence) - num_known :]
        if not np.array_equal(known, tokens[:num_known]):
            return False
        self.sequence.extend(tokens[num_known:])
        return True

    def take_rest(self) -> None:
        """Append what was generated since the last step."""
        if self.request is not None:
            self.sequence.extend(_tokens_of(self.request)[len(self.sequence) :])


def _tokens_of(request: EngineRequest) -> TokenIds:
    prompt = np.asarray(request.origin_input_ids_unpadded, np.int32)
    return np.concatenate([prompt, np.asarray(request.output_ids, np.int32)])
