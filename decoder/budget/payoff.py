"""Decides whether a drafter pays: its recent gain against its time, and when to retry it."""

import statistics
from collections import deque
from typing import Final

_LEVEL: Final = 0.25
"""Weight of the prior of zero slope, in squared distance from the mean."""


class FadingRatio:
    """A ratio of two sums with exponentially decaying weights.

    Unlike an exponential moving average with an initial value, it is at first the plain ratio of
    all values, and later that of about the latest 1 / (1 - decay).

    Args:
        decay: factor on earlier values with each new one, between 0 and 1.

    Attributes:
        numerator: decaying sum of the values above.
        denominator: decaying sum of the values below.
    """

    def __init__(self, decay: float) -> None:
        self._decay = decay
        self.numerator = 0.0
        self.denominator = 0.0

    def add(self, above: float, below: float = 1.0) -> None:
        """Add a numerator and a denominator; with the default 1 the ratio is a mean."""
        self.numerator = self._decay * self.numerator + above
        self.denominator = self._decay * self.denominator + below

    def value(self, default: float = 0.0) -> float:
        """Return the ratio; `default` before anything was added."""
        return self.numerator / self.denominator if self.denominator else default


class FadingLine:
    """A line fitted to points between 0 and 1 with decaying weights.

    The prior is a set of points spread evenly along a guessed line. A few points say little about
    the slope, so a zero slope is added as a prior with the weight of one point at distance 0.5 from
    the mean.

    Args:
        decay: factor on the weight of points at each `fade`, between 0 and 1.
        known: weight of the guess, in points.
        at_0: guessed value at 0.
        at_1: guessed value at 1.
    """

    def __init__(self, decay: float, known: float, *, at_0: float, at_1: float) -> None:
        slope, mean, square = at_1 - at_0, 1 / 2, 1 / 3  # moments of numbers between 0 and 1
        self._decay = decay
        self._count = known
        self._x, self._xx = known * mean, known * square
        self._y = known * (at_0 + slope * mean)
        self._xy = known * (at_0 * mean + slope * square)

    def fade(self) -> None:
        """Decay the weights of all points."""
        self._count *= self._decay
        self._x *= self._decay
        self._xx *= self._decay
        self._y *= self._decay
        self._xy *= self._decay

    def add(self, x: float, y: float) -> None:
        """Add a point."""
        self._count += 1
        self._x += x
        self._xx += x * x
        self._y += y
        self._xy += x * y

    def at(self, x: float) -> float:
        """Return the line's value."""
        mean_x, mean_y = self._x / self._count, self._y / self._count
        variance = self._xx / self._count - mean_x**2 + _LEVEL / self._count
        slope = (self._xy / self._count - mean_x * mean_y) / variance
        return mean_y + slope * (x - mean_x)


class RecentMedian:
    """The median of the latest values: outliers among less than half of them do not matter.

    Args:
        count: how many values are kept; a lasting change shows after half as many.
    """

    def __init__(self, count: int) -> None:
        self._values: deque[float] = deque(maxlen=count)

    def add(self, value: float) -> None:
        """Add a value."""
        self._values.append(value)

    def value(self) -> float | None:
        """Return the median; `None` before the first value."""
        return statistics.median(self._values) if self._values else None


class Payoff:
    """Learns the gain of asking for something and decides whether to ask again.

    Asking continues while the mean gain is worth its time. After that there is a pause of some
    steps, then one trial; each time that it still does not pay, the pause doubles. The first step
    at which it pays again ends the pauses.

    Gains are in a unit of the caller's choice, such as seconds or tokens. Its worth in seconds is
    passed with each decision, because the pace of decoding may change while nothing is learned.

    Args:
        decay: decay of the mean gain per answer.
        latest_counts: whether the last answer alone can show that asking pays.
    """

    def __init__(self, decay: float, *, latest_counts: bool = False) -> None:
        self._gains = FadingRatio(decay)
        self._latest = 0.0
        self._latest_counts = latest_counts
        self._is_untried = True
        self._pause = 0
        self._waits = 0

    @property
    def gain(self) -> float:
        """Mean gain of recent answers; 0 before the first."""
        return self._gains.value()

    def learn(self, gain: float) -> None:
        """Learn the gain of an answer."""
        self._is_untried = False
        self._latest = gain
        self._gains.add(gain)

    def pays(self, unit_s: float, cost_s: float) -> bool:
        """Return whether asking gains more than it costs, as far as is known.

        Args:
            unit_s: seconds that a unit of gain is worth now.
            cost_s: seconds that an answer takes.
        """
        gain = max(self.gain, self._latest) if self._latest_counts else self.gain
        return self._is_untried or gain * unit_s >= cost_s

    def is_due(self, unit_s: float, cost_s: float, longest_pause: int) -> bool:
        """Return whether to ask in this step; call it once per step.

        Args:
            unit_s: seconds that a unit of gain is worth now.
            cost_s: seconds that an answer takes.
            longest_pause: most steps between two trials; 0 to ask at every step.
        """
        if self.pays(unit_s, cost_s):
            self._pause = self._waits = 0
            return True
        if self._pause == 0:
            self._pause = self._waits = min(1, longest_pause)
        elif self._waits == 0:
            self._pause = self._waits = min(2 * self._pause, longest_pause)
            return True
        if self._waits == 0:
            return True
        self._waits -= 1
        return False

    def encourage(self) -> None:
        """Ask in the next step even if it does not pay yet: the last answer was promising."""
        self._pause = max(self._pause, 1)
        self._waits = 0
