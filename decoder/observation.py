"""What can be seen of decoding while it goes on: one pass of the target after the other."""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from decoder.statistics import Statistics
from decoder.stopping import StopRule
from retriever.tree import DraftTree


@dataclass(frozen=True, slots=True)
class Times:
    """Where a pass spent its time, in seconds.

    Attributes:
        draft_s: in the drafter.
        target_s: in the target, the wait for its choices included.
        host_s: in the loop itself.
    """

    draft_s: float
    target_s: float
    host_s: float


@dataclass(frozen=True, slots=True, eq=False)
class Step:
    """One pass of the target, the prompt's included.

    Attributes:
        drafted: what the drafter sent, as far as there is room for it.
        tree: what was verified of it: the first nodes.
        path: int64[k], the nodes that were accepted and kept, from the root downwards.
        tokens: what was committed: theirs, and the target's own behind them unless the sequence
            ended before.
        times: what it took.
    """

    drafted: DraftTree
    tree: DraftTree
    path: NDArray[np.int64]
    tokens: list[int]
    times: Times


Observer = Callable[[Step], object]
"""Is called once for every pass, after its tokens are out. What it raises ends the sequence."""


@dataclass(frozen=True, slots=True)
class Watch:
    """Who may end a sequence, and who looks on."""

    stop_rule: StopRule | None = None
    observer: Observer | None = None


class Clock:
    """Tells the times of single passes from the sums that statistics keep."""

    def __init__(self, statistics: Statistics) -> None:
        self._statistics = statistics
        self._last = self._sums()

    def lap(self) -> Times:
        """Return the times since the last call."""
        sums, last = self._sums(), self._last
        self._last = sums
        return Times(sums[0] - last[0], sums[1] - last[1], sums[2] - last[2])

    def _sums(self) -> tuple[float, float, float]:
        statistics = self._statistics
        return statistics.draft_s, statistics.target_s, statistics.host_s
