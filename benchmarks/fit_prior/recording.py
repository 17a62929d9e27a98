"""Recording outcomes: replaying traces with a predictor that notes what it learns from."""

import itertools
from collections.abc import Iterator
from dataclasses import replace
from typing import Final

import numpy as np

from benchmarks.fit_prior.outcomes import Outcome, Outcomes
from benchmarks.workloads import Workload
from retriever.drafter import DraftRequest, TokenIds
from retriever.kernels.layout import Evidence, Work
from retriever.kernels.mixing import depth_bucket, match_bucket
from retriever.plugins.replay.replay import replay
from retriever.predict.databases import Databases
from retriever.predict.draft import Predictor
from retriever.predict.weights import Weights
from retriever.sessions.embedded import EmbeddedDrafter
from retriever.sessions.options import DEFAULT_LIMITS
from retriever.tree import DraftTree

EVERY: Final = 3
"""Of so many traces one is replayed where outputs or indexes are left out."""


class Recorder(Predictor):
    """A predictor that notes the outcomes that it learns from.

    Args:
        max_budget: most nodes of any tree.
        start: weights that pools begin with, instead of the package's.
    """

    def __init__(self, max_budget: int, start: Weights) -> None:
        super().__init__(max_budget)
        self._start = start
        self._noted: list[Outcome] = []

    def step(self, databases: Databases, request: DraftRequest) -> DraftTree:
        """Do a step, having noted what will be learned from; see `Predictor.step`."""
        if databases.pool.learned == 0:
            databases.pool.weights[:] = self._start
        self._look_at(databases, request.new_tokens)
        return super().step(databases, request)

    def note(self, databases: Databases, tokens: TokenIds) -> None:
        """Do as `Predictor.note` does, having noted what will be learned from."""
        self._look_at(databases, tokens)
        super().note(databases, tokens)

    def _look_at(self, databases: Databases, tokens: TokenIds) -> None:
        if len(tokens) and self.learns_from(databases):
            self._noted.extend(outcomes_of(self.scratch.work, tokens))

    def outcomes(self) -> Outcomes:
        """Return what was noted."""
        return Outcomes.of(self._noted)


def outcomes_of(work: Work, tokens: TokenIds) -> Iterator[Outcome]:
    """Follow int32[n], what came next, down the last tree, as far as it was considered."""
    current = 0
    for token in tokens.tolist():
        node = work.nodes[current]
        first, end = int(node["first_child"]), int(node["end_child"])
        if end == 0:
            return
        traits = work.traits[node["place"] + 1].copy()
        hits = np.flatnonzero(work.nodes["token"][first:end] == token)
        chosen = int(hits[0]) if len(hits) else -1
        place = (int(node["dominant"]), int(match_bucket(traits)), int(depth_bucket(traits)))
        yield Outcome(work.evidence[first:end, : Evidence.SIZE].copy(), traits, place, chosen)
        current = first + chosen
        if chosen < 0 or work.nodes[current]["place"] < 0:
            return


def record(workload: Workload, start: Weights, budget: int) -> Outcomes:
    """Replay a workload with trees of `budget` nodes; return what there was to learn from."""
    recorder = Recorder(DEFAULT_LIMITS.max_budget_nodes, start)
    drafter = EmbeddedDrafter(workload.indexes, predictor=recorder)
    for output in workload.outputs:
        drafter.remember(output)
    replay(drafter, workload.traces, budget)
    return recorder.outcomes()


def variants(workload: Workload) -> Iterator[Workload]:
    """Give the workload, and a third of its traces without outputs, indexes, and either.

    So that the weights are right for drafters that have only just begun, and the whole workload
    still counts most.
    """
    outputs = [workload.outputs, []] if workload.outputs else [[]]
    indexes = [workload.indexes, []] if workload.indexes else [[]]
    for place, (outputs_, indexes_) in enumerate(itertools.product(outputs, indexes)):
        traces = workload.traces[:: EVERY if place else 1]
        yield replace(workload, traces=traces, outputs=outputs_, indexes=indexes_)
