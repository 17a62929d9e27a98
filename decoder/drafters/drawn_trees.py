"""Draft trees whose tokens are drawn at random from a draft model's distributions.

Verification then uses those distributions (multi-candidate rejection), which accepts more under
sampling. The shape of a tree is fixed before its first token is drawn, from how often the first,
second, ... draw below a node was kept lately and from nothing else (the best tree of a given size:
Sequoia, Chen et al., 2024, arXiv:2402.12374). So no token influences where it stands in the tree,
and verification stays exact.

Certain nodes, such as retrieved ones, take part in the plan by probabilities that no draw has
changed. Below a node that has certain children in the plan, tokens are drawn from what those leave
of the distribution, and that is the proposal that verification is told: so a token is never both,
no draw is spent on a token that is there already, and no draw is dropped for its value.
"""

import time
from dataclasses import dataclass
from typing import Final

import numpy as np
import torch
from numpy.typing import NDArray
from transformers import (
    LogitsProcessorList,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from decoder.drafters.draft_model import BranchCache, DraftModel
from decoder.drafters.model_trees import (
    Bounds,
    Children,
    Frontier,
    JudgedDraft,
    ModelDraft,
    StoppingRule,
    grow,
)
from decoder.errors import ContradictoryOptionsError
from decoder.sampling.verification import CERTAIN, SampledTree
from retriever.drafter import TokenIds
from retriever.tree import ROOT, DraftTree, Source

MAX_SIBLINGS: Final = 8
"""Most draws below one node. Each later one is kept less often: with the prior below, the eighth in
0.1% of nodes, so more would take room in the tree and gain hardly anything."""

_DECAY: Final = 0.99
"""Some hundred nodes with a draw of that rank: a share of 0.5 is known to ±0.05."""

_PRIOR_SHARE: Final = 0.6
"""Share of nodes at which a draw is kept, of those that reach it, until outcomes are learned: a
guess between a model that draws as the target does (1) and one that knows little of it."""

_LEAST_LEFT: Final = 1e-3
"""Least share that certain nodes leave to draws: their probabilities are estimates."""

_PRIOR_WEIGHT: Final = 2.0
"""Nodes that the guess counts for: a handful of outcomes outweighs it."""


@dataclass(frozen=True, slots=True)
class Draws:
    """How drafts are drawn; settings equal to the target's sampling are accepted most often.

    Attributes:
        temperature: logits are divided by it; more than zero.
        top_k: only the so many most probable tokens are drawn; `None` for all.
        top_p: only the most probable tokens that make up this probability; 1 for all.
        seed: of the draws, which are never those of the target's sampling.

    Raises:
        ContradictoryOptionsError: nothing can be drawn with a setting.
    """

    temperature: float = 1.0
    top_k: int | None = None
    top_p: float = 1.0
    seed: int = 0

    def __post_init__(self) -> None:
        if not self.temperature > 0:
            raise ContradictoryOptionsError(
                f"drafts cannot be drawn at temperature {self.temperature}: give more than 0, "
                "or draft without drawing"
            )
        if (self.top_k is not None and self.top_k < 1) or not 0 < self.top_p <= 1:
            raise ContradictoryOptionsError(
                f"top_k {self.top_k} and top_p {self.top_p} leave no token to draw"
            )

    def distributions(self, logits: torch.Tensor) -> torch.Tensor:
        """Return float32[rows, C], the distributions to draw from; each row sums to one."""
        warpers = LogitsProcessorList([TemperatureLogitsWarper(self.temperature)])
        if self.top_k is not None:
            warpers.append(TopKLogitsWarper(self.top_k))
        if self.top_p < 1:
            warpers.append(TopPLogitsWarper(self.top_p))
        no_tokens = torch.empty(len(logits), 0, dtype=torch.int64, device=logits.device)
        scores: torch.Tensor = warpers(no_tokens, logits.float())  # type: ignore[arg-type]  # any integers
        return torch.softmax(scores, dim=-1)


class RankRates:
    """How often the first, second, ... draw below a node that was kept is kept itself.

    Fading shares, which begin with a geometric prior.
    """

    def __init__(self) -> None:
        self._kept = _PRIOR_WEIGHT * _PRIOR_SHARE * (1 - _PRIOR_SHARE) ** np.arange(MAX_SIBLINGS)
        self._drawn = np.full(MAX_SIBLINGS, _PRIOR_WEIGHT)

    def rates(self) -> NDArray[np.float64]:
        """Return float64[8], shares by rank; they fall and lie between 0 and 1."""
        return np.minimum.accumulate(np.minimum(self._kept / self._drawn, 1.0))

    def learn(self, outcome: JudgedDraft) -> None:
        """Learn which draws of a tree were kept, of the share that certain siblings left."""
        path = set(outcome.path.tolist())
        tree = outcome.tree
        is_drawn = (
            tree.rows != CERTAIN if isinstance(tree, SampledTree) else np.ones(len(tree), bool)
        )
        left = shares_left(tree, ~is_drawn)
        for parent in outcome.decided_parents():
            children = np.flatnonzero((tree.parents == parent) & is_drawn)[:MAX_SIBLINGS].tolist()
            self._kept[: len(children)] *= _DECAY
            self._drawn[: len(children)] *= _DECAY
            self._drawn[: len(children)] += left[parent]
            for rank, child in enumerate(children):
                self._kept[rank] += child in path


def shares_left(tree: DraftTree, is_certain: NDArray[np.bool_]) -> NDArray[np.float64]:
    """Return float64[N + 1], the share of each node that its certain children leave; root last."""
    left = np.ones(len(tree) + 1)
    above = np.append(tree.probabilities, 1.0).astype(np.float64)
    for node in np.flatnonzero(is_certain).tolist():
        parent = tree.parents[node]
        left[parent] -= above[node] / max(above[parent], _LEAST_LEFT)
    return np.maximum(left, _LEAST_LEFT)


def drawn_below(distribution: torch.Tensor, count: int, random: np.random.Generator) -> list[int]:
    """Draw tokens one after the other, each from what the earlier ones left.

    Args:
        distribution: float32[C], not negative.
        count: of draws; fewer where no more tokens have a probability.
        random: generator of random numbers.

    Returns:
        Columns in the order in which they were drawn.
    """
    left = distribution.double().numpy().copy()
    columns: list[int] = []
    for point in random.random(count).tolist():
        ends = np.cumsum(left)
        column = int(np.searchsorted(ends, point * ends[-1], side="right"))
        if column == len(ends):
            break  # nothing is left
        columns.append(column)
        left[column] = 0.0
    return columns


class Plan(Frontier):
    """The shape of a tree before anything is drawn: certain nodes, and places for draws.

    Certain nodes have the numbers that they have in their tree. In place of a token, the others
    carry the rank of their draw.

    Args:
        certain: nodes whose tokens are known.
        readable: bool[N], which of them can be read.
        max_nodes: most nodes that are kept.
        min_log_probability: of a path; less probable nodes are never kept.
        max_depth: nodes as deep as this are not read; `None` for no limit.
    """

    def __init__(
        self,
        certain: DraftTree,
        readable: NDArray[np.bool_],
        max_nodes: int,
        min_log_probability: float = -np.inf,
        max_depth: int | None = None,
    ) -> None:
        super().__init__(max_nodes, min_log_probability, max_depth)
        self.num_certain = len(certain)
        self.shares_left = shares_left(certain, np.ones(len(certain), np.bool_))
        with np.errstate(divide="ignore"):
            self.plant(certain, np.log(certain.probabilities.astype(np.float64)), readable)

    def children(self, nodes: list[int], rates: NDArray[np.float64]) -> list[Children]:
        """Return the places for draws below nodes, or the root, by the rates of ranks."""
        ranks = np.flatnonzero(rates > 0).astype(np.int32)
        below = []
        for node in nodes:
            left = self.shares_left[node] if node < self.num_certain else 1.0
            below.append(Children(ranks, np.log(rates[ranks] * left)))
        return below


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
        filling = Filling(plan, self._random)
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
        tree = filling.tree(self._model.columns, self._num_tokens)
        return ModelDraft(tree, tree.probabilities.astype(np.float64), num_passes)

    def learn(self, draft: ModelDraft, outcome: JudgedDraft) -> None:  # noqa: ARG002  as others need it
        """Learn from the outcome of a draft."""
        self._rates.learn(outcome)

    def _planned(self, bounds: Bounds) -> tuple[Frontier, list[list[int]]]:
        """Return the best shape by the rates of draws, and the nodes of each pass.

        In place of a token, its nodes carry the rank of their draw.
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


class Filling:
    """Puts drawn tokens into a planned shape.

    Args:
        plan: the shape.
        random: generator of random numbers.
        certain: the nodes that have tokens already, the first ones of the plan.
        source: that drawn nodes are labelled with.
    """

    def __init__(
        self,
        plan: Frontier,
        random: np.random.Generator,
        certain: DraftTree | None = None,
        source: Source = Source.MODEL,
    ) -> None:
        certain = DraftTree.empty() if certain is None else certain
        self._plan = plan
        self._random = random
        self._source = source
        self._sources = certain.sources
        self._tokens: dict[int, int] = dict(enumerate(certain.token_ids.tolist()))
        self._children: dict[int, list[int]] = {}
        self._named: dict[int, list[int]] = {}
        self._to_read = {ROOT}
        for node in plan.kept.tolist():
            parent = plan.parents[node]
            if node in self._tokens:
                self._named.setdefault(parent, []).append(self._tokens[node])
            else:
                self._children.setdefault(parent, []).append(node)
                self._note_path(parent)
        self._read: dict[int, int] = {ROOT: ROOT}
        self._rows: dict[int, int] = {}
        self._distributions: list[torch.Tensor] = []

    def to_expand(self, planned: list[int]) -> list[int]:
        """Return those of planned nodes that have a token, and a draw below in the plan."""
        return [node for node in planned if node in self._tokens and node in self._to_read]

    def edges(self, nodes: list[int]) -> tuple[list[int], list[int]]:
        """Return the tokens of nodes that are to be read, and the rows of their parents."""
        parents = [self._read[self._plan.parents[node]] for node in nodes]
        for node in nodes:
            self._read[node] = len(self._read) - 1
        return [self._tokens[node] for node in nodes], parents

    def take(
        self, nodes: list[int], distributions: torch.Tensor, columns: NDArray[np.int32]
    ) -> None:
        """Draw the children of nodes from distributions [n, C] over tokens int32[C], rising."""
        for node, distribution in zip(nodes, distributions.cpu(), strict=True):
            children = self._children.get(node, [])
            left = _without_named(distribution, columns, self._named.get(node, []))
            drawn = drawn_below(left, len(children), self._random)
            for child, column in zip(children, drawn, strict=False):
                self._tokens[child] = int(columns[column])
                self._rows[child] = len(self._distributions)
            if drawn:
                self._distributions.append(left)

    def tree(self, columns: NDArray[np.int32], num_tokens: int) -> SampledTree:
        """Return the planned nodes that have a token, with proposals over so many tokens."""
        nodes = [node for node in self._plan.kept.tolist() if node in self._tokens]
        places = {ROOT: ROOT} | {node: place for place, node in enumerate(nodes)}
        sources = [
            int(self._source) if node in self._rows else int(self._sources[node]) for node in nodes
        ]
        return SampledTree(
            np.array([self._tokens[node] for node in nodes], np.int32),
            np.array([places[self._plan.parents[node]] for node in nodes], np.int32),
            np.exp(self._plan.log_probabilities(nodes)).astype(np.float32),
            np.array(sources, np.uint8),
            self._proposals(columns, num_tokens),
            np.array([self._rows.get(node, CERTAIN) for node in nodes], np.int32),
        )

    def _note_path(self, node: int) -> None:
        """Note that a node and all above it are to be read."""
        while node not in self._to_read:
            self._to_read.add(node)
            node = self._plan.parents[node]

    def _proposals(self, columns: NDArray[np.int32], num_tokens: int) -> torch.Tensor:
        """Return float32[rows, num_tokens]: zero for tokens that the model cannot draft."""
        proposals = torch.zeros(len(self._distributions), num_tokens)
        if self._distributions:
            proposals[:, torch.from_numpy(columns.astype(np.int64))] = torch.stack(
                self._distributions
            )
        return proposals


def _without_named(
    distribution: torch.Tensor, columns: NDArray[np.int32], named: list[int]
) -> torch.Tensor:
    """Return float32[C], what certain siblings leave of a distribution, normalised.

    Zero everywhere where they leave nothing.
    """
    if not named:
        return distribution
    left = distribution.clone()
    left[torch.from_numpy(np.isin(columns, named))] = 0.0
    mass = float(left.double().sum())
    return left / mass if mass > 0 else left
