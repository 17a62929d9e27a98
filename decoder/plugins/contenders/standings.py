"""The figures of contenders as in the tables of papers, with bootstrap intervals.

Speed-up is a ratio of seconds per token. It is computed from sums and includes the prompts' passes.
Accepted tokens are the tokens per pass after the prompt's pass, including the target's own token
(the bonus token).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from decoder.plugins.contenders.contender import PLAIN, UNDRAFTED, Run, total_of

DRAWS: Final = 2000
"""Number of bootstrap samples; with this many, the ends of a 90% interval vary by about 4% of its
width."""

LEVEL: Final = 0.90

MT_BENCH: Final = "multi-turn"
_MT_BENCH_CATEGORIES: Final = frozenset(
    {
        "writing",
        "roleplay",
        "reasoning",
        "math",
        "coding",
        "extraction",
        "stem",
        "humanities",
    }
)
"""Categories of MT-Bench, which the tables of Spec-Bench count as one category."""

_SEED: Final = 20240115  # any fixed seed, so that intervals of a report are reproducible


Interval = tuple[float, float | None, float | None]
"""A figure and the ends of its interval; `None` if there is no interval."""


@dataclass(frozen=True, slots=True)
class Comparison:
    """A group of prompts, often just one, that all contenders decoded.

    Attributes:
        category: category of the prompt; empty for a group of several prompts.
        runs: run of each contender, by name.
        group: number of the group. The turns of a conversation share it, and so do the seeds; they
            are resampled together.
        asked: tokens of each prompt.
    """

    category: str
    runs: dict[str, Run]
    group: int = 0
    asked: Sequence[list[int]] = ()


@dataclass(frozen=True, slots=True, eq=False)
class Sums:
    """The contenders' sums by group of prompts.

    Attributes:
        names: names of C contenders.
        seconds: float64[G, C], seconds in each of G groups.
        tokens: float64[G, C], generated tokens.
        steps: float64[G, C], passes after the prompts' passes.
        step_tokens: float64[G, C], tokens of those passes.
    """

    names: list[str]
    seconds: NDArray[np.float64]
    tokens: NDArray[np.float64]
    steps: NDArray[np.float64]
    step_tokens: NDArray[np.float64]

    @classmethod
    def of(cls, comparisons: Sequence[Comparison]) -> "Sums":
        """Return the sums of comparisons."""
        names = list(comparisons[0].runs)
        numbers = sorted({comparison.group for comparison in comparisons})
        row_of = {number: row for row, number in enumerate(numbers)}
        sums = np.zeros((4, len(numbers), len(names)))
        for comparison in comparisons:
            row = row_of[comparison.group]
            for column, name in enumerate(names):
                sums[:, row, column] += comparison.runs[name].account
        return cls(names, *sums)

    def speeds(self) -> NDArray[np.float64]:
        """Return float64[1 + DRAWS, C], tokens per second: of all groups, then of each sample."""
        return _paces(self.tokens, self.seconds, self._draws())

    def accepted(self) -> NDArray[np.float64]:
        """Return float64[1 + DRAWS, C], tokens per step, in the same order."""
        return _paces(self.step_tokens, self.steps, self._draws())

    def _draws(self) -> NDArray[np.float64]:
        """Return float64[DRAWS, G], how often each group is in each sample, for all contenders."""
        count = len(self.seconds)
        rng = np.random.default_rng(_SEED)
        drawn: NDArray[np.int64] = rng.multinomial(count, np.full(count, 1 / count), size=DRAWS)
        return drawn.astype(np.float64)


def standings(comparisons: Sequence[Comparison], reference: str) -> dict[str, Any]:
    """Return the figures of all contenders, for all groups and for each category.

    Args:
        comparisons: at least one, all of the same contenders.
        reference: the baseline contender for speed-up.

    Returns:
        `num_groups`, and `contenders` with the figures of each. `speedup` and `accepted_tokens`
        (per pass and sequence) are `[value, low, high]`. The two ends of the interval at `LEVEL`
        over groups are `None` if there is only one group. `over`, in the same form, has the ratios
        of tokens per second over plain generation and over decoding without drafts, by name.
        `median_over` has the medians of these ratios over groups. Then follow counts. For our
        contenders, `step_ms` has the median milliseconds of a pass in target, drafter and host,
        without prompts. `categories` has the same figures by category. `against` has, by contender
        and other contender, the ratios of their speeds and of their accepted tokens.
    """
    columns: dict[str, list[Comparison]] = {}
    for comparison in comparisons:
        if comparison.category:
            columns.setdefault(column_of(comparison.category), []).append(comparison)
    return {
        "interval": LEVEL,
        **_figures(comparisons, reference),
        "categories": {name: _figures(members, reference) for name, members in columns.items()},
        "against": _against(Sums.of(comparisons)),
    }


def _figures(comparisons: Sequence[Comparison], reference: str) -> dict[str, Any]:
    sums = Sums.of(comparisons)
    speeds, accepted, count = sums.speeds(), sums.accepted(), len(sums.seconds)
    by_group, columns = sums.tokens / sums.seconds, {name: n for n, name in enumerate(sums.names)}
    contenders: dict[str, dict[str, Any]] = {}
    for name, column in columns.items():
        ratios = speeds[:, [column]] / speeds
        bases = [base for base in (PLAIN, UNDRAFTED) if base in columns and base != name]
        medians = np.median(by_group[:, [column]] / by_group, axis=0)
        contenders[name] = {
            "tokens_per_second": float(speeds[0, column]),
            "speedup": _interval(ratios[:, columns[reference]], count),
            "over": {base: _interval(ratios[:, columns[base]], count) for base in bases},
            "median_over": {base: float(medians[columns[base]]) for base in bases},
            "accepted_tokens": _interval(accepted[:, column], count),
            **_spent([comparison.runs[name] for comparison in comparisons]),
        }
    return {"num_groups": count, "contenders": contenders}


def _spent(runs: Sequence[Run]) -> dict[str, Any]:
    """Return counts of a contender's runs, and the parts of their time as shares of the total."""
    total = total_of(runs)
    seconds = sum(run.seconds for run in runs)
    passes = sum(run.num_passes for run in runs)
    tokens = sum(len(run.token_ids) for run in runs)
    steps = [step for run in runs for step in run.steps]
    figures: dict[str, Any] = {
        "num_tokens": tokens,
        "num_passes": passes,
        "tokens_per_pass": tokens / passes,
        "seconds": seconds,
        "draft_share": total.draft_s / seconds,
        "nodes_per_step": total.num_drafted / len(steps) if steps else 0.0,
        "step_ms": {},
    }
    if not steps:
        return figures
    parts = {
        "target": [step.target_s for step in steps],
        "draft": [step.draft_s for step in steps],
        "host": [step.host_s for step in steps],
    }
    return {
        **figures,
        "step_ms": {part: 1e3 * median(seconds) for part, seconds in parts.items()},
        "num_steps": len(steps),
        "sequences_per_step": total.widths.total() / len(steps),
        "accepted_by_source": total.accepted_by_source(),
        "prompt_share": total.prompt_s / total.total_s,
    }


def column_of(category: str) -> str:
    """Return the column of a category in the tables of Spec-Bench."""
    return MT_BENCH if category in _MT_BENCH_CATEGORIES else category


def _paces(
    tokens: NDArray[np.float64], spent: NDArray[np.float64], weights: NDArray[np.float64]
) -> NDArray[np.float64]:
    """Return float64[1 + draws, C], tokens per cost: of all groups, then of each sample."""
    drawn = np.concatenate([np.ones((1, len(tokens))), weights])
    taken = drawn @ spent
    paces: NDArray[np.float64] = np.where(taken > 0, drawn @ tokens / np.maximum(taken, 1e-12), 1.0)
    return paces  # 1 if the cost is 0, as for answers of one token


def _interval(drawn: NDArray[np.float64], count: int) -> Interval:
    """Return a figure, float64[1 + draws], with the ends of its percentile interval.

    Args:
        drawn: the figure of all groups, then of each sample.
        count: number of resampled groups; with one group there is no interval.
    """
    if count == 1:
        return float(drawn[0]), None, None
    tail = (1 - LEVEL) / 2
    low, high = np.quantile(drawn[1:], (tail, 1 - tail))
    return float(drawn[0]), float(low), float(high)


def _against(sums: Sums) -> dict[str, dict[str, dict[str, Interval]]]:
    speeds, accepted, count = sums.speeds(), sums.accepted(), len(sums.seconds)
    numbered = list(enumerate(sums.names))
    return {
        name: {
            other: {
                "speed": _interval(speeds[:, column] / speeds[:, base], count),
                "accepted_tokens": _interval(accepted[:, column] / accepted[:, base], count),
            }
            for base, other in numbered
            if base != column
        }
        for column, name in numbered
    }


def in_brackets(figure: Interval) -> str:
    """Return a figure as text, with its interval in brackets if there is one."""
    value, low, high = figure
    if low is None or high is None:
        return f"{value:.2f}"
    return f"{value:.2f} [{low:.2f}, {high:.2f}]"
