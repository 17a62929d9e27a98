"""What was counted over the last hour, for a chart: a ring of samples, whatever comes."""

import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from typing import Final

from retriever.tally import Tally
from retriever.tree import Source

SAMPLE_S: Final = 10.0
MAX_SAMPLES: Final = 361
"""An hour, and the sample that it begins with."""


@dataclass(frozen=True, slots=True)
class Rates:
    """What was accepted between two samples.

    Attributes:
        begin_s: time of the first, in seconds of the clock.
        end_s: time of the second.
        per_second: accepted tokens a second, by source.
    """

    begin_s: float
    end_s: float
    per_second: tuple[float, ...]


class History:
    """Samples of accepted tokens by source.

    Args:
        tally: gives what is sampled.
        clock: seconds, rising.
    """

    def __init__(
        self, tally: Callable[[], Tally], clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._tally = tally
        self._clock = clock
        self._samples: deque[tuple[float, tuple[int, ...]]] = deque(maxlen=MAX_SAMPLES)
        self.sample()

    def sample(self) -> None:
        """Take a sample if the last one is old enough."""
        now = self._clock()
        if not self._samples or now - self._samples[-1][0] >= SAMPLE_S:
            self._samples.append((now, tuple(self._tally().by_source[1].tolist())))

    def rates(self) -> list[Rates]:
        """Return what was accepted between samples, oldest first."""
        samples = list(self._samples)
        return [
            Rates(
                begin,
                end,
                tuple((after[each] - before[each]) / (end - begin) for each in Source),
            )
            for (begin, before), (end, after) in pairwise(samples)
        ]
