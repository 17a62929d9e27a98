"""Reports of a benchmark: where our contenders lose, tables, notes and plots."""

from collections.abc import Iterator, Sequence
from itertools import zip_longest
from operator import truediv
from pathlib import Path
from statistics import median
from typing import Any, Final

from rich.box import SIMPLE_HEAD
from rich.table import Table

from decoder.commands.plots import figure_class, save
from decoder.observation import Statistics, counted
from decoder.plugins.contenders.contender import (
    FOREDRAFT,
    PLAIN,
    PROMPT_LOOKUP,
    UNDRAFTED,
    total_of,
)
from decoder.plugins.contenders.standings import Comparison, in_brackets

_KEYS: Final = {PROMPT_LOOKUP: "prompt_lookup"}
"""Names of contenders in keys of the default report, if they differ."""

_OTHERS: Final = (PLAIN, _KEYS[PROMPT_LOOKUP], UNDRAFTED)
"""Keys of the contenders that the default report compares our own decoder with."""


def summarize(comparisons: Sequence[Comparison]) -> dict[str, Any]:
    """Return our own decoder's figures relative to the other default contenders.

    `overall` has the figures of all prompts, and `categories` has those of each category.
    """
    categories: dict[str, list[Comparison]] = {}
    for comparison in comparisons:
        categories.setdefault(comparison.category, []).append(comparison)
    return {
        "overall": _figures(comparisons),
        "categories": {name: _figures(members) for name, members in categories.items()},
    }


def time_per_step(drafted: Statistics, undrafted: Statistics) -> dict[str, Any]:
    """Return the parts of a step's time, without the prompt's pass.

    Args:
        drafted: statistics of decoding with drafts.
        undrafted: statistics of the same loop without drafts; shares are relative to its step.

    Returns:
        Milliseconds per step in target, draft and host, each also as a share of a plain step; empty
        if there was only the prompt's pass.
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
    """Return one category's figures; each ratio compares sums of tokens over sums of seconds."""
    runs = {
        _KEYS.get(name, name): [comparison.runs[name] for comparison in comparisons]
        for name in comparisons[0].runs
    }
    num_tokens = {key: sum(len(run.token_ids) for run in each) for key, each in runs.items()}
    num_passes = {key: sum(run.num_passes for run in each) for key, each in runs.items()}
    pace = {key: num_tokens[key] / sum(run.seconds for run in each) for key, each in runs.items()}
    paces = {key: [len(run.token_ids) / run.seconds for run in each] for key, each in runs.items()}
    identical = {
        key: sum(
            run.token_ids == plain.token_ids for run, plain in zip(each, runs[PLAIN], strict=True)
        )
        for key, each in runs.items()
    }
    lookup = _KEYS[PROMPT_LOOKUP]
    drafted, undrafted = total_of(runs[FOREDRAFT]), total_of(runs[UNDRAFTED])
    return {
        "num_prompts": len(comparisons),
        **{f"speedup_over_{key}": pace[FOREDRAFT] / pace[key] for key in _OTHERS},
        **{
            f"median_speedup_over_{key}": median(map(truediv, paces[FOREDRAFT], paces[key]))
            for key in _OTHERS
        },
        "prompt_lookup_speedup_over_plain": pace[lookup] / pace[PLAIN],
        "tokens_per_step": num_tokens[FOREDRAFT] / num_passes[FOREDRAFT],
        "prompt_lookup_tokens_per_step": num_tokens[lookup] / num_passes[lookup],
        "identical": identical[FOREDRAFT],
        "undrafted_identical": identical[UNDRAFTED],
        "prompt_lookup_identical": identical[lookup],
        "tokens_per_second": pace,
        "num_tokens": num_tokens,
        "num_passes": num_passes,
        "time_per_step": time_per_step(drafted, undrafted),
        "foredraft": drafted.report(),
    }


PARTS: Final = {"target": "model", "draft": "drafter", "host": "loop"}
"""Parts of a step's time, in words."""

_BASES: Final = {PLAIN: "plain batches", UNDRAFTED: "undrafted"}


def conclusions_of(report: dict[str, Any]) -> list[str]:
    """Return the conclusions: where our contenders are or may be slower, or write other outputs."""
    ratios = list(_ratios(report["settings"]))
    lines = [f"slower: {words}" for words, figure in ratios if figure[0] < 1]
    if ratios and not lines:
        lines = ["slower nowhere: none of our ratios is below 1 at any width"]
    lines += [
        f"uncertain: {words}"
        for words, (ratio, low, _) in ratios
        if ratio >= 1 and (low is None or low < 1)
    ]
    return [*lines, *_exactness(report["exactness"])]


def _ratios(settings: Sequence[dict[str, Any]]) -> Iterator[tuple[str, Sequence[Any]]]:
    """Yield each ratio of our contenders, in words and as `[value, low, high]`."""
    for setting in settings:
        place = f", {described(setting)}" if len(settings) > 1 else ""
        for width in setting["widths"]:
            ours = {name: each for name, each in width["contenders"].items() if name != PLAIN}
            for name, figures in ours.items():
                whose = f"{name}, {width['parallel']} in parallel{place}"
                for base, figure in figures["over"].items():
                    yield (
                        f"{whose}: {in_brackets(figure)} times {_BASES[base]}{_doubt(figure)}",
                        figure,
                    )


def _doubt(figure: Sequence[Any]) -> str:
    """Return in words why a ratio may really be 1; empty if it is clearly not."""
    _, low, high = figure
    if low is None:
        return ", only one group"
    return ", the interval includes 1" if low < 1 <= high else ""


def _exactness(found: dict[str, Any] | None) -> Iterator[str]:
    """Yield lines about outputs that should be equal."""
    if found is None:
        return
    different = found["different"]
    num_ties = sum(each["is_tie"] for each in different)
    prompts = counted(found["num_prompts"], "prompt")
    compared = f"outputs of {prompts}, compared with {found['compared_with']}"
    if not different:
        yield f"{compared}: all are the same"
        return
    yield f"{compared}: {len(different)} differ, {num_ties} of them where two logits tie"
    for each in different:
        if not each["is_tie"]:
            yield (
                f"DIFFERENT: {each['contender']}, {each['parallel']} in parallel, prompt "
                f"{each['prompt']}, token {each['position']}: {each['drafted']}, not "
                f"{each['plain']}; the two best logits are {each['gap']:.2g} apart"
            )


def rows_of(setting: dict[str, Any]) -> tuple[list[str], list[list[str]]]:
    """Return the headings and rows of a table, with one row for each width and contender."""
    widths = setting["widths"]
    found = [figures for width in widths for figures in width["contenders"].values()]
    bases = [base for base in _BASES if any(base in figures["over"] for figures in found)]
    headings = ["parallel", "contender", "tokens/s", *(f"x {base}" for base in bases)]
    headings += ["accepted", "nodes", "drafting", *(f"{part}, ms" for part in PARTS.values())]
    rows = [
        [str(width["parallel"]), name, *_cells_of(figures, bases, width["num_answers"])]
        for width in widths
        for name, figures in width["contenders"].items()
    ]
    return [*headings, "equal"], rows


def _cells_of(figures: dict[str, Any], bases: Sequence[str], num_answers: int) -> list[str]:
    over, steps, identical = figures["over"], figures["step_ms"], figures["identical"]
    return [
        f"{figures['tokens_per_second']:.1f}",
        *(in_brackets(over[base]) if base in over else "" for base in bases),
        in_brackets(figures["accepted_tokens"]),
        f"{figures['nodes_per_step']:.1f}" if steps else "",
        f"{figures['draft_share']:.0%}" if steps else "",
        *(f"{steps[part]:.2f}" if steps else "" for part in PARTS),
        "" if identical is None else f"{identical}/{num_answers}",
    ]


def tables_of(report: dict[str, Any], over: str | None = None) -> list[Table]:
    """Return the tables of all contenders by width; without --parallel also by category.

    Args:
        report: report of a `Benchmark`, with the key `drafter`.
        over: contender that a separate table compares the others with.
    """
    tables = []
    for setting in report["settings"]:
        prompts = counted(max(width["num_prompts"] for width in setting["widths"]), "prompt")
        title = f"{title_of(report)}\n{described(setting)}; {prompts}"
        tables.append(_table(title, *rows_of(setting)))
        if over is not None:
            tables.append(_over(setting, over))
        if is_one_by_one(report):
            tables += _by_category(setting)
    return tables


def is_one_by_one(report: dict[str, Any]) -> bool:
    """Return whether prompts were never decoded in parallel."""
    widths = [width for setting in report["settings"] for width in setting["widths"]]
    return all(width["parallel"] == 1 for width in widths)


def _table(title: str, headings: Sequence[str], rows: Sequence[Sequence[str]]) -> Table:
    """Return a table; if its first column has widths, each width is a section."""
    table = Table(title=title, box=SIMPLE_HEAD)
    for heading in headings:
        is_name = heading == "contender"
        table.add_column(heading, justify="left" if is_name else "right", no_wrap=is_name)
    for row, following in zip_longest(rows, rows[1:], fillvalue=("",)):
        is_last = headings[0] == "parallel" and row[0] != following[0]
        table.add_row(*row, end_section=is_last)
    return table


def _over(setting: dict[str, Any], over: str) -> Table:
    """Return a table of the others' speed and accepted tokens relative to one contender."""
    rows = [
        [str(width["parallel"]), name, *map(in_brackets, against[over].values())]
        for width in setting["widths"]
        for name, against in width["against"].items()
        if name != over
    ]
    headings = ["parallel", "contender", "speed", "accepted"]
    return _table(f"over {over}, {described(setting)}", headings, rows)


def _by_category(setting: dict[str, Any]) -> Iterator[Table]:
    """Yield tables of speed-up and accepted tokens, rows by contender, columns by category."""
    (width,) = setting["widths"]
    parts = {**width["categories"], "overall": width}
    speedup = f"speed-up over {setting['reference']}"
    for figure, title in (("speedup", speedup), ("accepted_tokens", "accepted tokens")):
        rows = [
            [name, *(in_brackets(each["contenders"][name][figure]) for each in parts.values())]
            for name in width["contenders"]
        ]
        yield _table(f"{title}, {described(setting)}", ["contender", *parts], rows)


def notes_of(report: dict[str, Any]) -> list[str]:
    """Return the notes below the tables of contenders."""
    settings = report["settings"]
    widths = [width for setting in settings for width in setting["widths"]]
    groups = ", ".join(
        f"{width['parallel']}: {counted(width['num_prompts'], 'prompt')} in "
        f"{counted(width['num_groups'], 'group')}"
        for width in widths
    )
    resampled = "prompts" if is_one_by_one(report) else f"groups of prompts; {groups}"
    notes = [
        "x: ratio of tokens per second, prompts included; undrafted: our own loop without drafts",
        "plain: model.generate, several prompts in left-padded batches",
        f"[]: 90% bootstrap intervals, with equal samples for all contenders, over {resampled}",
        "accepted: tokens per pass and sequence after the prompt's pass, including the model's own",
        "nodes: per pass, summed over sequences; drafting: its share of the time",
        "ms: medians of passes, without the prompts' passes",
    ]
    compared = sorted({width["compared_with"] or "" for width in widths} - {""})
    if compared:
        notes.append(f"equal: outputs identical to those of {' or '.join(compared)}")
    if any(each["temperature"] for each in settings):
        notes.append(
            "sampled: our contenders use random numbers that depend on prompt and position, so "
            "each writes the same as undrafted; transformers uses different ones"
        )
    if report["left_out"]:
        shown = ", ".join(map(str, report["left_out"]))
        notes.append(f"left out because too few prompts fit the model: {shown} in parallel")
    return [*notes, *_common_notes(report)]


def title_of(report: dict[str, Any]) -> str:
    """Return the title of a report: model, dtype, device and the sources of drafts."""
    return f"{report['model']}, {report['dtype']} on {report['device']}; {report['drafter']}"


def table_of(report: dict[str, Any]) -> Table:
    """Return a table of our own decoder, with one row for each category and one for all."""
    title = title_of(report)
    table = Table(title=title, caption="\n".join(_notes(report)), box=SIMPLE_HEAD)
    table.add_column("category", no_wrap=True)
    headings = ("prompts", "tokens/s", "x plain", "x lookup", "x undrafted", "tokens", "lookup")
    for heading in (*headings, "equal"):
        table.add_column(heading, justify="right")
    for name, figures in [*report["categories"].items(), ("overall", report["overall"])]:
        table.add_row(
            name,
            str(figures["num_prompts"]),
            f"{figures['tokens_per_second']['foredraft']:.1f}",
            *(f"{figures[f'speedup_over_{key}']:.2f}" for key in _OTHERS),
            f"{figures['tokens_per_step']:.2f}",
            f"{figures['prompt_lookup_tokens_per_step']:.2f}",
            f"{figures['identical']}/{figures['num_prompts']}",
        )
    return table


def _notes(report: dict[str, Any]) -> list[str]:
    notes = [
        "x: speed-up in time per token; tokens: per pass of the model; lookup: prompt lookup",
        "undrafted: our own loop without drafts; equal: prompts with the output of plain generate",
    ]
    times = report["overall"]["time_per_step"]
    if times:
        parts = ", ".join(f"{name} {ms:.2f} ms" for name, ms in times["ms"].items())
        in_all = sum(times["ms"].values())
        notes.append(
            f"a step: {parts}, {in_all:.2f} ms in all; plain step: {times['plain_step_ms']:.2f} ms"
        )
    return [*notes, *_common_notes(report)]


def _common_notes(report: dict[str, Any]) -> list[str]:
    """Return the notes below every table: interruption, warm-up and skipped prompts."""
    notes = [_interruption(report["interrupted_at"])] if report["interrupted"] else []
    if report["warm"]["num_prompts"]:
        warm = report["warm"]
        notes.append(
            f"warm-up: {counted(warm['num_prompts'], 'prompt')}, "
            f"{counted(warm['num_tokens'], 'token')}"
        )
    if report["skipped"]:
        notes.append(f"prompts skipped because they do not fit the model: {report['skipped']}")
    return notes


def _interruption(at: dict[str, Any]) -> str:
    """Return the note about an interruption; see `Benchmark.report`."""
    num_done = at["done"]
    place = f"interrupted: {at['where']}, {num_done} of {counted(at['of'], at['unit'])}"
    uncounted = "" if at["counted"] or not num_done else ", which are left out"
    return f"{place}{uncounted}; nothing was measured after that"


def described(setting: dict[str, Any]) -> str:
    """Return a setting of a report in words."""
    words = in_words(setting["nodes"], setting["temperature"])
    if setting["num_seeds"] > 1:
        words.append(counted(setting["num_seeds"], "seed"))
    return ", ".join(words)


def in_words(nodes: int | None, temperature: float) -> list[str]:
    """Return the settings of contenders, in words."""
    words = ["as many nodes as pay off" if nodes is None else counted(nodes, "node")]
    if temperature:
        words.append(f"temperature {temperature:g}")
    return words


_PART_COLOURS: Final = ("#56b4e9", "#e69f00", "0.6")

MARKS: Final = ("o", "s", "^", "D", "v", "P")
COLOURS: Final = ("#0072b2", "#e69f00", "#009e73", "#cc79a7", "#d55e00", "#56b4e9")
"""Colours that colour-blind readers can tell apart (Okabe and Ito, 2008)."""


def draw(report: dict[str, Any], path: Path) -> None:
    """Write a plot of all contenders.

    Without --parallel, it shows speed-up and accepted tokens, with intervals. With --parallel, it
    shows tokens per second over the number of prompts that share passes, and the parts of a step's
    time.

    Raises:
        PlotError: the file cannot be written, or matplotlib is missing.
    """
    settings = report["settings"]
    if is_one_by_one(report):
        figure, title = _draw_standings(settings), "; 90% intervals over prompts"
    else:
        figure, title = _draw_widths(settings), ""
    title = f"{title_of(report)}{title}"
    if report["interrupted"]:
        title += "; interrupted"
    figure.suptitle(title, fontsize="medium", wrap=True)
    save(figure, path)


def _draw_standings(settings: Sequence[dict[str, Any]]) -> Any:
    """Return a plot of speed-up and accepted tokens of each contender, with intervals."""
    names = list(settings[0]["widths"][0]["contenders"])
    size = (9.6, 1.6 + 0.24 * len(names) * max(len(settings), 2))
    figure = figure_class()(figsize=size, layout="constrained")
    axes = figure.subplots(1, 2, sharey=True)
    speedup = f"tokens per second over {settings[0]['reference']}"
    parts = (("speedup", speedup), ("accepted_tokens", "accepted tokens per pass"))
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
    return figure


def _draw_figure(axes: Any, settings: Sequence[dict[str, Any]], names: list[str], key: str) -> None:
    """Draw a dot with an interval for each contender, slightly lower for each further setting."""
    for number, setting in enumerate(settings):
        offset = 0.6 * (number - (len(settings) - 1) / 2) / len(settings)
        found = [setting["widths"][0]["contenders"][name][key] for name in names]
        # With one prompt there is no interval.
        figures = [
            (v, v if low is None else low, v if low is None else high) for v, low, high in found
        ]
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


def _draw_widths(settings: Sequence[dict[str, Any]]) -> Any:
    """Return a plot of tokens per second over width, and of the parts of a step's time."""
    num_bars = max(len(list(_bars(setting))) for setting in settings)
    size = (max(5.2 * len(settings), 7.2), 4.4 + 0.22 * num_bars)
    figure = figure_class()(figsize=size, layout="constrained")
    ratios = {"height_ratios": [3.2, max(0.22 * num_bars, 0.8)]}
    axes = figure.subplots(2, len(settings), squeeze=False, gridspec_kw=ratios)
    for column, setting in enumerate(settings):
        _draw_speed(axes[0, column], setting)
        _draw_parts(axes[1, column], setting)
        axes[0, column].set_title(described(setting), fontsize="medium")
    axes[0, 0].set_ylabel("tokens per second")
    return figure


def _draw_speed(axes: Any, setting: dict[str, Any]) -> None:
    """Draw a line for each contender, sorted by width."""
    widths = sorted(setting["widths"], key=lambda width: int(width["parallel"]))
    shown = [width["parallel"] for width in widths]
    for number, name in enumerate(widths[0]["contenders"]):
        axes.plot(
            shown,
            [width["contenders"][name]["tokens_per_second"] for width in widths],
            label="plain batches" if name == PLAIN else name,
            color=COLOURS[number % len(COLOURS)],
            marker=MARKS[number % len(MARKS)],
            markersize=5,
        )
    axes.set_xscale("log", base=2)
    axes.set_xticks(shown, [str(width) for width in shown])
    axes.minorticks_off()
    axes.set_ylim(bottom=0)
    axes.set_xlabel("sequences in parallel")
    axes.grid(alpha=0.3)
    axes.legend()


def _bars(setting: dict[str, Any]) -> Iterator[tuple[str, dict[str, float]]]:
    """Yield the name and the parts of each bar: a step of a contender at a width."""
    for width in setting["widths"]:
        for name, figures in width["contenders"].items():
            if figures["step_ms"]:
                yield f"{width['parallel']}, {name}", figures["step_ms"]


def _draw_parts(axes: Any, setting: dict[str, Any]) -> None:
    """Draw a bar for each width and each of our contenders, divided into the parts of the time."""
    bars = list(_bars(setting))
    left = [0.0] * len(bars)
    for (part, words), colour in zip(PARTS.items(), _PART_COLOURS, strict=True):
        lengths = [parts[part] for _, parts in bars]
        axes.barh(range(len(bars)), lengths, left=left, color=colour, label=words)
        left = [start + length for start, length in zip(left, lengths, strict=True)]
    axes.set_yticks(range(len(bars)), [name for name, _ in bars])
    axes.invert_yaxis()
    axes.set_xlabel("median time of a pass by part, ms")
    axes.grid(axis="x", alpha=0.3)
    if bars:
        axes.legend(loc="lower center", bbox_to_anchor=(0.5, 1), ncols=len(PARTS), frameon=False)
