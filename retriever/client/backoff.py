"""Pauses between attempts: longer after each failure, and never the same for two clients."""

from collections.abc import Callable
from random import SystemRandom
from typing import Final

FIRST_PAUSE_S: Final = 0.1
"""Longest pause after the first failure, in seconds."""

LAST_PAUSE_S: Final = 5.0
"""Longest pause after any failure, in seconds."""


_DRAW: Final = SystemRandom().random


class Backoff:
    """Exponential back-off with equal jitter: half of each pause is drawn by lot.

    Source: "Exponential Backoff And Jitter", AWS Architecture Blog, 2015.

    Args:
        first_s: longest pause after the first failure, in seconds.
        last_s: longest pause after any, in seconds.
        draw: gives numbers from 0 to 1.
    """

    def __init__(
        self,
        first_s: float = FIRST_PAUSE_S,
        last_s: float = LAST_PAUSE_S,
        draw: Callable[[], float] = _DRAW,
    ) -> None:
        self._first_s = first_s
        self._last_s = last_s
        self._draw = draw
        self._longest_s = first_s

    def next_pause_s(self) -> float:
        """Return how long to pause after one more failure, in seconds."""
        longest_s, self._longest_s = self._longest_s, min(2 * self._longest_s, self._last_s)
        return longest_s * (1 + self._draw()) / 2

    def reset(self) -> None:
        """Begin anew: something succeeded."""
        self._longest_s = self._first_s
