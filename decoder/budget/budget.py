"""How much of a draft is worth verifying: the cost of a pass against what it may bring."""

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from decoder.budget.calibration import Calibration
from decoder.sampling.verification import follow
from decoder.target.target import Target
from retriever.tree import ROOT, DraftTree, Source

DEFAULT_WIDTHS = (1, 2, 4, 8, 16, 32, 64)
_CONTEXT_TOKENS = 64
_ENOUGH_ROUNDS = 4
_AGREEMENT = 1.08
_MIN_ROUNDS = 2  # the first pass of a shape also pays for kernels and buffers


class Budget(Protocol):
    """Decides how many nodes of a tree are verified."""

    @property
    def max_nodes(self) -> int:
        """Most nodes that could ever pay: a drafter need not send more."""
        ...

    def cut(self, tree: DraftTree) -> DraftTree:
        """Return the prefix of the tree that is worth verifying."""
        ...

    def learn(self, tree: DraftTree, path: NDArray[np.int64]) -> None:
        """Take in that of a verified tree the nodes in `path`, int64[k], were accepted."""
        ...


@dataclass(frozen=True, slots=True)
class FixedBudget:
    """Verifies the first `max_nodes` nodes, whatever they cost."""

    max_nodes: int

    def cut(self, tree: DraftTree) -> DraftTree:
        """Return the first `max_nodes` nodes."""
        return tree.prefix(self.max_nodes)

    def learn(self, tree: DraftTree, path: NDArray[np.int64]) -> None:
        """Take in an outcome; nothing follows from it."""


@dataclass(frozen=True, slots=True)
class CostCurve:
    """What one pass of the target costs at several widths.

    Attributes:
        widths: tokens in a pass, rising from 1.
        seconds: what a pass of each width took.
    """

    widths: tuple[int, ...]
    seconds: tuple[float, ...]

    def table(self) -> NDArray[np.float64]:
        """Return float64[W], seconds of a pass of 1, 2, ..., W tokens, W the largest width.

        Linear between the measured widths, and never falling: where a narrow pass was
        measured slower than a wider one, the wider one is held for as slow.
        """
        seconds = np.maximum.accumulate(self.seconds)
        return np.interp(np.arange(1, self.widths[-1] + 1), self.widths, seconds)


class MeasuredBudget:
    """Cuts a tree where expected tokens per second peak.

    The first n nodes bring 1 + (sum of their probabilities) tokens, the target's own token
    included, for a pass of 1 + n tokens. Zero nodes are taken where none pays. Probabilities
    are corrected by outcomes first, so that a drafter too sure of itself costs little.

    Args:
        curve: the target's costs.
    """

    def __init__(self, curve: CostCurve) -> None:
        self.curve = curve
        self._calibration = Calibration()
        table = curve.table()
        # Average gain never rises along a tree, so where certain nodes stop paying, all do.
        self.max_nodes = int(np.argmax(np.arange(1, len(table) + 1) / table))
        self._seconds = table[: self.max_nodes + 1]

    def cut(self, tree: DraftTree) -> DraftTree:
        """Return the prefix of the tree that is expected to give most tokens per second."""
        probabilities = self._calibration.corrected(tree)[: self.max_nodes]
        expected = np.cumsum(np.concatenate(([1.0], probabilities)))
        return tree.prefix(int(np.argmax(expected / self._seconds[: len(expected)])))

    def learn(self, tree: DraftTree, path: NDArray[np.int64]) -> None:
        """Take in that of a verified tree the nodes in `path`, int64[k], were accepted."""
        self._calibration.learn(tree, path)


def measure_costs(
    target: Target, widths: Sequence[int] = DEFAULT_WIDTHS, max_seconds: float = 6.0
) -> CostCurve:
    """Time passes of several widths, in turn, and take the shortest of each.

    What else runs on a machine only ever makes a pass longer. Rounds are repeated until the
    two shortest passes of every width agree, so that a busy moment does not pass for a cost.
    A sequence in progress is lost; the target is left without one.

    Args:
        target: the model to measure.
        widths: tokens in a pass, rising from 1.
        max_seconds: no round begins later; there are at least two.
    """
    widths = [width for width in widths if width - 1 <= target.max_nodes]
    context = np.arange(_context_tokens(target), dtype=np.int32) % target.vocabulary_size
    trees = [_bush(width - 1, target.vocabulary_size) for width in widths]
    samples: list[list[float]] = [[] for _ in widths]
    target.prefill(context)
    deadline = time.perf_counter() + max_seconds
    while not all(map(_agree, samples)):
        for tree, taken in zip(trees, samples, strict=True):
            taken.append(_time_pass(target, tree))
        if len(samples[0]) >= _MIN_ROUNDS and time.perf_counter() > deadline:
            break
    target.reset()
    return CostCurve(tuple(widths), tuple(min(taken) for taken in samples))


def _agree(samples: list[float]) -> bool:
    """Return whether there are enough samples and the two least differ by little."""
    if len(samples) < _ENOUGH_ROUNDS:
        return False
    least, second = sorted(samples)[:2]
    return second <= least * _AGREEMENT


def _time_pass(target: Target, tree: DraftTree) -> float:
    """Return the seconds until the choices of one pass are known to the host."""
    target.rewind()
    start = time.perf_counter()
    follow(tree, target.verify(0, tree).argmax(dim=-1).tolist())
    return time.perf_counter() - start


def _context_tokens(target: Target) -> int:
    """Return a context's length that leaves room for a pass."""
    room = _CONTEXT_TOKENS if target.max_length is None else target.max_length - 2
    return max(1, min(_CONTEXT_TOKENS, room))


def _bush(num_nodes: int, vocabulary_size: int) -> DraftTree:
    """Return a tree of depth one: a pass costs the same for every shape."""
    return DraftTree(
        np.arange(num_nodes, dtype=np.int32) % vocabulary_size,
        np.full(num_nodes, ROOT, np.int32),
        np.zeros(num_nodes, np.float32),
        np.full(num_nodes, Source.UNSPECIFIED, np.uint8),
    )
