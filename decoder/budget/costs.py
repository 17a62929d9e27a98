"""What a pass costs, by its width and its context, and what a step takes beside its pass.

Passes are measured once, or learned from those that come, and then adapted.
"""

import math
import statistics
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import Any, Final, Self

import numpy as np
from numpy.typing import NDArray

from decoder.budget.payoff import FadingRatio, RecentMedian

# Errors below are mean absolute errors of logarithms, for made-up passes whose time varies by 8%,
# of which every 33rd takes thirty times as long, while the load doubles and halves every 200 steps
# and some widths are 1.4 times as expensive as measured: 0.085 for the load, 0.025 for the shape.

_LOAD_RATE: Final = 0.1
"""Share of an error of the load that is corrected at once: some ten passes. With 0.03 the error of
the load is 0.17; with 0.3 it is 0.07, but all of a table then moves with every pass's noise."""

_SHAPE_RATE: Final = 0.05
"""Share of a contrast of two widths that is put down to each. With 0.01 the error of the shape is
0.08, learned too late; with 0.2 it is 0.045, which is noise."""

_MOST_SURPRISE: Final = 0.3
"""Where errors of the load are clipped, as logarithms: three times what passes vary by. With 0.1 a
change of load is followed late (an error of 0.15), and without clipping pauses count (0.14)."""

_MOST_CONTRAST: Final = 0.15
"""Where contrasts of widths are clipped; they are small, as passes share their load. With 0.05 the
error of the shape is 0.04, without clipping 0.12."""

_FADING: Final = 0.999
"""What was learned of widths halves in 700 contrasts, so that a width that seemed expensive is
tried again within a long answer. Without fading the error is the same, with 0.99 it is 0.09."""

_MOST_SHAPE: Final = math.log(4)
"""No width counts as more than four times as expensive or as cheap as measured: a bound that no
sound run comes near."""

_FRESH_PASSES: Final = 16
"""Passes that a table serves: making one takes as long as the rest of a step's decisions, some tens
of microseconds. With 1 the error of the load is 0.06, with 64 it is 0.15."""

_CONTEXT_GRAIN: Final = 64
"""Tokens by which a context grows before its table is made again. Even where each token of context
adds a microsecond to a pass of milliseconds, 64 change a table by less than passes vary."""


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
        low, high, share = self._between(context)
        table: NDArray[np.float64] = self._rows[low] + share * (self._rows[high] - self._rows[low])
        return table

    def pass_s(self, width: int, context: int) -> float:
        """Return the seconds of a pass of so many tokens, without those of other widths."""
        low, high, share = self._between(context)
        first, second = self._lists[low][width - 1], self._lists[high][width - 1]
        return first + share * (second - first)

    def _between(self, context: int) -> tuple[int, int, float]:
        """Return the rows that a context stands between, and how far it is from the first."""
        high = min(max(bisect_left(self.contexts, context), 1), len(self.contexts) - 1)
        low = max(high - 1, 0)
        span = self.contexts[high] - self.contexts[low] or 1
        return low, high, max(context - self.contexts[low], 0) / span if high else 0.0

    @cached_property
    def _rows(self) -> NDArray[np.float64]:
        measured = np.maximum.accumulate(np.array(self.seconds), axis=1)
        measured = np.maximum.accumulate(measured, axis=0)
        every_width = np.arange(1, self.widths[-1] + 1)
        return np.stack([np.interp(every_width, self.widths, row) for row in measured])

    @cached_property
    def _lists(self) -> list[list[float]]:
        rows: list[list[float]] = self._rows.tolist()  # of which an element is read at once
        return rows


def checked_surface(
    contexts: Sequence[Any], widths: Sequence[Any], seconds: Sequence[Sequence[Any]]
) -> CostSurface:
    """Return a surface of values that were read from somewhere.

    Args:
        contexts: tokens before a pass, rising.
        widths: tokens in a pass, rising from 1.
        seconds: a row for each context, a column for each width.

    Raises:
        ValueError or TypeError: they are not that.
    """
    contexts, widths = tuple(map(int, contexts)), tuple(map(int, widths))
    rows = tuple(tuple(map(float, row)) for row in seconds)
    rising = all(low < high for axis in (contexts, widths) for low, high in pairwise(axis))
    whole = len(rows) == len(contexts) and all(len(row) == len(widths) for row in rows)
    sound = all(math.isfinite(s) and s > 0 for row in rows for s in row)
    if not (contexts and rising and whole and sound and widths[:1] == (1,) and contexts[0] >= 0):
        raise ValueError("not a table of costs")
    return CostSurface(contexts, widths, rows)


class AdaptiveCosts:
    """A surface that follows what passes really take.

    Two things differ from what was measured: how busy the machine is, which slows passes of
    every width alike, and how expensive some widths are. Only passes that follow one another tell
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

    @property
    def load(self) -> float:
        """How many times as long as measured passes take now, of all widths alike."""
        return math.exp(self._load)

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

    def table_to(self, width: int, context: int) -> NDArray[np.float64]:
        """Return float64[width], seconds as `table` does.

        Beyond the widest pass measured costs rise as they do over its wider half.
        """
        table = self.table(context)
        widest = len(table)
        if width <= widest:
            return table[:width]
        slope = (table[-1] - table[widest // 2]) / max(widest - 1 - widest // 2, 1)
        beyond = table[-1] + slope * np.arange(1, width - widest + 1)
        return np.concatenate([table, beyond])

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


_RECENT_STEPS: Final = 9
"""Plain steps whose median says what they take beside their passes: up to four pauses of the
machine change nothing."""

_ENOUGH_PLAIN: Final = 3
"""Plain steps before it is known what steps take without drafts."""

_NODES_DECAY: Final = 0.9
"""What nodes add is that of some ten steps with drafts, each weighed by its nodes."""

_MOST_EXCESS: Final = 1.0
"""Where that is clipped, to what the step's pass is said to cost: pauses of the machine."""


class StepOverhead:
    """What steps take beyond what their passes are said to cost, without drafts and for each node.

    Costs are of passes over one sequence. A step also accepts paths, moves what is kept, and has
    the drafter learn, for each sequence by itself; on a quick device that may take longer than the
    nodes in its pass. Only plain steps tell what drafts add to a step, so nothing is said before
    three of them; all is in proportion to the machine's load.
    """

    def __init__(self) -> None:
        self._plain = RecentMedian(_RECENT_STEPS)
        self._node_s = FadingRatio(_NODES_DECAY)
        self._num_plain = 0

    @property
    def is_known(self) -> bool:
        """Whether enough plain steps were seen."""
        return self._num_plain >= _ENOUGH_PLAIN

    @property
    def plain(self) -> float:
        """How many times as long a plain step takes as its pass is said to."""
        return (self._plain.value() or 1.0) if self.is_known else 1.0

    @property
    def node_s(self) -> float:
        """Seconds that each node adds beyond what it adds to the pass, on a machine of load 1."""
        return max(self._node_s.value(), 0.0)

    def learn(self, num_nodes: int, pass_s: float, step_s: float, load: float) -> None:
        """Take in a step.

        Args:
            num_nodes: of all trees that it verified.
            pass_s: seconds that its pass is said to cost.
            step_s: seconds that it took, without drafting.
            load: how many times as long as measured passes take now.
        """
        if num_nodes == 0:
            self._num_plain += 1
            self._plain.add(step_s / pass_s)
        elif self.is_known:
            excess = _clipped(step_s / pass_s - self.plain, _MOST_EXCESS)
            self._node_s.add(excess * pass_s / load, num_nodes)


_ENOUGH: Final = 3
"""Passes of a width before it counts as known: the median of three ignores one slow pass, as the
first of a shape often is."""

_STALE_PASSES: Final = 4096
"""Passes after which a width that was not seen counts as unknown, and is tried again three times:
under a thousandth of all passes."""

_FINE: Final = 8
"""Widths up to here are known one by one; beyond, in steps of a quarter: costs leap where kernels
change, mostly at powers of two, and a quarter is finer than that."""


class ObservedCosts(AdaptiveCosts):
    """What passes cost where none can be made to be timed: learned from those that come.

    A width is known once three passes had about it. Between known widths costs are linear, and
    beyond the widest they rise as between the last two. What is narrower than all known ones counts
    as cheap in proportion, and what is wider than the only known one as no more expensive: so both
    are soon tried, and known. From then on a width is adapted as `AdaptiveCosts` does.

    Args:
        max_width: of a pass, tokens of all its sequences together.
    """

    def __init__(self, max_width: int) -> None:
        widths = _observed_widths(max_width)
        super().__init__(CostSurface.flat(widths, [1.0] * len(widths)))
        self._knots = np.array(widths)
        self._samples: list[list[float]] = [[] for _ in widths]
        self._seen = [0] * len(widths)
        self._num_passes = 0

    def learn(self, width: int, context: int, seconds: float) -> None:
        """Take in what a pass of some width took; one wider than all others says nothing."""
        if seconds <= 0 or width > self._knots[-1]:
            return
        self._num_passes += 1
        place = int(np.abs(self._knots - width).argmin())
        self._seen[place] = self._num_passes
        samples = self._samples[place]
        if len(samples) == _ENOUGH:
            super().learn(width, context, seconds)
        else:
            samples.append(seconds * math.exp(-self._load))
            if len(samples) == _ENOUGH:
                self._rebuild()
        if self._num_passes % _STALE_PASSES == 0:
            self._forget_unseen()

    def _forget_unseen(self) -> None:
        last = self._num_passes - _STALE_PASSES
        stale = [at for at, seen in enumerate(self._seen) if seen <= last and self._samples[at]]
        for at in stale:
            self._samples[at].clear()
        if stale:
            self._rebuild()

    def _rebuild(self) -> None:
        """Make the surface again from what is known."""
        known = [at for at, samples in enumerate(self._samples) if len(samples) == _ENOUGH]
        seconds = [statistics.median(self._samples[at]) for at in known]
        widths = self._knots[known]
        rise = 0.0
        if len(known) > 1:
            rise = max(seconds[-1] - seconds[-2], 0.0) / float(widths[-1] - widths[-2])
        beyond = np.maximum(self._knots - widths[-1], 0)
        below = np.minimum(self._knots / widths[0], 1.0)
        found = np.interp(self._knots, widths, seconds) * below + rise * beyond
        self.surface = CostSurface.flat(self._knots.tolist(), found.tolist())
        self._shape = [
            shape if len(samples) == _ENOUGH else 0.0
            for shape, samples in zip(self._shape, self._samples, strict=True)
        ]
        self._context = -_CONTEXT_GRAIN  # the table is made again


def _observed_widths(max_width: int) -> list[int]:
    """Return widths that are told apart, rising from 1 to the largest."""
    widths = list(range(1, min(_FINE, max_width) + 1))
    while widths[-1] < max_width:
        widths.append(min(widths[-1] + widths[-1] // 4, max_width))
    return widths
