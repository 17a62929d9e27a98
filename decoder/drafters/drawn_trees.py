"""Trees of tokens that were drawn from a draft model's distributions."""

import time

import numpy as np
import torch
from numpy.typing import NDArray

from decoder.drafters.branch_cache import BranchCache
from decoder.drafters.draft_model import DraftModel
from decoder.drafters.drawing import Draws, RankRates, drawn_below
from decoder.drafters.growing import Children, Frontier, grow
from decoder.drafters.model_trees import Bounds, ModelDraft
from decoder.drafters.outcomes import Outcome
from decoder.drafters.sampled import SampledTree
from decoder.drafters.stopping import StoppingRule
from retriever.drafter import TokenIds
from retriever.tree import ROOT, DraftTree, Source


class DrawnTrees:
    """Grows trees whose shape is planned first and then filled with draws.

    Args:
        model: whose distributions are drawn from.
        rule: when to stop.
        draws: how to draw.
        num_tokens: size of the target's vocabulary, which proposals are made for.
    """

    def __init__(
        self, model: DraftModel, rule: StoppingRule, draws: Draws, num_tokens: int
    ) -> None:
        self._model = model
        self._rule = rule
        self._draws = draws
        self._num_tokens = num_tokens
        self._rates = RankRates()
        self._random = np.random.default_rng(draws.seed)

    def draft(self, cache: BranchCache, tokens: TokenIds, bounds: Bounds) -> ModelDraft:
        """Draft behind a sequence, int32[n], whose cache it is."""
        plan, passes = self._planned(bounds)
        filling = _Filling(plan, self._random)
        filling.take([ROOT], self._draws.distributions(cache.catch_up(tokens)), self._model.columns)
        num_passes = 1
        for planned in passes:
            nodes = filling.to_expand(planned)
            if nodes:
                start = time.perf_counter()
                logits = cache.expand(*filling.edges(nodes))
                filling.take(nodes, self._draws.distributions(logits), self._model.columns)
                self._rule.measured.record_pass(time.perf_counter() - start)
                num_passes += 1
        tree = filling.tree(self._proposals(filling.distributions))
        return ModelDraft(tree, tree.probabilities.astype(np.float64), num_passes)

    def learn(self, draft: ModelDraft, outcome: Outcome) -> None:  # noqa: ARG002  as others need it
        """Take in what became of a draft."""
        self._rates.learn(outcome)

    def _planned(self, bounds: Bounds) -> tuple[Frontier, list[list[int]]]:
        """Return the best shape by what is known of draws, and the passes that it takes.

        Its nodes carry the rank of their draw for a token.
        """
        rates = self._rates.rates()
        ranks = np.flatnonzero(rates > 0).astype(np.int32)
        children = Children(ranks, np.log(rates[ranks]))
        plan = bounds.frontier()
        plan.expand([ROOT], [children])
        passes = grow(
            plan,
            lambda nodes: [children] * len(nodes),
            bounds.width,
            bounds.max_passes,
            lambda log_probabilities: self._rule.is_worthwhile(np.exp(log_probabilities)),
        )
        return plan, passes

    def _proposals(self, distributions: list[torch.Tensor]) -> torch.Tensor:
        """Return float32[rows, vocabulary]: zero for tokens that the model cannot draft."""
        drawn = torch.stack(distributions)
        proposals = drawn.new_zeros(len(drawn), self._num_tokens)
        proposals[:, torch.from_numpy(self._model.columns.astype(np.int64)).to(drawn.device)] = (
            drawn
        )
        return proposals


class _Filling:
    """Puts drawn tokens into a planned shape."""

    def __init__(self, plan: Frontier, random: np.random.Generator) -> None:
        self._plan = plan
        self._random = random
        self._children: dict[int, list[int]] = {}
        for node in plan.kept.tolist():
            self._children.setdefault(plan.parents[node], []).append(node)
        self._tokens: dict[int, int] = {}
        self._read: dict[int, int] = {ROOT: ROOT}
        self._rows: dict[int, int] = {}
        self.distributions: list[torch.Tensor] = []

    def to_expand(self, planned: list[int]) -> list[int]:
        """Return those of planned nodes that have a token, and a child in the plan."""
        return [node for node in planned if node in self._tokens and node in self._children]

    def edges(self, nodes: list[int]) -> tuple[list[int], list[int]]:
        """Return the tokens of nodes that are to be read, and the rows of their parents."""
        parents = [self._read[self._plan.parents[node]] for node in nodes]
        for node in nodes:
            self._read[node] = len(self._read) - 1
        return [self._tokens[node] for node in nodes], parents

    def take(
        self, nodes: list[int], distributions: torch.Tensor, columns: NDArray[np.int32]
    ) -> None:
        """Draw the children of nodes from distributions [n, C] over tokens int32[C]."""
        for node, distribution in zip(nodes, distributions.cpu(), strict=True):
            children = self._children.get(node, [])
            drawn = drawn_below(distribution, len(children), self._random)
            for child, column in zip(children, drawn, strict=False):
                self._tokens[child] = int(columns[column])
                self._rows[child] = len(self.distributions)
            self.distributions.append(distribution)

    def tree(self, proposals: torch.Tensor) -> SampledTree:
        """Return the planned nodes that have a token."""
        nodes = [node for node in self._plan.kept.tolist() if node in self._tokens]
        places = {ROOT: ROOT} | {node: place for place, node in enumerate(nodes)}
        shape = DraftTree(
            np.array([self._tokens[node] for node in nodes], np.int32),
            np.array([places[self._plan.parents[node]] for node in nodes], np.int32),
            np.exp(self._plan.log_probabilities(nodes)).astype(np.float32),
            np.full(len(nodes), Source.MODEL, np.uint8),
        )
        rows = np.array([self._rows[node] for node in nodes], np.int32)
        return SampledTree(
            shape.token_ids, shape.parents, shape.probabilities, shape.sources, proposals, rows
        )
