import numpy as np
import pytest
from hypothesis import given, strategies as st

from retriever.errors import InvalidTreeError
from retriever.tree import ROOT, DraftTree, Source


@st.composite
def trees(draw: st.DrawFn, max_nodes: int = 24) -> DraftTree:
    """Valid trees: nodes attached at random, then sorted by probability."""
    num_nodes = draw(st.integers(0, max_nodes))
    parents: list[int] = []
    probabilities: list[float] = []
    for node in range(num_nodes):
        parent = draw(st.integers(ROOT, node - 1))
        above = 1.0 if parent == ROOT else probabilities[parent]
        previous = probabilities[-1] if probabilities else 1.0
        share = draw(st.floats(0.1, 1.0))
        probabilities.append(float(np.float32(min(above, previous) * share)))
        parents.append(parent)
    sources = draw(st.lists(st.integers(1, 5), min_size=num_nodes, max_size=num_nodes))
    return DraftTree.checked(list(range(num_nodes)), parents, probabilities, sources)


@given(trees(), st.integers(0, 30))
def test_tree_prefix_is_a_valid_tree(tree: DraftTree, size: int) -> None:
    prefix = tree.prefix(size)
    assert len(prefix) == min(size, len(tree))
    DraftTree.checked(prefix.token_ids, prefix.parents, prefix.probabilities, prefix.sources)


@given(trees(max_nodes=12), st.integers(0, 12))
def test_tree_prefix_is_the_best_tree_of_its_size(tree: DraftTree, size: int) -> None:
    """No other choice of as many nodes has a larger sum of probabilities."""
    best = sorted(tree.probabilities.tolist(), reverse=True)[:size]
    assert tree.prefix(size).probabilities.tolist() == best


@given(trees(), st.integers(1, 30))
def test_best_chain_has_the_largest_sum_of_probabilities(tree: DraftTree, most: int) -> None:
    chain = tree.best_chain(most)
    sums = [
        float(tree.probabilities[tree.path_to(node)].sum())
        for node in range(len(tree))
        if len(tree.path_to(node)) <= most
    ]
    assert chain.parents.tolist() == list(range(-1, len(chain) - 1))
    assert float(chain.probabilities.sum()) == pytest.approx(max(sums, default=0.0), rel=1e-5)


@given(trees())
def test_depth_is_the_length_of_the_path(tree: DraftTree) -> None:
    assert tree.depths().tolist() == [len(tree.path_to(node)) for node in range(len(tree))]


@given(trees(), st.data())
def test_following_a_path_finds_it(tree: DraftTree, data: st.DataObject) -> None:
    if len(tree) == 0:
        assert len(tree.follow(np.array([1, 2]))) == 0
        return
    path = tree.path_to(data.draw(st.integers(0, len(tree) - 1)))
    off_the_tree = np.append(tree.token_ids[path], len(tree))
    assert tree.follow(off_the_tree).tolist() == path.tolist()


def test_sources_stay_with_their_nodes() -> None:
    tree = DraftTree.checked([7, 8, 9], [ROOT, ROOT, 0], [0.5, 0.3, 0.2], [1, 2, 4])
    assert [Source(s) for s in tree.best_chain(2).sources] == [Source.CONTEXT, Source.CORPUS]


def test_empty_tree_is_a_miss() -> None:
    assert len(DraftTree.empty()) == 0
    assert len(DraftTree.checked([], [], [], [])) == 0
    assert len(DraftTree.empty().best_chain(4)) == 0


@pytest.mark.parametrize(
    ("arrays", "reason"),
    [
        (([1], [ROOT], [0.5], [1, 1]), "differ in length"),
        (([1], [0], [0.5], [1]), "earlier node"),
        (([1], [-2], [0.5], [1]), "earlier node"),
        (([1, 2], [1, ROOT], [0.5, 0.5], [1, 1]), "earlier node"),
        (([1, 2], [ROOT, ROOT], [0.4, 0.5], [1, 1]), "falling probability"),
        (([1, 1], [ROOT, ROOT], [0.5, 0.4], [1, 1]), "same token"),
        (([1], [ROOT], [1.5], [1]), "between 0 and 1"),
        (([1], [ROOT], [float("nan")], [1]), "between 0 and 1"),
        (([-1], [ROOT], [0.5], [1]), "negative"),
        (([1 << 40], [ROOT], [0.5], [1]), "does not fit"),
        (([100], [ROOT], [0.5], [1]), "outside the vocabulary"),
        (([1], [ROOT], [0.5], [77]), "unknown source"),
        (([[1]], [ROOT], [0.5], [1]), "dimension"),
    ],
)
def test_arrays_that_are_no_tree_are_refused(arrays: tuple[list[int], ...], reason: str) -> None:
    with pytest.raises(InvalidTreeError, match=reason):
        DraftTree.checked(*arrays, vocabulary_size=100)
