"""A benchmark's report as a table for the terminal."""

from typing import Any, Final

from rich.box import SIMPLE_HEAD
from rich.table import Table

from decoder.statistics import counted

_HEADINGS: Final = (
    "prompts",
    "tokens/s",
    "x plain",
    "x lookup",
    "x undrafted",
    "tokens",
    "lookup",
    "equal",
)


def table_of(report: dict[str, Any]) -> Table:
    """Return a table with a row for each category and one for all."""
    title = f"{report['model']}, {report['dtype']} on {report['device']}; {report['drafter']}"
    table = Table(title=title, caption="\n".join(_notes(report)), box=SIMPLE_HEAD)
    table.add_column("category", no_wrap=True)
    for heading in _HEADINGS:
        table.add_column(heading, justify="right")
    for name, figures in [*report["categories"].items(), ("overall", report["overall"])]:
        table.add_row(name, *_cells(figures))
    return table


def _notes(report: dict[str, Any]) -> list[str]:
    notes = [
        "x: in time per token; tokens: per pass of the model; lookup: prompt lookup",
        "undrafted: our own loop without drafts; equal: prompts with the output of plain generate",
    ]
    times = report["overall"]["time_per_step"]
    if times:
        parts = ", ".join(
            f"{name} {ms:.2f} ms ({times['share_of_plain_step'][name]:.0%})"
            for name, ms in times["ms"].items()
        )
        notes.append(f"a step: {parts}; a plain one: {times['plain_step_ms']:.2f} ms")
    if report["warm"]["num_prompts"]:
        warm = report["warm"]
        notes.append(
            f"warmed with {counted(warm['num_prompts'], 'prompt')}, "
            f"{counted(warm['num_tokens'], 'token')}"
        )
    if report["skipped"]:
        notes.append(f"prompts skipped, as the model cannot take them: {report['skipped']}")
    return notes


def _cells(figures: dict[str, Any]) -> list[str]:
    return [
        str(figures["num_prompts"]),
        f"{figures['tokens_per_second']['foredraft']:.1f}",
        f"{figures['speedup_over_plain']:.2f}",
        f"{figures['speedup_over_prompt_lookup']:.2f}",
        f"{figures['speedup_over_undrafted']:.2f}",
        f"{figures['mean_accepted_tokens']:.2f}",
        f"{figures['prompt_lookup_mean_accepted_tokens']:.2f}",
        f"{figures['identical']}/{figures['num_prompts']}",
    ]
