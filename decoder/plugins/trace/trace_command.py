"""The command that shows traces."""

import json
from collections import Counter
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

import typer
from rich.box import SIMPLE_HEAD
from rich.table import Table
from rich.text import Text

from decoder.commands.terminal import print_table
from decoder.plugins.trace.trace import TracedStep, check_trace, read_as_far
from decoder.plugins.trace.viewer.trace_page import write_page


@dataclass(slots=True)
class TraceSummary:
    """Sums over the passes of a trace, and the medians of their times.

    Times and widths leave out the passes that read prompts, because their cost depends on the
    length of the prompt.

    Attributes:
        num_prompts: number of prompts with a pass.
        num_steps: number of passes, including those that read prompts.
        num_tokens: number of committed tokens.
        num_drafted: number of drafted nodes.
        num_verified: number of verified nodes.
        accepted: number of accepted nodes by source.
        widths: number of passes by the number of tokens in the pass.
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
        """Mean number of committed tokens per pass."""
        return self.num_tokens / self.num_steps if self.num_steps else 0.0

    def report(self) -> dict[str, Any]:
        """Return all figures as plain values: sources by count, widths in ascending order."""
        return {
            **asdict(self),
            "accepted": dict(self.accepted.most_common()),
            "widths": dict(sorted(self.widths.items())),
            "tokens_per_step": self.tokens_per_step,
        }


def summarize(steps: Iterable[TracedStep]) -> TraceSummary:
    """Return the sums and medians of a trace, which is read once."""
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


_NUMBERS = ("prompt", "pass", "drafted", "width", "accepted", "draft µs", "target µs", "host µs")
_BAR_CHARACTERS = 40


def show_trace(file: Path, html: Path | None, *, as_json: bool) -> None:
    """Show the passes of a trace and their totals; see `foredraft trace --help`."""
    if html is not None:
        check_trace(html, "page")
    steps, note = read_as_far(file)
    if note:
        typer.echo(f"note: {note}", err=True)
    if html is not None:
        write_page(html, steps, file.name, note)
        typer.echo(f"wrote {html}: open it in a browser", err=True)
        if not as_json:
            return
    summary = summarize(steps)
    if as_json:
        typer.echo(json.dumps(summary.report()))
        return
    print_table(_table(steps))
    for line in _totals(summary):
        typer.echo(line)


def _table(steps: Iterable[TracedStep]) -> Table:
    caption = "width: tokens in the pass; pass 1 reads the prompt"
    table = Table(box=SIMPLE_HEAD, caption=caption, padding=(0, 1, 0, 0), pad_edge=False)
    for heading in _NUMBERS:
        table.add_column(heading, justify="right")
    table.add_column("sources")
    table.add_column("text", overflow="fold")
    for step in steps:
        text = json.dumps(step.text, ensure_ascii=False)[1:-1]
        table.add_row(*_numbers(step), _sources(step), Text(text))
    return table


def _numbers(step: TracedStep) -> list[str]:
    times = (step.draft_us, step.target_us, step.host_us)
    return [
        str(step.prompt),
        str(step.step),
        str(len(step.tree.tokens)),
        "" if step.is_prompt else str(step.width),
        str(len(step.path)),
        *(f"{time:.0f}" for time in times),
    ]


def _sources(step: TracedStep) -> str:
    counts = Counter(step.accepted_sources())
    return ", ".join(f"{name} {count}" for name, count in counts.most_common())


def _totals(summary: TraceSummary) -> list[str]:
    accepted = ", ".join(f"{name} {count}" for name, count in summary.accepted.most_common())
    medians = ", ".join(f"{name} {time:.0f}" for name, time in summary.median_us.items())
    lines = [
        f"prompts: {summary.num_prompts}",
        f"passes: {summary.num_steps}",
        f"tokens: {summary.num_tokens}, {summary.tokens_per_step:.2f} per pass",
        f"nodes drafted: {summary.num_drafted}",
        f"nodes verified: {summary.num_verified}",
        f"nodes accepted: {summary.accepted.total()} ({accepted or 'none'})",
        f"median microseconds of a pass: {medians or 'only prompt passes'}",
    ]
    most = max(summary.widths.values(), default=0)
    for width, count in sorted(summary.widths.items()):
        bar = "█" * round(count / most * _BAR_CHARACTERS)
        lines.append(f"width {width:3}: {count:6} {bar}")
    return lines
