from collections import Counter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from decoder.budget import budget
from decoder.budget.budget import CostCurve, FixedBudget, MeasuredBudget, measure_costs
from decoder.target.target import Target
from retriever.tree import ROOT, DraftTree, Source
from tests.decoder.decoding import ScriptedDrafter, decoded, decoder_with, nothing, tiny_llama

WIDTHS = (1, 2, 4, 8, 16, 32)


def tree_with(probabilities: list[float]) -> DraftTree:
    count = len(probabilities)
    return DraftTree.checked(
        np.arange(count),
        np.full(count, ROOT),
        sorted(probabilities, reverse=True),
        np.full(count, Source.CORPUS),
    )


def cost(curve: CostCurve, width: int) -> float:
    """Interpolate the slow way: the dearest narrower point bounds every measured one."""
    dearest = [max(curve.seconds[: at + 1]) for at in range(len(curve.widths))]
    for at, (low, high) in enumerate(zip(curve.widths, curve.widths[1:], strict=False)):
        if low <= width <= high:
            share = (width - low) / (high - low)
            return dearest[at] + share * (dearest[at + 1] - dearest[at])
    raise AssertionError(width)


def rate(curve: CostCurve, tree: DraftTree, num_nodes: int) -> float:
    expected = 1 + float(tree.probabilities[:num_nodes].astype(float).sum())
    return expected / cost(curve, num_nodes + 1)


@given(
    st.lists(st.floats(0.001, 1.0), min_size=len(WIDTHS), max_size=len(WIDTHS)),
    st.lists(st.floats(0.0, 1.0, width=32), max_size=31),
)
def test_cut_has_the_best_rate_of_all_prefixes(
    seconds: list[float], probabilities: list[float]
) -> None:
    curve = CostCurve(WIDTHS, tuple(seconds))
    tree = tree_with(probabilities)
    cut = MeasuredBudget(curve).cut(tree)
    best = max(rate(curve, tree, num_nodes) for num_nodes in range(len(tree) + 1))
    assert rate(curve, tree, len(cut)) == pytest.approx(best, rel=1e-6)
    np.testing.assert_array_equal(cut.token_ids, tree.token_ids[: len(cut)])


def test_nothing_is_verified_where_nothing_pays() -> None:
    budget = MeasuredBudget(CostCurve((1, 2, 4), (1.0, 1.9, 3.5)))
    assert len(budget.cut(tree_with([0.5, 0.5, 0.5]))) == 0


def test_all_is_verified_where_width_is_free() -> None:
    budget = MeasuredBudget(CostCurve((1, 2, 4), (1.0, 1.0, 1.0)))
    assert len(budget.cut(tree_with([0.1, 0.01, 0.001]))) == 3


def test_a_drafter_is_asked_for_no_more_than_could_pay() -> None:
    dear = MeasuredBudget(CostCurve((1, 2, 4, 8), (1.0, 2.5, 5.0, 10.0)))
    knee = MeasuredBudget(CostCurve((1, 4, 8), (1.0, 1.2, 9.0)))
    assert (dear.max_nodes, knee.max_nodes) == (0, 3)
    assert len(knee.cut(tree_with([1.0] * 7))) == 3


def test_dear_narrow_passes_bound_wider_ones() -> None:
    table = CostCurve((1, 2, 4), (1.0, 3.0, 2.0)).table()
    assert table.tolist() == [1.0, 3.0, 3.0, 3.0]


def test_fixed_budget_takes_the_first_nodes() -> None:
    assert len(FixedBudget(2).cut(tree_with([0.9, 0.8, 0.7]))) == 2
    assert len(FixedBudget(9).cut(tree_with([0.9, 0.8, 0.7]))) == 3


def test_measuring_leaves_no_trace(prompt: list[int]) -> None:
    model = tiny_llama()
    decoder = decoder_with(model, ScriptedDrafter(nothing))
    before = decoded(decoder, prompt, 10)
    curve = measure_costs(decoder.target, max_seconds=0.05)
    assert curve.widths[0] == 1
    assert all(seconds > 0 for seconds in curve.seconds)
    assert decoder.target._committed == 0
    assert decoded(decoder, prompt, 10) == before


def test_a_busy_moment_does_not_pass_for_a_cost(monkeypatch: pytest.MonkeyPatch) -> None:
    passes: Counter[int] = Counter()

    def busy_at_first(_: Target, tree: DraftTree) -> float:
        passes[len(tree)] += 1
        busy = 10.0 if passes.total() < 12 else 1.0
        return busy * (1 + passes[len(tree)] % 3 / 10) * (len(tree) + 1)

    monkeypatch.setattr(budget, "_time_pass", busy_at_first)
    assert measure_costs(Target(tiny_llama()), (1, 2, 4)).seconds == (1.0, 2.0, 4.0)


def test_measuring_fits_models_with_little_room() -> None:
    model = tiny_llama()
    model.config.max_position_embeddings = 4
    assert len(measure_costs(Target(model), (1, 2, 4), 0.01).seconds) == 3


CHEAP = CostCurve((1, 2, 4), (1.0, 1.2, 1.6))
NOBODY = np.empty(0, np.int64)


def test_a_drafter_too_sure_of_itself_is_soon_left_alone_and_tried_again() -> None:
    measured = MeasuredBudget(CHEAP)
    tree = tree_with([0.9, 0.85, 0.8])
    verified = []
    for _ in range(400):
        cut = measured.cut(tree)
        verified.append(len(cut))
        measured.learn(cut, NOBODY)
    assert verified[0] == 3
    assert verified[10] == 0
    assert 0 < sum(verified[100:]) < 0.1 * 3 * 300


def test_a_drafter_that_is_right_as_often_as_it_says_is_believed() -> None:
    rng = np.random.default_rng(0)
    measured = MeasuredBudget(CHEAP)
    verified = []
    for _ in range(300):
        cut = measured.cut(tree_with([0.7]))
        verified.append(len(cut))
        measured.learn(cut, np.flatnonzero(rng.random(len(cut)) < 0.7))
    assert np.mean(verified) > 0.95


def test_distrust_of_the_unsure_does_not_touch_the_sure() -> None:
    measured = MeasuredBudget(CHEAP)
    for _ in range(50):
        measured.learn(tree_with([0.95, 0.5, 0.5]), np.array([0]))
    assert len(measured.cut(tree_with([0.95, 0.5, 0.5]))) == 1
