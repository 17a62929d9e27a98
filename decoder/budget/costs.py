"""What a pass of the target costs, by its width and its context: measured once, then adapted."""

import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Final, Self

import numpy as np
from numpy.typing import NDArray

from retriever.tree import ROOT, DraftTree, Source

if TYPE_CHECKING:  # engines without torch have costs, too
    from decoder.model.target import Target

# Errors below are mean absolute errors of logarithms, for made-up passes whose time varies by 8%,
# of which every 33rd takes thirty times as long, while the load doubles and halves every 200 steps
# and some widths are 1.4 times as dear as was measured: 0.085 for the load, 0.025 for the shape.

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
"""What was learned of widths halves in 700 contrasts, so that a width that seemed dear is tried
again within a long answer. Without fading the error is the same, with 0.99 it is 0.09."""

_MOST_SHAPE: Final = math.log(4)
"""No width counts as more than four times as dear or as cheap as measured: a bound that no sound
run comes near."""

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


class AdaptiveCosts:
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


DEFAULT_WIDTHS: Final = (1, 2, 4, 8, 16, 32, 64)
"""Tokens in a pass. Costs leap where products of matrices change their kernels, mostly at powers of
two. 64 nodes bring 12% more tokens than 32 on chats, and twice as many would bring less again."""

DEFAULT_CONTEXTS: Final = (64, 512, 2048)
"""Tokens before a pass: short, usual, and long enough for attention to show. Costs are linear in
the context, so three points suffice, and beyond the last the line goes on."""

DEFAULT_SECONDS: Final = 3.0
"""As long as a start may take more for it, once for each machine and model. 21 kinds of passes run
four times in that where a pass takes 35 ms."""

_ENOUGH_ROUNDS: Final = 4
"""Passes of a kind before their two shortest may agree: the first warms caches, and of three more
two are seldom disturbed."""

_MOST_ROUNDS: Final = 12
"""On a machine that never rests the two shortest may never agree: a dozen passes have to do."""

_AGREEMENT: Final = 1.08
"""The longer of the two shortest passes over the shorter. Undisturbed passes differ by a few
percent, and 8% of a cost moves a cut by a node or so, where gains are flat."""

_CHECKED_WIDTH: Final = 8
"""Width that is timed again before kept costs are believed: a usual cut, which takes hardly longer
than a plain pass."""

_CHECKS: Final = 5
"""Passes of which the shortest counts: five take a tenth of a second for a pass of 20 ms."""

_STILL_HOLDS: Final = 1.3
"""How much quicker or slower than kept a pass may be on a machine at rest: another version or
setting differs by more. What is within it, `AdaptiveCosts` corrects."""

Samples = dict[tuple[int, int], list[float]]
"""(context, width) to the seconds of the passes timed so far."""

Timing = Callable[["Target", DraftTree], float]
"""How a pass is timed, in seconds."""


def time_pass(target: "Target", tree: DraftTree) -> float:
    """Return the seconds until the choices of one pass are known to the host."""
    from decoder.sampling.verification import follow  # noqa: PLC0415  (loads torch)

    target.rewind()
    start = time.perf_counter()
    logits = target.verify(0, tree)
    follow(tree, lambda rows: logits[rows].argmax(dim=-1), together=True)
    return time.perf_counter() - start


def measure_costs(
    target: "Target",
    widths: Sequence[int] = DEFAULT_WIDTHS,
    contexts: Sequence[int] = DEFAULT_CONTEXTS,
    max_seconds: float = DEFAULT_SECONDS,
    timed: Timing = time_pass,
) -> CostSurface:
    """Time passes of several widths and contexts, in turn, and take the shortest of each.

    What else runs on a machine only ever makes a pass longer. Rounds are repeated, a dozen times
    at most, until the two shortest passes of every kind agree, so that a busy moment does not
    pass for a cost. Contexts are made up in the cache instead of read. A sequence in progress is
    lost; the target is left without one.

    Where passes are padded, each width is measured with the next one, which is where costs leap,
    and work that is done once for each shape is done before.

    Args:
        target: the model to measure.
        widths: tokens in a pass, rising from 1.
        contexts: tokens before it, rising; what exceeds the model's limit is shortened.
        max_seconds: no pass begins later, but for two passes of the two narrowest widths at the
            first context. What was not reached by then is left out of the surface.
        timed: how a pass is timed, in seconds.
    """
    return decided(target, lambda: _measured(target, widths, contexts, max_seconds, timed))


def decided(target: "Target", find: Callable[[], CostSurface]) -> CostSurface:
    """Return what is found, by the first of the processes that share the target's model."""
    if target.ranks is None:
        return find()

    def plain() -> list[object]:
        found = find()
        return [found.contexts, found.widths, found.seconds]

    contexts, widths, seconds = target.ranks.decided(plain, target)
    return CostSurface(tuple(contexts), tuple(widths), tuple(map(tuple, seconds)))


def _measured(
    target: "Target",
    widths: Sequence[int],
    contexts: Sequence[int],
    max_seconds: float,
    timed: Timing,
) -> CostSurface:
    """Return what was timed; see `measure_costs`."""
    if target.pads_passes:
        widths = sorted({*widths, *(width + 1 for width in widths[:-1])})
    widths = [width for width in widths if width - 1 <= target.max_nodes]
    points = [(context, width) for context in _fitting(contexts, target) for width in widths]
    trees = {(context, width): _trial(width - 1, context, target) for context, width in points}
    samples: Samples = {point: [] for point in points}
    must = {(points[0][0], width) for width in widths[:2]}
    if target.pads_passes:
        _run_once(target, trees, timed)
    deadline = time.perf_counter() + max_seconds
    held = 0
    for context, width in _rounds(samples):
        is_late = time.perf_counter() > deadline
        if is_late and all(len(samples[point]) > 1 for point in must):
            break
        if is_late and (context, width) not in must:
            continue
        if context != held:
            target.pretend(context)
            held = context
        samples[context, width].append(timed(target, trees[context, width]))
    target.reset()
    return _surface(samples)


def still_holds(
    target: "Target",
    surface: CostSurface,
    timed: Timing = time_pass,
) -> bool:
    """Return whether passes take what a surface says, or a busy machine slows them all.

    A plain pass and one of a usual width are timed in turn. A pass that is more than 30% quicker
    than kept was not measured like this, and nor was one that alone is slower. Where both are
    slower the machine is busy: `AdaptiveCosts` follows that, and what is measured meanwhile would
    be the worse table.

    A sequence in progress is lost; the target is left without one.
    """
    context = surface.contexts[0]
    width = max(width for width in surface.widths if width <= _CHECKED_WIDTH)
    trees = [_trial(each - 1, context, target) for each in (1, width)]
    target.pretend(context)
    rounds = [[timed(target, tree) for tree in trees] for _ in range(_CHECKS)]
    target.reset()
    plain_s, wide_s = map(min, zip(*rounds, strict=True))
    table = surface.table(context)
    loads = plain_s / float(table[0]), wide_s / float(table[width - 1])
    least, most = min(loads), max(loads)
    is_busy = least > _STILL_HOLDS
    return bool(least >= 1 / _STILL_HOLDS and (is_busy or most <= least * _STILL_HOLDS))


def _run_once(
    target: "Target",
    trees: dict[tuple[int, int], DraftTree],
    timed: Timing,
) -> None:
    """Run every pass once, those behind the longest context first: what holds it is kept."""
    for context, width in sorted(trees, reverse=True):
        target.pretend(context)
        timed(target, trees[context, width])


def _rounds(samples: Samples) -> Iterator[tuple[int, int]]:
    """Go through all kinds of passes again and again as long as there is something to learn."""
    for _ in range(_MOST_ROUNDS):
        yield from samples
        if all(map(_agree, samples.values())):
            break


def _agree(taken: list[float]) -> bool:
    """Return whether there are enough samples and the two least differ by little."""
    if len(taken) < _ENOUGH_ROUNDS:
        return False
    least, second = sorted(taken)[:2]
    return second <= least * _AGREEMENT


def _surface(samples: Samples) -> CostSurface:
    """Return what was timed: the widths of the first context, and the contexts with them all."""
    contexts = list(dict.fromkeys(context for context, _ in samples))
    timed = {point: min(taken) for point, taken in samples.items() if taken}
    widths = tuple(width for context, width in timed if context == contexts[0])
    whole = tuple(c for c in contexts if all((c, width) in timed for width in widths))
    rows = tuple(tuple(timed[context, width] for width in widths) for context in whole)
    return CostSurface(whole, widths, rows)


def _fitting(contexts: Sequence[int], target: "Target") -> list[int]:
    """Return contexts that leave room for a pass, rising; one where reading them takes long."""
    from decoder.model.compatibility import Capability  # noqa: PLC0415  (loads torch)

    if target.capability is not Capability.TREES:
        contexts = contexts[:1]
    room = contexts[-1] if target.max_length is None else target.max_length - 2
    return sorted({max(1, min(context, room)) for context in contexts})


def _trial(num_nodes: int, context: int, target: "Target") -> DraftTree:
    """Return a tree to time; a pass costs the same for every shape.

    A chain, which every target can verify, or a bush where a chain would pass the model's limit.
    """
    fits = target.max_length is None or context + num_nodes < target.max_length
    nodes = np.arange(num_nodes, dtype=np.int32)
    return DraftTree(
        nodes % target.vocabulary_size,
        nodes - 1 if fits else np.full(num_nodes, ROOT, np.int32),
        np.zeros(num_nodes, np.float32),
        np.full(num_nodes, Source.UNSPECIFIED, np.uint8),
    )
