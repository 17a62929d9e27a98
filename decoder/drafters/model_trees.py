"""The most probable continuations by a draft model, as a tree."""

import time
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from decoder.drafters.branch_cache import BranchCache
from decoder.drafters.draft_model import DraftModel
from decoder.drafters.growing import Children, Frontier, grow
from decoder.drafters.outcomes import Outcome
from decoder.drafters.path_calibration import PathCalibration
from decoder.drafters.stopping import StoppingRule
from retriever.drafter import TokenIds
from retriever.tree import ROOT, DraftTree, Source


@dataclass(frozen=True, slots=True)
class Bounds:
    """How far a draft may grow.

    Attributes:
        max_nodes: most nodes of the tree.
        min_probability: of paths; less probable ones are left out.
        width: most nodes in one pass of the draft model.
        max_passes: most passes beside the one that reads the sequence.
        max_depth: nodes as deep as this have no children; `None` for no limit.
    """

    max_nodes: int
    min_probability: float
    width: int
    max_passes: int
    max_depth: int | None

    def frontier(self) -> Frontier:
        """Return an empty frontier within these bounds."""
        with np.errstate(divide="ignore"):
            least = float(np.log(self.min_probability))
        return Frontier(self.max_nodes, least, self.max_depth)


@dataclass(frozen=True, slots=True, eq=False)
class ModelDraft:
    """A tree and what is needed to learn from it.

    Attributes:
        tree: N nodes.
        estimates: float64[N], probabilities of its paths before any correction.
        num_passes: of the draft model, that over the sequence included.
    """

    tree: DraftTree
    estimates: NDArray[np.float64]
    num_passes: int


class TreeGrower(Protocol):
    """A way to make trees from a draft model."""

    def draft(self, cache: BranchCache, tokens: TokenIds, bounds: Bounds) -> ModelDraft:
        """Draft behind a sequence, int32[n], whose cache it is."""
        ...

    def learn(self, draft: ModelDraft, outcome: Outcome) -> None:
        """Take in what became of a draft."""
        ...


class MostProbableTrees:
    """Grows trees of the most probable paths.

    Args:
        model: whose probabilities these are.
        rule: when to stop.
    """

    def __init__(self, model: DraftModel, rule: StoppingRule) -> None:
        self._model = model
        self._rule = rule
        self._calibration = PathCalibration()

    def draft(self, cache: BranchCache, tokens: TokenIds, bounds: Bounds) -> ModelDraft:
        """Draft behind a sequence, int32[n], whose cache it is."""
        frontier = bounds.frontier()
        frontier.expand([ROOT], self._children(cache.catch_up(tokens), bounds.max_nodes))

        def expand(nodes: list[int]) -> list[Children]:
            start = time.perf_counter()
            logits = cache.expand(*frontier.edges(nodes))
            children = self._children(logits, bounds.max_nodes)
            self._rule.measured.record_pass(time.perf_counter() - start)
            return children

        passes = grow(frontier, expand, bounds.width, bounds.max_passes, self._is_worthwhile)
        return self._finished(frontier, bounds.min_probability, 1 + len(passes))

    def learn(self, draft: ModelDraft, outcome: Outcome) -> None:
        """Take in what became of a draft."""
        self._calibration.learn(outcome, draft.estimates)

    def _children(self, logits: torch.Tensor, count: int) -> list[Children]:
        """Return the most probable tokens after each row of logits [rows, C]."""
        best = logits.topk(min(count, logits.shape[-1]))
        precise = torch.promote_types(logits.dtype, torch.float32)
        sums = logits.to(precise).logsumexp(-1, keepdim=True)
        columns = best.indices.cpu().numpy()
        values = (best.values - sums).clamp(max=0).cpu().double().numpy()
        rows = []
        for row_columns, row_values in zip(columns, values, strict=True):
            is_possible = np.isfinite(row_values)
            rows.append(
                Children(self._model.columns[row_columns[is_possible]], row_values[is_possible])
            )
        return rows

    def _is_worthwhile(self, log_probabilities: NDArray[np.float64]) -> bool:
        return self._rule.is_worthwhile(self._calibration.corrected(np.exp(log_probabilities)))

    def _finished(self, frontier: Frontier, min_probability: float, num_passes: int) -> ModelDraft:
        kept = frontier.kept
        estimates = np.exp(frontier.log_probabilities(kept))
        corrected = self._calibration.corrected(estimates).astype(np.float32)
        tokens = np.array(frontier.tokens, np.int32)[kept]
        sources = np.full(len(kept), Source.MODEL, np.uint8)
        tree = DraftTree(tokens, frontier.kept_parents(), corrected, sources)
        count = int(np.sum(corrected >= min_probability))
        return ModelDraft(tree.prefix(count), estimates[:count], num_passes)
