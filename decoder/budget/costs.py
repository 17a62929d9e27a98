"""What a pass of the target costs, by its width and by the context behind it."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Final, Self

import numpy as np
from numpy.typing import NDArray

_LOAD_RATE: Final = 0.1
_SHAPE_RATE: Final = 0.05
_MOST_SURPRISE: Final = 0.3
_MOST_CONTRAST: Final = 0.15
_FADING: Final = 0.999
_MOST_SHAPE: Final = math.log(4)
_FRESH_PASSES: Final = 16
_CONTEXT_GRAIN: Final = 64


@dataclass(frozen=True)
class CostSurface:
    """What passes cost at several widths and contexts.

    Attributes:
        contexts: tokens in the cache before a pass, rising.
        widths: tokens in a pass, rising from 1.
        seconds: what a pass took, a row for each context, a column for each width.
    """

    contexts: tuple[int, ...]
    widths: tuple[int, ...]
    seconds: tuple[tuple[float, ...], ...]

    @classmethod
    def flat(cls, widths: Sequence[int], seconds: Sequence[float]) -> Self:
        """Return costs that no context changes."""
        return cls((0,), tuple(widths), (tuple(seconds),))

    def table(self, context: int) -> NDArray[np.float64]:
        """Return float64[W], seconds of a pass of 1, 2, ..., W tokens, W the largest width.

        Linear between what was measured, and beyond the longest context as between the last
        two: attention costs so much for each token. Never falling with width or context: where
        a pass was measured slower than a larger one, the larger one is held for as slow.
        """
        after = int(np.searchsorted(self.contexts, context))
        high = min(max(after, 1), len(self.contexts) - 1)
        low = max(high - 1, 0)
        if high == low:
            only: NDArray[np.float64] = self._rows[0]
            return only
        span = self.contexts[high] - self.contexts[low]
        share = max(context - self.contexts[low], 0) / span
        table: NDArray[np.float64] = self._rows[low] + share * (self._rows[high] - self._rows[low])
        return table

    @cached_property
    def _rows(self) -> NDArray[np.float64]:
        measured = np.maximum.accumulate(np.array(self.seconds), axis=1)
        measured = np.maximum.accumulate(measured, axis=0)
        every_width = np.arange(1, self.widths[-1] + 1)
        return np.stack([np.interp(every_width, self.widths, row) for row in measured])


class LiveCosts:
    """A surface that follows what passes really take.

    Two things differ from what was measured: how busy the machine is, which slows passes of
    every width alike, and how dear some widths are. Only passes that follow one another tell
    widths apart, as they share the machine's load. Errors are taken as logarithms and clipped
    (Huber, 1964, doi:10.1214/aoms/1177703732), so one slow pass moves nothing by much, and what
    was learned of widths fades, so that a width is tried again.

    Args:
        surface: what was measured.
    """

    def __init__(self, surface: CostSurface) -> None:
        self.surface = surface
        widths = np.array(surface.widths, np.float64)
        places = np.interp(np.arange(1, widths[-1] + 1), widths, np.arange(len(widths)))
        self._places = places
        below = np.maximum(np.minimum(places.astype(int), len(widths) - 2), 0)
        self._below: list[int] = below.tolist()
        self._shares: list[float] = (places - below).tolist()
        self._load = 0.0
        self._shape = [0.0] * len(widths)
        self._last: tuple[int, float] | None = None
        self._context = -_CONTEXT_GRAIN
        self._age = 0

    def table(self, context: int) -> NDArray[np.float64]:
        """Return float64[W], seconds of a pass of 1, 2, ..., W tokens behind a context, rising."""
        moved = abs(context - self._context) >= _CONTEXT_GRAIN
        if moved:
            self._context = context
            self._measured = self.surface.table(context)
            self._logs: list[float] = np.log(self._measured).tolist()
        if moved or self._age >= _FRESH_PASSES:
            shape = np.interp(self._places, np.arange(len(self._shape)), self._shape)
            self._table = np.maximum.accumulate(self._measured * np.exp(shape + self._load))
            self._age = 0
        return self._table

    def learn(self, width: int, context: int, seconds: float) -> None:
        """Take in what a pass of some width took; one wider than the surface says nothing."""
        if seconds <= 0 or width > len(self._places):
            return
        self.table(context)
        self._age += 1
        logarithm = math.log(seconds) - self._logs[width - 1]
        if self._last is not None and self._last[0] != width:
            self._tell_apart(width, logarithm, *self._last)
        self._last = width, logarithm
        error = logarithm - self._load - self._shape_of(width)
        self._load += _LOAD_RATE * _clipped(error, _MOST_SURPRISE)

    def _tell_apart(
        self, width: int, logarithm: float, before: int, logarithm_before: float
    ) -> None:
        expected = self._shape_of(width) - self._shape_of(before)
        error = logarithm - logarithm_before - expected
        step = _SHAPE_RATE * _clipped(error, _MOST_CONTRAST)
        self._shape = [_FADING * share for share in self._shape]
        self._reshape(width, step)
        self._reshape(before, -step)

    def _shape_of(self, width: int) -> float:
        below = self._below[width - 1]
        share = self._shares[width - 1]
        if share == 0:
            return self._shape[below]
        return self._shape[below] * (1 - share) + self._shape[below + 1] * share

    def _reshape(self, width: int, step: float) -> None:
        below, share = self._below[width - 1], self._shares[width - 1]
        for at, part in ((below, 1 - share), (below + 1, share)):
            if part == 0:
                continue
            self._shape[at] = max(-_MOST_SHAPE, min(_MOST_SHAPE, self._shape[at] + step * part))


def _clipped(error: float, most: float) -> float:
    return max(-most, min(most, error))
