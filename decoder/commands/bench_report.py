"""Reports of a benchmark: our own decoder's figures, and the tables and the plot of contenders."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any, Final

from rich.box import SIMPLE_HEAD
from rich.table import Table

from decoder.contenders.contender import FOREDRAFT, PLAIN, PROMPT_LOOKUP, UNDRAFTED, Run
from decoder.contenders.standings import Comparison
from decoder.estimate.estimate_plot import figure_class, save
from decoder.observation import Statistics, counted

_KEYS: Final = {PROMPT_LOOKUP: "prompt_lookup"}
"""Names of contenders in keys of the default report, where they differ."""


def summarize(comparisons: Sequence[Comparison]) -> dict[str, Any]:
    """Return our own decoder's figures beside those of the other default contenders.

    Those of all prompts are `overall`, those of each category in `categories`.
    """
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


def _figures(comparisons: Sequence[Comparison]) -> dict[str, Any]:
    """Return one category's figures; ratios are of seconds per token, sums over sums."""
    runs = {name: [c.runs[name] for c in comparisons] for name in comparisons[0].runs}
    pace = {name: _seconds_per_token(members) for name, members in runs.items()}
    others = {_KEYS.get(name, name): name for name in (PLAIN, PROMPT_LOOKUP, UNDRAFTED)}
    drafted, undrafted = _total(runs[FOREDRAFT]), _total(runs[UNDRAFTED])
    return {
        "num_prompts": len(comparisons),
        **{f"speedup_over_{key}": pace[name] / pace[FOREDRAFT] for key, name in others.items()},
        **{
            f"median_speedup_over_{key}": median(c.speedup(name) for c in comparisons)
            for key, name in others.items()
        },
        "prompt_lookup_speedup_over_plain": pace[PLAIN] / pace[PROMPT_LOOKUP],
        "mean_accepted_tokens": _tokens_per_pass(runs[FOREDRAFT]),
        "prompt_lookup_mean_accepted_tokens": _tokens_per_pass(runs[PROMPT_LOOKUP]),
        "identical": _num_identical(runs[FOREDRAFT], runs[PLAIN]),
        "undrafted_identical": _num_identical(runs[UNDRAFTED], runs[PLAIN]),
        "prompt_lookup_identical": _num_identical(runs[PROMPT_LOOKUP], runs[PLAIN]),
        "tokens_per_second": _keyed({name: 1 / seconds for name, seconds in pace.items()}),
        "num_tokens": _keyed({name: _num_tokens(members) for name, members in runs.items()}),
        "num_passes": _keyed(
            {name: sum(r.num_passes for r in members) for name, members in runs.items()}
        ),
        "time_per_step": time_per_step(drafted, undrafted),
        "foredraft": drafted.report(),
    }


def _keyed(figures: Mapping[str, float]) -> dict[str, float]:
    return {_KEYS.get(name, name): figure for name, figure in figures.items()}


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


def tables_of(report: dict[str, Any], over: str | None = None) -> list[Table]:
    """Return the tables of all contenders, as papers have them: for all prompts, by category.

    Args:
        report: of `run_benchmark`, with `drafter`.
        over: a contender that the others are set against in a table of their own.
    """
    tables = []
    for setting in report["settings"]:
        tables.append(_standings_table(report, setting))
        if over is not None:
            tables.append(_ratio_table(setting, over))
        tables += _category_tables(setting)
    return tables


def notes_of(report: dict[str, Any]) -> list[str]:
    """Return the lines below the tables of contenders."""
    return [*_standings_notes(report), *common_notes(report)]


def title_of(report: dict[str, Any]) -> str:
    """Return what a report is of: model, precision, device and where drafts come from."""
    return f"{report['model']}, {report['dtype']} on {report['device']}; {report['drafter']}"


def table_of(report: dict[str, Any]) -> Table:
    """Return a table with a row for each category and one for all, of our own decoder."""
    title = title_of(report)
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
    return [*notes, *common_notes(report)]


def common_notes(report: dict[str, Any]) -> list[str]:
    """Return the lines below any tables: what was interrupted, warmed with and skipped."""
    notes = [_interruption(report["interrupted_at"])] if report["interrupted"] else []
    if report["warm"]["num_prompts"]:
        warm = report["warm"]
        notes.append(
            f"warmed with {counted(warm['num_prompts'], 'prompt')}, "
            f"{counted(warm['num_tokens'], 'token')}"
        )
    if report["skipped"]:
        notes.append(f"prompts skipped, as the model cannot take them: {report['skipped']}")
    return notes


def _interruption(at: dict[str, Any]) -> str:
    """Return the line about an interruption; see `Benchmark.report`."""
    unit = "group" if "groups" in at else "prompt"
    num_done, num_units = at[f"{unit}s"], at[f"of_{unit}s"]
    place = f"interrupted: {at['where']}, {num_done} of {counted(num_units, unit)}"
    uncounted = "" if at["counted"] or not num_done else ", which are left out"
    return f"{place}{uncounted}; nothing was measured behind that"


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


def described(setting: dict[str, Any]) -> str:
    """Return a setting of a report in words."""
    words = in_words(setting["nodes"], setting["temperature"])
    if setting["num_seeds"] > 1:
        words.append(counted(setting["num_seeds"], "seed"))
    return ", ".join(words)


def in_words(nodes: int | None, temperature: float) -> list[str]:
    """Return what contenders meet under, in words."""
    words = ["as many nodes as pay" if nodes is None else counted(nodes, "node")]
    if temperature:
        words.append(f"temperature {temperature:g}")
    return words


def _standings_table(report: dict[str, Any], setting: dict[str, Any]) -> Table:
    """Return a row for each contender, over all prompts."""
    overall = setting["overall"]
    prompts = counted(overall["num_prompts"], "prompt")
    title = f"{title_of(report)}\n{described(setting)}; {prompts}"
    table = Table(title=title, box=SIMPLE_HEAD)
    table.add_column("contender", no_wrap=True)
    for heading in ("speed-up", "90%", "accepted", "90%", "nodes", "tokens/s", "drafting", "equal"):
        table.add_column(heading, justify="right")
    for name, figures in overall["contenders"].items():
        table.add_row(
            name,
            *_with_interval(figures["speedup"]),
            *_with_interval(figures["accepted_tokens"]),
            f"{figures['nodes_per_step']:.1f}",
            f"{figures['tokens_per_second']:.1f}",
            f"{figures['draft_share']:.0%}",
            f"{figures['identical']}/{overall['num_answers']}",
        )
    return table


def _ratio_table(setting: dict[str, Any], over: str) -> Table:
    """Return how many times one contender's speed and accepted tokens the others have."""
    table = Table(title=f"over {over}, {described(setting)}", box=SIMPLE_HEAD)
    table.add_column("contender", no_wrap=True)
    for heading in ("speed", "90%", "accepted", "90%"):
        table.add_column(heading, justify="right")
    for name, against in setting["against"].items():
        if name != over:
            ratios = against[over]
            cells = (*_with_interval(ratios["speed"]), *_with_interval(ratios["accepted_tokens"]))
            table.add_row(name, *cells)
    return table


def _category_tables(setting: dict[str, Any]) -> list[Table]:
    """Return speed-up and accepted tokens, a row for each contender, a column for each category."""
    tables = []
    for figure, title in (("speedup", "speed-up"), ("accepted_tokens", "accepted tokens")):
        table = Table(title=f"{title}, {described(setting)}", box=SIMPLE_HEAD)
        table.add_column("contender", no_wrap=True)
        parts = {**setting["categories"], "overall": setting["overall"]}
        for name in parts:
            table.add_column(name, justify="right")
        for contender in setting["overall"]["contenders"]:
            cells = [each["contenders"][contender][figure] for each in parts.values()]
            table.add_row(
                contender, *(f"{v:.2f} [{low:.2f}, {high:.2f}]" for v, low, high in cells)
            )
        tables.append(table)
    return tables


def _with_interval(figure: Sequence[float]) -> tuple[str, str]:
    value, low, high = figure
    return f"{value:.2f}", f"{low:.2f}-{high:.2f}"


def _standings_notes(report: dict[str, Any]) -> list[str]:
    reference = report["settings"][0]["reference"]
    notes = [
        f"speed-up: in tokens per second over {reference}; nodes: of a draft; drafting: its share",
        "accepted: tokens of a pass after the prompt's, the model's own token included",
        "90%: intervals by bootstrap over prompts, which are resampled alike for all contenders",
        f"equal: answers that are those of {reference}",
    ]
    if any(each["temperature"] for each in report["settings"]):
        notes.append(
            "sampled: ours draw with the numbers of a prompt's positions, so each writes what "
            "undrafted writes; transformers' own draw with others"
        )
    return notes


MARKS: Final = ("o", "s", "^", "D", "v", "P")
COLOURS: Final = ("#0072b2", "#e69f00", "#009e73", "#cc79a7", "#d55e00", "#56b4e9")
"""Told apart by readers who see few colours (Okabe and Ito, 2008)."""


def draw_standings(report: dict[str, Any], path: Path) -> None:
    """Write a plot: speed-up and accepted tokens of each contender, with their intervals.

    Raises:
        PlotError: the file cannot be written, or matplotlib is missing.
    """
    settings = report["settings"]
    names = list(settings[0]["overall"]["contenders"])
    size = (9.6, 1.6 + 0.24 * len(names) * max(len(settings), 2))
    figure = figure_class()(figsize=size, layout="constrained")
    axes = figure.subplots(1, 2, sharey=True)
    speedup = f"tokens per second over {settings[0]['reference']}"
    parts = (("speedup", speedup), ("accepted_tokens", "accepted tokens of a pass"))
    for each, (key, label) in zip(axes, parts, strict=True):
        _draw_figure(each, settings, names, key)
        each.set_xlabel(label)
        each.axvline(1, color="0.6", linewidth=1)
        each.grid(axis="x", alpha=0.3)
    axes[0].set_yticks(range(len(names)), names)
    axes[0].invert_yaxis()
    if len(settings) > 1:
        lines, labels = axes[0].get_legend_handles_labels()
        figure.legend(lines, labels, loc="outside lower center", ncols=min(len(settings), 4))
    title = f"{title_of(report)}; 90% intervals over prompts"
    if report["interrupted"]:
        title += "; interrupted"
    figure.suptitle(title, fontsize="medium", wrap=True)
    save(figure, path)


def _draw_figure(axes: Any, settings: Sequence[dict[str, Any]], names: list[str], key: str) -> None:
    """Draw a dot with its interval for each contender, a little lower for each further setting."""
    for number, setting in enumerate(settings):
        offset = 0.6 * (number - (len(settings) - 1) / 2) / len(settings)
        figures = [setting["overall"]["contenders"][name][key] for name in names]
        axes.errorbar(
            [value for value, _, _ in figures],
            [place + offset for place in range(len(names))],
            xerr=[
                [max(value - low, 0.0) for value, low, _ in figures],
                [max(high - value, 0.0) for value, _, high in figures],
            ],
            fmt=MARKS[number % len(MARKS)],
            color=COLOURS[number % len(COLOURS)],
            markersize=5,
            capsize=2,
            label=described(setting),
        )
