"""The most probable continuations by a draft model, as a tree that grows as long as that pays.

A tree grows best first: it holds the most probable paths known so far, and each pass of the model
expands the most probable nodes below which there may be more of them (SpecExec, Svirschevski et
al., 2024, arXiv:2406.02532), several nodes in a pass as in EAGLE-2 (Li et al., 2024,
arXiv:2406.16858).

It stops where another pass is expected to bring fewer tokens than its time is worth. SpecDec++
(Huang et al., 2024, arXiv:2405.19715) shows that the best rule stops where the probability of an
accepted token falls below a threshold. Here the threshold is measured: the time of a draft pass, in
tokens at the pace of decoding.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final, Protocol, Self

import numpy as np
import torch
from numpy.typing import NDArray

from decoder.budget.calibration import Calibration
from decoder.budget.payoff import FadingRatio, Payoff, RecentMedian
from decoder.drafters.asking import StepCosts
from decoder.drafters.draft_model import BranchCache, DraftModel
from retriever.drafter import TokenIds
from retriever.tree import ROOT, DraftTree, Source


@dataclass(frozen=True, slots=True, eq=False)
class JudgedDraft:
    """A draft compared with the tokens committed after it, verified or not.

    Attributes:
        tree: the draft, N nodes.
        num_committed: tokens committed after it, at least one.
        path: int64[k], the nodes that came true.
        is_known: bool[N], false for nodes deeper than what was committed that may come true yet.
    """

    tree: DraftTree
    num_committed: int
    path: NDArray[np.int64]
    is_known: NDArray[np.bool_]

    @classmethod
    def of(cls, tree: DraftTree, committed: TokenIds) -> Self:
        """Compare a draft with the tokens committed after it, int32[n], at least one."""
        path = tree.follow(committed)
        is_known = np.ones(len(tree), np.bool_)
        if len(path) == len(committed):
            below = {int(path[-1])}
            for node in range(int(path[-1]) + 1, len(tree)):
                if int(tree.parents[node]) in below:
                    below.add(node)
                    is_known[node] = False
        return cls(tree, len(committed), path, is_known)

    def came_true(self) -> NDArray[np.bool_]:
        """Return bool[N], which nodes are on the path."""
        came_true = np.zeros(len(self.tree), np.bool_)
        came_true[self.path] = True
        return came_true

    def decided_parents(self) -> list[int]:
        """Return the root and the nodes on the path whose next token is known."""
        return [ROOT, *self.path.tolist()][: self.num_committed]


_RECENT: Final = 15
"""Steps and passes whose median time counts. A draft takes one to nine passes, so this spans a few
drafts; seven pauses of the machine change nothing."""

_DECAY: Final = 0.95
"""Gains are those of some twenty drafts. In simulated decoding 0.9 loses 4% with a model that is
always useful and barely pays, and 0.98 keeps asking one that is no longer useful."""

_LONGEST_PAUSE: Final = 128
"""A model that is never useful then costs at most 0.6% in simulated decoding. With 512 a change of
the text every 200 to 500 steps is missed, which costs up to 15%; 32 would notice changes sooner, at
0.6% more for useless models."""


class MeasuredCosts:
    """Recent costs of passes: medians, so that a pause of the machine changes nothing."""

    def __init__(self) -> None:
        self._target_s = RecentMedian(_RECENT)
        self._pass_s = RecentMedian(_RECENT)

    def record_step(self, seconds: float) -> None:
        """Take in the time from the end of a draft to the request for the next one."""
        self._target_s.add(seconds)

    def record_pass(self, seconds: float) -> None:
        """Take in a pass of the draft model."""
        self._pass_s.add(seconds)

    def known(self) -> StepCosts | None:
        """Return the costs once both are measured."""
        target_s, pass_s = self._target_s.value(), self._pass_s.value()
        if target_s is None or pass_s is None:
            return None
        return StepCosts(target_s, pass_s)


class StoppingRule:
    """Decides whether another pass of the draft model pays, and whether to draft at all.

    A pass pays where the tokens that it is expected to bring are worth its time at the pace at
    which tokens come: that maximises tokens per second as long as gains fall from pass to pass.
    Where whole drafts do not pay, the next steps go without; pauses double up to 128 steps, so
    that a change of the workload is noticed.

    Args:
        costs: what passes cost; measured if not given.
    """

    def __init__(self, costs: StepCosts | None = None) -> None:
        self.measured = MeasuredCosts()
        self._given = costs
        self._drafts = Payoff(_DECAY)
        self._tokens = FadingRatio(_DECAY)  # committed, to drafts
        self._passes = FadingRatio(_DECAY)  # of the draft model, to drafts
        self._followed = FadingRatio(_DECAY)  # nodes whose next token was drafted, to nodes

    def threshold(self) -> float:
        """Return how many tokens a pass must be expected to bring; 0 while costs are unknown."""
        costs = self._costs()
        if costs is None:
            return 0.0
        step_s = costs.target_s + costs.pass_s * self._passes.value()
        return costs.pass_s * self._tokens.value(default=1.0) / step_s if step_s > 0 else 0.0

    def is_worthwhile(self, probabilities: NDArray[np.float64]) -> bool:
        """Return whether to expand nodes which come true with these probabilities, float64[n].

        None of them is another's ancestor, so at most one comes true.
        """
        share = (self._followed.numerator + 1) / (self._followed.denominator + 1)
        return min(float(probabilities.sum()), 1.0) * share >= self.threshold()

    def is_due(self) -> bool:
        """Return whether to draft in this step; each call counts as one."""
        costs = self._costs()
        if costs is None:
            return True
        plain_tokens = self._tokens.value(default=1.0) - self._drafts.gain
        token_s = costs.target_s / plain_tokens
        draft_s = costs.pass_s * self._passes.value()
        return self._drafts.is_due(token_s, draft_s, _LONGEST_PAUSE)

    def learn(self, outcome: JudgedDraft, num_passes: int) -> None:
        """Learn from the outcome of a draft that took `num_passes`."""
        num_right = len(outcome.path)
        self._tokens.add(outcome.num_committed)
        self._passes.add(num_passes)
        self._followed.add(num_right, len(outcome.decided_parents()))
        # every step commits one token without a draft
        self._drafts.learn(min(num_right, outcome.num_committed - 1))

    def _costs(self) -> StepCosts | None:
        return self._given or self.measured.known()


_NOT_EXPANDED: Final = -1
_NEVER_EXPANDED: Final = -2


@dataclass(frozen=True, slots=True, eq=False)
class Children:
    """Candidates for the children of one node.

    Attributes:
        tokens: int32[n].
        log_probabilities: float64[n], each given the node, falling and at most 0.
    """

    tokens: TokenIds
    log_probabilities: NDArray[np.float64]


class Frontier:
    """The most probable nodes known so far, and which of them were expanded.

    Nodes have numbers in the order in which they became known, so that parents precede children.

    Args:
        max_nodes: how many are kept.
        min_log_probability: of a path; less probable nodes are never kept.
        max_depth: nodes as deep as this are not expanded; `None` for no limit.

    Attributes:
        kept: int64[n], the nodes by falling probability.
        num_expanded: how many were expanded.
    """

    def __init__(
        self, max_nodes: int, min_log_probability: float = -np.inf, max_depth: int | None = None
    ) -> None:
        self._max_nodes = max_nodes
        self._min_log_probability = min_log_probability
        self._max_depth = max_depth
        self.tokens: list[int] = []
        self.parents: list[int] = []
        self.rows: list[int] = []
        self._depths: list[int] = []
        self._log_probabilities = np.empty(0)
        self.kept = np.empty(0, np.int64)
        self.num_expanded = 0

    def log_probabilities(self, nodes: NDArray[np.int64] | list[int]) -> NDArray[np.float64]:
        """Return float64[n], of the paths to nodes."""
        return self._log_probabilities[np.asarray(nodes, np.int64)]

    def worth_expanding(self, width: int) -> list[int]:
        """Return the most probable nodes, `width` at most, below which there may be more to keep.

        No node is more probable than its parent, so the last of a full tree has nothing to add.
        """
        if self._max_nodes == 0:
            return []
        is_full = len(self.kept) == self._max_nodes
        least = self._log_probabilities[self.kept[-1]] if is_full else -np.inf
        found: list[int] = []
        for node in self.kept.tolist():
            if len(found) == width or self._log_probabilities[node] <= least:
                break
            is_deep = self._max_depth is not None and self._depths[node] >= self._max_depth
            above = self.parents[node]
            is_known = above == ROOT or self.rows[above] >= 0
            if self.rows[node] == _NOT_EXPANDED and is_known and not is_deep:
                found.append(node)
        return found

    def plant(
        self, tree: DraftTree, log_probabilities: NDArray[np.float64], readable: NDArray[np.bool_]
    ) -> None:
        """Make the nodes of a tree known, before any other.

        Args:
            tree: N nodes, the most probable first.
            log_probabilities: float64[N], of their paths.
            readable: bool[N], which of them may be expanded, once their parents are.
        """
        self.tokens.extend(tree.token_ids.tolist())
        self.parents.extend(tree.parents.tolist())
        self.rows.extend(np.where(readable, _NOT_EXPANDED, _NEVER_EXPANDED).tolist())
        self._depths.extend(tree.depths().tolist())
        self._log_probabilities = log_probabilities
        num_kept = min(len(tree), self._max_nodes)
        self.kept = np.flatnonzero(log_probabilities[:num_kept] >= self._min_log_probability)

    def edges(self, nodes: list[int]) -> tuple[list[int], list[int]]:
        """Return the tokens of nodes, and their parents' numbers among the expanded ones."""
        above = [self.parents[node] for node in nodes]
        rows = [ROOT if parent == ROOT else self.rows[parent] for parent in above]
        return [self.tokens[node] for node in nodes], rows

    def kept_parents(self) -> NDArray[np.int32]:
        """Return int32[n], the parents of the kept nodes by their numbers among these."""
        places = np.full(len(self.tokens) + 1, ROOT, np.int32)
        places[self.kept] = np.arange(len(self.kept))
        return places[np.array(self.parents, np.int64)[self.kept]]

    def expand(self, nodes: list[int], children: list[Children]) -> None:
        """Add the children of nodes, or of the sequence itself (`ROOT`)."""
        for node, each in zip(nodes, children, strict=True):
            if node != ROOT:
                self.rows[node] = self.num_expanded
                self.num_expanded += 1
            self._add(node, each)
        known = np.arange(len(self.tokens) - sum(len(each.tokens) for each in children))
        new = np.arange(len(known), len(self.tokens))
        candidates = np.concatenate([self.kept, new])
        values = self._log_probabilities[candidates]
        candidates = candidates[values >= self._min_log_probability]
        order = np.argsort(-self._log_probabilities[candidates], kind="stable")
        self.kept = candidates[order[: self._max_nodes]]

    def _add(self, node: int, children: Children) -> None:
        above, depth = (
            (0.0, 0) if node == ROOT else (self._log_probabilities[node], self._depths[node])
        )
        count = len(children.tokens)
        self.tokens.extend(children.tokens.tolist())
        self.parents.extend([node] * count)
        self.rows.extend([_NOT_EXPANDED] * count)
        self._depths.extend([depth + 1] * count)
        self._log_probabilities = np.concatenate(
            [self._log_probabilities, above + children.log_probabilities]
        )


def grow(
    frontier: Frontier,
    expand: Callable[[list[int]], list[Children]],
    width: int,
    max_passes: int,
    is_worthwhile: Callable[[NDArray[np.float64]], bool],
) -> list[list[int]]:
    """Expand a frontier until no pass pays, and return the nodes of each pass.

    Args:
        frontier: knows the children of the root.
        expand: returns the children of nodes, computed in one pass.
        width: most nodes of a pass.
        max_passes: most passes.
        is_worthwhile: whether a pass over nodes of these log probabilities pays.
    """
    passes: list[list[int]] = []
    while len(passes) < max_passes and (nodes := frontier.worth_expanding(width)):
        if not is_worthwhile(frontier.log_probabilities(nodes)):
            break
        frontier.expand(nodes, expand(nodes))
        passes.append(nodes)
    return passes


@dataclass(frozen=True, slots=True)
class Bounds:
    """How far a draft may grow.

    Attributes:
        max_nodes: most nodes of the tree.
        min_probability: of paths; less probable ones are left out.
        width: most nodes in one pass of the draft model.
        max_passes: most passes besides the one that reads the sequence.
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
    """A tree, with the estimates to calibrate by its outcome.

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

    def learn(self, draft: ModelDraft, outcome: JudgedDraft) -> None:
        """Learn from the outcome of a draft."""
        ...


_EDGES: Final = np.exp2(np.arange(-10.0, 0.0))
"""A bin for each halving down to 1/1024, as frontiers are ranked by the logarithm. Less probable
nodes are hardly ever among those that are kept."""

_CALIBRATION_DECAY: Final = 0.99
"""Some hundred drafts. A draft model errs alike for a whole text, so there is less to unlearn than
for databases, and rare bins need the nodes."""

_PRIOR_NODES: Final = 4.0
"""Four sure nodes in a row that fail halve the trust in a bin: a model states its own probability,
which is a better guess to begin with than a count of occurrences."""


class MostProbableTrees:
    """Grows trees of the most probable paths.

    Args:
        model: whose probabilities these are.
        rule: when to stop.
    """

    def __init__(self, model: DraftModel, rule: StoppingRule) -> None:
        self._model = model
        self._rule = rule
        self._calibration = Calibration(_EDGES, _CALIBRATION_DECAY, _PRIOR_NODES)

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

    def learn(self, draft: ModelDraft, outcome: JudgedDraft) -> None:
        """Learn from the outcome of a draft."""
        known = outcome.is_known
        self._calibration.learn(draft.estimates[known], outcome.came_true()[known])

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
