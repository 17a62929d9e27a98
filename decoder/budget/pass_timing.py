"""Times passes of a target, once for each machine and model, and checks stored costs."""

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
"""Numbers of tokens in the timed passes. Costs jump when matrix products change their kernels,
mostly at powers of two. On chats, 64 nodes yield 12% more tokens than 32 nodes; 128 nodes would add
even less."""

DEFAULT_CONTEXTS: Final = (64, 512, 2048)
"""Numbers of tokens before the timed passes: short, usual, and long enough for attention to take
noticeable time. Costs are linear in the context, so three points are enough; beyond the last point
they are extrapolated."""

DEFAULT_SECONDS: Final = 3.0
"""Seconds that measuring may add to a start, once for each machine and model. At 35 ms per pass,
each of 21 kinds of passes can run four times."""

_ENOUGH_ROUNDS: Final = 4
"""Fewest passes of a kind before the two shortest are compared: the first pass warms caches, and of
the three others at least two are usually undisturbed."""

_MOST_ROUNDS: Final = 12
"""Most passes of a kind: on a machine that is never idle, the two shortest may never agree."""

_AGREEMENT: Final = 1.08
"""Largest allowed ratio of the second-shortest pass to the shortest. Undisturbed passes differ by a
few percent, and an error of 8% changes the verified tree by about one node, which hardly
matters."""

_CHECKED_WIDTH: Final = 8
"""Width that is timed again before stored costs are used: a usual width, which takes hardly longer
than a plain pass."""

_CHECKS: Final = 5
"""Number of passes per check, of which the shortest counts: five passes of 20 ms take a tenth of a
second."""

_STILL_HOLDS: Final = 1.3
"""Factor by which passes on an idle machine may be faster or slower than stored: another version or
setting changes costs by more. `AdaptiveCosts` corrects smaller differences."""

Samples = dict[tuple[int, int], list[float]]
"""Maps (context, width) to the seconds of the passes timed so far."""


def time_pass(target: Target, tree: DraftTree) -> float:
    """Run one pass; return the seconds until the host knows the chosen tokens."""
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
    """Time passes of several widths and contexts alternately, and use the shortest of each kind.

    Other load on the machine can only make a pass longer. Rounds are repeated, at most twelve
    times, until the two shortest passes of every kind agree, so that a busy moment does not count
    as a cost. Contexts are faked in the cache instead of read. A sequence in progress is lost, and
    the target holds none afterwards.

    If passes are padded, the width after each given width is measured too, because costs jump
    there. Every pass then runs once before it is timed, because its first run also prepares its
    shape.

    Args:
        target: the target whose passes are timed.
        widths: tokens in a pass, ascending from 1.
        contexts: numbers of tokens before a pass, ascending; longer ones are cut to the model's
            limit.
        max_seconds: after this many seconds no pass starts, except two passes of each of the two
            narrowest widths at the first context. Kinds that were not timed are left out of the
            surface.
        timed: function that runs a pass and returns its seconds.
    """
    return decided(target, lambda: _measured(target, widths, contexts, max_seconds, timed))


def decided(target: Target, find: Callable[[], CostSurface]) -> CostSurface:
    """Return the result of `find`; if processes share the model, only the first runs it."""
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
    """Return whether passes match a surface, or a busy machine slows all of them.

    A plain pass and a pass of a usual width are timed alternately. If either is more than 30%
    faster than stored, or only one is slower, the costs were measured under other conditions. If
    both are slower, the machine is busy: `AdaptiveCosts` corrects that, and measuring now would
    give a worse table.

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
    """Run every pass once, the longest contexts first, so that their memory is reused."""
    for context, width in sorted(trees, reverse=True):
        target.pretend(context)
        timed(target, trees[context, width])


def _rounds(samples: Samples) -> Iterator[tuple[int, int]]:
    """Cycle through all kinds of passes until the two shortest of each kind agree."""
    for _ in range(_MOST_ROUNDS):
        yield from samples
        if all(map(_agree, samples.values())):
            break


def _agree(taken: list[float]) -> bool:
    """Return whether there are enough samples and the two shortest hardly differ."""
    if len(taken) < _ENOUGH_ROUNDS:
        return False
    least, second = sorted(taken)[:2]
    return second <= least * _AGREEMENT


def _surface(samples: Samples) -> CostSurface:
    """Return a surface of the widths timed at the first context, for contexts with all of them."""
    contexts = list(dict.fromkeys(context for context, _ in samples))
    timed = {point: min(taken) for point, taken in samples.items() if taken}
    widths = tuple(width for context, width in timed if context == contexts[0])
    whole = tuple(c for c in contexts if all((c, width) in timed for width in widths))
    rows = tuple(tuple(timed[context, width] for width in widths) for context in whole)
    return CostSurface(whole, widths, rows)


def _fitting(contexts: Sequence[int], target: Target) -> list[int]:
    """Return ascending contexts that leave room for a pass; only one if reading them is slow."""
    if target.capability is not Capability.TREES:
        contexts = contexts[:1]
    room = contexts[-1] if target.max_length is None else target.max_length - 2
    return sorted({max(1, min(context, room)) for context in contexts})


def _trial(num_nodes: int, context: int, target: Target) -> DraftTree:
    """Return a tree to time; a pass costs the same for every tree shape.

    The tree is a chain, which every target can verify. If a chain would exceed the model's length
    limit, all nodes are siblings.
    """
    fits = target.max_length is None or context + num_nodes < target.max_length
    nodes = np.arange(num_nodes, dtype=np.int32)
    return DraftTree(
        nodes % target.vocabulary_size,
        nodes - 1 if fits else np.full(num_nodes, ROOT, np.int32),
        np.zeros(num_nodes, np.float32),
        np.full(num_nodes, Source.UNSPECIFIED, np.uint8),
    )
