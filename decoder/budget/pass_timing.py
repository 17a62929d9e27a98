"""Timing passes of a target, once for each machine and model, and checking stored costs."""

import time
from collections.abc import Callable, Iterator, Sequence
from typing import Final

import numpy as np

from decoder.budget.costs import CostSurface
from decoder.model.compatibility import Capability
from decoder.model.target import Target
from decoder.sampling.walk import follow
from retriever.tree import ROOT, DraftTree, Source

DEFAULT_WIDTHS: Final = (1, 2, 4, 8, 16, 32, 64)
"""Tokens in a pass. Costs jump when matrix products change their kernels, mostly at powers of two.
64 nodes yield 12% more tokens than 32 on chats, and 128 would yield a smaller gain still."""

DEFAULT_CONTEXTS: Final = (64, 512, 2048)
"""Tokens before a pass: short, usual, and long enough for attention to show. Costs are linear in
the context, so three points suffice; beyond the last they are extrapolated."""

DEFAULT_SECONDS: Final = 3.0
"""Time that measuring may add to a start, once for each machine and model. At 35 ms a pass, 21
kinds of passes run four times in it."""

_ENOUGH_ROUNDS: Final = 4
"""Least passes of a kind before its two shortest are compared: the first warms caches, and of three
more two are rarely disturbed."""

_MOST_ROUNDS: Final = 12
"""On a machine that is never idle the two shortest may never agree: twelve passes must suffice."""

_AGREEMENT: Final = 1.08
"""Most that the second-shortest pass may exceed the shortest, as a ratio. Undisturbed passes differ
by a few percent, and 8% of a cost moves a cut by about one node, where gains are flat."""

_CHECKED_WIDTH: Final = 8
"""Width that is timed again before stored costs are used: a usual cut, which takes hardly longer
than a plain pass."""

_CHECKS: Final = 5
"""Passes of which the shortest counts: five passes of 20 ms take a tenth of a second."""

_STILL_HOLDS: Final = 1.3
"""Factor by which a pass may be faster or slower than stored on an idle machine: another version or
setting differs by more. `AdaptiveCosts` corrects differences within it."""

Samples = dict[tuple[int, int], list[float]]
"""(context, width) to the seconds of the passes timed so far."""


def time_pass(target: Target, tree: DraftTree) -> float:
    """Return the seconds until the choices of one pass are known to the host."""
    target.rewind()
    start = time.perf_counter()
    logits = target.verify(0, tree)
    follow(tree, lambda rows: logits[rows].argmax(dim=-1), together=True)
    return time.perf_counter() - start


def measure_costs(
    target: Target,
    widths: Sequence[int] = DEFAULT_WIDTHS,
    contexts: Sequence[int] = DEFAULT_CONTEXTS,
    max_seconds: float = DEFAULT_SECONDS,
    timed: Callable[[Target, DraftTree], float] = time_pass,
) -> CostSurface:
    """Time passes of several widths and contexts in turn and take the shortest of each kind.

    Other load on the machine only ever makes a pass longer. Rounds are repeated, at most twelve
    times, until the two shortest passes of every kind agree, so that a busy moment is not taken for
    a cost. Contexts are faked in the cache instead of read. A sequence in progress is lost; the
    target is left without one.

    If passes are padded, each width is measured together with the next one, where costs jump, and
    work that is done once for each shape is done first.

    Args:
        target: the model to measure.
        widths: tokens in a pass, ascending from 1.
        contexts: tokens before it, ascending; those beyond the model's limit are shortened.
        max_seconds: no pass starts after this, except two passes of each of the two narrowest
            widths at the first context. Kinds that were not reached are left out of the surface.
        timed: times a pass, in seconds.
    """
    return decided(target, lambda: _measured(target, widths, contexts, max_seconds, timed))


def decided(target: Target, find: Callable[[], CostSurface]) -> CostSurface:
    """Return the result of `find`, run by the first of the processes that share the model."""
    return find() if target.ranks is None else target.ranks.decided(find, target)


def _measured(
    target: Target,
    widths: Sequence[int],
    contexts: Sequence[int],
    max_seconds: float,
    timed: Callable[[Target, DraftTree], float],
) -> CostSurface:
    """Return the timed surface; see `measure_costs`."""
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
    target: Target,
    surface: CostSurface,
    timed: Callable[[Target, DraftTree], float] = time_pass,
) -> bool:
    """Return whether passes match a surface, or are all slowed by a busy machine.

    A plain pass and one of a usual width are timed in turn. If either is more than 30% faster than
    stored, or only one is slower, the costs were measured under other conditions. If both are
    slower, the machine is busy: `AdaptiveCosts` follows that, and measuring now would give a worse
    table.

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
    target: Target,
    trees: dict[tuple[int, int], DraftTree],
    timed: Callable[[Target, DraftTree], float],
) -> None:
    """Run every pass once, the longest contexts first: the memory allocated for them is reused."""
    for context, width in sorted(trees, reverse=True):
        target.pretend(context)
        timed(target, trees[context, width])


def _rounds(samples: Samples) -> Iterator[tuple[int, int]]:
    """Cycle through all kinds of passes until their two shortest agree."""
    for _ in range(_MOST_ROUNDS):
        yield from samples
        if all(map(_agree, samples.values())):
            break


def _agree(taken: list[float]) -> bool:
    """Return whether there are enough samples and the two shortest differ by little."""
    if len(taken) < _ENOUGH_ROUNDS:
        return False
    least, second = sorted(taken)[:2]
    return second <= least * _AGREEMENT


def _surface(samples: Samples) -> CostSurface:
    """Return a surface of the first context's timed widths and the contexts that have them all."""
    contexts = list(dict.fromkeys(context for context, _ in samples))
    timed = {point: min(taken) for point, taken in samples.items() if taken}
    widths = tuple(width for context, width in timed if context == contexts[0])
    whole = tuple(c for c in contexts if all((c, width) in timed for width in widths))
    rows = tuple(tuple(timed[context, width] for width in widths) for context in whole)
    return CostSurface(whole, widths, rows)


def _fitting(contexts: Sequence[int], target: Target) -> list[int]:
    """Return contexts that leave room for a pass, ascending; only one if reading them is slow."""
    if target.capability is not Capability.TREES:
        contexts = contexts[:1]
    room = contexts[-1] if target.max_length is None else target.max_length - 2
    return sorted({max(1, min(context, room)) for context in contexts})


def _trial(num_nodes: int, context: int, target: Target) -> DraftTree:
    """Return a tree to time; a pass costs the same for every tree shape.

    A chain, which every target can verify, or all siblings if a chain would exceed the model's
    limit.
    """
    fits = target.max_length is None or context + num_nodes < target.max_length
    nodes = np.arange(num_nodes, dtype=np.int32)
    return DraftTree(
        nodes % target.vocabulary_size,
        nodes - 1 if fits else np.full(num_nodes, ROOT, np.int32),
        np.zeros(num_nodes, np.float32),
        np.full(num_nodes, Source.UNSPECIFIED, np.uint8),
    )
