"""Drafts for sampled output: sampled tokens added to trees of retrieved tokens.

Verification uses the distributions from which the draft tokens were sampled (multi-candidate
rejection), which accepts more tokens if the output is sampled. The shape of a tree is fixed before
its first token is sampled. It depends only on how often the first, second, ... sample below a node
was accepted recently (the best tree of a given size: Sequoia, Chen et al., 2024, arXiv:2402.12374).
So no token influences its own place in the tree, and verification stays exact.

The shape grows best-first: it holds the most probable paths known so far. Each pass of the model
expands the most probable nodes below which there may be more such paths (SpecExec, Svirschevski et
al., 2024, arXiv:2406.02532). A pass expands several nodes, as in EAGLE-2 (Li et al., 2024,
arXiv:2406.16858).

Nodes that are not sampled, such as retrieved ones, are called certain. They are planned with
probabilities that no sample has influenced. Below a node with certain children, tokens are sampled
from the distribution without those children, and verification gets that distribution as the
proposal. So no token is both certain and sampled, and no sample is wasted or dropped because of its
value.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice
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

from decoder.drafters.asking import AskedDraft, StepCosts
from decoder.drafters.following import Verified
from decoder.drafters.fusion import MAX_PASSES, WIDTH, FusedDrafter, FusedSequence
from decoder.drafters.kernels.readings import ROOT_ROW
from decoder.drafters.kernels.siblings import Hints
from decoder.drafters.readers import ReadTree, TreeReader
from decoder.drafters.recycling import RecycledLogits
from decoder.errors import ContradictoryOptionsError
from decoder.sampling.verification import CERTAIN, SampledTree
from retriever.drafter import Drafter, TokenIds
from retriever.follower import DraftLimits
from retriever.tree import ROOT, DraftTree

MAX_SIBLINGS: Final = 8
"""Most tokens sampled below one node. Each further sample is accepted less often; with the prior,
samples after the eighth are accepted at 0.1% of nodes. So more samples would fill the tree and gain
hardly anything."""

_DECAY: Final = 0.99
"""Averages over about 100 nodes with a sample of the same rank, so that a share of 0.5 is known to
±0.05."""

_PRIOR_SHARE: Final = 0.6
"""Prior share of accepted samples among those that the target reaches. It is a guess: a model that
samples exactly as the target does has a share of 1, a poor model has less."""

_LEAST_LEFT: Final = 1e-3
"""Least share of probability that certain nodes leave to samples, because their probabilities are
only estimates."""

_PRIOR_WEIGHT: Final = 2.0
"""Weight of the prior, as a number of nodes: a few observed nodes outweigh it."""


@dataclass(frozen=True, slots=True)
class Draws:
    """How draft tokens are sampled; acceptance is highest with the output's own settings.

    Attributes:
        temperature: divisor of the logits; more than zero.
        top_k: sample only from this many most probable tokens; `None` for all.
        top_p: sample only from the most probable tokens that make up this probability; 1 for all.
        seed: seed of the draft tokens, which are sampled independently of the output.

    Raises:
        ContradictoryOptionsError: the settings leave no token to sample.
    """

    temperature: float = 1.0
    top_k: int | None = None
    top_p: float = 1.0
    seed: int = 0

    def __post_init__(self) -> None:
        if not self.temperature > 0:
            raise ContradictoryOptionsError(
                f"drafts cannot be sampled at temperature {self.temperature}: give more than 0, "
                "or draft without sampling"
            )
        if (self.top_k is not None and self.top_k < 1) or not 0 < self.top_p <= 1:
            raise ContradictoryOptionsError(
                f"top_k {self.top_k} and top_p {self.top_p} leave no token to sample"
            )

    def distributions(self, logits: torch.Tensor) -> torch.Tensor:
        """Return float32[rows, C], the distributions to sample from; each row sums to 1."""
        warpers = LogitsProcessorList([TemperatureLogitsWarper(self.temperature)])
        if self.top_k is not None:
            warpers.append(TopKLogitsWarper(self.top_k))
        if self.top_p < 1:
            warpers.append(TopPLogitsWarper(self.top_p))
        no_tokens = torch.empty(len(logits), 0, dtype=torch.int64, device=logits.device)
        scores: torch.Tensor = warpers(no_tokens, logits.float())  # type: ignore[arg-type]  # any integers
        return torch.softmax(scores, dim=-1)


class RankRates:
    """How often the first, second, ... sample below an accepted node is accepted itself.

    The shares decay exponentially and start from a geometric prior.
    """

    def __init__(self) -> None:
        self._kept = _PRIOR_WEIGHT * _PRIOR_SHARE * (1 - _PRIOR_SHARE) ** np.arange(MAX_SIBLINGS)
        self._drawn = np.full(MAX_SIBLINGS, _PRIOR_WEIGHT)

    def rates(self) -> NDArray[np.float64]:
        """Return float64[8], the share of accepted samples by rank, descending, from 1 to 0."""
        return np.minimum.accumulate(np.minimum(self._kept / self._drawn, 1.0))

    def learn(self, tree: DraftTree, committed: TokenIds) -> None:
        """Learn which samples were accepted, relative to the share that certain siblings leave.

        Args:
            tree: the verified tree with sampled tokens.
            committed: int32[n], the tokens committed after the draft, n at least 1.
        """
        path = tree.follow(committed).tolist()
        is_drawn = (
            tree.rows != CERTAIN if isinstance(tree, SampledTree) else np.ones(len(tree), bool)
        )
        left = shares_left(tree, ~is_drawn)
        for parent in [ROOT, *path][: len(committed)]:  # beyond, the next token is unknown
            children = np.flatnonzero((tree.parents == parent) & is_drawn)[:MAX_SIBLINGS].tolist()
            self._kept[: len(children)] *= _DECAY
            self._drawn[: len(children)] *= _DECAY
            self._drawn[: len(children)] += left[parent]
            for rank, child in enumerate(children):
                self._kept[rank] += child in path


def shares_left(tree: DraftTree, is_certain: NDArray[np.bool_]) -> NDArray[np.float64]:
    """Return float64[N + 1], each node's share that its certain children leave; root last."""
    left = np.ones(len(tree) + 1)
    above = np.append(tree.probabilities, 1.0).astype(np.float64)
    for node in np.flatnonzero(is_certain).tolist():
        parent = tree.parents[node]
        left[parent] -= above[node] / max(above[parent], _LEAST_LEFT)
    return np.maximum(left, _LEAST_LEFT)


def drawn_below(distribution: torch.Tensor, count: int, random: np.random.Generator) -> list[int]:
    """Sample tokens one after another without replacement.

    Args:
        distribution: float32[C], non-negative probabilities of the columns.
        count: number of tokens to sample; fewer if no more tokens have a probability.
        random: generator of random numbers.

    Returns:
        Columns in the order in which they were sampled.
    """
    left = distribution.double().numpy().copy()
    columns: list[int] = []
    for point in random.random(count).tolist():
        ends = np.cumsum(left)
        column = int(np.searchsorted(ends, point * ends[-1], side="right"))
        if column == len(ends):
            break  # no probability left
        columns.append(column)
        left[column] = 0.0
    return columns


Children = tuple[TokenIds, NDArray[np.float64]]
"""Candidates for the children of one node: int32[n], their tokens, and float64[n], their
log-probabilities given the node, in descending order."""


class Frontier:
    """The most probable nodes known so far, and which of these were expanded.

    Nodes are numbered in the order in which they are added, so parents precede children.

    Args:
        max_nodes: most nodes that the tree keeps.
        min_log_probability: least log-probability of a path; less probable nodes are not added.
        max_depth: nodes at this depth are not expanded; `None` for no limit.

    Attributes:
        tokens: token id of each node.
        parents: number of each node's parent, or `ROOT`.
        rows: row of the root and of each expanded node, in the order of expansion.
        kept: numbers of the nodes in the tree, by descending probability.
    """

    def __init__(
        self, max_nodes: int, min_log_probability: float = -np.inf, max_depth: int | None = None
    ) -> None:
        self._max_nodes = max_nodes
        self._min_log_probability = min_log_probability
        self._max_depth = max_depth
        self.tokens: list[int] = []
        self.parents: list[int] = []
        self.rows = {ROOT: ROOT}
        self.kept: list[int] = []
        self._depths: list[int] = []
        self._log_probabilities: list[float] = []
        self._is_expandable: list[bool] = []

    def log_probabilities(self, nodes: list[int]) -> NDArray[np.float64]:
        """Return float64[n], the log-probabilities of the paths to nodes."""
        return np.array([self._log_probabilities[node] for node in nodes], np.float64)

    def worth_expanding(self, width: int) -> list[int]:
        """Return the most probable nodes, at most `width`, whose children may still enter the tree.

        No node is more probable than its parent, so children of a full tree's last node cannot
        enter.
        """
        is_full = 0 < len(self.kept) == self._max_nodes
        least = self._log_probabilities[self.kept[-1]] if is_full else -np.inf
        found = (
            node
            for node in self.kept
            if self._log_probabilities[node] > least and self._can_be_expanded(node)
        )
        return list(islice(found, width))

    def plant(self, tree: DraftTree, readable: NDArray[np.bool_]) -> None:
        """Add the nodes of a tree before any other nodes; they keep their numbers.

        Args:
            tree: N nodes, the most probable first.
            readable: bool[N], which nodes may be expanded after their parents.
        """
        with np.errstate(divide="ignore"):
            logarithms = np.log(tree.probabilities.astype(np.float64)).tolist()
        parents, depths = tree.parents.tolist(), tree.depths().tolist()
        nodes = zip(parents, tree.token_ids.tolist(), logarithms, depths, strict=True)
        for node, is_readable in zip(nodes, readable.tolist(), strict=True):
            self._add(*node, is_expandable=is_readable)
        self._keep(range(min(len(tree), self._max_nodes)))

    def expand(self, nodes: list[int], children: list[Children]) -> None:
        """Add children below nodes, or below the sequence itself (`ROOT`)."""
        num_known = len(self.tokens)
        for node, (tokens, log_probabilities) in zip(nodes, children, strict=True):
            above, depth = 0.0, 1
            if node != ROOT:
                above, depth = self._log_probabilities[node], self._depths[node] + 1
                self.rows[node] = len(self.rows) - 1
            for token, logarithm in zip(tokens.tolist(), log_probabilities.tolist(), strict=True):
                self._add(node, token, above + logarithm, depth, is_expandable=True)
        self._keep([*self.kept, *range(num_known, len(self.tokens))])

    def _can_be_expanded(self, node: int) -> bool:
        is_below_expanded = self.parents[node] in self.rows
        return is_below_expanded and self._is_expandable[node] and node not in self.rows

    def _add(
        self, parent: int, token: int, log_probability: float, depth: int, *, is_expandable: bool
    ) -> None:
        self.tokens.append(token)
        self.parents.append(parent)
        self._depths.append(depth)
        self._log_probabilities.append(log_probability)
        is_shallow = self._max_depth is None or depth < self._max_depth
        self._is_expandable.append(is_expandable and is_shallow)

    def _keep(self, candidates: Sequence[int]) -> None:
        """Keep the most probable nodes; among equally probable nodes, keep the first."""
        values = self._log_probabilities
        probable = [node for node in candidates if values[node] >= self._min_log_probability]
        self.kept = sorted(probable, key=values.__getitem__, reverse=True)[: self._max_nodes]


class Filling:
    """Samples tokens for the free places of a planned tree, which also has certain nodes.

    Args:
        plan: the planned tree. A free place has the rank of its sample instead of a token.
        certain: the first nodes of the plan, which already have tokens.
        reader: the drafting model to sample the other tokens from.
        random: generator of random numbers.
    """

    def __init__(
        self, plan: Frontier, certain: DraftTree, reader: TreeReader, random: np.random.Generator
    ) -> None:
        self._plan = plan
        self._reader = reader
        self._random = random
        self._sources: dict[int, int] = dict(enumerate(certain.sources.tolist()))
        self._tokens: dict[int, int] = dict(enumerate(certain.token_ids.tolist()))
        self._children: dict[int, list[int]] = {}
        self._named: dict[int, list[int]] = {}
        self._to_read = {ROOT}
        for node in plan.kept:
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
        """Return those planned nodes that have a token and free places below them."""
        return [node for node in planned if node in self._tokens and node in self._to_read]

    def edges(self, nodes: list[int]) -> tuple[list[int], list[int]]:
        """Return the tokens of the nodes to read, and the rows of their parents."""
        parents = [self._read[self._plan.parents[node]] for node in nodes]
        for node in nodes:
            self._read[node] = len(self._read) - 1
        return [self._tokens[node] for node in nodes], parents

    def take(self, nodes: list[int], distributions: torch.Tensor) -> None:
        """Sample the children of n nodes from distributions [n, C] over the model's columns."""
        columns = self._reader.columns
        for node, distribution in zip(nodes, distributions.cpu(), strict=True):
            children = self._children.get(node, [])
            left = _without_named(distribution, columns, self._named.get(node, []))
            drawn = drawn_below(left, len(children), self._random)
            for child, column in zip(children, drawn, strict=False):
                self._tokens[child] = int(columns[column])
                self._sources[child] = int(self._reader.source)
                self._rows[child] = len(self._distributions)
            if drawn:
                self._distributions.append(left)

    def tree(self, num_tokens: int) -> SampledTree:
        """Return the planned nodes that have a token, with proposals [rows, num_tokens]."""
        nodes = [node for node in self._plan.kept if node in self._tokens]
        places = {ROOT: ROOT} | {node: place for place, node in enumerate(nodes)}
        return SampledTree(
            np.array([self._tokens[node] for node in nodes], np.int32),
            np.array([places[self._plan.parents[node]] for node in nodes], np.int32),
            np.exp(self._plan.log_probabilities(nodes)).astype(np.float32),
            np.array([self._sources[node] for node in nodes], np.uint8),
            self._proposals(num_tokens),
            np.array([self._rows.get(node, CERTAIN) for node in nodes], np.int32),
        )

    def _note_path(self, node: int) -> None:
        """Mark a node and its ancestors for reading."""
        while node not in self._to_read:
            self._to_read.add(node)
            node = self._plan.parents[node]

    def _proposals(self, num_tokens: int) -> torch.Tensor:
        """Return float32[rows, num_tokens], the proposals; zero for tokens that the model lacks."""
        proposals = torch.zeros(len(self._distributions), num_tokens)
        if self._distributions:
            columns = torch.from_numpy(self._reader.columns.astype(np.int64))
            proposals[:, columns] = torch.stack(self._distributions)
        return proposals


def _without_named(
    distribution: torch.Tensor, columns: NDArray[np.int32], named: list[int]
) -> torch.Tensor:
    """Return float32[C], a distribution normalised without the certain siblings' tokens.

    It is zero everywhere if the siblings leave no probability.
    """
    if not named:
        return distribution
    left = distribution.clone()
    left[torch.from_numpy(np.isin(columns, named))] = 0.0
    mass = float(left.double().sum())
    return left / mass if mass > 0 else left


class DrawnFusion(FusedDrafter):
    """Adds tokens sampled from a model to retrieved trees; a `Drafter` that learns from passes.

    A draft is a `SampledTree`. Its shape is planned before any token is sampled. The plan uses the
    tree of the fast drafters and recycled logits, which does not depend on samples. It also uses
    how often the first, second, ... sample below a node was accepted recently. Then tokens are
    sampled for the free places, one pass of the model at a time (`Filling`). So a node's place
    never depends on its own token. That is why multi-candidate rejection preserves the target's
    distribution (`decoder.sampling.choice.Rejection`), in the whole tree and in each of its
    prefixes.

    Of several drafting models, the first that is expected to pay off provides the samples; it is
    chosen before its pass.

    Args:
        drafters: drafters that answer in microseconds, such as retrieval.
        limits: vocabulary sizes of the target and the drafters.
        readers: drafting models to sample from, the fastest first.
        draws: how to sample; acceptance is highest with the output's own settings.
        recycled: likely tokens from earlier passes of the target; `None` for none.
        costs: seconds of the target's and the drafting models' passes; measured if not given.

    Raises:
        VocabularyMismatchError: a drafting model proposes tokens that the target lacks.
    """

    _asks_all = False

    def __init__(  # noqa: PLR0913  as `FusedDrafter`, and how to sample
        self,
        drafters: Sequence[Drafter],
        limits: DraftLimits,
        *,
        readers: Sequence[TreeReader],
        draws: Draws,
        recycled: RecycledLogits | None = None,
        costs: StepCosts | None = None,
    ) -> None:
        super().__init__(drafters, limits, readers=readers, recycled=recycled, costs=costs)
        self._draws = draws
        self._rates = [RankRates() for _ in readers]
        self._random = np.random.default_rng(draws.seed)
        self._num_tokens = limits.model_vocabulary or 1 + max(
            (int(reader.columns.max()) for reader in readers), default=0
        )

    def take_in(self, sequence: FusedSequence, verified: Verified) -> Hints:
        """Learn from a pass, including how often samples of each rank are accepted."""
        if sequence.has_drafted and sequence.asked and len(verified.tree):
            came = np.append(verified.tree.token_ids[verified.path], verified.next_token)
            self._rates[sequence.asked[0].number].learn(verified.tree, came.astype(np.int32))
        return super().take_in(sequence, verified)

    def _read(
        self, sequence: FusedSequence, asked: AskedDraft, budget_nodes: int, floor: float
    ) -> SampledTree:
        """Return a tree of certain and sampled nodes."""
        read, number = sequence.read, asked.number
        plan, passes = self._planned(asked, budget_nodes, floor)
        filling = Filling(plan, asked.tree, self._readers.all[number], self._random)
        filling.take([ROOT], self._distributions(read, number, ROOT_ROW, 1))
        asked.note_pass()
        for planned in passes:
            nodes = filling.to_expand(planned)
            if not nodes:
                continue
            first, (tokens, parents) = int(read.num_rows[number]), filling.edges(nodes)
            if not read.read(number, np.array(tokens, np.int32), np.array(parents, np.int32) + 1):
                break
            filling.take(nodes, self._distributions(read, number, first, len(nodes)))
            reach = float(np.exp(plan.log_probabilities(nodes)).sum())
            self._readers.rules[number].record_pass(asked.note_pass(reach))
        read.drop()  # weights learn from the certain tree, which no model extended
        return filling.tree(self._num_tokens)

    def _planned(
        self, asked: AskedDraft, budget_nodes: int, floor: float
    ) -> tuple[Frontier, list[list[int]]]:
        """Return the best shape before any token is sampled, and the nodes of each pass."""
        rule, certain = self._readers.rules[asked.number], asked.tree
        rates = self._rates[asked.number].rates()
        ranks = np.flatnonzero(rates > 0).astype(np.int32)
        left = shares_left(certain, np.ones(len(certain), np.bool_))

        def draws_below(nodes: list[int]) -> list[Children]:
            shares = [left[node] if node < len(certain) else 1.0 for node in nodes]
            return [(ranks, np.log(rates[ranks] * share)) for share in shares]

        max_depth = self._readers.all[asked.number].max_depth
        plan = Frontier(budget_nodes, float(np.log(floor)), max_depth)
        plan.plant(certain, self._known_paths(len(certain)))
        plan.expand([ROOT], draws_below([ROOT]))
        passes: list[list[int]] = []
        while len(passes) < MAX_PASSES and (nodes := plan.worth_expanding(WIDTH)):
            if not rule.is_worthwhile(float(np.exp(plan.log_probabilities(nodes)).sum())):
                break
            plan.expand(nodes, draws_below(nodes))
            passes.append(nodes)
        return plan, passes

    def _distributions(self, read: ReadTree, number: int, first: int, count: int) -> torch.Tensor:
        """Return float32[count, C], the distributions to sample from, for a model's rows."""
        width = len(self._readers.all[number].columns)
        rows = read.readings.logits[number, first : first + count, :width]
        return self._draws.distributions(torch.from_numpy(rows))
