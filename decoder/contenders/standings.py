"""The figures of contenders as the papers' tables have them, with bootstrap intervals.

Speed-up is in seconds per token, those of the prompt's pass included, as sums over sums. Accepted
tokens are those of a pass after the prompt's, the target's own token (the bonus token) included.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from decoder.contenders.contender import FOREDRAFT, PLAIN, UNDRAFTED, Run
from decoder.observation import Statistics

DRAWS: Final = 2000
"""Resampled sets of prompts: the ends of a 90% interval then vary by about 4% of its width."""

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
"""Categories of MT-Bench, which Spec-Bench's tables count as one."""

_SEED: Final = 20240115  # any: intervals of a report can be had again


@dataclass(frozen=True, slots=True)
class Comparison:
    """One prompt, or a group of prompts, decoded in every way.

    Attributes:
        category: the prompt's; empty for a group.
        runs: contender's name to what it did.
        prompt: its number, or the group's; turns of one conversation and seeds share it, and are
            resampled as one.
        turn: of the conversation, from 0.
    """

    category: str
    runs: dict[str, Run]
    prompt: int = 0
    turn: int = 0

    def speedup(self, over: str) -> float:
        """Return how many times as fast per token this decoder was as another way."""
        own, other = self.runs[FOREDRAFT], self.runs[over]
        return (other.seconds / len(other.token_ids)) / (own.seconds / len(own.token_ids))


@dataclass(frozen=True, slots=True, eq=False)
class Sums:
    """What contenders did, added up by prompt.

    Attributes:
        names: of C contenders.
        seconds: float64[P, C], of P prompts.
        tokens: float64[P, C].
        steps: float64[P, C], passes after the prompts'.
        step_tokens: float64[P, C], tokens of those.
    """

    names: list[str]
    seconds: NDArray[np.float64]
    tokens: NDArray[np.float64]
    steps: NDArray[np.float64]
    step_tokens: NDArray[np.float64]

    @classmethod
    def of(cls, comparisons: Sequence[Comparison]) -> "Sums":
        """Add up comparisons."""
        names = list(comparisons[0].runs)
        numbers = sorted({comparison.prompt for comparison in comparisons})
        row_of = {number: row for row, number in enumerate(numbers)}
        sums = np.zeros((4, len(numbers), len(names)))
        for comparison in comparisons:
            row = row_of[comparison.prompt]
            for column, name in enumerate(names):
                sums[:, row, column] += comparison.runs[name].account
        return cls(names, *sums)

    def speeds(self) -> NDArray[np.float64]:
        """Return float64[1 + DRAWS, C], tokens per second: of all prompts, then of each draw."""
        return _paces(self.tokens, self.seconds, self._draws())

    def accepted(self) -> NDArray[np.float64]:
        """Return float64[1 + DRAWS, C], tokens per step, likewise."""
        return _paces(self.step_tokens, self.steps, self._draws())

    def _draws(self) -> NDArray[np.float64]:
        """Return float64[DRAWS, P], how often each prompt is drawn; the same for all contenders."""
        count = len(self.seconds)
        rng = np.random.default_rng(_SEED)
        drawn: NDArray[np.int64] = rng.multinomial(count, np.full(count, 1 / count), size=DRAWS)
        return drawn.astype(np.float64)


def standings(comparisons: Sequence[Comparison], reference: str) -> dict[str, Any]:
    """Return the figures of all contenders, for all prompts and for each category.

    Args:
        comparisons: at least one, all of the same contenders.
        reference: the contender that speed-up is over and outputs are compared with.

    Returns:
        `reference`; `overall` and `categories`, each with `num_prompts`, `num_answers` and the
        figures of each contender: `speedup` and `accepted_tokens` are `[value, low, high]`, ends of
        the interval at `LEVEL` over prompts; and `against`, for all prompts: by contender and other
        contender, the ratio of their speeds and of their accepted tokens, likewise.
    """
    columns: dict[str, list[Comparison]] = {}
    for comparison in comparisons:
        columns.setdefault(column_of(comparison.category), []).append(comparison)
    return {
        "reference": reference,
        "interval": LEVEL,
        "overall": _figures(comparisons, reference),
        "categories": {name: _figures(members, reference) for name, members in columns.items()},
        "against": _against(Sums.of(comparisons)),
    }


def parallel_standings(comparisons: Sequence[Comparison]) -> dict[str, Any]:
    """Return the figures of contenders that decoded groups of prompts, some at a time.

    Args:
        comparisons: of at least one group, all of the same contenders.

    Returns:
        `num_groups`, and by contender: `over`, by the name of plain batches and of decoding without
        drafts, the ratio of tokens per second as `[value, low, high]`, with ends of the interval at
        `LEVEL` over groups, `None` where there is one group; `median_over`, the medians of groups;
        `accepted_tokens`, of a pass and sequence, likewise; and `step_ms`, the medians of target,
        drafter and host, without what prompts took, empty where passes were not watched. `against`
        is that of `standings`.
    """
    sums = Sums.of(comparisons)
    speeds, accepted = sums.speeds(), sums.accepted()
    bases = [name for name in (PLAIN, UNDRAFTED) if name in sums.names]
    by_group = sums.tokens / sums.seconds
    figures: dict[str, Any] = {}
    for column, name in enumerate(sums.names):
        over = {base: sums.names.index(base) for base in bases if base != name}
        figures[name] = {
            "tokens_per_second": float(speeds[0, column]),
            "over": {
                base: _interval(speeds[:, column] / speeds[:, other], len(by_group))
                for base, other in over.items()
            },
            "median_over": {
                base: float(np.median(by_group[:, column] / by_group[:, other]))
                for base, other in over.items()
            },
            "accepted_tokens": _interval(accepted[:, column], len(by_group)),
            **_sharing([comparison.runs[name] for comparison in comparisons]),
        }
    return {
        "interval": LEVEL,
        "num_groups": len(by_group),
        "contenders": figures,
        "against": _against(sums, len(by_group)),
    }


def _sharing(runs: Sequence[Run]) -> dict[str, Any]:
    """Return counts of runs of several prompts, and where the time of their passes went."""
    total = Statistics()
    for run in runs:
        total.add(run.statistics)
    steps = [step for run in runs for step in run.steps]
    counts: dict[str, Any] = {
        "num_tokens": sum(len(run.token_ids) for run in runs),
        "seconds": sum(run.seconds for run in runs),
        "step_ms": {},
    }
    if not steps:
        return counts
    parts = {
        "target": [step.target_s for step in steps],
        "draft": [step.draft_s for step in steps],
        "host": [step.host_s for step in steps],
    }
    return {
        **counts,
        "step_ms": {part: 1e3 * median(seconds) for part, seconds in parts.items()},
        "num_steps": len(steps),
        "sequences_per_step": total.widths.total() / len(steps),
        "nodes_per_step": total.num_drafted / len(steps),
        "accepted_by_source": total.accepted_by_source(),
        "prompt_share": total.prompt_s / total.total_s,
    }


def column_of(category: str) -> str:
    """Return the column of Spec-Bench's tables that a category belongs to."""
    return MT_BENCH if category in _MT_BENCH_CATEGORIES else category


def _figures(comparisons: Sequence[Comparison], reference: str) -> dict[str, Any]:
    sums = Sums.of(comparisons)
    speeds, accepted = sums.speeds(), sums.accepted()
    base = sums.names.index(reference)
    return {
        "num_prompts": len(sums.seconds),
        "num_answers": len(comparisons),
        "contenders": {
            name: {
                "speedup": _interval(speeds[:, column] / speeds[:, base]),
                "accepted_tokens": _interval(accepted[:, column]),
                "tokens_per_second": float(speeds[0, column]),
                "identical": _num_identical(comparisons, name, reference),
                **_drafting(comparisons, name),
            }
            for column, name in enumerate(sums.names)
        },
    }


def _drafting(comparisons: Sequence[Comparison], name: str) -> dict[str, Any]:
    """Return counts and times of a contender's runs; shares are of its whole time."""
    runs = [comparison.runs[name] for comparison in comparisons]
    seconds = sum(run.seconds for run in runs)
    passes = sum(run.num_passes for run in runs)
    tokens = sum(len(run.token_ids) for run in runs)
    steps = sum(run.statistics.widths.total() for run in runs)
    nodes = sum(run.statistics.num_drafted for run in runs)
    return {
        "num_tokens": tokens,
        "num_passes": passes,
        "tokens_per_pass": tokens / passes,
        "nodes_per_step": nodes / steps if steps else 0.0,
        "draft_share": sum(run.statistics.draft_s for run in runs) / seconds,
    }


def _paces(
    tokens: NDArray[np.float64], spent: NDArray[np.float64], weights: NDArray[np.float64]
) -> NDArray[np.float64]:
    """Return float64[1 + draws, C], tokens by what they took: of all prompts, then of each draw."""
    drawn = np.concatenate([np.ones((1, len(tokens))), weights])
    taken = drawn @ spent
    paces: NDArray[np.float64] = np.where(taken > 0, drawn @ tokens / np.maximum(taken, 1e-12), 1.0)
    return paces  # 1 where nothing was taken: answers of one token


def _interval(drawn: NDArray[np.float64], count: int | None = None) -> list[float | None]:
    """Return a figure, float64[1 + draws], with the ends of its percentile interval.

    Args:
        drawn: of all, then of each draw.
        count: how many are resampled; of one there is no interval. Not given: taken as many.
    """
    if count == 1:
        return [float(drawn[0]), None, None]
    tail = (1 - LEVEL) / 2
    low, high = np.quantile(drawn[1:], (tail, 1 - tail))
    return [float(drawn[0]), float(low), float(high)]


def _against(
    sums: Sums, count: int | None = None
) -> dict[str, dict[str, dict[str, list[float | None]]]]:
    speeds, accepted = sums.speeds(), sums.accepted()
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


def _num_identical(comparisons: Sequence[Comparison], name: str, reference: str) -> int:
    return sum(
        comparison.runs[name].token_ids == comparison.runs[reference].token_ids
        for comparison in comparisons
    )
