"""Decides whether a drafter pays off, from its recent gain and its time, and when to retry it."""

import statistics
from collections import deque
from typing import Final

_LEVEL: Final = 0.25
"""Weight of the prior of zero slope, as a squared distance from the mean."""


class FadingRatio:
    """A ratio of two sums with exponentially decaying weights.

    At first it is the plain ratio of all values, unlike an exponential moving average with an
    initial value. Later it is the ratio of about the latest 1 / (1 - decay) values.

    Args:
        decay: each new value multiplies the weight of earlier values by this factor, from 0 to 1.

    Attributes:
        numerator: decaying sum of the added numerators.
        denominator: decaying sum of the added denominators.
    """

    def __init__(self, decay: float) -> None:
        self._decay = decay
        self.numerator = 0.0
        self.denominator = 0.0

    def add(self, above: float, below: float = 1.0) -> None:
        """Add a numerator and a denominator; with the default 1.0 the ratio is a mean."""
        self.numerator = self._decay * self.numerator + above
        self.denominator = self._decay * self.denominator + below

    def value(self, default: float = 0.0) -> float:
        """Return the ratio; `default` before anything was added."""
        return self.numerator / self.denominator if self.denominator else default


class FadingLine:
    """A line fitted to points with x from 0 to 1 and decaying weights.

    The prior is a set of points spread evenly along a guessed line. A few points say little about
    the slope, so there is also a prior of zero slope, with the weight of one point at distance 0.5
    from the mean.

    Args:
        decay: each `fade` multiplies the weights of all points by this factor, from 0 to 1.
        known: weight of the guessed line, in points.
        at_0: guessed value at x = 0.
        at_1: guessed value at x = 1.
    """

    def __init__(self, decay: float, known: float, *, at_0: float, at_1: float) -> None:
        slope, mean, square = at_1 - at_0, 1 / 2, 1 / 3  # moments of uniform x
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
        """Return the line's value at `x`."""
        mean_x, mean_y = self._x / self._count, self._y / self._count
        variance = self._xx / self._count - mean_x**2 + _LEVEL / self._count
        slope = (self._xy / self._count - mean_x * mean_y) / variance
        return mean_y + slope * (x - mean_x)


class RecentMedian:
    """The median of the latest values: outliers do not matter if they are fewer than half.

    Args:
        count: number of latest values that count; a lasting change shows after half as many.
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
    """Learns how much requests gain, and decides whether to make the next request.

    Requests continue while the mean gain exceeds their time. Otherwise there is a pause, then one
    trial. Each time that a trial does not pay off, the pause doubles. The first trial that pays off
    again ends the pauses.

    Gains are in a unit of the caller's choice, such as seconds or tokens. Each decision is given
    the unit's current value in seconds, because the pace of decoding may change during a pause.

    Args:
        decay: each new gain multiplies the weight of earlier gains by this factor.
        latest_counts: whether the last gain alone can show that requests pay off.
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
        """Mean gain of recent requests; 0 before the first request."""
        return self._gains.value()

    def learn(self, gain: float) -> None:
        """Learn the gain of a request."""
        self._is_untried = False
        self._latest = gain
        self._gains.add(gain)

    def pays(self, unit_s: float, cost_s: float) -> bool:
        """Return whether a request is expected to gain more than it costs.

        Args:
            unit_s: seconds that one unit of gain saves at the current pace.
            cost_s: seconds that a request takes.
        """
        gain = max(self.gain, self._latest) if self._latest_counts else self.gain
        return self._is_untried or gain * unit_s >= cost_s

    def is_due(self, unit_s: float, cost_s: float, longest_pause: int) -> bool:
        """Return whether to make a request in this step; call this once per step.

        Args:
            unit_s: seconds that one unit of gain saves at the current pace.
            cost_s: seconds that a request takes.
            longest_pause: most steps between two trials; 0 for a request in every step.
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
        """After a good sign, allow a request in the next step even if it may not pay off."""
        self._pause = max(self._pause, 1)
        self._waits = 0
