"""Replaying recorded outputs through a drafter, without running a model.

A draft changes no output, so what a verifier would have accepted can be counted from the recording.
"""

import time
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray
from rich.table import Table

from retriever.drafter import Drafter, DraftRequest, PredictionDrafter
from retriever.replay.reliability_report import Bin, Group, Reliability
from retriever.replay.traces import Trace
from retriever.tree import DraftTree, Source


@dataclass(slots=True)
class ReplayReport:
    """What a replay counted.

    Attributes:
        traces: recorded outputs replayed.
        steps: decoding steps that the verifier would have made.
        tokens: tokens committed, one of the model's own in each step included.
        nodes: nodes drafted.
        accepted_by_source: drafted tokens that were accepted, by the database they came from.
        draft_us: time of each draft in microseconds.
        calibration: of the nodes' probabilities; None if it is not asked for.
        calibrate_after: traces to replay before probabilities are counted.
    """

    traces: int = 0
    steps: int = 0
    tokens: int = 0
    nodes: int = 0
    accepted_by_source: Counter[Source] = field(default_factory=Counter)
    draft_us: list[float] = field(default_factory=list)
    calibration: Reliability | None = None
    calibrate_after: int = 0

    def add(self, tree: DraftTree, path: NDArray[np.int64]) -> None:
        """Count a draft, of which the nodes `path` (int64[k]) were accepted."""
        self.steps += 1
        self.nodes += len(tree)
        self.accepted_by_source.update(map(Source, tree.sources[path].tolist()))
        if self.calibration is not None and self.traces >= self.calibrate_after:
            self.calibration.add(tree, path)

    def as_json(self) -> dict[str, Any]:
        """Return the figures that are reported."""
        times = self.draft_us or [0.0]
        accepted = self.accepted_by_source.total()
        figures = {
            "mean_accepted_tokens": self.tokens / max(1, self.steps),
            "mean_nodes": self.nodes / max(1, self.steps),
            "steps": self.steps,
            "tokens": self.tokens,
            "traces": self.traces,
            "draft_us": {
                "p50": float(np.percentile(times, 50)),
                "p99": float(np.percentile(times, 99)),
            },
            "accepted_by_source": {
                source.name.lower(): count / accepted
                for source, count in sorted(self.accepted_by_source.items())
            },
        }
        if self.calibration is not None:
            figures["calibration"] = self.calibration.as_json()
        return figures


def replay(
    drafter: Drafter,
    traces: Iterable[Trace],
    budget_nodes: int,
    calibrate_after: int | None = None,
) -> ReplayReport:
    """Replay traces one after the other; each joins the generations when it ends.

    Args:
        drafter: whose drafts to count.
        traces: recorded outputs.
        budget_nodes: most nodes of each tree.
        calibrate_after: count how often nodes of each probability are accepted, but for so many
            traces at the beginning; None not to count it at all.

    Raises:
        RetrieverError: the drafter refuses a trace.
    """
    report = ReplayReport()
    if calibrate_after is not None:
        report.calibration, report.calibrate_after = Reliability(), calibrate_after
    for trace in traces:
        replay_one(drafter, f"replay-{report.traces}", trace, budget_nodes, report)
        report.traces += 1
    return report


def replay_one(
    drafter: Drafter, session: str, trace: Trace, budget_nodes: int, report: ReplayReport
) -> None:
    """Replay one trace, with its predictions if the drafter takes any, and count it."""
    if trace.predictions and isinstance(drafter, PredictionDrafter):
        drafter.open(session, trace.prompt, predictions=trace.predictions)
    else:
        drafter.open(session, trace.prompt)
    committed = trace.output[:0]
    done = 0
    while done < len(trace.output):
        length = len(trace.prompt) + done
        began = time.perf_counter()
        tree = drafter.draft([DraftRequest(session, committed, length, budget_nodes)])[0]
        report.draft_us.append((time.perf_counter() - began) * 1e6)
        path = tree.follow(trace.output[done:])
        report.add(tree, path)
        committed = trace.output[done : done + len(path) + 1]
        done += len(committed)
    report.tokens += done
    drafter.close(session, committed)


def tables(report: ReplayReport) -> Iterator[Table]:
    """Give the figures, then their calibration if it was asked for."""
    yield _figures(report)
    if report.calibration is not None:
        yield _calibration(report.calibration)


def _figures(report: ReplayReport) -> Table:
    table = Table("figure", "value", title=f"{report.traces} traces replayed")
    for name, value in report.as_json().items():
        if name == "calibration":
            continue
        parts = value.items() if isinstance(value, dict) else [("", value)]
        for part, number in parts:
            text = f"{number:.3f}" if isinstance(number, float) else str(number)
            table.add_row(f"{name} {part}".strip(), text)
    return table


def _calibration(calibration: Reliability) -> Table:
    table = Table("nodes", "number", "mean probability", "accepted", "error")
    table.title = f"expected calibration error {calibration.ece():.4f}"
    for each in calibration.bins():
        table.add_row(f"given {each.start:g} to {each.end:g}", *_cells(each))
    for what, groups in (("source", calibration.by_source()), ("depth", calibration.by_depth())):
        table.add_section()
        for name, group in groups.items():
            table.add_row(f"{what} {name}", *_cells(group), f"{group.ece:.4f}")
    return table


def _cells(counted: Bin | Group) -> tuple[str, str, str]:
    return str(counted.nodes), f"{counted.probability:.4f}", f"{counted.accepted:.4f}"
