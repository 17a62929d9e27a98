"""What a trace says as a whole."""

from collections import Counter
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from statistics import median
from typing import Any

from decoder.trace import TracedStep


@dataclass(slots=True)
class TraceSummary:
    """Sums over the passes of a trace, and the medians of their times.

    Times and widths leave the prompts' own passes out: those cost what a prompt's length costs.

    Attributes:
        num_prompts: prompts that have a pass.
        num_steps: passes, the prompts' included.
        num_tokens: tokens committed.
        num_drafted: nodes that drafters sent.
        num_verified: nodes that were verified of them.
        accepted: accepted nodes by source.
        widths: number of passes by tokens in the pass.
        median_us: median microseconds of a pass in the drafter, the target and the loop itself.
    """

    num_prompts: int = 0
    num_steps: int = 0
    num_tokens: int = 0
    num_drafted: int = 0
    num_verified: int = 0
    accepted: Counter[str] = field(default_factory=Counter)
    widths: Counter[int] = field(default_factory=Counter)
    median_us: dict[str, float] = field(default_factory=dict)

    @property
    def tokens_per_step(self) -> float:
        """Mean tokens for each pass."""
        return self.num_tokens / self.num_steps if self.num_steps else 0.0

    def report(self) -> dict[str, Any]:
        """Return all figures as plain values, sources by count and widths in order."""
        return {
            **asdict(self),
            "accepted": dict(self.accepted.most_common()),
            "widths": dict(sorted(self.widths.items())),
            "tokens_per_step": self.tokens_per_step,
        }


def summarize(steps: Iterable[TracedStep]) -> TraceSummary:
    """Add up a trace, which is gone through once."""
    summary = TraceSummary()
    times: dict[str, list[float]] = {"draft": [], "target": [], "host": []}
    prompts = set()
    for step in steps:
        prompts.add(step.prompt)
        _count(summary, step)
        if not step.is_prompt:
            summary.widths[step.width] += 1
            for name, taken in times.items():
                taken.append(getattr(step, f"{name}_us"))
    summary.num_prompts = len(prompts)
    summary.median_us = {name: median(taken) for name, taken in times.items() if taken}
    return summary


def _count(summary: TraceSummary, step: TracedStep) -> None:
    summary.num_steps += 1
    summary.num_tokens += len(step.tokens)
    summary.num_drafted += len(step.tree.tokens)
    summary.num_verified += step.num_kept
    summary.accepted.update(step.accepted_sources())
