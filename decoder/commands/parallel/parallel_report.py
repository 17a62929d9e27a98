"""Reports of prompts in parallel: where ours lose, tables, and a plot."""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Final

from rich.box import SIMPLE_HEAD
from rich.table import Table

from decoder.commands.bench_report import COLOURS, MARKS, common_notes, described, title_of
from decoder.contenders.contender import PLAIN, UNDRAFTED
from decoder.estimate.estimate_plot import figure_class, save
from decoder.observation import counted

PARTS: Final = {"target": "model", "draft": "drafter", "host": "loop"}
"""Of a step's time, in words."""

_BASES: Final = {PLAIN: "plain batches", UNDRAFTED: "undrafted"}

_HEADINGS: Final = (
    "tokens/s",
    "x plain batches",
    "x undrafted",
    "accepted",
    "nodes",
    *(f"{part}, ms" for part in PARTS.values()),
    "equal",
)

_PART_COLOURS: Final = ("#56b4e9", "#e69f00", "0.6")


def conclusions_of(report: dict[str, Any]) -> list[str]:
    """Return what is to be read first: where ours are slower, or may be, and wrong outputs."""
    ratios = list(_ratios(report["settings"]))
    lines = [f"slower: {words}" for words, figure in ratios if figure[0] < 1]
    if ratios and not lines:
        lines = ["slower nowhere: at no width is a ratio of ours below 1"]
    lines += [
        f"uncertain: {words}"
        for words, (ratio, low, _) in ratios
        if ratio >= 1 and (low is None or low < 1)
    ]
    return [*lines, *_exactness(report["exactness"])]


def _ratios(settings: Sequence[dict[str, Any]]) -> Iterator[tuple[str, Sequence[Any]]]:
    """Yield each ratio of ours, in words and as `[value, low, high]`."""
    for setting in settings:
        place = f", {described(setting)}" if len(settings) > 1 else ""
        for width in setting["widths"]:
            ours = {name: each for name, each in width["contenders"].items() if name != PLAIN}
            for name, figures in ours.items():
                whose = f"{name}, {width['parallel']} in parallel{place}"
                for base, figure in figures["over"].items():
                    yield (
                        f"{whose}: {_interval(figure)} times {_BASES[base]}{_doubt(figure)}",
                        figure,
                    )


def _doubt(figure: Sequence[Any]) -> str:
    """Return why a ratio may as well be 1, in words; nothing where it may not."""
    _, low, high = figure
    if low is None:
        return ", one group alone"
    return ", the interval has 1 in it" if low < 1 <= high else ""


def _exactness(found: dict[str, Any] | None) -> Iterator[str]:
    """Yield lines about outputs that were to be the same."""
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
    """Return the headings and the rows of a table, a row for each width and contender."""
    rows = [
        [str(width["parallel"]), name, *_cells(width, figures)]
        for width in setting["widths"]
        for name, figures in width["contenders"].items()
    ]
    return ["parallel", "contender", *_HEADINGS], rows


def _cells(width: dict[str, Any], figures: dict[str, Any]) -> list[str]:
    over, steps, identical = figures["over"], figures["step_ms"], figures["identical"]
    return [
        f"{figures['tokens_per_second']:.1f}",
        *(_interval(over[base]) if base in over else "" for base in _BASES),
        _interval(figures["accepted_tokens"]),
        f"{figures['nodes_per_step']:.1f}" if steps else "",
        *(f"{steps[part]:.2f}" if steps else "" for part in PARTS),
        "" if identical is None else f"{identical}/{width['num_answers']}",
    ]


def _interval(figure: Sequence[float | None]) -> str:
    value, low, high = figure
    if low is None or high is None:
        return f"{value:.2f}"
    return f"{value:.2f} [{low:.2f}, {high:.2f}]"


def tables_of_widths(report: dict[str, Any], over: str | None = None) -> list[Table]:
    """Return the tables of all settings.

    Args:
        report: of `ParallelBenchmark`, with `drafter`.
        over: a contender that the others are set against in a table of their own.
    """
    tables = []
    for setting in report["settings"]:
        tables.append(_table(report, setting))
        if over is not None:
            tables.append(_ratio_table(setting, over))
    return tables


def _table(report: dict[str, Any], setting: dict[str, Any]) -> Table:
    title = f"{title_of(report)}\n{described(setting)}"
    headings, rows = rows_of(setting)
    table = Table(title=title, box=SIMPLE_HEAD)
    for heading in headings:
        table.add_column(heading, justify="left" if heading == "contender" else "right")
    for before, row in zip([[""], *rows], rows, strict=False):
        if before[0] not in {"", row[0]}:
            table.add_section()
        table.add_row(*row)
    return table


def _ratio_table(setting: dict[str, Any], over: str) -> Table:
    """Return how many times one contender's speed and accepted tokens the others have."""
    table = Table(title=f"over {over}, {described(setting)}", box=SIMPLE_HEAD)
    for heading in ("parallel", "contender", "speed", "accepted"):
        table.add_column(heading, justify="left" if heading == "contender" else "right")
    for width in setting["widths"]:
        for name, against in width["against"].items():
            if name != over:
                ratios = against[over]
                cells = (_interval(ratios["speed"]), _interval(ratios["accepted_tokens"]))
                table.add_row(str(width["parallel"]), name, *cells)
    return table


def notes_of_widths(report: dict[str, Any]) -> list[str]:
    """Return the lines below the tables."""
    widths = [width for setting in report["settings"] for width in setting["widths"]]
    groups = ", ".join(
        f"{width['parallel']}: {counted(width['num_prompts'], 'prompt')} in "
        f"{counted(width['num_groups'], 'group')}"
        for width in widths
    )
    compared = sorted({width["compared_with"] or "" for width in widths} - {""})
    ratios = (
        "x: in tokens per second, prompts included; plain batches: model.generate, padded on the "
        "left; undrafted: our own loop without drafts"
    )
    intervals = (
        "[]: 90% intervals by bootstrap over groups of prompts, which all contenders decode in "
        f"turn; {groups}"
    )
    notes = [
        ratios,
        intervals,
        "accepted: tokens of a pass and sequence after the prompt's pass, the model's own included",
        "nodes: of a pass, all sequences together; ms: medians of passes, without the prompts",
    ]
    if compared:
        notes.append(f"equal: outputs that are those of {' or '.join(compared)}")
    if report["left_out"]:
        shown = ", ".join(map(str, report["left_out"]))
        notes.append(f"left out for want of prompts that the model takes: {shown} in parallel")
    return [*notes, *common_notes(report)]


def draw_widths(report: dict[str, Any], path: Path) -> None:
    """Write a plot: tokens per second over the width for each contender, and a step's time by part.

    Raises:
        PlotError: the file cannot be written, or matplotlib is missing.
    """
    settings = report["settings"]
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
    title = title_of(report)
    if report["interrupted"]:
        title += "; interrupted"
    figure.suptitle(title, fontsize="medium", wrap=True)
    save(figure, path)


def _draw_speed(axes: Any, setting: dict[str, Any]) -> None:
    """Draw a line for each contender, whatever order the widths were measured in."""
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
    """Draw a bar for each width and contender of ours, divided by where the time goes."""
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
