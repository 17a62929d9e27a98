"""The report of a measurement on a device: Markdown that says where drafts lose, with plots."""

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Final

from decoder.commands.plots import figure_class, save
from decoder.errors import PlotError
from decoder.plugins.bench.bench_report import (
    COLOURS,
    MARKS,
    conclusions_of,
    draw,
    notes_of,
    rows_of,
)

Draw = Callable[[dict[str, Any], Path], None]


def write_report(result: dict[str, Any], output: Path) -> None:
    """Write the report of what was measured until now, and its plots, beside the JSON.

    Args:
        result: what the JSON holds.
        output: the JSON; the report has its name with `.md`, plots with `-PART.svg`.
    """
    sections = [_head(result), *(section(result, output) for section in _SECTIONS)]
    output.with_suffix(".md").write_text("\n\n".join(filter(None, sections)) + "\n")


def _head(result: dict[str, Any]) -> str:
    versions = ", ".join(f"{name} {version}" for name, version in result["versions"].items())
    lines = [f"# {result['model']} on {result['device']['name']}, {result['date']}"]
    about = f"{result['num_prompts']} prompts, at most {result['max_new_tokens']} tokens each"
    lines.append(f"Drafts from {result['drafter']}; {about}; {versions}.")
    return "\n\n".join(lines)


def _exactness(result: dict[str, Any], _: Path) -> str:
    """Return what the outputs in float32 are, alone and in parallel."""
    found = result.get("exactness")
    if found is None:
        return ""
    num_ties = sum(each["is_tie"] for each in found["different"])
    alone = (
        f"Alone: {found['identical']} of {found['prompts']} outputs are those of model.generate, "
        f"{num_ties} of the others part at a tie."
    )
    together = found["parallel"]
    lines = ["## Exactness, float32, greedy", alone]
    lines += conclusions_of({"settings": [], "exactness": together})
    names = list(next(iter(together["identical"].values())))
    rows = [
        [width, *(f"{counts[name]}/{together['answers'][width]}" for name in names)]
        for width, counts in together["identical"].items()
    ]
    return "\n\n".join([*lines, _table(["parallel", *names], rows)])


def _parallel(result: dict[str, Any], output: Path) -> str:
    """Return tokens per second by width."""
    report = result.get("parallel")
    if report is None:
        return ""
    tables = [_table(*rows_of(setting)) for setting in report["settings"]]
    return "\n\n".join(
        [
            f"## In parallel, {report['dtype']}",
            "\n".join(f"- {line}" for line in conclusions_of(report)),
            _plot(draw, report, output, "parallel"),
            *tables,
            "\n".join(f"- {line}" for line in notes_of(report)),
        ]
    )


def _bench(result: dict[str, Any], output: Path) -> str:
    """Return the speed of one prompt at a time."""
    report = result.get("bench")
    if report is None:
        return ""
    (setting,) = report["settings"]
    return "\n\n".join(
        [
            f"## One prompt at a time, {report['dtype']}",
            _plot(draw, report, output, "bench"),
            _table(*rows_of(setting)),
        ]
    )


def _cost_curve(result: dict[str, Any], output: Path) -> str:
    """Return what passes cost by width and context."""
    found = result.get("cost-curve")
    if found is None:
        return ""
    rows = [
        [str(context), *(f"{ms:.2f}" for ms in row)]
        for context, row in zip(found["contexts"], found["milliseconds"], strict=True)
    ]
    return "\n\n".join(
        [
            "## Passes, bfloat16: milliseconds by context and width",
            _plot(_draw_costs, found, output, "cost-curve"),
            _table(["context", *map(str, found["widths"])], rows),
        ]
    )


def _commit_cost(result: dict[str, Any], _: Path) -> str:
    """Return what verifying and committing costs beside a stock cache."""
    found = result.get("commit-cost")
    if found is None:
        return ""
    headings = list(found["rows"][0])
    rows = [[f"{row[name]:.6g}" for name in headings] for row in found["rows"]]
    words = [name.replace("_ms", ", ms").replace("_", " ") for name in headings]
    return "\n\n".join(["## Verifying and committing", _table(words, rows)])


_SECTIONS: Final = (_exactness, _parallel, _bench, _cost_curve, _commit_cost)


def _table(headings: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [headings, ["---"] * len(headings), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _plot(drawing: Draw, report: dict[str, Any], output: Path, name: str) -> str:
    """Draw a plot; return the line that shows it, or says why there is none."""
    path = output.with_name(f"{output.stem}-{name}.svg")
    try:
        drawing(report, path)
    except PlotError as error:
        return f"No plot: {str(error).removeprefix('--plot: ')}"
    return f"![{name}]({path.name})"


def _draw_costs(found: dict[str, Any], path: Path) -> None:
    """Write a plot: milliseconds of a pass over its width, a line for each context."""
    figure = figure_class()(figsize=(7.2, 4.4), layout="constrained")
    axes = figure.subplots()
    for number, (context, row) in enumerate(_by_context(found)):
        axes.plot(
            found["widths"],
            row,
            label=f"{context} tokens of context",
            color=COLOURS[number % len(COLOURS)],
            marker=MARKS[number % len(MARKS)],
        )
    axes.set_xscale("log", base=2)
    axes.set_xticks(found["widths"], [str(width) for width in found["widths"]])
    axes.minorticks_off()
    axes.set(xlabel="tokens of a pass", ylabel="milliseconds", ylim=(0, None))
    axes.grid(alpha=0.3)
    axes.legend()
    save(figure, path)


def _by_context(found: dict[str, Any]) -> Iterator[tuple[int, list[float]]]:
    yield from zip(found["contexts"], found["milliseconds"], strict=True)
