"""When a draft model stops: another pass must bring more than the time it takes.

SpecDec++ (Huang et al., 2024, arXiv:2405.19715) shows that to stop a draft best is to stop where
the probability of an accepted token falls below a threshold. Here nothing sets the threshold but
time: it is what a draft pass takes, in tokens at the pace of decoding.
"""

import statistics
from collections import deque
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from decoder.drafters.outcomes import Outcome

_RECENT: Final = 15
_DECAY: Final = 0.95
_LONGEST_REST: Final = 128


@dataclass(frozen=True, slots=True)
class StepCosts:
    """What passes cost.

    Attributes:
        target_s: seconds of a decoding step without its model draft.
        pass_s: seconds of a pass of the draft model; 0 lets a draft grow as long as it can.
    """

    target_s: float
    pass_s: float


class MeasuredCosts:
    """What passes cost lately: medians, so that a pause of the machine changes nothing."""

    def __init__(self) -> None:
        self._target_s: deque[float] = deque(maxlen=_RECENT)
        self._pass_s: deque[float] = deque(maxlen=_RECENT)

    def record_step(self, seconds: float) -> None:
        """Take in the time from the end of a draft to the request for the next one."""
        self._target_s.append(seconds)

    def record_pass(self, seconds: float) -> None:
        """Take in a pass of the draft model."""
        self._pass_s.append(seconds)

    def known(self) -> StepCosts | None:
        """Return the costs once both are measured."""
        if not self._target_s or not self._pass_s:
            return None
        return StepCosts(statistics.median(self._target_s), statistics.median(self._pass_s))


class StoppingRule:
    """Decides whether another pass of the draft model pays, and whether to draft at all.

    A pass pays where the tokens that it is expected to bring are worth its time at the pace at
    which tokens come: that maximises tokens per second as long as gains fall from pass to pass.
    Where whole drafts do not pay, the next steps go without; the pauses double up to 128 steps,
    so that a workload that has turned is noticed.

    Args:
        costs: what passes cost; measured if not given.
    """

    def __init__(self, costs: StepCosts | None = None) -> None:
        self.measured = MeasuredCosts()
        self._given = costs
        self._steps, self._tokens, self._passes, self._right = 0.0, 0.0, 0.0, 0.0
        self._asked = 0.0
        self._rest, self._resting = 1, 0

    def threshold(self) -> float:
        """Return how many tokens a pass must be expected to bring; 0 while costs are unknown."""
        costs = self._costs()
        if costs is None:
            return 0.0
        steps, tokens = max(self._steps, 1.0), max(self._tokens, 1.0)
        step_s = costs.target_s + costs.pass_s * self._passes / steps
        return costs.pass_s * (tokens / steps) / step_s if step_s > 0 else 0.0

    def is_worthwhile(self, probabilities: NDArray[np.float64]) -> bool:
        """Return whether to expand nodes which come true with these probabilities, float64[n].

        None of them is another's ancestor, so at most one comes true.
        """
        deeper = min(float(probabilities.sum()), 1.0) * (self._right + 1) / (self._asked + 1)
        return deeper >= self.threshold()

    def is_due(self) -> bool:
        """Return whether to draft in this step; each call counts as one."""
        if self._resting > 0:
            self._resting -= 1
            return False
        return True

    def learn(self, outcome: Outcome, num_passes: int) -> None:
        """Take in what became of a draft that took so many passes."""
        num_right = len(outcome.path)
        self._steps = self._steps * _DECAY + 1
        self._tokens = self._tokens * _DECAY + outcome.num_committed
        self._passes = self._passes * _DECAY + num_passes
        self._right = self._right * _DECAY + num_right
        self._asked = self._asked * _DECAY + len(outcome.decided_parents())
        self._rest, self._resting = (
            (1, 0)
            if self._pays()
            else (
                min(2 * self._rest, _LONGEST_REST),
                self._rest,
            )
        )

    def _pays(self) -> bool:
        """Return whether a token takes less time with drafts than it would without them."""
        costs = self._costs()
        if costs is None:
            return True
        target_s = self._steps * costs.target_s
        with_drafts = (target_s + self._passes * costs.pass_s) / self._tokens
        return with_drafts <= target_s / max(self._tokens - self._right, self._steps)

    def _costs(self) -> StepCosts | None:
        return self._given or self.measured.known()
