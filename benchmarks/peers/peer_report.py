"""Writing down what programs and drafters did: first where ours loses."""

import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

from benchmarks.peers.contestants import OUTPUTS_ALONE, Absent
from benchmarks.peers.peer import Kind
from retriever.commands.factories import OWN

EQUAL: Final = 0.005
"""Tokens per step that differ by less, as a share, are said to be level."""


@dataclass(frozen=True, slots=True)
class Times:
    """How long a drafter took, in microseconds.

    Attributes:
        draft_us_p50: of a draft with the tokens of the step before taken in, median.
        draft_us_p99: the same, 99th percentile.
        draft_us_p50_by_fifth: median in each fifth of the traces, in their order.
        open_us_p50: of an opening with its prompt, median.
        close_us_p50: of an end, median.
    """

    draft_us_p50: float
    draft_us_p99: float
    draft_us_p50_by_fifth: list[float]
    open_us_p50: float
    close_us_p50: float


@dataclass(frozen=True, slots=True)
class Row:
    """One contender on one workload at one budget.

    Attributes:
        workload: its name.
        contender: its name.
        kind: `ours`, `program` or `reading`.
        evidence: what it drafts from besides the sequence.
        reads: for a reading, the contender whose rule it reads, if that is a program here.
        budget: nodes that each tree might have.
        steps: decoding steps.
        tokens_per_step: mean, the model's own token included.
        nodes_per_step: mean.
        times: none for a reading: they are ours, not those of the program that it stands for.
        settings: in words; empty for those of every day.
        memory_mb: what making it took, mapped files not counted; none for a reading and where the
            system does not say.
    """

    workload: str
    contender: str
    kind: str
    evidence: str
    reads: str
    budget: int
    steps: int
    tokens_per_step: float
    nodes_per_step: float
    times: Times | None
    settings: str = ""
    memory_mb: float | None = None

    def in_a_line(self) -> str:
        """Return the main figures as text."""
        return f"{self.contender}: {self.tokens_per_step:.3f} tokens per step{_microseconds(self)}"


@dataclass(frozen=True, slots=True)
class PeerReport:
    """All rows of a run.

    Attributes:
        circumstances: machine, versions and load.
        turns: after what another drafter has its turn.
        workloads: what each was made of.
        rows: in the order in which they were measured.
        absent: what cannot be had here, and why.
    """

    circumstances: dict[str, Any]
    turns: str
    workloads: list[dict[str, Any]]
    rows: list[Row]
    absent: list[Absent]

    def write(self, stem: Path) -> list[Path]:
        """Write `stem` with `.json`, `.md` and `.png`; return the paths."""
        stem.parent.mkdir(parents=True, exist_ok=True)
        paths = [stem.with_name(f"{stem.name}.{suffix}") for suffix in ("json", "md", "png")]
        paths[0].write_text(self.as_text() + "\n")
        paths[1].write_text(self.as_markdown())
        self.plot(paths[2])
        return paths

    def as_text(self) -> str:
        """Return everything as JSON."""
        return json.dumps(asdict(self), indent=1)

    def as_markdown(self) -> str:
        """Return what is lost first, then a table for each workload, and what is not here."""
        stated = ", ".join(f"{name} {value}" for name, value in self.circumstances.items())
        opening = "Other systems' own programs and our drafter, in one run, in turns by"
        parts = [
            f"{opening} {self.turns}. {stated}.",
            "\n## Where ours loses\n",
            *(self._losses() or ["Nowhere in this run."]),
            "\n## Ours over each program\n",
            *self._ratios(),
        ]
        for workload in _names(self.rows, "workload"):
            parts += [f"\n## {workload}\n", *self._tables(workload)]
        parts += ["\n## Our readings beside the programs\n", *self._readings()]
        parts += ["\n## Not here\n", "| system | why |", "|---|---|"]
        parts += [f"| {each.name} | {each.reason} |" for each in self.absent]
        return "\n".join(parts) + "\n"

    def plot(self, path: Path) -> None:
        """Draw tokens per step against nodes, and below it the times of ours and of programs."""
        from matplotlib.figure import Figure  # noqa: PLC0415  (loading it takes a second)

        workloads = _names(self.rows, "workload")
        figure = Figure(figsize=(5 * len(workloads) + 3, 7), layout="constrained")
        axes = figure.subplots(2, len(workloads), squeeze=False, sharex=True, height_ratios=[3, 2])
        names = _names(self.rows, "contender")
        for column, workload in enumerate(workloads):
            above, below = axes[0, column], axes[1, column]
            for name in names:
                rows = self._of(workload, name)
                style = _style(names.index(name), rows)
                _line(above, rows, lambda row: row.tokens_per_step, name, style)
                timed = [row for row in rows if row.times]
                _line(below, timed, lambda row: row.times and row.times.draft_us_p50, name, style)
            budgets = _names(self.rows, "budget")
            above.set_xscale("log", base=2)
            above.set_xticks(budgets, [str(budget) for budget in budgets])
            above.set_title(workload)
            below.set(yscale="log", xlabel="nodes")
            below.yaxis.set_major_formatter("{x:.0f}")
            below.yaxis.set_minor_formatter("{x:.0f}")
        axes[0, 0].set_ylabel("tokens per step")
        axes[1, 0].set_ylabel("microseconds per draft, median\n(programs and ours)")
        lines, labels = axes[0, 0].get_legend_handles_labels()
        figure.legend(lines, labels, loc="outside right upper")
        figure.savefig(path, dpi=110)

    def _of(self, workload: str, contender: str) -> list[Row]:
        return [r for r in self.rows if (r.workload, r.contender) == (workload, contender)]

    def _pairs(self, workload: str) -> list[tuple[Row, Row]]:
        """Our row beside each program's, and beside each reading's: the same evidence or less."""
        pairs = []
        for row in self.rows:
            if row.workload == workload and row.kind != Kind.OURS:
                for own in self._ours(workload, row.budget):
                    pairs.append((own, row))
                    break
        return pairs

    def _ours(self, workload: str, budget: int) -> list[Row]:
        """Our rows, the one with all evidence first."""
        ours = [*self._of(workload, OWN), *self._of(workload, OUTPUTS_ALONE)]
        return [row for row in ours if row.budget == budget]

    def _losses(self) -> list[str]:
        """A row for each figure and other drafter that is ahead of ours, a column for a workload.

        Ours comes first in each cell, and then the other.
        """
        workloads = _names(self.rows, "workload")
        lost: dict[tuple[str, str], dict[str, list[str]]] = {}
        for figure in FIGURES:
            for workload in workloads:
                for own, other in self._pairs(workload):
                    if figure.is_lost(own, other):
                        cells = lost.setdefault((figure.name, other.contender), {})
                        text = f"{other.budget}: {figure.text(own)} / {figure.text(other)}"
                        cells.setdefault(workload, []).append(text)
        if not lost:
            return []
        return [
            "`foredraft` / the other, by nodes.\n",
            f"| figure | ahead of ours | {' | '.join(workloads)} |",
            "|---" * (len(workloads) + 2) + "|",
            *(
                f"| {figure} | {name} | {' | '.join('; '.join(of.get(w, ())) for w in workloads)} |"
                for (figure, name), of in lost.items()
            ),
        ]

    def _ratios(self) -> list[str]:
        budgets = _names(self.rows, "budget")
        head = [f"tokens, {budget}" for budget in budgets]
        head += [f"time, {budget}" for budget in budgets]
        lines = [
            _RATIOS,
            f"| workload | program | {' | '.join(head)} |",
            "|---" * (len(head) + 2) + "|",
        ]
        for workload in _names(self.rows, "workload"):
            pairs = [p for p in self._pairs(workload) if p[1].kind == Kind.PROGRAM]
            for name in dict.fromkeys(other.contender for _, other in pairs):
                of_name = {
                    other.budget: (own, other) for own, other in pairs if other.contender == name
                }
                cells = [_token_ratio(*of_name[b]) if b in of_name else "" for b in budgets]
                cells += [_time_ratio(*of_name[b]) if b in of_name else "" for b in budgets]
                lines.append(f"| {workload} | {name} | {' | '.join(cells)} |")
        return lines

    def _tables(self, workload: str) -> list[str]:
        rows = [row for row in self.rows if row.workload == workload]
        budgets = _names(rows, "budget")
        head = " | ".join(f"{budget} nodes" for budget in budgets)
        lines = [
            "Tokens per step; microseconds of a draft, median and 99th percentile.\n",
            f"| drafter | drafts from | {head} | open, µs | memory, MB | settings |",
            "|---" * (len(budgets) + 5) + "|",
        ]
        for name in _names(rows, "contender"):
            own = [row for row in rows if row.contender == name]
            cells = [f"{row.tokens_per_step:.2f}{_microseconds(row)}" for row in own]
            last = own[-1]
            opened = f"{last.times.open_us_p50:.0f}" if last.times else ""
            memory = f"{last.memory_mb:.0f}" if last.memory_mb is not None else ""
            settings = "; ".join(dict.fromkeys(row.settings for row in own if row.settings))
            lines.append(
                f"| {name} | {last.evidence} | {' | '.join(cells)} | {opened} | {memory} "
                f"| {settings} |"
            )
        return lines

    def _readings(self) -> list[str]:
        lines = [
            _READINGS,
            "| workload | nodes | reading | its figure | program | its figure | reading over it |",
            "|---" * 7 + "|",
        ]
        for row in self.rows:
            for program in self._of(row.workload, row.reads):
                if program.budget == row.budget:
                    ratio = row.tokens_per_step / program.tokens_per_step - 1
                    lines.append(
                        f"| {row.workload} | {row.budget} | {row.contender} "
                        f"| {row.tokens_per_step:.3f} | {program.contender} "
                        f"| {program.tokens_per_step:.3f} | {ratio:+.2%} |"
                    )
        return lines


@dataclass(frozen=True, slots=True)
class Figure:
    """A figure in which ours may lose.

    Attributes:
        name: in reports.
        value: of a row; none where it has none.
        digits: after the point.
        more_is_better: whether the higher one wins.
    """

    name: str
    value: Callable[[Row], Any]
    digits: int = 0
    more_is_better: bool = False

    def is_lost(self, own: Row, other: Row) -> bool:
        """Return whether the other row is ahead of ours."""
        ours, theirs = self.value(own), self.value(other)
        if ours is None or theirs is None:
            return False
        if self.more_is_better:
            return bool(ours < theirs * (1 - EQUAL))
        return bool(ours > theirs * (1 + EQUAL))

    def text(self, row: Row) -> str:
        """Return the figure of a row."""
        return f"{self.value(row) or 0:.{self.digits}f}"


FIGURES: Final = (
    Figure("Tokens per step", lambda row: row.tokens_per_step, 2, more_is_better=True),
    Figure("Median draft, µs", lambda row: row.times and row.times.draft_us_p50),
    Figure("99th percentile of a draft, µs", lambda row: row.times and row.times.draft_us_p99),
    Figure("Opening a sequence, µs", lambda row: row.times and row.times.open_us_p50),
    Figure("Ending a sequence, µs", lambda row: row.times and row.times.close_us_p50),
    Figure("Memory, MB", lambda row: row.memory_mb),
)


_RATIOS: Final = """\
Tokens per step of `foredraft` over the program's at equal nodes (above 1: ours is ahead), and
median time of a draft over the program's (below 1: ours is ahead; in brackets the least and the
most of five parts of the run).
"""
_READINGS: Final = """\
Tokens per step at the same settings. Time and memory of a reading are not shown: they say nothing
of the program.
"""


def _microseconds(row: Row) -> str:
    if row.times is None:
        return ""
    return f" ({row.times.draft_us_p50:.0f}, {row.times.draft_us_p99:.0f} µs)"


def _token_ratio(own: Row, other: Row) -> str:
    return f"{own.tokens_per_step / other.tokens_per_step:.2f}"


def _time_ratio(own: Row, other: Row) -> str:
    if own.times is None or other.times is None:
        return ""
    parts = [
        ours / theirs
        for ours, theirs in zip(
            own.times.draft_us_p50_by_fifth, other.times.draft_us_p50_by_fifth, strict=False
        )
    ]
    ratio = own.times.draft_us_p50 / other.times.draft_us_p50
    return f"{ratio:.2f} ({min(parts):.2f} to {max(parts):.2f})"


def _line(
    axes: Any, rows: Sequence[Row], value: Callable[[Row], Any], name: str, style: dict[str, Any]
) -> None:
    if rows:
        points = [(row.budget, value(row)) for row in rows]
        axes.plot(*zip(*points, strict=True), marker="o", label=name, **style)
    axes.grid(alpha=0.3)


def _style(place: int, rows: Sequence[Row]) -> dict[str, Any]:
    if any(row.kind == Kind.OURS for row in rows):
        dashes = "-" if rows[0].contender == OWN else ":"
        return {"color": "black", "linewidth": 2.5, "linestyle": dashes}
    reading = any(row.kind == Kind.READING for row in rows)
    return {"color": f"C{place % 10}", "linestyle": "--" if reading else "-"}


def _names(rows: Iterable[Row], attribute: str) -> list[Any]:
    """Return the values of an attribute, each once, in order of appearance."""
    return list(dict.fromkeys(getattr(row, attribute) for row in rows))
