"""The command that reads traces."""

import json
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Annotated

import typer
from rich.box import SIMPLE_HEAD
from rich.table import Table
from rich.text import Text

from decoder.errors import TraceFileError
from decoder.options import AsJson
from decoder.table_printing import print_table
from decoder.trace import TracedStep, read_trace
from decoder.trace_summary import TraceSummary, summarize

_NUMBERS = ("prompt", "pass", "drafted", "width", "accepted", "draft µs", "target µs", "host µs")
_BAR_CHARACTERS = 40


def trace_command(
    file: Annotated[
        Path, typer.Argument(metavar="FILE", help="What `generate --trace` wrote (.gz too).")
    ],
    *,
    as_json: AsJson = False,
) -> None:
    """Show the passes of a trace and what they come to; --json gives the totals alone."""
    steps = list(read_trace(file))
    if not steps:
        raise TraceFileError(f"{file} holds no pass: nothing was generated while it was written")
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
        f"median microseconds of a pass: {medians or 'none but prompts'}",
    ]
    most = max(summary.widths.values(), default=0)
    for width, count in sorted(summary.widths.items()):
        bar = "█" * round(count / most * _BAR_CHARACTERS)
        lines.append(f"width {width:3}: {count:6} {bar}")
    return lines
