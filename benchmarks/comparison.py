"""Writing the figures of a comparison as JSON, as tables in Markdown, and as a plot."""

import json
import os
import platform
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any, Final

from benchmarks.workloads import Workload
from retriever.commands.factories import OWN

_OPENING: Final = (
    "Tokens per step, and microseconds per draft of ours (median). All others are our readings of "
    "rules, whose times say nothing of the programs: `python -m benchmarks.peers` measures those."
)
PACKAGES: Final = ("numpy", "numba", "transformers")


@dataclass(frozen=True, slots=True)
class Measurement:
    """One drafter on one workload at one budget.

    Attributes:
        workload: name of the workload.
        drafter: name of the drafter.
        budget: largest number of nodes in a tree.
        tokens_per_step: mean number of tokens per step, including the model's own token.
        nodes_per_step: mean number of nodes per step.
        draft_us_p50: median microseconds of a draft; None for our implementations of published
            rules, because the authors' programs take other times.
        draft_us_p99: 99th percentile of the microseconds of a draft; None as `draft_us_p50`.
    """

    workload: str
    drafter: str
    budget: int
    tokens_per_step: float
    nodes_per_step: float
    draft_us_p50: float | None
    draft_us_p99: float | None

    def in_a_line(self) -> str:
        """Return the figures as text."""
        return (
            f"{self.workload}, {self.drafter}, {self.budget} nodes: {self.tokens_per_step:.3f} "
            f"tokens per step{_microseconds(self)}"
        )


@dataclass(frozen=True, slots=True)
class Comparison:
    """All measurements of a run.

    Attributes:
        circumstances: machine, versions and load.
        workloads: contents of each workload.
        measurements: the measurements, in the order in which they were made.
    """

    circumstances: dict[str, Any]
    workloads: list[dict[str, Any]]
    measurements: list[Measurement]

    def write(self, stem: Path) -> list[Path]:
        """Write `stem` with `.json`, `.md` and `.png`; return the paths."""
        stem.parent.mkdir(parents=True, exist_ok=True)
        paths = [stem.with_name(f"{stem.name}.{suffix}") for suffix in ("json", "md", "png")]
        paths[0].write_text(json.dumps(asdict(self), indent=1) + "\n")
        paths[1].write_text(self.as_markdown())
        self.plot(paths[2])
        return paths

    def as_markdown(self) -> str:
        """Return a table for each workload, with rows for drafters and columns for budgets."""
        stated = ", ".join(f"{name} {value}" for name, value in self.circumstances.items())
        parts = [f"{_OPENING} {stated}."]
        for workload in _names(self.measurements, "workload"):
            rows = [row for row in self.measurements if row.workload == workload]
            budgets = _names(rows, "budget")
            parts.append(f"\n## {workload}\n")
            parts.append("| drafter | " + " | ".join(f"{b} nodes" for b in budgets) + " |")
            parts.append("|---" * (len(budgets) + 1) + "|")
            parts.extend(_row(rows, drafter) for drafter in _names(rows, "drafter"))
        return "\n".join(parts) + "\n"

    def plot(self, path: Path) -> None:
        """Draw tokens per step, and below them microseconds of our drafts, against the budget."""
        from matplotlib.figure import Figure  # noqa: PLC0415  (loading it takes a second)

        workloads = _names(self.measurements, "workload")
        figure = Figure(figsize=(5 * len(workloads) + 2, 7), layout="constrained")
        axes = figure.subplots(2, len(workloads), squeeze=False, sharex=True, height_ratios=[3, 1])
        for column, workload in enumerate(workloads):
            rows = [row for row in self.measurements if row.workload == workload]
            _draw(axes[0, column], rows, "tokens_per_step", workload)
            timed = [row for row in rows if row.draft_us_p50 is not None]
            if timed:
                _draw(axes[1, column], timed, "draft_us_p50", "")
            axes[1, column].set(yscale="log", xlabel="nodes")
            axes[1, column].yaxis.set_major_formatter("{x:.0f}")
            axes[1, column].yaxis.set_minor_formatter("{x:.0f}")
        axes[0, 0].set_ylabel("tokens per step")
        axes[1, 0].set_ylabel("µs per draft,\nours, median")
        lines, names = axes[0, 0].get_legend_handles_labels()
        figure.legend(lines, names, loc="outside right upper")
        figure.savefig(path, dpi=120)


def circumstances() -> dict[str, Any]:
    """Return the machine, the versions and the load of the machine."""
    return {
        "machine": platform.machine(),
        "cores": os.cpu_count(),
        "load": round(os.getloadavg()[0], 1),
        "python": platform.python_version(),
        **{package: version(package) for package in PACKAGES},
    }


def describe(workload: Workload) -> dict[str, Any]:
    """Return the contents of a workload."""
    return {
        "name": workload.name,
        "traces": len(workload.traces),
        "output_tokens": sum(len(trace.output) for trace in workload.traces),
        "warm_outputs": len(workload.outputs),
        "warm_tokens": sum(map(len, workload.outputs)),
        "indexed_tokens": sum(index.num_tokens for index in workload.indexes),
    }


def _row(rows: Sequence[Measurement], drafter: str) -> str:
    own = [row for row in rows if row.drafter == drafter]
    cells = [f"{row.tokens_per_step:.2f}{_microseconds(row)}" for row in own]
    return f"| {_label(drafter)} | {' | '.join(cells)} |"


def _label(drafter: str) -> str:
    return drafter if drafter == OWN else f"{drafter} (our reading)"


def _microseconds(row: Measurement) -> str:
    return "" if row.draft_us_p50 is None else f" ({row.draft_us_p50:.0f} µs)"


def _draw(axes: Any, rows: Sequence[Measurement], figure: str, title: str) -> None:
    for place, drafter in enumerate(_names(rows, "drafter")):
        points = [(row.budget, getattr(row, figure)) for row in rows if row.drafter == drafter]
        style = {"color": "black", "linewidth": 2.5} if drafter == OWN else {"color": f"C{place}"}
        axes.plot(*zip(*points, strict=True), marker="o", label=_label(drafter), **style)
    budgets = _names(rows, "budget")
    axes.set_xscale("log", base=2)
    axes.set_xticks(budgets, [str(budget) for budget in budgets])
    axes.set_title(title)
    axes.grid(alpha=0.3)


def _names(rows: Iterable[Measurement], attribute: str) -> list[Any]:
    """Return the distinct values of an attribute, in order of appearance."""
    return list(dict.fromkeys(getattr(row, attribute) for row in rows))
