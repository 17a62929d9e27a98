"""A draft model stops where another pass costs more than it can be expected to bring."""

import numpy as np
import pytest

from decoder.drafters.asking import StepCosts
from decoder.drafters.model_drafter import DraftingOptions, ModelDrafter
from decoder.drafters.model_trees import JudgedDraft, StoppingRule
from retriever.tree import ROOT, DraftTree
from tests.decoder.decoding import decoded, decoder_with, plainly, prompt_of, tiny_llama, tree_of
from tests.decoder.drafters.model_drafter.draft_models import llama

CHAIN = tree_of([(ROOT, 1), (0, 2), (1, 3)])


def outcome(committed: list[int]) -> JudgedDraft:
    return JudgedDraft.of(CHAIN, np.array(committed, np.int32))


def num_passes(seed: int, costs: StepCosts, num_tokens: int = 100) -> tuple[int, int]:
    """Return passes of target and draft model for one output, which is always the same."""
    target, draft_model, prompt = tiny_llama(layers=3), llama(seed), prompt_of(12)
    passes: list[int] = []
    draft_model.register_forward_pre_hook(lambda *_: passes.append(1))
    decoder = decoder_with(target, ModelDrafter(draft_model, DraftingOptions(costs=costs)))
    generation = decoder.generate(prompt, num_tokens)
    assert [token for step in generation for token in step] == plainly(target, prompt, num_tokens)
    return generation.statistics.num_passes, len(passes)


def test_useless_model_is_soon_left_alone() -> None:
    costs = StepCosts(target_s=1.0, pass_s=0.5)
    target_passes, draft_passes = num_passes(99, costs)
    assert target_passes * costs.target_s + draft_passes * costs.pass_s < 110 * costs.target_s
    assert draft_passes < target_passes / 3
    without_costs = num_passes(99, StepCosts(target_s=1.0, pass_s=0.0), 30)
    assert without_costs[1] > 4 * without_costs[0]


def test_useful_model_goes_on() -> None:
    target_passes, draft_passes = num_passes(1, StepCosts(target_s=1.0, pass_s=0.05))
    assert target_passes < 40
    assert draft_passes > 2 * target_passes


def test_threshold_is_the_price_of_a_pass_in_tokens() -> None:
    rule = StoppingRule(StepCosts(target_s=3.0, pass_s=0.5))
    assert rule.threshold() == pytest.approx(0.5 / 3.0)
    rule.learn(outcome([1, 2, 9]), num_passes=2)
    assert rule.threshold() == pytest.approx(0.5 * 3 / (3.0 + 2 * 0.5))
    shares = np.array([0.3, 0.2])
    followed = (2 + 1) / (3 + 1)  # root and two nodes had a child to follow, two of them did
    assert rule.is_worthwhile(shares) == (0.5 * followed >= rule.threshold())
    assert not rule.is_worthwhile(shares / 2)


def test_costs_are_measured_where_none_are_given() -> None:
    drafter = ModelDrafter(llama(1))
    decoded(decoder_with(tiny_llama(layers=3), drafter), prompt_of(12), 40)
    costs = drafter.rule.measured.known()
    assert costs is not None
    assert costs.target_s > 0
    assert costs.pass_s > 0
    assert drafter.rule.threshold() > 0


def test_pauses_grow_while_drafts_do_not_pay_and_end_when_they_do() -> None:
    rule = StoppingRule(StepCosts(target_s=1.0, pass_s=0.5))
    pauses = []
    for _ in range(9):
        rule.learn(outcome([9]), num_passes=1)
        pauses.append(next(n for n in range(200) if rule.is_due()))
    assert pauses == [1, 2, 4, 8, 16, 32, 64, 128, 128]
    while not rule.is_due():
        pass
    for _ in range(20):
        rule.learn(outcome([1, 2, 9]), num_passes=1)
    assert rule.is_due()


def test_nodes_deeper_than_what_is_committed_are_not_judged() -> None:
    tree = tree_of([(ROOT, 1), (0, 2), (1, 3), (0, 4), (ROOT, 5)])
    seen = JudgedDraft.of(tree, np.array([1], np.int32))
    assert seen.path.tolist() == [0]
    assert seen.is_known.tolist() == [True, False, False, False, True]
    assert seen.decided_parents() == [ROOT]


def test_empty_draft_is_an_outcome_too() -> None:
    nothing = JudgedDraft.of(DraftTree.empty(), np.array([4], np.int32))
    assert nothing.decided_parents() == [ROOT]
    assert len(nothing.path) == 0
