"""The speedup from drafts: compares the seconds that answers take with plain decoding."""

from dataclasses import dataclass
from typing import Any, Final

from decoder.budget.budget import Budget, MeasuredBudget
from decoder.observation import ObservedPass, Observer, counted
from retriever.kernels.compiling import num_compiled

_TELLING_PASSES: Final = 16
"""Fewest passes for an estimate with a range: with fewer, one slow pass dominates."""

_MOST_OFF: Final = 3.0
"""Largest factor by which passes may be slower or faster than when their costs were measured. Other
load on the machine changes which widths are expensive, not only how long passes take."""

_SIGMAS: Final = 2.0
"""Standard errors on either side of an estimate: 95% of such ranges contain the true value."""

_WHY_NOTHING: Final = (
    ", because nothing was found, the drafter failed, or wider passes were measured to be too "
    "expensive here"
)

UNKNOWN: Final = (
    "the speedup from drafts is not known yet: there was no pass after the prompt's own"
)


@dataclass(slots=True)
class Speedup:
    """Seconds that one or more answers take with drafts and without.

    An estimate uses measured costs only for the ratio of a plain pass to a wider one, because other
    load on the machine slows both. So the estimate never exceeds the tokens per pass.

    Attributes:
        own_s: seconds with drafts, including the pass over the prompt.
        plain_s: seconds that the same tokens take without drafts, estimated or measured.
        num_passes: number of passes after those over the prompts; with 0 the speedup is unknown.
        num_nodes: number of draft nodes in these passes.
        passes_s: seconds that the target took for these passes.
        measured_s: seconds that passes of the same widths took when costs were measured.
        products: sums over these passes of plain², plain x own and own² seconds, for the variance.
        num_compared: number of answers that were also decoded without drafts.
        num_different: number of compared answers whose tokens differ.
        first_difference: position, from 1, of the first differing token in the first answer that
            differs.
    """

    own_s: float = 0.0
    plain_s: float = 0.0
    num_passes: int = 0
    num_nodes: int = 0
    passes_s: float = 0.0
    measured_s: float = 0.0
    products: tuple[float, float, float] = (0.0, 0.0, 0.0)
    num_compared: int = 0
    num_different: int = 0
    first_difference: int | None = None

    @property
    def times_plain(self) -> float | None:
        """The speedup over plain decoding; `None` if it is unknown or costs are out of date."""
        is_known = self.num_passes > 0 and self.own_s > 0 and self.plain_s > 0
        return self.plain_s / self.own_s if is_known and not self._is_off else None

    @property
    def range(self) -> tuple[float, float] | None:
        """Lower and upper bound of an estimate; `None` for a measurement or too few passes."""
        times = self.times_plain
        if times is None or self.num_compared or self.num_passes < _TELLING_PASSES:
            return None
        plain, both, own = self.products
        deviation = max(plain - 2 * times * both + times * times * own, 0.0) ** 0.5
        off = _SIGMAS * deviation / self.own_s
        return max(times - off, 0.0), times + off

    @property
    def _off(self) -> float:
        """Ratio of passes' current durations to those when their costs were measured."""
        return self.passes_s / self.measured_s if self.measured_s else 1.0

    @property
    def _is_off(self) -> bool:
        return not self.num_compared and not 1 / _MOST_OFF <= self._off <= _MOST_OFF

    def observer(self, budget: Budget, num_prompt: int) -> Observer:
        """Return an observer that adds the passes of an answer, as an estimate.

        Each token counts as one plain pass. A plain pass costs the actual pass's time, times the
        budget's current ratio of plain to actual costs; the prompt's pass costs the same in both.
        Passes during which this process compiled kernels do not count, because compiling happens
        only once. With a budget that does not measure costs, nothing is added.

        Args:
            budget: the decoder's budget.
            num_prompt: number of prompt tokens.
        """
        if not isinstance(budget, MeasuredBudget):
            return lambda _: None
        costs = budget.costs
        context = num_prompt
        is_first = True
        compiled_before = num_compiled()

        def observe(step: ObservedPass) -> None:
            nonlocal context, is_first, compiled_before
            compiled = num_compiled()
            has_compiled, compiled_before = compiled != compiled_before, compiled
            if is_first:
                is_first = False
                self.own_s += step.times.target_s + step.times.host_s
                self.plain_s += step.times.target_s
            elif not has_compiled:
                table = costs.table_to(step.width, context)
                self._add(step, float(table[step.num_sequences - 1]), float(table[-1]), costs.load)
            context += len(step.tokens)

        return observe

    def _add(self, step: ObservedPass, plain_s: float, wide_s: float, load: float) -> None:
        """Add a pass.

        Args:
            step: the pass, as one of its sequences observed it.
            plain_s: estimated seconds of a plain pass over all sequences of this pass.
            wide_s: estimated seconds of a pass as wide as this one.
            load: ratio of passes' current durations to those when their costs were measured.
        """
        whole_s = step.times.target_s * step.width / (1 + len(step.tree))
        share_s = whole_s * plain_s / wide_s / step.num_sequences  # it holds all of them
        plain, own = len(step.tokens) * share_s, step.times.total_s
        self.plain_s += plain
        self.own_s += own
        self.num_passes += 1
        self.num_nodes += len(step.tree)
        self.passes_s += whole_s
        self.measured_s += wide_s / load
        self._vary(plain * plain, plain * own, own * own)

    def _vary(self, *products: float) -> None:
        plain, both, own = map(float.__add__, self.products, products)
        self.products = plain, both, own

    def add(self, other: "Speedup") -> None:
        """Add the seconds of other answers."""
        if self.first_difference is None:
            self.first_difference = other.first_difference
        self.own_s += other.own_s
        self.plain_s += other.plain_s
        self.num_passes += other.num_passes
        self.num_nodes += other.num_nodes
        self.passes_s += other.passes_s
        self.measured_s += other.measured_s
        self._vary(*other.products)
        self.num_compared += other.num_compared
        self.num_different += other.num_different

    def report(self) -> dict[str, Any]:
        """Return the figures as plain values."""
        is_measured = self.num_compared > 0
        return {
            "times_plain": self.times_plain,
            "range": self.range,
            "times_as_measured": self._off,
            "plain_seconds": self.plain_s,
            "is_measured": is_measured,
            "is_identical": self.num_different == 0 if is_measured else None,
        }

    def summary(self) -> str:
        """Return the speedup in one line for users."""
        times = self.times_plain
        if times is None:
            return self._doubt() if self._is_off else UNKNOWN
        gain = f"{times:.1f}x plain decoding on this machine"
        if not self.num_compared and not self.num_nodes:
            return f"{gain}: nothing was drafted{_WHY_NOTHING}"
        if not self.num_compared:
            return f"{gain}{self._surety()}"
        useless = ": drafts do not pay off here" if times < 1 else ""
        seconds = f"{self.own_s:.2f} s against {self.plain_s:.2f} s without drafts"
        return f"{gain}, measured{useless}: {seconds}; {self._identity()}"

    def _surety(self) -> str:
        """Return how certain an estimate is, and whether drafts fail to pay off."""
        passes = counted(self.num_passes, "pass", "passes")
        if self.range is None:
            return f", by a rough estimate from {passes}"
        low, high = self.range
        useless = ": drafts do not pay off here" if high < 1 else ""
        return f" ({low:.1f} to {high:.1f}), estimated from {passes}{useless}"

    def _doubt(self) -> str:
        """Return why an estimate is withheld."""
        return (
            f"the speedup from drafts is not known now: passes take {self._off:.2g} times as "
            "long as when their costs were measured. Has other work started or ended here? "
            "`foredraft generate --compare` measures it"
        )

    def _identity(self) -> str:
        if not self.num_different:
            one = self.num_compared == 1
            return "the output is identical" if one else f"all {self.num_compared} are identical"
        at = f"from token {self.first_difference} on"
        if self.num_compared == 1:
            return f"the output differs {at}"
        return f"{self.num_different} of {self.num_compared} outputs differ, the first {at}"
