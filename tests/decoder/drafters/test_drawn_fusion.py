"""Fused drafts with draws leave the target's distribution alone, whole and cut."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from transformers import TopKLogitsWarper, TopPLogitsWarper

from decoder.drafters.asking import StepCosts
from decoder.drafters.drawing import MAX_SIBLINGS, DrawnFusion, Draws, RankRates, drawn_below
from decoder.drafters.following import Verified
from decoder.errors import ContradictoryOptionsError
from decoder.sampling.rule import accept_rule
from decoder.sampling.sampling_settings import SamplingSettings
from decoder.sampling.verification import CERTAIN, PassContext, SampledTree
from retriever.errors import DrafterUnavailableError
from retriever.follower import DraftLimits
from retriever.sequences import TokenSequence
from retriever.tree import ROOT, DraftTree, Source
from tests.decoder.decoding import prompt_of
from tests.decoder.drafters.draft_models import alone, distribution, drafted, llama
from tests.decoder.drafters.drafted_chains import LIMITS, paths_of, saying
from tests.decoder.drafters.scripted_readers import ScriptedReader, Unavailable
from tests.decoder.rounding import Rounding
from tests.suite_parts import cases

FREE = StepCosts(target_s=1.0, pass_s=0.0)
SIZE = 4
NUM_TREES = cases(500, of=1500)
CRITICAL = 37.7
"""Of chi-square with 15 degrees of freedom, at 0.001."""

Change = Callable[[SampledTree], SampledTree]
Shares = NDArray[np.float64]


class World:
    """A target and a draft model that are tables, by the last two tokens behind the prompt."""

    def __init__(self, seed: int) -> None:
        rng = np.random.default_rng(seed)
        shape = (SIZE + 1, SIZE + 1)
        self.target = rng.dirichlet(np.ones(SIZE), size=shape)
        self.draft = rng.dirichlet(np.ones(SIZE), size=shape)

    def after(self, path: tuple[int, ...], table: Shares) -> Shares:
        shares: Shares = table[(*path, SIZE, SIZE)[:2]]
        return shares

    def logits(self, tree: DraftTree) -> torch.Tensor:
        rows = [(), *paths_of(tree)]
        return torch.from_numpy(np.log([self.after(path, self.target) for path in rows])).float()

    def said(self, tokens: list[int]) -> dict[int, float]:
        shares = self.after(tuple(tokens[1:]), self.draft)
        return dict(enumerate(np.log(shares).tolist()))


def drafter_of(world: World, seed: int, *, reads_paths: bool) -> DrawnFusion:
    retrieval = saying(([2, 1], 0.5), ([0], 0.2))
    reader = ScriptedReader(
        world.said, columns=range(SIZE), reads_paths=reads_paths, vocabulary=SIZE
    )
    return DrawnFusion(
        [retrieval],
        DraftLimits(SIZE),
        readers=[reader],
        draws=Draws(seed=seed),
        costs=FREE,
    )


def statistic(change: Change, seed: int = 0, *, reads_paths: bool = False) -> float:
    """Return chi-square of the first two tokens of many verified drafts."""
    world, rng = World(seed), np.random.default_rng(seed)
    drafter = drafter_of(world, seed, reads_paths=reads_paths)
    rule = accept_rule(SamplingSettings(temperature=1.0, seed=seed, coupled=False))
    prompt = np.zeros(1, np.int32)
    counts, kinds = np.zeros((SIZE, SIZE)), set()
    for number in range(NUM_TREES):
        fused = drafter.follow(TokenSequence(prompt))
        tree = fused.draft(7)
        assert isinstance(tree, SampledTree)
        kinds.add((bool((tree.rows == CERTAIN).any()), bool((tree.rows != CERTAIN).any())))
        tree = change(tree)
        logits = world.logits(tree)
        path, token = rule(tree, logits, PassContext(number, prompt))
        first, second = (*tree.token_ids[path].tolist(), token, -1)[:2]
        fused.learn(Verified(0, tree, logits, path, token))
        fused.close()
        if second < 0:
            second = int(rng.choice(SIZE, p=world.after((first,), world.target)))
        counts[first, second] += 1
    assert kinds == {(True, True)}
    target = world.target
    expected = NUM_TREES * target[SIZE, SIZE][:, None] * target[:SIZE, SIZE]
    return float(np.sum((counts - expected) ** 2 / expected))


def unchanged(tree: SampledTree) -> SampledTree:
    return tree


def cut(tree: SampledTree) -> SampledTree:
    return tree.prefix(3)


def without_improbable_draws(tree: SampledTree) -> SampledTree:
    """Drop a draw by its value."""
    shares = tree.proposals.numpy()[tree.rows, tree.token_ids]
    kept = np.zeros(len(tree), np.bool_)
    for node, parent in enumerate(tree.parents.tolist()):
        stays = tree.rows[node] == CERTAIN or shares[node] > 0.4
        kept[node] = stays and (parent == ROOT or kept[parent])
    return tree.among(kept)


def with_swapped_rows(tree: SampledTree) -> SampledTree:
    """Tell that draws came from another node's distribution."""
    swapped = tree.proposals.flip(0)
    return SampledTree(
        tree.token_ids, tree.parents, tree.probabilities, tree.sources, swapped, tree.rows
    )


@pytest.mark.seeds
@pytest.mark.parametrize(
    ("change", "seed", "reads_paths"),
    [(cut, 0, False), (unchanged, 1, True), (unchanged, 0, False), (cut, 1, True)][
        : cases(2, of=4)
    ],
)
def test_verified_drafts_are_distributed_as_the_target(
    change: Change, seed: int, *, reads_paths: bool
) -> None:
    assert statistic(change, seed, reads_paths=reads_paths) < CRITICAL


@pytest.mark.seeds
@pytest.mark.parametrize("change", [without_improbable_draws, with_swapped_rows])
def test_planted_errors_are_noticed(change: Change) -> None:
    assert statistic(change) > CRITICAL


def fused(reader: ScriptedReader, seed: int = 0, budget: int = 10) -> DraftTree:
    retrieval = saying(([4, 5, 6], 0.6), ([20], 0.2))
    draws = Draws(seed=seed)
    drafter = DrawnFusion([retrieval], LIMITS, readers=[reader], draws=draws, costs=FREE)
    tree = drafter.follow(TokenSequence(np.array([3], np.int32))).draft(budget)
    return DraftTree.checked(tree.token_ids, tree.parents, tree.probabilities, tree.sources)


def test_shape_is_the_same_whatever_is_drawn_but_tokens_are_not() -> None:
    trees = [fused(ScriptedReader(lambda _: {}), seed) for seed in range(5)]
    assert len({tree.parents.tobytes() for tree in trees}) == 1
    assert len({tree.probabilities.tobytes() for tree in trees}) == 1
    assert len({tree.token_ids.tobytes() for tree in trees}) == 5
    for tree in trees:
        assert {(4,), (4, 5), (4, 5, 6), (20,)} <= set(paths_of(tree))


def tree_of_two(seed: int) -> SampledTree:
    """Draft where the model finds likely what was retrieved."""
    retrieval = saying(([4], 0.6), ([20], 0.2))
    reader = ScriptedReader(lambda _: {4: 3.0, 20: 2.0, 7: 1.0, 8: 0.0})
    draws = Draws(seed=seed)
    drafter = DrawnFusion([retrieval], LIMITS, readers=[reader], draws=draws, costs=FREE)
    tree = drafter.follow(TokenSequence(np.array([3], np.int32))).draft(8)
    assert isinstance(tree, SampledTree)
    return tree


def test_draws_are_from_what_certain_siblings_leave_and_say_so() -> None:
    for seed in range(20):
        check_draws(seed)


def check_draws(seed: int) -> None:
    tree = tree_of_two(seed)
    assert len(set(paths_of(tree))) == len(tree)
    top = tree.parents == ROOT
    assert tree.token_ids[top & (tree.rows == CERTAIN)].tolist() == [4, 20]
    for node in np.flatnonzero(tree.rows != CERTAIN).tolist():
        siblings = (tree.parents == tree.parents[node]) & (tree.rows == CERTAIN)
        proposal = tree.proposals[tree.rows[node]]
        assert float(proposal.sum()) == pytest.approx(1.0, abs=1e-5)
        assert not proposal[tree.token_ids[siblings].tolist()].any()
        assert proposal[int(tree.token_ids[node])] > 0
        assert tree.sources[node] == Source.MODEL


def test_ranks_are_learned_of_the_share_that_certain_nodes_leave() -> None:
    world = World(3)
    drafter = drafter_of(world, 3, reads_paths=False)
    shares = []
    for _ in range(150):
        fused = drafter.follow(TokenSequence(np.zeros(1, np.int32)))
        tree = fused.draft(7)
        assert isinstance(tree, SampledTree)
        shares.append(float(tree.probabilities[tree.rows != CERTAIN].max()))
        path = tree.follow(np.array([2, 1]))
        fused.learn(Verified(0, tree, world.logits(tree), path, 1))
        fused.close()
    assert shares[-1] < 0.5 * shares[0]  # what is retrieved comes always: draws lose their places


def test_without_its_model_a_draft_is_that_of_the_others() -> None:
    reader = Unavailable(3, DrafterUnavailableError("too long"))
    tree = fused(reader)
    assert not isinstance(tree, SampledTree)
    assert {(4,), (4, 5), (4, 5, 6), (20,)} == set(paths_of(tree))


@pytest.mark.parametrize(("top_k", "top_p"), [(None, 1.0), (5, 1.0), (None, 0.7), (6, 0.8)])
def test_proposals_are_the_distributions_drawn_from(top_k: int | None, top_p: float) -> None:
    model, prompt = llama(), prompt_of(9)
    draws = Draws(temperature=0.7, top_k=top_k, top_p=top_p, seed=4)
    tree = drafted(alone(model, draws=draws, vocabulary=60), prompt, 24)
    assert isinstance(tree, SampledTree)
    assert tree.proposals.shape[1] == 60
    for node, path in enumerate(paths_of(tree)):
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


def test_a_row_gives_no_more_draws_than_it_has_tokens() -> None:
    shares = torch.tensor([0.0, 0.25, 0.0, 0.75])
    random = np.random.default_rng(0)
    drawn = [tuple(drawn_below(shares, 4, random)) for _ in range(2000)]
    assert set(drawn) == {(1, 3), (3, 1)}
    assert drawn.count((3, 1)) == pytest.approx(1500, abs=80)


def test_one_possible_token_makes_one_chain() -> None:
    tree = drafted(alone(llama(), draws=Draws(top_k=1)), prompt_of(5), 16)
    assert np.array_equal(tree.parents, np.arange(-1, len(tree) - 1))
    assert len(tree) > 1


def test_rates_of_ranks_are_learned() -> None:
    rates = RankRates()
    tree = drafted(alone(llama(), draws=Draws()), prompt_of(5), 16)
    children = np.flatnonzero(tree.parents == ROOT)
    second = np.array([tree.token_ids[children[1]]], np.int32)
    before = rates.rates()
    for _ in range(300):
        rates.learn(tree, second)
    after = rates.rates()
    assert after[0] < 0.2 < before[0]
    assert len(after) == MAX_SIBLINGS
    assert np.all(np.diff(after) <= 0)


@pytest.mark.parametrize("settings", [{"temperature": 0.0}, {"top_k": 0}, {"top_p": 0.0}])
def test_settings_that_leave_nothing_to_draw_are_refused(settings: dict[str, Any]) -> None:
    with pytest.raises(ContradictoryOptionsError):
        Draws(**settings)
