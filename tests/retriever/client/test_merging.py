"""Merged trees: valid, within the budget, and what the slow twin makes of them."""

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from retriever.client.merging import merge_trees
from retriever.tree import DraftTree, Source
from tests.retriever.client.merging_twin import merge_slowly, paths_of, random_tree
from tests.suite_parts import cases


def tree_of(*nodes: tuple[int, int, float], source: Source = Source.CORPUS) -> DraftTree:
    token_ids, parents, probabilities = zip(*nodes, strict=True)
    return DraftTree.checked(token_ids, parents, probabilities, [source] * len(nodes))


@settings(max_examples=cases(80, of=400), deadline=None)
@given(
    seed=st.integers(0, 2**32),
    num_trees=st.integers(1, 5),
    budget=st.integers(1, 24),
    min_probability=st.sampled_from([0.0, 0.001, 0.05, 0.3]),
)
def test_merged_tree_is_valid_and_that_of_the_twin(
    seed: int, num_trees: int, budget: int, min_probability: float
) -> None:
    rng = np.random.default_rng(seed)
    trees = [random_tree(rng, budget, min_probability) for _ in range(num_trees)]
    merged = merge_trees(trees, budget, min_probability)
    for size in range(len(merged) + 1):
        cut = merged.prefix(size)
        DraftTree.checked(cut.token_ids, cut.parents, cut.probabilities, cut.sources)
    assert len(merged) <= budget
    if num_trees == 1:
        assert paths_of(merged) == paths_of(trees[0])
        return
    expected = merge_slowly(trees, budget, min_probability)
    assert [p for p, _, _ in expected] == list(paths_of(merged))
    assert merged.probabilities.tolist() == pytest.approx([p for _, p, _ in expected], rel=1e-6)
    assert merged.sources.tolist() == [source for _, _, source in expected]


@given(seed=st.integers(0, 2**32), copies=st.integers(2, 5))
@settings(max_examples=50, deadline=None)
def test_equal_trees_are_no_more_evidence_than_one(seed: int, copies: int) -> None:
    tree = random_tree(np.random.default_rng(seed), 12, 0.0)
    merged = merge_trees([tree] * copies, 12)
    assert merged.token_ids.tolist() == tree.token_ids.tolist()
    assert merged.parents.tolist() == tree.parents.tolist()
    assert merged.probabilities.tolist() == pytest.approx(tree.probabilities.tolist(), rel=1e-6)


def test_one_that_is_sure_is_not_drowned_by_many_that_are_vague() -> None:
    sure = tree_of((7, -1, 0.9), (8, 0, 0.88))
    vague = tree_of((1, -1, 0.05), (2, -1, 0.04))
    merged = merge_trees([vague, sure, vague, vague], 2)
    assert merged.token_ids.tolist() == [7, 8]
    assert merged.probabilities[0] > 0.5


def test_node_below_a_cut_is_missing_and_not_impossible() -> None:
    """What a tree of two nodes lacks, where three were asked for, it holds impossible."""
    one = tree_of((1, -1, 0.5), (2, -1, 0.4))
    other = tree_of((3, -1, 0.6), (1, -1, 0.1))
    cut = paths_of(merge_trees([one, other], 2))
    whole = paths_of(merge_trees([one, other], 3))
    assert list(cut) == [(3,), (1,)]
    assert cut[3,][0] > whole[3,][0] > 0.4


def test_sources_are_those_of_the_surest() -> None:
    one = tree_of((1, -1, 0.5), source=Source.CONTEXT)
    other = tree_of((1, -1, 0.8), (2, -1, 0.1), source=Source.CORPUS)
    merged = merge_trees([one, other], 4)
    assert merged.sources.tolist() == [Source.CORPUS, Source.CORPUS]


@pytest.mark.parametrize("trees", [[], [DraftTree.empty()], [DraftTree.empty()] * 3])
def test_nothing_merges_to_nothing(trees: list[DraftTree]) -> None:
    assert len(merge_trees(trees, 8)) == 0


def test_tree_beyond_the_budget_is_cut() -> None:
    tree = tree_of((1, -1, 0.5), (2, -1, 0.4), (3, -1, 0.1))
    assert len(merge_trees([tree], 2)) == 2
    assert len(merge_trees([tree, tree], 2)) == 2
    assert len(merge_trees([tree, tree], 0)) == 0
