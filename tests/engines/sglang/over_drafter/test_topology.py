"""Any tree, built by the engine's kernel for its trained drafters."""

import numpy as np
import pytest
import torch

from decoder.engines.experimental_sglang.topology import (
    DEPTH,
    Nodes,
    filled,
    nodes_of,
    topology_of,
)
from retriever.tree import ROOT, DraftTree
from tests.engines.sglang.conftest import Kernels
from tests.engines.sglang.rows import random_tree
from tests.engines.sglang.tree_verification import Links, sampled

NUM_TOKENS, NUM_NODES = 5, 7


def rows(count: int) -> tuple[list[DraftTree], list[Nodes]]:
    random = np.random.default_rng(9)
    trees = [random_tree(random, NUM_NODES, NUM_TOKENS) for _ in range(count)]
    return trees, [filled(Nodes.of(tree), NUM_NODES) for tree in trees]


def built(kernels: Kernels, filled_rows: list[Nodes], length: int = 3) -> list[Links]:
    count, width = len(filled_rows), NUM_NODES + 1
    topology = [torch.from_numpy(each) for each in topology_of(filled_rows)]
    mask = torch.ones(count * width * width, dtype=torch.bool)
    positions = torch.zeros(count * width, dtype=torch.int64)
    links = torch.full((3, count, width), -1)
    kernels.build_tree(
        topology[0], topology[1], torch.full((count,), length), mask, positions, *links,
        NUM_NODES, DEPTH, width, 1,
    )  # fmt: skip
    return [
        Links(
            positions.view(count, width)[row].numpy() - length,
            links[1, row].numpy(),
            links[2, row].numpy(),
        )
        for row in range(count)
    ]


def test_rows_are_full_and_keep_their_tree() -> None:
    for tree, row in zip(*rows(200), strict=True):
        assert len(row.tokens) == len(row.parents) == NUM_NODES
        assert row.tokens[: len(tree)].tolist() == tree.token_ids.tolist()
        assert row.parents[: len(tree)].tolist() == tree.parents.tolist()
        below = list(zip(row.parents.tolist(), row.tokens.tolist(), strict=True))
        assert len(set(below)) == NUM_NODES
        assert (row.parents < np.arange(NUM_NODES)).all()


def test_a_chain_stays_a_chain() -> None:
    row = filled(Nodes(np.array([4, 2]), np.array([ROOT, 0])), 5, is_chain=True)
    assert row.parents.tolist() == [-1, 0, 1, 2, 3]
    assert row.tokens[:2].tolist() == [4, 2]


def test_the_engines_kernel_links_each_node_to_its_parent(kernels: Kernels) -> None:
    _, filled_rows = rows(200)
    for row, links in zip(filled_rows, built(kernels, filled_rows), strict=True):
        children: dict[int, list[int]] = {}
        for node, parent in enumerate(row.parents.tolist()):
            children.setdefault(parent + 1, []).append(node + 1)
        for node in range(NUM_NODES + 1):
            found, child = [], int(links.next_token[node])
            while child != -1:
                found.append(child)
                child = int(links.next_sibling[child])
            assert found == children.get(node, [])
        depths = [0]
        depths += [0] * NUM_NODES
        for node, parent in enumerate(row.parents.tolist()):
            depths[node + 1] = depths[parent + 1] + 1
        assert links.positions.tolist() == depths


def test_sampling_over_full_rows_gives_the_targets_own_distribution(kernels: Kernels) -> None:
    random = np.random.default_rng(2)
    _, filled_rows = rows(40)
    size = int(max(row.tokens.max() for row in filled_rows)) + 1
    for row, links in zip(filled_rows, built(kernels, filled_rows), strict=True):
        tokens = np.append(0, row.tokens)
        for node in range(NUM_NODES + 1):
            target = random.dirichlet([0.7] * size)
            drawn = sampled(tokens, links, node, target.tolist())
            np.testing.assert_allclose(drawn, target, atol=1e-12)


def test_the_engines_own_form_is_read_back() -> None:
    _, filled_rows = rows(100)
    topology = topology_of(filled_rows)
    for row, nodes in enumerate(filled_rows):
        parents, selected, tokens = (each[row].tolist() for each in topology)
        read = nodes_of(tokens, selected, parents, NUM_NODES)
        assert read.tokens.tolist() == nodes.tokens.tolist()
        assert read.parents.tolist() == nodes.parents.tolist()


def test_a_tree_without_a_parent_is_refused() -> None:
    with pytest.raises(ValueError, match="no parent"):
        nodes_of([1, 2], [0, 9], [-1, 0, 7, 7, 7], 2)
