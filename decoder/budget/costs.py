"""The costs of passes by width and context, and the overhead of decoding steps.

Costs are measured once, or learned while passes run, and then adapted.
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

# Errors below are mean absolute errors of logarithms, for simulated passes whose time varies by 8%.
# Every 33rd pass takes thirty times as long, the load doubles or halves every 200 steps, and some
# widths are 1.4 times as expensive as measured. The chosen values give errors of 0.085 for the load
# and 0.025 for the shape, that is, the relative cost of widths.

_LOAD_RATE: Final = 0.1
"""Share of an error of the load that one pass corrects, so that about ten passes count. With 0.03
the error of the load is 0.17; with 0.3 it is 0.07, but then the noise of every pass moves the whole
table."""

_SHAPE_RATE: Final = 0.05
"""Share of the error in comparing two widths by which each width is corrected. With 0.01 the error
of the shape is 0.08, because corrections come too late; with 0.2 it is 0.045, because of noise."""

_MOST_SURPRISE: Final = 0.3
"""Clipping limit for errors of the load, as logarithms: three times the usual variation of passes.
With 0.1 a change of load is noticed late (an error of 0.15); without clipping, machine pauses count
in full (an error of 0.14)."""

_MOST_CONTRAST: Final = 0.15
"""Clipping limit for differences between widths, which are small because successive passes have the
same load. With 0.05 the error of the shape is 0.04; without clipping it is 0.12."""

_FADING: Final = 0.999
"""Corrections of widths halve within 700 comparisons, so a width that seemed expensive is tried
again within a long answer. Without fading the error is the same; with 0.99 it is 0.09."""

_MOST_SHAPE: Final = math.log(4)
"""No width counts as more than four times as expensive, or as cheap, as measured; normal runs stay
far below this factor."""

_FRESH_PASSES: Final = 16
"""Number of passes for which a table is used: building it takes tens of microseconds, as long as
the rest of a step's decisions. With 1 the error of the load is 0.06; with 64 it is 0.15."""

_CONTEXT_GRAIN: Final = 64
"""Tokens by which a context grows before its table is rebuilt. Even if each token of context adds a
microsecond to a pass of milliseconds, 64 tokens change a table less than passes vary."""


@dataclass(frozen=True)
class CostSurface:
    """The costs of passes at several widths and contexts.

    Attributes:
        contexts: numbers of tokens in the cache before a pass, ascending.
        widths: numbers of tokens in a pass, ascending from 1.
        seconds: durations of passes, a row for each context and a column for each width.
    """

    contexts: tuple[int, ...]
    widths: tuple[int, ...]
    seconds: tuple[tuple[float, ...], ...]

    @classmethod
    def flat(cls, widths: Sequence[int], seconds: Sequence[float]) -> Self:
        """Return costs that do not depend on the context."""
        return cls((0,), tuple(widths), (tuple(seconds),))

    def table(self, context: int) -> NDArray[np.float64]:
        """Return float64[W], the seconds of passes of 1, 2, ..., W tokens, up to the largest width.

        Costs are interpolated linearly between measured points. Beyond the longest context they are
        extrapolated from the last two, because attention has a fixed cost per token. Costs never
        decrease with width or context: if a pass was slower than a larger pass, the larger pass
        counts as equally slow.
        """
        low, high, share = self._between(context)
        table: NDArray[np.float64] = self._rows[low] + share * (self._rows[high] - self._rows[low])
        return table

    def pass_s(self, width: int, context: int) -> float:
        """Return the seconds of a pass of `width` tokens, without computing other widths."""
        low, high, share = self._between(context)
        first, second = self._lists[low][width - 1], self._lists[high][width - 1]
        return first + share * (second - first)

    def _between(self, context: int) -> tuple[int, int, float]:
        """Return the two rows around a context and its relative distance from the first."""
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
        rows: list[list[float]] = self._rows.tolist()  # single elements are read faster
        return rows


def checked_surface(
    contexts: Sequence[Any], widths: Sequence[Any], seconds: Sequence[Sequence[Any]]
) -> CostSurface:
    """Check values that were read from a file, and return them as a surface.

    Args:
        contexts: numbers of tokens before a pass, ascending.
        widths: numbers of tokens in a pass, ascending from 1.
        seconds: seconds of passes, a row for each context and a column for each width.

    Raises:
        ValueError or TypeError: the values are not a valid surface.
    """
    contexts, widths = tuple(map(int, contexts)), tuple(map(int, widths))
    rows = tuple(tuple(map(float, row)) for row in seconds)
    rising = all(low < high for axis in (contexts, widths) for low, high in pairwise(axis))
    whole = len(rows) == len(contexts) and all(len(row) == len(widths) for row in rows)
    sound = all(math.isfinite(s) and s > 0 for row in rows for s in row)
    if not (contexts and rising and whole and sound and widths[:1] == (1,) and contexts[0] >= 0):
        raise ValueError("not a valid table of costs")
    return CostSurface(contexts, widths, rows)


class AdaptiveCosts:
    """A cost surface that adapts to the actual durations of passes.

    Two things may differ from the measurement: the load of the machine, which slows passes of every
    width equally, and the relative cost of some widths. Widths can be compared only by successive
    passes, because these have the same load. Errors are logarithmic and clipped (Huber, 1964,
    doi:10.1214/aoms/1177703732), so one slow pass has little influence. Corrections of widths fade,
    so that an expensive width is tried again.

    Args:
        surface: the measured costs.
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
        """Ratio of current to measured durations, the same for all widths."""
        return math.exp(self._load)

    def table(self, context: int) -> NDArray[np.float64]:
        """Return float64[W], the ascending seconds of passes of 1, 2, ..., W tokens."""
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
        """Return float64[width], seconds as in `table`, but also for wider passes.

        Beyond the widest measured pass, costs rise with the slope of the upper half of the widths.
        """
        table = self.table(context)
        widest = len(table)
        if width <= widest:
            return table[:width]
        slope = (table[-1] - table[widest // 2]) / max(widest - 1 - widest // 2, 1)
        beyond = table[-1] + slope * np.arange(1, width - widest + 1)
        return np.concatenate([table, beyond])

    def learn(self, width: int, context: int, seconds: float) -> None:
        """Learn from the duration of a pass; passes wider than the surface are ignored."""
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
"""Number of plain steps that the median of their overhead covers: up to four machine pauses do not
change the median."""

_ENOUGH_PLAIN: Final = 3
"""Number of plain steps after which their overhead counts as known."""

_NODES_DECAY: Final = 0.9
"""Decay of the overhead per node: it averages over about ten steps with drafts, weighted by
nodes."""

_MOST_EXCESS: Final = 1.0
"""Clipping limit for the overhead per step, relative to the predicted cost of the step's pass, so
that machine pauses count little."""


class StepOverhead:
    """The time that steps take beyond their passes' predicted costs, for plain steps and per node.

    Costs are measured on passes over one sequence. For each sequence, a step also accepts a path,
    moves accepted rows in the cache, and lets the drafter learn. On a fast device that may take
    longer than the nodes add to the pass. Only plain steps show how much time drafts add, so the
    overhead is unknown before three plain steps. All overheads scale with the machine's load.
    """

    def __init__(self) -> None:
        self._plain = RecentMedian(_RECENT_STEPS)
        self._node_s = FadingRatio(_NODES_DECAY)
        self._num_plain = 0

    @property
    def is_known(self) -> bool:
        """Whether enough plain steps were timed."""
        return self._num_plain >= _ENOUGH_PLAIN

    @property
    def plain(self) -> float:
        """A plain step's duration, divided by the predicted cost of its pass."""
        return (self._plain.value() or 1.0) if self.is_known else 1.0

    @property
    def node_s(self) -> float:
        """Seconds that each node adds to a step, beyond its cost in the pass, at load 1."""
        return max(self._node_s.value(), 0.0)

    def learn(self, num_nodes: int, pass_s: float, step_s: float, load: float) -> None:
        """Learn from a step.

        Args:
            num_nodes: number of nodes that the step verified, over all trees.
            pass_s: predicted seconds of the step's pass.
            step_s: actual seconds of the step, without drafting.
            load: ratio of current to measured durations.
        """
        if num_nodes == 0:
            self._num_plain += 1
            self._plain.add(step_s / pass_s)
        elif self.is_known:
            excess = _clipped(step_s / pass_s - self.plain, _MOST_EXCESS)
            self._node_s.add(excess * pass_s / load, num_nodes)


_ENOUGH: Final = 3
"""Number of passes after which a width's cost counts as known: the median of three ignores one slow
pass, and the first pass of a shape is often slow."""

_STALE_PASSES: Final = 4096
"""Number of passes after which an unused width counts as unknown again. It is then tried three
times, in less than a thousandth of all passes."""

_FINE: Final = 8
"""Largest width up to which each width is tracked; tracked widths beyond it grow by a quarter.
Costs jump when kernels change, mostly at powers of two, and a quarter is finer than that."""


class ObservedCosts(AdaptiveCosts):
    """Costs that are learned while passes run, for targets whose passes cannot be timed in advance.

    A width is known after three passes of about that width. Costs are linear between known widths,
    and extrapolated beyond the widest from the last two. Widths below all known widths count as
    proportionally cheaper. Widths above the only known width count as no more expensive. So both
    are soon tried and known. From then on a width's cost adapts as in `AdaptiveCosts`.

    Args:
        max_width: most tokens of a pass, over all sequences.
    """

    def __init__(self, max_width: int) -> None:
        widths = _observed_widths(max_width)
        super().__init__(CostSurface.flat(widths, [1.0] * len(widths)))
        self._knots = np.array(widths)
        self._samples: list[list[float]] = [[] for _ in widths]
        self._seen = [0] * len(widths)
        self._num_passes = 0

    def learn(self, width: int, context: int, seconds: float) -> None:
        """Learn from the duration of a pass; passes wider than `max_width` are ignored."""
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
        """Rebuild the surface from the known widths."""
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
        self._context = -_CONTEXT_GRAIN  # so that the table is rebuilt


def _observed_widths(max_width: int) -> list[int]:
    """Return the tracked widths, ascending from 1 to `max_width`."""
    widths = list(range(1, min(_FINE, max_width) + 1))
    while widths[-1] < max_width:
        widths.append(min(widths[-1] + widths[-1] // 4, max_width))
    return widths
