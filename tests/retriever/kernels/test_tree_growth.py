"""Trees have the probabilities that the evidence gives them, and are the best of their size."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from retriever.kernels import tree_growth as growth
from retriever.kernels.layout import Chains, Found, Tables, Work
from retriever.kernels.mixing import learn
from retriever.predict.weights import Weights
from retriever.sessions.embedded import EmbeddedDrafter
from retriever.tree import DraftTree
from tests.retriever.kernels.twins.tree_twin import TreeTwin
from tests.retriever.kernels.twins.worlds import MAX_BUDGET, random_world
from tests.retriever.predict.blank import random_weights
from tests.suite_parts import cases

NUM_WORLDS = cases(12, of=120)
# Where shares of all are compared: over fewer, one world weighs too much.
MANY_WORLDS = cases(24, of=120)


def thorough(
    found: Found,
    num_rows: int,
    sequence: Chains,
    live: NDArray[np.int64],
    tables: Tables,
    weights: Weights,
    escape: float,
    work: Work,
    *rest: Any,
) -> int:
    """The kernel, told that a child may be as probable as its parent: it gives up no node.

    Python runs it; what it calls is compiled as ever.
    """
    named = work._replace(nodes=work.nodes.view(np.recarray))  # whose fields are attributes
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(growth, "LIKELY_CHILD_BOUND", 1.0)
        size: int = growth.grow_tree.py_func(
            found, num_rows, sequence, live, tables, weights, escape, named, *rest
        )
    return size


def paths_of(tree: DraftTree) -> list[tuple[int, ...]]:
    return [tuple(tree.token_ids[tree.path_to(node)].tolist()) for node in range(len(tree))]


def check_nodes(tree: DraftTree, twin: TreeTwin) -> None:
    for node, path in enumerate(paths_of(tree)):
        expected = twin.probability(path)
        assert float(tree.probabilities[node]) == pytest.approx(expected, rel=1e-3, abs=1e-4)
        assert int(tree.sources[node]) == twin.known(path[:-1]).sources[path[-1]]


@pytest.mark.seeds
def test_nodes_have_the_probabilities_of_their_paths() -> None:
    rng = np.random.default_rng(91)
    nodes_seen, missed, best = 0, 0.0, 0.0
    for _ in range(MANY_WORLDS):
        world, weights = random_world(rng), random_weights(rng)
        twin = TreeTwin(world, weights)
        budget = int(rng.integers(1, MAX_BUDGET + 1))
        min_probability = float(rng.choice([0.0, 0.01, 0.2]))
        tree = world.grow(weights, budget, min_probability)
        check_nodes(tree, twin)
        assert (tree.probabilities >= np.float32(min_probability)).all()
        most = twin.best(budget, min_probability)
        assert len(tree) <= len(most)
        nodes_seen += len(tree)
        missed += sum(most) - float(tree.probabilities.sum())
        best += sum(most)
    assert nodes_seen > 4 * MANY_WORLDS
    assert missed < 0.02 * best


@pytest.mark.seeds
def test_a_thorough_tree_is_the_best_of_its_size() -> None:
    rng = np.random.default_rng(92)
    for _ in range(NUM_WORLDS):
        world, weights = random_world(rng), random_weights(rng)
        twin = TreeTwin(world, weights)
        budget = int(rng.integers(1, MAX_BUDGET + 1))
        tree = world.grow(weights, budget, 0.0, by=thorough)
        check_nodes(tree, twin)
        most = twin.best(budget, 0.0)
        np.testing.assert_allclose(tree.probabilities, most[: len(tree)], rtol=1e-3, atol=1e-5)
        assert len(tree) == len(most) or most[len(tree)] < 1.01e-6  # at the threshold


@pytest.mark.seeds
def test_learning_follows_the_tree_as_far_as_it_was_considered() -> None:
    rng = np.random.default_rng(93)
    unknown = 1 << 30
    for _ in range(NUM_WORLDS):
        world, weights = random_world(rng), random_weights(rng)
        budget = int(rng.integers(1, MAX_BUDGET + 1))
        tree = world.grow(weights, budget, 0.0, by=thorough)
        for node, path in enumerate(paths_of(tree)):
            is_end = node == budget - 1  # what follows the last node was not considered
            tokens = np.array([*path, unknown, unknown], np.int32)
            assert learn(weights, world.scratch.work, tokens, 1e-6) == len(path) + (not is_end)


@pytest.mark.seeds
def test_growth_ends_without_harm_when_there_is_no_room() -> None:
    rng = np.random.default_rng(94)
    for _ in range(2 * NUM_WORLDS):
        max_nodes = int(rng.integers(1, 60))
        world = random_world(rng, max_nodes=max_nodes)
        tree = world.grow(random_weights(rng), MAX_BUDGET, 0.0)
        assert len(tree) <= max_nodes - 1


def test_tokens_of_no_known_vocabulary_are_drafted() -> None:
    most = np.iinfo(np.int32).max - 1
    tree = EmbeddedDrafter().draft_context([most, 0, most - 1, most, 0], 4)
    assert int(tree.token_ids[0]) == most - 1


def damaged(array: NDArray[Any], rng: np.random.Generator) -> NDArray[Any]:
    """An array of which some bytes, or all, are random."""
    kept = rng.random(array.nbytes) >= rng.choice([0.1, 1.0])
    noise = rng.integers(0, 256, array.nbytes, np.uint8)
    return np.where(kept, array.view(np.uint8), noise).view(array.dtype)


@pytest.mark.seeds
def test_damaged_tables_never_reach_a_tree() -> None:
    """Every token is of the vocabulary, whatever the tables hold; only sizes are as they were."""
    rng = np.random.default_rng(95)
    fields = [name for name in Tables._fields if name[:-1] in ("starts", "tokens", "counts")]
    for _ in range(4 * NUM_WORLDS):
        world, weights = random_world(rng), random_weights(rng)
        arrays = {
            name: damaged(getattr(world.tables, name), rng)
            for name in fields
            if rng.random() < 0.5 and len(getattr(world.tables, name))
        }
        world.tables = world.tables._replace(**arrays)
        world.grow(weights, MAX_BUDGET, 0.0)  # checks the tree


@pytest.mark.soak
@pytest.mark.skipif("NUMBA_BOUNDSCHECK" in os.environ, reason="this is the child")
def test_nothing_is_read_out_of_bounds(tmp_path: Path) -> None:
    """Runs the tests of damage and of full tables again, with every index checked."""
    names = (
        "tree_growth.py::test_damaged",
        "tree_growth.py::test_growth_ends",
        "row_kernels.py::test_damaged",
    )
    checks = {"NUMBA_BOUNDSCHECK": "1", "NUMBA_CACHE_DIR": str(tmp_path)}
    here = Path(__file__).parent
    chosen = " or ".join(name.split("::")[1] for name in names)
    files = sorted({str(here / f"test_{name.split('::')[0]}") for name in names})
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-k", chosen, *files]
    child = subprocess.run(
        command, env=os.environ | checks, capture_output=True, text=True, check=False
    )
    assert child.returncode == 0, child.stdout + child.stderr
    assert "4 passed" in child.stdout
