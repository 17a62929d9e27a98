"""Keys and values of sequences that are over, so that those that begin alike need not read them."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Final

import numpy as np
import torch

from retriever.drafter import TokenIds

DEFAULT_PREFIX_BYTES: Final = 256 << 20
"""Some 10,000 tokens of a small model, 2,000 of one of 8B."""

_LEAST_TOKENS: Final = 32
"""Shorter ones are read again in less time than it takes to look after them."""

LayerStates = Mapping[int, tuple[torch.Tensor, torch.Tensor]]
"""Keys and values by the number of their layer, [1, heads, n, size] each."""


@dataclass(frozen=True, slots=True, eq=False)
class Prefix:
    """A sequence's tokens, and what the target keeps of them.

    Attributes:
        tokens: int32[n].
        states: of the n tokens.
    """

    tokens: TokenIds
    states: LayerStates

    @property
    def num_bytes(self) -> int:
        """Memory that the states take."""
        return sum(each.nbytes for layer in self.states.values() for each in layer)


class PrefixStore:
    """Keeps the latest prefixes within so many bytes.

    Args:
        max_bytes: of all states; 0 to keep nothing.
    """

    def __init__(self, max_bytes: int = DEFAULT_PREFIX_BYTES) -> None:
        self._max_bytes = max_bytes
        self._kept: list[Prefix] = []  # the latest last

    def __iter__(self) -> Iterator[Prefix]:
        return iter(self._kept)

    @property
    def num_bytes(self) -> int:
        """Memory that is taken now."""
        return sum(prefix.num_bytes for prefix in self._kept)

    def wants(self, num_tokens: int, num_new: int, bytes_per_token: int) -> bool:
        """Return whether to keep a prefix, so many tokens of which would else be lost."""
        return num_new >= _LEAST_TOKENS and num_tokens * bytes_per_token <= self._max_bytes

    def put(self, prefix: Prefix) -> None:
        """Keep a prefix in place of those that it begins with; the oldest give way."""
        self._kept = [each for each in self._kept if not _begins(prefix.tokens, each.tokens)]
        self._kept.append(prefix)
        while self.num_bytes > self._max_bytes:
            self._kept.pop(0)

    def best(self, tokens: TokenIds, beyond: int) -> tuple[Prefix, int] | None:
        """Return the prefix that shares most with a sequence, and how many tokens that is.

        Args:
            tokens: int32[n], the sequence.
            beyond: tokens that need not be read anyway; a few more are not worth it.
        """
        shared = [num_shared(prefix.tokens, tokens) for prefix in self._kept]
        most = max(shared, default=0)
        if most - beyond < _LEAST_TOKENS:
            return None
        found = self._kept.pop(shared.index(most))
        if len(found.tokens) - most >= _LEAST_TOKENS:  # else it goes on elsewhere
            self._kept.append(found)
        return found, most

    def clear(self) -> None:
        """Forget all."""
        self._kept.clear()


def num_shared(one: TokenIds, other: TokenIds) -> int:
    """Return how many first tokens of int32[n] and int32[m] are the same."""
    length = min(len(one), len(other))
    different = np.flatnonzero(one[:length] != other[:length])
    return int(different[0]) if len(different) else length


def _begins(longer: TokenIds, shorter: TokenIds) -> bool:
    return num_shared(longer, shorter) == len(shorter)
