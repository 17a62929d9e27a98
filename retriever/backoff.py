"""Back-off: how long to wait before a failed operation is tried again."""

import time
from collections.abc import Callable
from random import SystemRandom
from typing import Final

FIRST_PAUSE_S: Final = 0.1
"""Longest pause after the first failure, in seconds: too short for a user to notice."""

LAST_PAUSE_S: Final = 5.0
"""Longest pause after any failure, in seconds. A service that recovers is used again within this
time."""

FAILURE_SHARE: Final = 1 / 20
"""Largest share of the time that failing calls may take if the caller can do no other work."""

_DRAW: Final = SystemRandom().random


class Backoff:
    """Pauses after failures: exponential with equal jitter, longer after slow failures.

    Half of each exponential pause is random, so that clients of one server do not all return at the
    same time. Source: "Exponential Backoff And Jitter", AWS Architecture Blog, 2015. If the caller
    blocks on a failing call, `share` lengthens the pause so that failures take at most this share
    of the time.

    Args:
        first_s: longest exponential pause after the first failure, in seconds; 0 for none.
        last_s: longest exponential pause after any failure, in seconds.
        share: share of the time that failures may take; 1 if the caller does not block on them.
        clock: a monotonic clock in seconds.
        draw: returns random numbers from 0 to 1.

    Attributes:
        num_failures: failures since the last success.
    """

    def __init__(
        self,
        first_s: float = FIRST_PAUSE_S,
        last_s: float = LAST_PAUSE_S,
        share: float = 1.0,
        *,
        clock: Callable[[], float] = time.monotonic,
        draw: Callable[[], float] = _DRAW,
    ) -> None:
        self._first_s = self._longest_s = first_s
        self._last_s = last_s
        self._share = share
        self._clock = clock
        self._draw = draw
        self._until_s = -float("inf")
        self.num_failures = 0

    def fail(self, took_s: float = 0.0, least_s: float = 0.0) -> float:
        """Note a failure; return how long to pause, in seconds.

        Args:
            took_s: how long the failed operation took, in seconds.
            least_s: shortest pause that the other side asks for, in seconds.
        """
        longest_s, self._longest_s = self._longest_s, min(2 * self._longest_s, self._last_s)
        deserved_s = took_s * (1 / self._share - 1)
        pause_s = max(longest_s * (1 + self._draw()) / 2, deserved_s, least_s)
        self._until_s = self._clock() + pause_s
        self.num_failures += 1
        return pause_s

    def is_over(self) -> bool:
        """Return whether the pause is over."""
        return self._clock() >= self._until_s

    def succeed(self) -> None:
        """Reset after a success."""
        self._longest_s = self._first_s
        self._until_s = -float("inf")
        self.num_failures = 0


def drafter_backoff(clock: Callable[[], float] = time.monotonic) -> Backoff:
    """Return the back-off for a drafter that a decoding loop blocks on.

    A drafter that fails quickly is retried soon. A drafter that hangs takes at most a twentieth of
    the decoding time.

    Args:
        clock: a monotonic clock in seconds.
    """
    return Backoff(first_s=0.0, share=FAILURE_SHARE, clock=clock)
