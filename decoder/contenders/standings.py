"""The figures of contenders as the papers' tables have them, with bootstrap intervals.

Speed-up is in seconds per token, those of the prompt's pass included, as sums over sums. Accepted
tokens are those of a pass after the prompt's, the target's own token (the bonus token) included.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from decoder.contenders.contender import FOREDRAFT, Run

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
    """One prompt decoded in every way.

    Attributes:
        category: the prompt's.
        runs: contender's name to what it did.
        prompt: its number; turns of one conversation and seeds share it, and are resampled as one.
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
                run = comparison.runs[name]
                num_tokens = len(run.token_ids)
                sums[:, row, column] += (
                    run.seconds,
                    num_tokens,
                    max(run.num_passes - 1, 0),
                    max(num_tokens - 1, 0),
                )
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


def _interval(drawn: NDArray[np.float64]) -> list[float]:
    """Return a figure, float64[1 + draws], with the ends of its percentile interval."""
    tail = (1 - LEVEL) / 2
    low, high = np.quantile(drawn[1:], (tail, 1 - tail))
    return [float(drawn[0]), float(low), float(high)]


def _against(sums: Sums) -> dict[str, dict[str, dict[str, list[float]]]]:
    speeds, accepted = sums.speeds(), sums.accepted()
    numbered = list(enumerate(sums.names))
    return {
        name: {
            other: {
                "speed": _interval(speeds[:, column] / speeds[:, base]),
                "accepted_tokens": _interval(accepted[:, column] / accepted[:, base]),
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
