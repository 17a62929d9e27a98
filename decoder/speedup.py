"""What drafts were worth: the seconds of answers against those that plain decoding takes."""

from dataclasses import dataclass
from typing import Any, Final

from decoder.budget.budget import Budget, MeasuredBudget
from decoder.observation import ObservedPass, Observer

_TELLING_PASSES: Final = 64
"""Passes from which on an estimate may say no: with fewer, noise dominates."""

UNKNOWN: Final = (
    "what drafts are worth here is not known yet: no pass was made behind the prompt's own"
)


@dataclass(slots=True)
class Speedup:
    """Seconds of one answer, or of many, with drafts and without.

    Attributes:
        own_s: seconds with drafts, the prompt's pass included.
        plain_s: seconds that the same tokens take without drafts, estimated or measured.
        num_passes: passes behind the prompts' own; without any nothing is known.
        num_compared: answers that were decoded plainly, too.
        num_different: those of them whose tokens differ.
        first_difference: the first token that differs, from 1, in the first such answer.
    """

    own_s: float = 0.0
    plain_s: float = 0.0
    num_passes: int = 0
    num_compared: int = 0
    num_different: int = 0
    first_difference: int | None = None

    @property
    def times_plain(self) -> float | None:
        """How many times as fast as plain decoding; `None` where that is not known yet."""
        is_known = self.num_passes > 0 and self.own_s > 0 and self.plain_s > 0
        return self.plain_s / self.own_s if is_known else None

    def observer(self, budget: Budget, num_prompt: int) -> Observer:
        """Return what adds the passes of an answer, as an estimate.

        Each token would have taken a plain pass, at what the budget knows of its cost by now; the
        prompt's pass is the same in both. A budget that does not measure knows no cost: nothing is
        added then.

        Args:
            budget: of the decoder.
            num_prompt: tokens of the prompt.
        """
        if not isinstance(budget, MeasuredBudget):
            return lambda _: None
        costs = budget.costs
        context = num_prompt
        is_first = True

        def observe(step: ObservedPass) -> None:
            nonlocal context, is_first
            times = step.times
            self.own_s += times.draft_s + times.target_s + times.host_s
            if is_first:
                self.plain_s += times.target_s
                is_first = False
            else:
                others = step.num_sequences  # a plain pass serves as many
                plain_s = float(costs.table_to(others, context)[others - 1]) / others
                self.plain_s += len(step.tokens) * plain_s
                self.num_passes += 1
            context += len(step.tokens)

        return observe

    def add(self, other: "Speedup") -> None:
        """Add the seconds of other answers."""
        if self.first_difference is None:
            self.first_difference = other.first_difference
        self.own_s += other.own_s
        self.plain_s += other.plain_s
        self.num_passes += other.num_passes
        self.num_compared += other.num_compared
        self.num_different += other.num_different

    def report(self) -> dict[str, Any]:
        """Return the figures as plain values."""
        is_measured = self.num_compared > 0
        return {
            "times_plain": self.times_plain,
            "plain_seconds": self.plain_s,
            "is_measured": is_measured,
            "is_identical": self.num_different == 0 if is_measured else None,
        }

    def summary(self) -> str:
        """Return a line for people to read."""
        times = self.times_plain
        if times is None:
            return UNKNOWN
        useless = self._useless() if times < 1 else ""
        gain = f"{times:.1f}x plain decoding on this machine"
        if not self.num_compared:
            return f"{gain}, estimated from measured passes{useless}"
        seconds = f"{self.own_s:.2f} s against {self.plain_s:.2f} s without drafts"
        return f"{gain}, measured{useless}: {seconds}; {self._identity()}"

    def _useless(self) -> str:
        if not self.num_compared and self.num_passes < _TELLING_PASSES:
            return ": too few passes to say whether drafts pay"
        return ": drafts do not pay here"

    def _identity(self) -> str:
        if not self.num_different:
            one = self.num_compared == 1
            return "the output is identical" if one else f"all {self.num_compared} are identical"
        at = f"from token {self.first_difference} on"
        if self.num_compared == 1:
            return f"the output differs {at}"
        return f"{self.num_different} of {self.num_compared} outputs differ, the first {at}"
