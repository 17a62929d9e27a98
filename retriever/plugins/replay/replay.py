"""Replay of recorded outputs through a drafter, without running a model.

A draft changes no output, so the recording shows what a verifier would have accepted.
"""

import time
from collections import Counter, deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray
from rich.table import Table

from retriever.drafter import Drafter, DraftRequest, SequenceOptions, TokenIds
from retriever.plugins.replay.reliability_report import Bin, Group, Reliability
from retriever.traces.trace_spool import Lane
from retriever.traces.traces import Trace
from retriever.tree import DraftTree, Source


@dataclass(slots=True)
class ReplayReport:
    """Counts of a replay.

    Attributes:
        traces: number of recorded outputs replayed.
        steps: number of decoding steps that a verifier would have made.
        tokens: number of committed tokens, including one of the model's own in each step.
        nodes: number of drafted nodes.
        accepted_by_source: number of accepted draft tokens from each database.
        draft_us: time of each draft, in microseconds.
        calibration: calibration of the nodes' probabilities; None if not requested.
        calibrate_after: number of traces to replay before probabilities are counted.
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
        """Count a draft whose nodes `path` (int64[k]) were accepted."""
        self.steps += 1
        self.nodes += len(tree)
        self.accepted_by_source.update(map(Source, tree.sources[path].tolist()))
        if self.calibration is not None and self.traces >= self.calibrate_after:
            self.calibration.add(tree, path)

    def as_json(self) -> dict[str, Any]:
        """Return the reported figures."""
        times = self.draft_us or [0.0]
        accepted = self.accepted_by_source.total()
        figures = {
            "tokens_per_step": self.tokens / max(1, self.steps),
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
    """Replay traces one after another; each joins the generations when it ends.

    Args:
        drafter: drafter whose drafts are counted.
        traces: recorded outputs.
        budget_nodes: most nodes of each tree.
        calibrate_after: number of traces to skip before counting how often nodes of each
            probability are accepted; None to skip the calibration.

    Raises:
        RetrieverError: the drafter refuses a trace.
    """
    report = _new_report(calibrate_after)
    for trace in traces:
        replay_one(drafter, f"replay-{report.traces}", trace, budget_nodes, report)
        report.traces += 1
    return report


def _new_report(calibrate_after: int | None) -> ReplayReport:
    report = ReplayReport()
    if calibrate_after is not None:
        report.calibration, report.calibrate_after = Reliability(), calibrate_after
    return report


def replay_one(
    drafter: Drafter, session: str, trace: Trace, budget_nodes: int, report: ReplayReport
) -> None:
    """Replay one trace, with its predictions if the drafter supports them, and count it."""
    _open(drafter, session, trace)
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


def replay_lanes(
    drafter: Drafter,
    groups: Iterable[Sequence[Lane]],
    budget_nodes: int,
    num_lanes: int,
    calibrate_after: int | None = None,
) -> ReplayReport:
    """Replay up to `num_lanes` lanes of a group concurrently, step by step.

    The next lane of a group starts when one ends, and the next group when all lanes have ended. If
    a drafter supports groups, it is told the group of each sequence.

    Args:
        drafter: drafter whose drafts are counted. The time of a draft is a step's time, divided by
            the number of its sequences.
        groups: lanes of each group.
        budget_nodes: most nodes of each tree.
        num_lanes: most lanes that are replayed concurrently.
        calibrate_after: as for `replay`.

    Raises:
        RetrieverError: the drafter refuses a trace.
    """
    report = _new_report(calibrate_after)
    for number, lanes in enumerate(groups):
        group = f"replay-{number}"
        waiting = deque(iter(lane()) for lane in lanes)
        running: list[_Running] = []
        while True:
            while waiting and len(running) < num_lanes:
                running += _begun(drafter, group, waiting.popleft(), report)
            if not running:
                break
            _step(drafter, running, budget_nodes, report)
            running = [each for lane in running for each in _going_on(drafter, group, lane, report)]
    return report


@dataclass(slots=True)
class _Running:
    """A trace that is being replayed.

    Attributes:
        session: name of the session.
        trace: the trace.
        lane: the traces that follow it.
        done: number of committed output tokens.
        committed: committed tokens that the drafter does not have yet.
    """

    session: str
    trace: Trace
    lane: Iterator[Trace]
    done: int
    committed: TokenIds


def _begun(
    drafter: Drafter, group: str, lane: Iterator[Trace], report: ReplayReport
) -> list[_Running]:
    """Open a session for the next trace of a lane; return an empty list at its end."""
    for trace in lane:
        session = f"replay-{report.traces}"
        report.traces += 1
        _open(drafter, session, trace, group)
        if len(trace.output):
            return [_Running(session, trace, lane, 0, trace.output[:0])]
        drafter.close(session, trace.output)
    return []


def _step(
    drafter: Drafter, running: Sequence[_Running], budget_nodes: int, report: ReplayReport
) -> None:
    """Draft for all running traces, and commit what a verifier would have accepted."""
    requests = [
        DraftRequest(each.session, each.committed, len(each.trace.prompt) + each.done, budget_nodes)
        for each in running
    ]
    began = time.perf_counter()
    trees = drafter.draft(requests)
    each_us = (time.perf_counter() - began) * 1e6 / len(running)
    for each, tree in zip(running, trees, strict=True):
        path = tree.follow(each.trace.output[each.done :])
        report.draft_us.append(each_us)
        report.add(tree, path)
        each.committed = each.trace.output[each.done : each.done + len(path) + 1]
        each.done += len(each.committed)
        report.tokens += len(each.committed)


def _going_on(
    drafter: Drafter, group: str, running: _Running, report: ReplayReport
) -> list[_Running]:
    """Return the running trace of a lane after a step: the same trace, or at its end the next."""
    if running.done < len(running.trace.output):
        return [running]
    drafter.close(running.session, running.committed)
    return _begun(drafter, group, running.lane, report)


def _open(drafter: Drafter, session: str, trace: Trace, group: str = "") -> None:
    """Open a session for a trace, with its predictions."""
    options = SequenceOptions(predictions=tuple(trace.predictions), group=group)
    drafter.open(session, trace.prompt, options)


def tables(report: ReplayReport, counted: Mapping[str, Any]) -> Iterator[Table]:
    """Yield tables of the figures, of what they count, and of the calibration if requested."""
    yield _figures(report, counted)
    if report.calibration is not None:
        yield _calibration(report.calibration)


def _figures(report: ReplayReport, counted: Mapping[str, Any]) -> Table:
    table = Table("figure", "value", title=f"{report.traces} traces replayed")
    for name, value in {**report.as_json(), **counted}.items():
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
