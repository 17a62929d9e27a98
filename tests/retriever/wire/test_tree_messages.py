"""Trees that are checked together are those that pass one by one."""

import numpy as np
import pytest

from retriever.errors import InvalidTreeError
from retriever.tree import DraftTree
from retriever.v1 import retriever_pb2 as pb
from retriever.wire.messages import (
    PACKED,
    clear_trees,
    tree_from_message,
    tree_to_message,
    trees_from_messages,
)
from tests.suite_parts import cases

NUM_FORESTS = cases(600, of=3000)


def some_tree(rng: np.random.Generator) -> pb.DraftTree:
    """A tree more often than not: with so few tokens siblings are often alike."""
    size = int(rng.integers(0, 6))
    parents = [int(rng.integers(-1, at)) if at else -1 for at in range(size)]
    tree = pb.DraftTree(
        token_ids=rng.integers(0, 9, size).tolist(),
        parents=parents,
        probabilities=np.sort(rng.random(size).astype(np.float32))[::-1].tolist(),
        sources=rng.integers(0, 6, size).tolist(),
    )
    if size and rng.random() < 0.2:
        damage(tree, int(rng.integers(8)), int(rng.integers(size)))
    return tree


def damage(tree: pb.DraftTree, kind: int, at: int) -> None:
    if kind == 0:
        tree.parents[at] = at
    elif kind == 1:
        tree.parents[at] = -2
    elif kind == 2:
        tree.probabilities[at] = 1.5
    elif kind == 3:
        tree.probabilities[at] = float("nan")
    elif kind == 4:
        tree.token_ids[at] = 1 << 31
    elif kind == 5:
        del tree.sources[at]
    elif kind == 6:
        tree.token_ids.append(1)
    else:
        tree.sources[at] = 99  # type: ignore[call-overload]  # of a newer service: no damage


def one_by_one(messages: list[pb.DraftTree]) -> list[DraftTree] | None:
    try:
        return [tree_from_message(message) for message in messages]
    except InvalidTreeError:
        return None


@pytest.mark.seeds
def test_forest_is_valid_where_each_of_its_trees_is() -> None:
    rng = np.random.default_rng(11)
    num_valid = 0
    for _ in range(NUM_FORESTS):
        messages = [some_tree(rng) for _ in range(int(rng.integers(0, 4)))]
        expected = one_by_one(messages)
        assert (clear_trees(messages) is None) == (expected is None)
        if expected is None:
            with pytest.raises(InvalidTreeError):
                trees_from_messages(messages, len(messages))
            continue
        num_valid += 1
        for one, other in zip(trees_from_messages(messages, len(messages)), expected, strict=True):
            for field in ("token_ids", "parents", "probabilities", "sources"):
                left, right = getattr(one, field), getattr(other, field)
                assert left.dtype == right.dtype
                assert left.tolist() == right.tolist()
    assert NUM_FORESTS / 6 < num_valid < 5 * NUM_FORESTS / 6


def test_another_number_of_trees_is_refused() -> None:
    with pytest.raises(InvalidTreeError, match="2 trees for 1"):
        trees_from_messages([pb.DraftTree(), pb.DraftTree()], 1)


def test_probabilities_that_rise_by_a_rounding_are_still_a_tree() -> None:
    message = pb.DraftTree(
        token_ids=[1, 2],
        parents=[-1, 0],
        probabilities=[0.5, 0.5000001],
        sources=[pb.SOURCE_CONTEXT] * 2,
    )
    assert clear_trees([message]) is None
    (tree,) = trees_from_messages([message], 1)
    assert tree.token_ids.tolist() == [1, 2]


@pytest.mark.parametrize("form", [PACKED, pb.TreeForm(packed=True, ancestors=True)])
def test_trees_travel_as_bytes_as_they_do_as_lists(form: pb.TreeForm) -> None:
    rng = np.random.default_rng(5)
    num_trees = 0
    for _ in range(300):
        listed = some_tree(rng)
        try:
            tree = tree_from_message(listed)
        except InvalidTreeError:
            continue
        num_trees += 1
        (back,) = trees_from_messages([tree_to_message(tree, form)], 1)
        for field in ("token_ids", "parents", "probabilities", "sources"):
            left, right = getattr(back, field), getattr(tree, field)
            assert left.dtype == right.dtype
            assert left.tolist() == right.tolist()
    assert num_trees > 30


@pytest.mark.parametrize(
    "packed",
    [
        bytes(12),
        bytes(14),
        np.array([-5], np.int32).tobytes() + np.array([-1], np.int32).tobytes() + bytes(5),
        np.array([5, 3], np.int32).tobytes() + bytes(18),
    ],
    ids=["too short", "too long", "no token", "a parent that is the node"],
)
def test_bytes_that_are_no_tree_are_refused(packed: bytes) -> None:
    with pytest.raises(InvalidTreeError):
        trees_from_messages([pb.DraftTree(packed=packed)], 1)


def test_ancestors_are_the_mask_of_attention_among_nodes() -> None:
    rng = np.random.default_rng(2)
    for size in (1, 7, 8, 9, 64, 130):
        parents = np.array([rng.integers(-1, node) for node in range(size)], np.int32)
        tree = DraftTree(
            np.arange(size, dtype=np.int32),
            parents,
            np.linspace(1, 0.1, size, dtype=np.float32),
            np.ones(size, np.uint8),
        )
        ancestors = tree_to_message(tree, pb.TreeForm(ancestors=True)).ancestors
        rows = np.frombuffer(ancestors, np.uint8).reshape(size, -(-size // 8))
        for node in range(size):
            on_path = set(tree.path_to(node).tolist())
            bits = {at for at in range(8 * rows.shape[1]) if rows[node, at // 8] >> at % 8 & 1}
            assert bits == on_path
    assert tree_to_message(DraftTree.empty(), pb.TreeForm(ancestors=True)) == pb.DraftTree()
