"""Where processes count while others read: latencies and errors, in shared memory."""

from bisect import bisect_left
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

BOUNDS_S: Final = tuple(float(bound) for bound in np.geomspace(5e-5, 10.0, 400))
"""Upper bounds of the latencies that are counted together, 3% apart, in seconds."""

_DRAFTS, _REFUSED, _ERRORS = (len(BOUNDS_S) + at for at in (1, 2, 3))
NUM_CELLS: Final = len(BOUNDS_S) + 4


@dataclass(slots=True)
class Board:
    """The counts of one process, which alone writes them.

    Attributes:
        number: of the process.
        cells: uint64[NUM_CELLS] of shared memory.
    """

    number: int
    cells: Any

    def add(self, seconds: float, num_drafts: int) -> None:
        """Count a step that took so long."""
        self.cells[bisect_left(BOUNDS_S, seconds)] += 1
        self.cells[_DRAFTS] += num_drafts

    @property
    def refused(self) -> int:
        """Requests that were refused and had to be."""
        return int(self.cells[_REFUSED])

    @refused.setter
    def refused(self, number: int) -> None:
        self.cells[_REFUSED] = number

    @property
    def errors(self) -> int:
        """What should not have happened."""
        return int(self.cells[_ERRORS])

    @errors.setter
    def errors(self, number: int) -> None:
        self.cells[_ERRORS] = number


@dataclass(frozen=True, slots=True)
class Counts:
    """What all processes counted."""

    cells: NDArray[np.int64]

    @classmethod
    def read(cls, boards: Iterable[Board]) -> "Counts":
        """Add up what stands there now."""
        return cls(np.sum([np.array(board.cells[:], np.int64) for board in boards], axis=0))

    def since(self, before: "Counts") -> "Counts":
        """Return what was counted between then and now."""
        return Counts(self.cells - before.cells)

    @property
    def steps(self) -> int:
        """Steps."""
        return int(self.cells[: len(BOUNDS_S) + 1].sum())

    @property
    def drafts(self) -> int:
        """Drafts in these steps."""
        return int(self.cells[_DRAFTS])

    @property
    def refused(self) -> int:
        """Requests that were refused and had to be."""
        return int(self.cells[_REFUSED])

    @property
    def errors(self) -> int:
        """What should not have happened."""
        return int(self.cells[_ERRORS])

    def latencies_ms(self, percents: Sequence[float]) -> list[float]:
        """Return percentiles of a step's time, in milliseconds; 0 where there was no step."""
        counts = self.cells[: len(BOUNDS_S)]
        reached = np.searchsorted(np.cumsum(counts), np.array(percents) / 100 * counts.sum())
        places = np.minimum(reached, len(BOUNDS_S) - 1)
        return [round(1e3 * BOUNDS_S[place], 3) if self.steps else 0.0 for place in places]
