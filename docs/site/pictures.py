"""Draws the README's pictures: a chart of saved results, and the demo as an animated terminal.

`python -m docs.site.pictures chart` and `terminal` read files in `benchmarks/results/` and write
pictures to `docs/pictures/`. `record` runs the demo and saves its output with times, for
`terminal`.
"""

import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Final
from xml.sax.saxutils import escape

import typer

ROOT: Final = Path(__file__).parents[2]
PICTURES: Final = ROOT / "docs" / "pictures"
RESULT: Final = ROOT / "benchmarks" / "results" / "decoding" / "2026-11-22-spec-bench-bfloat16.json"
RECORDING: Final = ROOT / "benchmarks" / "results" / "decoding" / "2026-11-22-demo.jsonl"

# Readable names of Spec-Bench categories; all other names are readable already.
WORDS: Final = {
    "math": "mathematics",
    "math_reasoning": "word problems",
    "qa": "questions",
    "rag": "from sources",
    "stem": "sciences",
    "roleplay": "role play",
    "summarization": "summaries",
}

# One card, light or dark as the reader's system is set.
CHART_STYLE: Final = """
text { font: 15px system-ui, "Segoe UI", "Liberation Sans", Helvetica, Arial, sans-serif;
  fill: #1f2328 }
.title { font-weight: 600; font-size: 19px }
.note { font-size: 13px; fill: #59636e }
.card { fill: #ffffff; stroke: #d1d9e0 }
.plain { fill: #9aa4af } .passes { fill: #7fb2ee } .drafts { fill: #0b62d0 }
@media (prefers-color-scheme: dark) {
  text { fill: #e6edf3 } .note { fill: #a5b0bb }
  .card { fill: #0d1117; stroke: #3d444d }
  .plain { fill: #78838f } .passes { fill: #2f5f9e } .drafts { fill: #5aa7ff }
}"""

WIDTH: Final = 480  # narrow, so that text stays legible on a narrow page
LABEL_END: Final = 126
BARS_FROM: Final = 134
BARS_WIDTH: Final = 250  # width of the longest bar; its figures are to the right
ROW: Final = 32
FIRST_ROW: Final = 116


@dataclass(frozen=True, slots=True)
class Pace:
    """Tokens per second on one workload.

    Attributes:
        workload: name of the workload, in words.
        plain: tokens per second of `model.generate`.
        undrafted: tokens per second of foredraft's loop without drafts, whose passes are faster.
        drafted: tokens per second of foredraft's loop with drafts.
    """

    workload: str
    plain: float
    undrafted: float
    drafted: float


def paces(result: Mapping[str, Any]) -> list[Pace]:
    """Return the pace of each category in a report of `foredraft bench --json`, fastest first."""
    found = [
        Pace(
            WORDS.get(name, name),
            figures["tokens_per_second"]["plain"],
            figures["tokens_per_second"]["undrafted"],
            figures["tokens_per_second"]["foredraft"],
        )
        for name, figures in result["categories"].items()
    ]
    return sorted(found, key=lambda pace: -pace.drafted / pace.plain)


def chart(result: Mapping[str, Any]) -> str:
    """Return an SVG chart of tokens per second by workload, plain and with drafts."""
    rows = paces(result)
    scale = BARS_WIDTH / max(pace.drafted for pace in rows)
    notes = (
        f"{result['overall']['num_prompts']} prompts of Spec-Bench, greedy, one at a time,",
        f"after {result['warm']['num_prompts']} other answers. In bfloat16 rounding can change",
        "a choice; in float32 the output is identical.",
    )
    foot = FIRST_ROW + ROW * len(rows) + 28
    height = foot + 20 * len(notes) - 2
    machine = result["machine"]
    lines = [
        svg_opening(WIDTH, height, "Tokens per second, plain and with drafts, by workload"),
        f"<style>{CHART_STYLE}</style>",
        card(WIDTH, height),
        text(20, 34, "Tokens per second, plain and with drafts", "title"),
        text(
            20, 58, f"{result['model']}, {result['dtype']}, {machine['num_cpus']} CPU cores", "note"
        ),
        *legend(86),
        *(line for place, pace in enumerate(rows) for line in bars(pace, place, scale)),
        *(text(20, foot + 20 * place, note, "note") for place, note in enumerate(notes)),
        "</svg>",
    ]
    return "\n".join(lines) + "\n"


def legend(y: int) -> Iterator[str]:
    """Yield the chart's legend."""
    x = 20
    for name, words, width in (
        ("plain", "plain generate", 138),
        ("passes", "our loop, no drafts", 168),
        ("drafts", "with drafts", 140),
    ):
        yield f'<rect class="{name}" x="{x}" y="{y - 11}" width="12" height="12" rx="2"/>'
        yield text(x + 18, y, words)
        x += width


def bars(pace: Pace, place: int, scale: float) -> Iterator[str]:
    """Yield one row: its name, the plain bar, the two-part bar with drafts, and the figures."""
    y = FIRST_ROW + ROW * place
    yield text(LABEL_END, y + 17, pace.workload, anchor="end")
    yield bar("plain", BARS_FROM, y + 2, pace.plain * scale)
    yield bar("passes", BARS_FROM, y + 12, min(pace.undrafted, pace.drafted) * scale)
    gained = max(pace.drafted - pace.undrafted, 0.0)
    yield bar("drafts", BARS_FROM + (pace.drafted - gained) * scale, y + 12, gained * scale)
    figures = f"{pace.drafted:.0f}, {pace.drafted / pace.plain:.1f}\u00d7"
    yield text(round(BARS_FROM + pace.drafted * scale) + 8, y + 19, figures)


def bar(name: str, x: float, y: int, width: float) -> str:
    """Return one bar of a chart."""
    return f'<rect class="{name}" x="{x:.1f}" y="{y}" width="{width:.1f}" height="10"/>'


def text(x: int, y: int, words: str, style: str = "", anchor: str = "start") -> str:
    """Return a line of text for a picture."""
    kind = f' class="{style}"' if style else ""
    ends = f' text-anchor="{anchor}"' if anchor != "start" else ""
    return f'<text x="{x}" y="{y}"{kind}{ends}>{escape(words)}</text>'


def card(width: int, height: int) -> str:
    """Return the background of a picture of this size in pixels."""
    return f'<rect class="card" x="0.5" y="0.5" width="{width - 1}" height="{height - 1}" rx="8"/>'


def svg_opening(width: int, height: int, title: str) -> str:
    """Return the first lines of a picture of this size in pixels."""
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" '
        f'width="{width}" height="{height}" role="img">\n<title>{escape(title)}</title>'
    )


# The terminal is dark in both schemes, so its colours are the same for everybody.
TERMINAL_STYLE: Final = """
text { font: 12.6px ui-monospace, SFMono-Regular, Menlo, Consolas, "DejaVu Sans Mono", monospace;
  fill: #d6dde5; white-space: pre }
.title { fill: #a5b0bb } .typed { fill: #7ee2a0 } .win { fill: #8cc4ff }
.card { fill: #11161d; stroke: #4b5561 } .dot { fill: #4b5561 }"""

COLUMNS: Final = 80
TERMINAL_WIDTH: Final = 640
LINE: Final = 18
SCREEN_FROM: Final = 58
LONGEST_PAUSE_S: Final = 1.2  # longest pause in the picture, even if the demo paused for longer
SHORTEST_PAUSE_S: Final = 0.15
SHOWN_AT_END_S: Final = 9.0
IS_RATIO: Final = re.compile(r"\d\.\d\dx")


@dataclass(frozen=True, slots=True)
class Line:
    """A line of a program's output, and its time in seconds since the program started."""

    at_s: float
    words: str


def record(command: list[str]) -> Iterator[Line]:
    """Run a command, and yield its output lines, including errors, as they appear."""
    environment = {**os.environ, "COLUMNS": str(COLUMNS), "PYTHONUNBUFFERED": "1", "NO_COLOR": "1"}
    start = time.monotonic()
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment
    ) as process:
        for line in process.stdout or ():
            yield Line(round(time.monotonic() - start, 2), line.rstrip())
    if process.returncode:
        raise SystemExit(f"error: the demo ended with {process.returncode}: nothing is saved")


def shortened(lines: list[Line]) -> list[float]:
    """Return when each line appears in the picture, in seconds, with long pauses shortened."""
    times: list[float] = []
    now, before = 1.5, 0.0
    for line in lines:
        now += min(max(line.at_s - before, SHORTEST_PAUSE_S), LONGEST_PAUSE_S)
        before = line.at_s
        times.append(round(now, 2))
    return times


def terminal(lines: list[Line]) -> str:
    """Return an SVG of a terminal in which lines appear over time; all at once if not animated."""
    times = shortened(lines)
    end = times[-1] + SHOWN_AT_END_S
    height = SCREEN_FROM + LINE * (len(lines) + 1) + 14
    took = f"{lines[-1].at_s:.0f} s, shortened here"
    drawn = [
        svg_opening(
            TERMINAL_WIDTH, height, "make demo: the same tasks decoded plainly and with drafts"
        ),
        f"<style>{TERMINAL_STYLE}",
        *(appearance(place, at, end) for place, at in enumerate(times)),
        "@media (prefers-reduced-motion: reduce) { text { animation: none !important } }</style>",
        card(TERMINAL_WIDTH, height),
        *(f'<circle class="dot" cx="{x}" cy="20" r="5"/>' for x in (20, 38, 56)),
        text(TERMINAL_WIDTH // 2, 25, f"foredraft ({took})", "title", anchor="middle"),
        text(12, SCREEN_FROM, "$ make demo", "typed"),
    ]
    for place, line in enumerate(lines):
        kind = " win" if IS_RATIO.search(line.words) else ""
        drawn.append(text(12, SCREEN_FROM + LINE * (place + 1), line.words, f"l{place}{kind}"))
    return "\n".join([*drawn, "</svg>"]) + "\n"


def appearance(place: int, at_s: float, end_s: float) -> str:
    """Return the CSS rules that show a line from a certain time on, in every loop."""
    share = 100 * at_s / end_s
    frames = f"0%, {share:.2f}% {{ opacity: 0 }} {share + 0.01:.2f}%, 100% {{ opacity: 1 }}"
    rule = f".l{place} {{ animation: a{place} {end_s:.2f}s infinite }}"
    return f"@keyframes a{place} {{ {frames} }} {rule}"


def read_recording(path: Path) -> list[Line]:
    """Return the lines of a recording that `record` saved."""
    return [Line(*json.loads(line)) for line in path.read_text().splitlines()]


app: Final = typer.Typer(no_args_is_help=True, add_completion=False)


@app.command("chart")
def chart_command(
    result: Annotated[Path, typer.Argument(help="A report of `foredraft bench --json`.")] = RESULT,
    output: Annotated[Path, typer.Option(help="File to write.")] = PICTURES / "speed.svg",
) -> None:
    """Draw tokens per second by workload."""
    output.write_text(chart(json.loads(result.read_text())))


@app.command("terminal")
def terminal_command(
    recording: Annotated[Path, typer.Argument(help="File that `record` wrote.")] = RECORDING,
    output: Annotated[Path, typer.Option(help="File to write.")] = PICTURES / "demo.svg",
) -> None:
    """Draw the demo as an animated terminal."""
    output.write_text(terminal(read_recording(recording)))


@app.command("record")
def record_command(
    output: Annotated[Path, typer.Option(help="File to write.")] = RECORDING,
) -> None:
    """Run the demo, and save its output lines with their times."""
    lines = list(record([sys.executable, str(ROOT / "benchmarks" / "demo.py")]))
    output.write_text("".join(json.dumps([line.at_s, line.words]) + "\n" for line in lines))


if __name__ == "__main__":
    app()
