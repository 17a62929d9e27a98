"""Replaying recorded outputs through a drafter, without running a model.

A draft changes no output, so what a verifier would have accepted can be counted from the recording.
"""

import time
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from retriever.drafter import Drafter, DraftRequest
from retriever.traces import Trace
from retriever.tree import Source


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
    """

    traces: int = 0
    steps: int = 0
    tokens: int = 0
    nodes: int = 0
    accepted_by_source: Counter[Source] = field(default_factory=Counter)
    draft_us: list[float] = field(default_factory=list)

    def as_json(self) -> dict[str, Any]:
        """Return the figures that are reported."""
        times = self.draft_us or [0.0]
        accepted = self.accepted_by_source.total()
        return {
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


def replay(drafter: Drafter, traces: Iterable[Trace], budget_nodes: int) -> ReplayReport:
    """Replay traces one after the other; each joins the generations when it ends.

    Raises:
        RetrieverError: the drafter refuses a trace.
    """
    report = ReplayReport()
    for trace in traces:
        replay_one(drafter, f"replay-{report.traces}", trace, budget_nodes, report)
        report.traces += 1
    return report


def replay_one(
    drafter: Drafter, session: str, trace: Trace, budget_nodes: int, report: ReplayReport
) -> None:
    """Replay one trace and count it in the report."""
    drafter.open(session, trace.prompt)
    committed = trace.output[:0]
    done = 0
    while done < len(trace.output):
        length = len(trace.prompt) + done
        began = time.perf_counter()
        tree = drafter.draft([DraftRequest(session, committed, length, budget_nodes)])[0]
        report.draft_us.append((time.perf_counter() - began) * 1e6)
        path = tree.follow(trace.output[done:])
        report.accepted_by_source.update(map(Source, tree.sources[path].tolist()))
        report.nodes += len(tree)
        report.steps += 1
        committed = trace.output[done : done + len(path) + 1]
        done += len(committed)
    report.tokens += done
    drafter.close(session, committed)
