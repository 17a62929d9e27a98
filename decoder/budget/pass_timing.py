"""Timing passes of a target: once for each machine and model, and checks of what was kept."""

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
two are rarely disturbed."""

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


def decided(target: Target, find: Callable[[], CostSurface]) -> CostSurface:
    """Return what is found, by the first of the processes that share the target's model."""
    return find() if target.ranks is None else target.ranks.decided(find, target)


def _measured(
    target: Target,
    widths: Sequence[int],
    contexts: Sequence[int],
    max_seconds: float,
    timed: Callable[[Target, DraftTree], float],
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
    target: Target,
    surface: CostSurface,
    timed: Callable[[Target, DraftTree], float] = time_pass,
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
    target: Target,
    trees: dict[tuple[int, int], DraftTree],
    timed: Callable[[Target, DraftTree], float],
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


def _fitting(contexts: Sequence[int], target: Target) -> list[int]:
    """Return contexts that leave room for a pass, rising; one where reading them takes long."""
    if target.capability is not Capability.TREES:
        contexts = contexts[:1]
    room = contexts[-1] if target.max_length is None else target.max_length - 2
    return sorted({max(1, min(context, room)) for context in contexts})


def _trial(num_nodes: int, context: int, target: Target) -> DraftTree:
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
