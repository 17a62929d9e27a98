"""Timing a target's passes at several widths and contexts."""

import time
from collections.abc import Iterator, Sequence
from typing import Final

import numpy as np

from decoder.budget.costs import CostSurface
from decoder.sampling.verification import follow
from decoder.target.compatibility import Capability
from decoder.target.target import Target
from retriever.tree import ROOT, DraftTree, Source

DEFAULT_WIDTHS: Final = (1, 2, 4, 8, 16, 32, 64)
DEFAULT_CONTEXTS: Final = (64, 512, 2048)
DEFAULT_SECONDS: Final = 3.0
_ENOUGH_ROUNDS: Final = 4
_MOST_ROUNDS: Final = 12
_AGREEMENT: Final = 1.08
_CHECKED_WIDTH: Final = 8
_CHECKS: Final = 5
_STILL_HOLDS: Final = 1.3

Samples = dict[tuple[int, int], list[float]]
"""(context, width) to the seconds of the passes timed so far."""


def measure_costs(
    target: Target,
    widths: Sequence[int] = DEFAULT_WIDTHS,
    contexts: Sequence[int] = DEFAULT_CONTEXTS,
    max_seconds: float = DEFAULT_SECONDS,
) -> CostSurface:
    """Time passes of several widths and contexts, in turn, and take the shortest of each.

    What else runs on a machine only ever makes a pass longer. Rounds are repeated, a dozen times
    at most, until the two shortest passes of every kind agree, so that a busy moment does not
    pass for a cost. Contexts are made up in the cache instead of read. A sequence in progress is
    lost; the target is left without one.

    Where passes are padded, each width is measured with the next one, which is where costs leap,
    and what is only done once for each shape is done before.

    Args:
        target: the model to measure.
        widths: tokens in a pass, rising from 1.
        contexts: tokens before it, rising; what exceeds the model's limit is shortened.
        max_seconds: no pass begins later, but for two passes of the two narrowest widths at the
            first context. What was not reached by then is left out of the surface.
    """
    if target.pads_passes:
        widths = sorted({*widths, *(width + 1 for width in widths[:-1])})
    widths = [width for width in widths if width - 1 <= target.max_nodes]
    points = [(context, width) for context in _fitting(contexts, target) for width in widths]
    trees = {(context, width): _trial(width - 1, context, target) for context, width in points}
    samples: Samples = {point: [] for point in points}
    must = {(points[0][0], width) for width in widths[:2]}
    if target.pads_passes:
        _run_once(target, trees)
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
        samples[context, width].append(time_pass(target, trees[context, width]))
    target.reset()
    return _surface(samples)


def still_holds(target: Target, surface: CostSurface) -> bool:
    """Return whether passes of one width take within 30% of what a surface says.

    A sequence in progress is lost; the target is left without one.
    """
    context = surface.contexts[0]
    width = max(width for width in surface.widths if width <= _CHECKED_WIDTH)
    tree = _trial(width - 1, context, target)
    target.pretend(context)
    seconds = min(time_pass(target, tree) for _ in range(_CHECKS))
    target.reset()
    expected = float(surface.table(context)[width - 1])
    return expected / _STILL_HOLDS <= seconds <= expected * _STILL_HOLDS


def time_pass(target: Target, tree: DraftTree) -> float:
    """Return the seconds until the choices of one pass are known to the host."""
    target.rewind()
    start = time.perf_counter()
    follow(tree, target.verify(0, tree).argmax(dim=-1).tolist())
    return time.perf_counter() - start


def _run_once(target: Target, trees: dict[tuple[int, int], DraftTree]) -> None:
    """Run every pass once, those behind the longest context first: what holds it is kept."""
    for context, width in sorted(trees, reverse=True):
        target.pretend(context)
        time_pass(target, trees[context, width])


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
