"""The kernels of forced drafts do what their obvious twins do."""

from itertools import pairwise

import numpy as np
import pytest
from numpy.typing import NDArray

from retriever.predict.grammar.forced_kernels import MOST_FORBIDDEN, merge_forced, order_paths
from retriever.tree import ROOT, DraftTree

Node = tuple[int, ...]
"""A node as the tokens down to it."""


def random_tree(rng: np.random.Generator, size: int) -> DraftTree:
    """Return a tree with few tokens, so that branches meet strings."""
    parents, tokens, shares = list[int](), list[int](), list[float]()
    children: dict[int, set[int]] = {}
    while len(parents) < size:
        parent = int(rng.integers(ROOT, len(parents)))
        free = sorted(set(range(6)) - children.setdefault(parent, set()))
        if not free:
            continue
        token = int(rng.choice(free))
        children[parent].add(token)
        parents.append(parent)
        tokens.append(token)
        shares.append(float(rng.random()) * (1.0 if parent == ROOT else shares[parent]))
    return DraftTree(
        np.array(tokens, np.int32),
        np.array(parents, np.int32),
        np.array(shares, np.float32),
        np.ones(size, np.uint8),
    )


def paths_of(tree: DraftTree) -> list[tuple[list[int], int]]:
    """Return the twin of `order_paths`: each path's nodes, and the depth of its first."""
    children: dict[int, list[int]] = {}
    for node, parent in enumerate(tree.parents.tolist()):
        children.setdefault(parent, []).append(node)
    found: list[tuple[list[int], int]] = []

    def walk(node: int, depth: int, path: list[int], begin: int) -> None:
        below = children.get(node, [])
        if not below:
            found.append((path, begin))
        for place, child in enumerate(below):
            if place == 0:
                walk(child, depth + 1, [*path, child], begin if path else depth)
            else:
                walk(child, depth + 1, [child], depth)

    walk(ROOT, 0, [], 0)
    return [(path, begin) for path, begin in found if path]


@pytest.mark.parametrize("seed", range(40))
def test_paths_follow_one_another_by_depth(seed: int) -> None:
    rng = np.random.default_rng(seed)
    tree = random_tree(rng, int(rng.integers(1, 40)))
    order, paths = np.empty(len(tree), np.int32), np.empty((2, len(tree) + 1), np.int32)
    count = order_paths(tree.parents, order, paths)
    begins, depths = paths[0, : count + 1].tolist(), paths[1, :count].tolist()
    assert begins[-1] == len(tree)
    found = [order[a:b].tolist() for a, b in pairwise(begins)]
    assert list(zip(found, depths, strict=True)) == paths_of(tree)


def merged(
    tree: DraftTree,
    forbidden: NDArray[np.int32],
    strings: list[tuple[int, list[int], list[float], int]],
) -> dict[Node, float]:
    """Return the twin of `merge_forced`: the probability of each node."""
    names = [tuple(tree.token_ids[tree.path_to(node)].tolist()) for node in range(len(tree))]
    shares: dict[Node, float] = {}
    retrieved = set[Node]()
    name: Node
    for node, name in enumerate(names):
        parent = int(tree.parents[node])
        siblings = np.flatnonzero(tree.parents == parent)
        before = 1.0 if parent == ROOT else max(float(tree.probabilities[parent]), 1e-9)
        lost = sum(min(float(tree.probabilities[n]) / before, 1) for n in siblings if forbidden[n])
        share = min(float(tree.probabilities[node]) / before, 1)
        if not forbidden[node]:
            shares[name] = min(share / (1 - min(lost, float(MOST_FORBIDDEN))), 1.0)
            retrieved.add(name)
    for at, tokens, probabilities, chosen_at in strings:
        name = () if at == ROOT else names[at]
        for place, (token, given) in enumerate(zip(tokens, probabilities, strict=True)):
            share, child = given, (*name, token)
            siblings_of = [n for n in shares if len(n) == len(child) and n[:-1] == name]
            if place == chosen_at:
                share *= max(1 - sum(shares[n] for n in siblings_of if n in retrieved), 0)
            else:
                for other in siblings_of:
                    if other != child:
                        shares[other] *= 1 - share
            shares[child] = max(shares.get(child, 0.0), share)
            name = child
    return {
        node: float(np.prod([shares[node[: n + 1]] for n in range(len(node))])) for node in shares
    }


@pytest.mark.parametrize("seed", range(60))
def test_strings_are_merged_into_what_is_allowed(seed: int) -> None:
    rng = np.random.default_rng(seed)
    size = int(rng.integers(0, 24))
    tree = random_tree(rng, size)
    forbidden = (rng.random(size) < 0.2).astype(np.int32)
    for node, parent in enumerate(tree.parents.tolist()):
        if parent != ROOT and forbidden[parent]:
            forbidden[node] = 1
    allowed = [ROOT, *np.flatnonzero(forbidden == 0).tolist()]
    strings = []
    for _ in range(int(rng.integers(0, 4))):
        length = int(rng.integers(1, 6))
        tokens = rng.integers(0, 6, length).tolist()
        shares = rng.random(length).tolist()
        strings.append((int(rng.choice(allowed)), tokens, shares, int(rng.integers(-1, length))))
    expected = merged(tree, forbidden, strings)
    num_added = sum(len(each[1]) for each in strings)
    most = size + num_added
    nodes, estimates = np.zeros((4, most), np.int32), np.zeros((2, most), np.float32)
    sources = np.ones(most, np.uint8)
    nodes[0, :size], nodes[1, :size], nodes[2, :size] = tree.token_ids, tree.parents, forbidden
    estimates[0, :size] = tree.probabilities
    ends = np.cumsum([0, *(len(each[1]) for each in strings)])[1:].tolist()
    made, made_shares = np.empty((2, most), np.int32), np.empty(most, np.float32)
    made_sources = np.empty(most, np.uint8)
    count = merge_forced(
        nodes,
        estimates,
        sources,
        size,
        np.array(
            [(each[0], end, each[3]) for each, end in zip(strings, ends, strict=True)], np.int32
        ).reshape(-1, 3),
        np.array([t for each in strings for t in each[1]], np.int32),
        np.array([p for each in strings for p in each[2]], np.float32),
        8,
        made,
        made_shares,
        made_sources,
    )
    result = DraftTree.checked(
        made[0, :count], made[1, :count], made_shares[:count], made_sources[:count]
    )
    found = {
        tuple(result.token_ids[result.path_to(node)].tolist()): float(result.probabilities[node])
        for node in range(count)
    }
    assert found.keys() == expected.keys()
    for path, probability in found.items():
        assert probability == pytest.approx(expected[path], rel=1e-4, abs=1e-6)
