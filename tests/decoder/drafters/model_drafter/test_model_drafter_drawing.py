"""Drawn drafts leave the target's distribution alone, under the rule that counts their proposals.

The rule here is a slow, obvious one: multi-candidate rejection without replacement (SpecInfer,
arXiv:2305.09781; MCSD, arXiv:2401.06706).
"""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from transformers import PreTrainedModel, TopKLogitsWarper, TopPLogitsWarper

from decoder.drafters.drawn_trees import MAX_SIBLINGS, DrawnTrees, Draws, RankRates, drawn_below
from decoder.drafters.model_drafter import DraftingOptions, ModelDrafter
from decoder.drafters.model_trees import Bounds, JudgedDraft, StoppingRule
from decoder.errors import ContradictoryOptionsError
from decoder.sampling.verification import SampledTree
from retriever.drafter import TokenIds
from retriever.tree import ROOT
from tests.decoder.decoding import prompt_of
from tests.decoder.drafters.model_drafter.draft_models import (
    FREE,
    distribution,
    drafted,
    llama,
    paths,
)
from tests.decoder.rounding import Rounding
from tests.suite_parts import cases

SIZE = 4
NUM_TREES = cases(1500, of=6000)
CRITICAL = 37.7
"""Of chi-square with 15 degrees of freedom, at 0.001."""

Shares = NDArray[np.float64]


class World:
    """A target and a draft model that are tables, and a cache that knows where it stands."""

    def __init__(self, seed: int) -> None:
        rng = np.random.default_rng(seed)
        self.target = rng.dirichlet(np.ones(SIZE), size=(SIZE + 1, SIZE + 1))
        self.draft = rng.dirichlet(np.ones(SIZE), size=(SIZE + 1, SIZE + 1))
        self.columns = np.arange(SIZE, dtype=np.int32)
        self._paths: list[tuple[int, ...]] = []

    def expected(self, path: tuple[int, ...], table: Shares) -> Shares:
        first, second = (*path, SIZE, SIZE)[:2]
        shares: Shares = table[first, second]
        return shares

    def catch_up(self, _tokens: TokenIds) -> torch.Tensor:
        self._paths = []
        return torch.from_numpy(np.log(self.expected((), self.draft)))[None]

    def expand(self, tokens: list[int], parents: list[int]) -> torch.Tensor:
        above = [() if parent == ROOT else self._paths[parent] for parent in parents]
        new = [(*path, token) for path, token in zip(above, tokens, strict=True)]
        self._paths += new
        return torch.from_numpy(np.log([self.expected(path, self.draft) for path in new]))


def drawing(
    model: PreTrainedModel, draws: Draws, target_vocabulary: int | None = None
) -> ModelDrafter:
    options = DraftingOptions(draws=draws, costs=FREE)
    return ModelDrafter(model, options, target_vocabulary=target_vocabulary)


def verified(tree: SampledTree, world: World, rng: np.random.Generator) -> tuple[int, ...]:
    """Return the accepted path and the token after it."""
    path: tuple[int, ...] = ()
    node = ROOT
    while True:
        left = world.expected(path, world.target).copy()
        proposal: Shares | None = None
        for child in np.flatnonzero(tree.parents == node).tolist():
            token = int(tree.token_ids[child])
            if proposal is None:
                proposal = tree.proposals[tree.rows[child]].double().numpy().copy()
            proposal = proposal / proposal.sum()
            if rng.random() < min(1.0, left[token] / proposal[token]):
                path, node = (*path, token), child
                break
            left = np.maximum(left - proposal, 0.0)
            left /= left.sum()
            proposal[token] = 0.0
        else:
            return (*path, int(rng.choice(SIZE, p=left)))


def statistic(change: Callable[[SampledTree], SampledTree], seed: int = 0) -> float:
    """Return chi-square of the first two tokens of many verified drafts."""
    world, rng = World(seed), np.random.default_rng(seed)
    model: Any = world
    trees = DrawnTrees(model, StoppingRule(FREE), Draws(seed=seed), SIZE)
    bounds = Bounds(max_nodes=5, min_probability=0.0, width=2, max_passes=2, max_depth=None)
    counts = np.zeros((SIZE, SIZE))
    for _ in range(NUM_TREES):
        drawn = trees.draft(model, np.zeros(1, np.int32), bounds)
        assert isinstance(drawn.tree, SampledTree)
        output = verified(change(drawn.tree), world, rng)
        first, second = (*output, -1)[:2]
        if second < 0:
            second = int(rng.choice(SIZE, p=world.expected((first,), world.target)))
        counts[first, second] += 1
        trees.learn(drawn, JudgedDraft.of(drawn.tree, np.array([first, second], np.int32)))
    target = world.target
    expected = NUM_TREES * target[SIZE, SIZE][:, None] * target[:SIZE, SIZE]
    return float(np.sum((counts - expected) ** 2 / expected))


def unchanged(tree: SampledTree) -> SampledTree:
    return tree


def without_improbable_draws(tree: SampledTree) -> SampledTree:
    """Keep a draw by its value: what the contract of drawn trees forbids."""
    shares = tree.proposals.numpy()[tree.rows, tree.token_ids]
    kept = np.zeros(len(tree), np.bool_)
    for node, parent in enumerate(tree.parents.tolist()):
        kept[node] = shares[node] > 0.3 and (parent == ROOT or kept[parent])
    return tree.among(kept)


def with_another_proposal(tree: SampledTree) -> SampledTree:
    """State another distribution than was drawn from."""
    even = torch.full_like(tree.proposals, 1 / SIZE)
    return SampledTree(
        tree.token_ids, tree.parents, tree.probabilities, tree.sources, even, tree.rows
    )


@pytest.mark.seeds
@pytest.mark.parametrize("seed", range(cases(1, of=2)))
def test_verified_drafts_are_distributed_as_the_target(seed: int) -> None:
    assert statistic(unchanged, seed) < CRITICAL


@pytest.mark.parametrize("change", [without_improbable_draws, with_another_proposal])
def test_planted_errors_are_noticed(change: Callable[[SampledTree], SampledTree]) -> None:
    assert statistic(change) > 3 * CRITICAL


@pytest.mark.parametrize(("top_k", "top_p"), [(None, 1.0), (5, 1.0), (None, 0.7), (6, 0.8)])
def test_proposals_are_the_distributions_drawn_from(top_k: int | None, top_p: float) -> None:
    model, prompt = llama(), prompt_of(9)
    draws = Draws(temperature=0.7, top_k=top_k, top_p=top_p, seed=4)
    tree = drafted(drawing(model, draws, 60), prompt, 24)
    assert isinstance(tree, SampledTree)
    assert tree.proposals.shape[1] == 60
    for node, path in enumerate(paths(tree)):
        scores = torch.from_numpy(np.log(distribution(model, [*prompt, *path[:-1]])))[None] / 0.7
        tokens = torch.empty(1, 0, dtype=torch.int64)
        for warper in (TopKLogitsWarper(top_k or 48), TopPLogitsWarper(top_p)):
            scores = warper(tokens, scores)
        expected = torch.softmax(scores, -1)[0]
        proposal = tree.proposals[tree.rows[node]]
        # Drawn in single precision: scores, exponentials, and what they and the kept add up to.
        Rounding(torch.float32, width=48, operations=4).check(proposal[:48], expected)
        assert not proposal[48:].any()
        assert proposal[path[-1]] > 0


def test_shape_is_the_same_whatever_is_drawn() -> None:
    model, prompt = llama(), prompt_of(9)
    trees = [
        drafted(
            ModelDrafter(model, DraftingOptions(draws=Draws(seed=seed), costs=FREE)), prompt, 20
        )
        for seed in range(4)
    ]
    assert len({tree.parents.tobytes() for tree in trees}) == 1
    assert len({tree.probabilities.tobytes() for tree in trees}) == 1
    assert len({tree.token_ids.tobytes() for tree in trees}) > 1
    again = drafted(drawing(model, Draws(seed=2)), prompt, 20)
    assert again.token_ids.tolist() == trees[2].token_ids.tolist()


def test_a_row_gives_no_more_draws_than_it_has_tokens() -> None:
    shares = torch.tensor([0.0, 0.25, 0.0, 0.75])
    random = np.random.default_rng(0)
    drawn = [tuple(drawn_below(shares, 4, random)) for _ in range(2000)]
    assert set(drawn) == {(1, 3), (3, 1)}
    assert drawn.count((3, 1)) == pytest.approx(1500, abs=80)


def test_one_possible_token_makes_one_chain() -> None:
    draws = Draws(top_k=1)
    tree = drafted(
        ModelDrafter(llama(), DraftingOptions(draws=draws, costs=FREE)), prompt_of(5), 16
    )
    assert np.array_equal(tree.parents, np.arange(-1, len(tree) - 1))
    assert len(tree) > 1


def test_rates_of_ranks_are_learned() -> None:
    rates = RankRates()
    tree = drafted(drawing(llama(), Draws()), prompt_of(5), 16)
    children = np.flatnonzero(tree.parents == ROOT)
    second = np.array([tree.token_ids[children[1]]], np.int32)
    before = rates.rates()
    for _ in range(300):
        rates.learn(JudgedDraft.of(tree, second))
    after = rates.rates()
    assert after[0] < 0.2 < before[0]
    assert len(after) == MAX_SIBLINGS
    assert np.all(np.diff(after) <= 0)


@pytest.mark.parametrize("settings", [{"temperature": 0.0}, {"top_k": 0}, {"top_p": 0.0}])
def test_settings_that_leave_nothing_to_draw_are_refused(settings: dict[str, Any]) -> None:
    with pytest.raises(ContradictoryOptionsError):
        Draws(**settings)
