"""The figures of a comparison of ways of decoding, as values and as a table."""

from dataclasses import dataclass
from statistics import median
from typing import Any, Final

from rich.box import SIMPLE_HEAD
from rich.table import Table

from decoder.contenders.contender import FOREDRAFT, PLAIN, PROMPT_LOOKUP, UNDRAFTED, Run
from decoder.observation import Statistics, counted


@dataclass(frozen=True, slots=True)
class Comparison:
    """One prompt decoded in every way.

    Attributes:
        category: the prompt's.
        runs: contender's name to what it did.
    """

    category: str
    runs: dict[str, Run]

    def speedup(self, over: str) -> float:
        """Return how many times as fast per token this decoder was as another way."""
        return _seconds_per_token([self.runs[over]]) / _seconds_per_token([self.runs[FOREDRAFT]])


def summarize(comparisons: list[Comparison]) -> dict[str, Any]:
    """Return the figures of all prompts (`overall`) and of each category (`categories`)."""
    categories: dict[str, list[Comparison]] = {}
    for comparison in comparisons:
        categories.setdefault(comparison.category, []).append(comparison)
    return {
        "overall": _figures(comparisons),
        "categories": {name: _figures(members) for name, members in categories.items()},
    }


def time_per_step(drafted: Statistics, undrafted: Statistics) -> dict[str, Any]:
    """Return where the time of a step goes, the prompt's pass left out.

    Args:
        drafted: of decoding with drafts.
        undrafted: of the same loop without; its step is what shares are of.

    Returns:
        Milliseconds a step of target, draft and host, each also as a share of a plain step;
        empty where a prompt's pass was all there was.
    """
    steps, plain_steps = drafted.widths.total(), undrafted.widths.total()
    if not steps or not plain_steps:
        return {}
    plain_s = (undrafted.total_s - undrafted.prompt_s) / plain_steps
    parts = {
        "target": drafted.target_s - drafted.prompt_s,
        "draft": drafted.draft_s,
        "host": drafted.host_s,
    }
    return {
        "plain_step_ms": plain_s * 1e3,
        "ms": {name: seconds / steps * 1e3 for name, seconds in parts.items()},
        "share_of_plain_step": {name: seconds / steps / plain_s for name, seconds in parts.items()},
    }


def _figures(comparisons: list[Comparison]) -> dict[str, Any]:
    """Return one category's figures; ratios are of seconds per token, sums over sums."""
    runs = {name: [c.runs[name] for c in comparisons] for name in comparisons[0].runs}
    pace = {name: _seconds_per_token(members) for name, members in runs.items()}
    others = (PLAIN, PROMPT_LOOKUP, UNDRAFTED)
    drafted, undrafted = _total(runs[FOREDRAFT]), _total(runs[UNDRAFTED])
    return {
        "num_prompts": len(comparisons),
        **{f"speedup_over_{name}": pace[name] / pace[FOREDRAFT] for name in others},
        **{f"median_speedup_over_{x}": median(c.speedup(x) for c in comparisons) for x in others},
        "prompt_lookup_speedup_over_plain": pace[PLAIN] / pace[PROMPT_LOOKUP],
        "mean_accepted_tokens": _tokens_per_pass(runs[FOREDRAFT]),
        "prompt_lookup_mean_accepted_tokens": _tokens_per_pass(runs[PROMPT_LOOKUP]),
        "identical": _num_identical(runs[FOREDRAFT], runs[PLAIN]),
        "undrafted_identical": _num_identical(runs[UNDRAFTED], runs[PLAIN]),
        "prompt_lookup_identical": _num_identical(runs[PROMPT_LOOKUP], runs[PLAIN]),
        "tokens_per_second": {name: 1 / seconds for name, seconds in pace.items()},
        "num_tokens": {name: _num_tokens(members) for name, members in runs.items()},
        "num_passes": {name: sum(r.num_passes for r in members) for name, members in runs.items()},
        "time_per_step": time_per_step(drafted, undrafted),
        "foredraft": drafted.report(),
    }


def _total(runs: list[Run]) -> Statistics:
    total = Statistics()
    for run in runs:
        total.add(run.statistics)
    return total


def _num_tokens(runs: list[Run]) -> int:
    return sum(len(run.token_ids) for run in runs)


def _seconds_per_token(runs: list[Run]) -> float:
    return sum(run.seconds for run in runs) / _num_tokens(runs)


def _tokens_per_pass(runs: list[Run]) -> float:
    return _num_tokens(runs) / sum(run.num_passes for run in runs)


def _num_identical(runs: list[Run], plain: list[Run]) -> int:
    pairs = zip(runs, plain, strict=True)
    return sum(run.token_ids == reference.token_ids for run, reference in pairs)


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
