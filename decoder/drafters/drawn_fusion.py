"""Fused drafts for sampling: what was retrieved is certain, what a model proposes is drawn."""

from collections.abc import Sequence

import numpy as np
import torch

from decoder.drafters.asking import AskedDraft, AskingRule, StepCosts
from decoder.drafters.drawn_trees import Draws, Filling, Plan, RankRates
from decoder.drafters.following import Verified
from decoder.drafters.fusion import MAX_PASSES, WIDTH, FusedDrafter, FusedSequence
from decoder.drafters.kernels.readings import ROOT_ROW
from decoder.drafters.kernels.siblings import Hints
from decoder.drafters.model_trees import JudgedDraft, grow
from decoder.drafters.readers import ReadTree
from decoder.drafters.reading import TreeReader
from decoder.drafters.recycling import RecycledLogits
from decoder.sampling.verification import SampledTree
from retriever.drafter import Drafter
from retriever.follower import DraftLimits
from retriever.tree import ROOT, DraftTree


class DrawnFusion(FusedDrafter):
    """Merges retrieved trees with draws from a model; a `Drafter` that learns from passes.

    A draft is a `SampledTree`. Its shape is planned before anything is drawn: from the tree of the
    quick drafters and recycled logits, which see no draw, and from how often the first, second, ...
    draw below a node was kept lately. Then tokens are drawn into it, pass by pass of the model
    (`Filling`). So where a node stands never depends on its own token, and multi-candidate
    rejection leaves the target's distribution as it is (`decoder.sampling.choice.Rejection`), in
    all of the tree and in each of its prefixes.

    Which reader draws is settled before it is read: the first that is expected to pay.

    Args:
        drafters: those that answer in microseconds, such as retrieval.
        limits: which tokens target and drafters know.
        readers: models to draw from, the quickest first.
        draws: how; settings equal to the target's sampling are accepted most often.
        recycled: likely tokens of earlier passes; `None` to do without.
        costs: what passes of readers cost; measured if not given.

    Raises:
        VocabularyMismatchError: a reader proposes tokens that the target does not know.
    """

    def __init__(  # noqa: PLR0913  as `FusedDrafter`, and how to draw
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
        """Learn from a pass, and how often draws of each rank are kept."""
        if sequence.has_drafted and sequence.asked and len(verified.tree):
            came = np.append(verified.tree.token_ids[verified.path], verified.next_token)
            outcome = JudgedDraft.of(verified.tree, came.astype(np.int32))
            self._rates[sequence.asked[0].number].learn(outcome)
        return super().take_in(sequence, verified)

    def _extended(
        self, sequence: FusedSequence, tree: DraftTree, budget_nodes: int, floor: float
    ) -> DraftTree:
        """Return the tree with draws of the first reader that pays."""
        read = sequence.read
        for number in read.present():
            asked = AskedDraft(number, tree, read.num_behind(number))
            if self._readers.rules[number].asks(tree) and read.begin(number):
                drawn = self._drawn(sequence, asked, budget_nodes, floor)
                sequence.asked.append(asked)
                read.drop()  # weights are learned as the certain tree was made: without readers
                return drawn
        return tree

    def _drawn(
        self, sequence: FusedSequence, asked: AskedDraft, budget_nodes: int, floor: float
    ) -> SampledTree:
        """Return a tree of certain nodes and draws."""
        read, number = sequence.read, asked.number
        rule, reader = self._readers.rules[number], self._readers.all[number]
        plan, passes = self._planned(asked, rule, (budget_nodes, floor))
        filling = Filling(plan, self._random, asked.tree, reader.source)
        filling.take([ROOT], self._distributions(read, number, ROOT_ROW, 1), reader.columns)
        asked.note_first()
        for planned in passes:
            nodes = filling.to_expand(planned)
            if nodes:
                first, (tokens, parents) = read.next_row(number), filling.edges(nodes)
                rows = np.array(parents, np.int32) + 1
                if not read.read(number, np.array(tokens, np.int32), rows):
                    break
                found = self._distributions(read, number, first, len(nodes))
                filling.take(nodes, found, reader.columns)
                reach = float(np.exp(plan.log_probabilities(nodes)).sum())
                rule.record_pass(asked.note_further(reach))
        return filling.tree(reader.columns, self._num_tokens)

    def _planned(
        self, asked: AskedDraft, rule: AskingRule, limits: tuple[int, float]
    ) -> tuple[Plan, list[list[int]]]:
        """Return the best shape before anything is drawn, and the nodes of each pass."""
        rates = self._rates[asked.number].rates()
        readable = self._known_paths(len(asked.tree))
        max_depth = self._readers.all[asked.number].max_depth
        plan = Plan(asked.tree, readable, limits[0], float(np.log(limits[1])), max_depth)
        plan.expand([ROOT], plan.children([ROOT], rates))
        passes = grow(
            plan,
            lambda nodes: plan.children(nodes, rates),
            WIDTH,
            MAX_PASSES,
            lambda logs: rule.is_worthwhile(float(np.exp(logs).sum())),
        )
        return plan, passes

    def _distributions(self, read: ReadTree, number: int, first: int, count: int) -> torch.Tensor:
        """Return float32[count, C], what a reader's rows are drawn from."""
        width = len(self._readers.all[number].columns)
        rows = read.readings.logits[number, first : first + count, :width]
        return self._draws.distributions(torch.from_numpy(rows))
