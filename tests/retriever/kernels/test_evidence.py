"""What is gathered for a node is what the definitions say, at the root and below."""

from typing import Any

import numpy as np
import pytest

from indexer.reader import PhraseTables
from retriever.kernels.layout import MAX_SUCCESSORS, Scratch, Tables
from retriever.kernels.live_table import WAYS
from retriever.kernels.succession import MOST_FOLLOWERS, MOST_SUCCESSORS, find_successor
from retriever.predict.searched_corpus import to_kernel
from tests.indexer.stages.phrase_reading import find
from tests.retriever.kernels.twins.evidence_twin import Known
from tests.retriever.kernels.twins.worlds import (
    DEPTH,
    ESCAPE,
    World,
    evidence_of,
    random_world,
    tables_of_tokens,
    writable,
)
from tests.suite_parts import cases

NUM_WORLDS = cases(12, of=250)


def check_states(world: World, current: int, path: tuple[int, ...]) -> None:
    node, text = world.scratch.work.nodes[current], [*world.sequence, *path]
    for field, order in (("pair", 2), ("triple", 3)):
        entry = find(world.phrases, text[-order:]) if len(text) >= order else None
        assert int(node[field]) == (-1 if entry is None else entry)


def check_node(world: World, known: Known, current: int, end: int) -> None:
    """Candidates, their order where it is defined, and all numbers."""
    work = world.scratch.work
    node, first = work.nodes[current], int(work.nodes[current]["first_child"])
    assert int(node["end_child"]) == end
    found = evidence_of(world, first, end)
    assert set(found) == set(known.candidates)
    for token, values in known.candidates.items():
        np.testing.assert_allclose(found[token], values, rtol=1e-4, atol=1e-7)
    np.testing.assert_allclose(work.traits[0], known.traits, rtol=1e-4)
    assert int(node["dominant"]) == known.dominant
    children = work.nodes[first:end]
    assert dict(zip(children["token"].tolist(), children["source"].tolist(), strict=True)) == (
        known.sources
    )
    assert (children["parent"] == current).all()
    assert (work.slots == -1).all()


def descend(world: World, parent: int, child: int, share: float) -> None:
    """What `grow_tree` notes of a candidate that it offers."""
    nodes = world.scratch.work.nodes
    nodes[child]["probability"] = nodes[parent]["probability"] * share
    nodes[child]["depth"] = nodes[parent]["depth"] + 1
    nodes[child]["before"], nodes[child]["earlier"] = (
        nodes[parent]["token"],
        nodes[parent]["before"],
    )


@pytest.mark.seeds
def test_evidence_equals_the_twins() -> None:
    rng = np.random.default_rng(71)
    nodes_seen = deep = 0
    for _ in range(NUM_WORLDS):
        world = random_world(rng)
        twin = world.twin()
        world.plant()
        frontier: list[tuple[int, tuple[int, ...]]] = [(0, ())]
        num_nodes = 1
        for _ in range(12):
            if not frontier:
                break
            current, path = frontier.pop(int(rng.integers(len(frontier))))
            end = world.gather(current, num_nodes)
            check_states(world, current, path)
            probability = float(world.scratch.work.nodes[current]["probability"])
            known = twin.gather(world.rows, path, ESCAPE, probability)
            check_node(world, known, current, end)
            for child in range(num_nodes, end):
                descend(world, current, child, float(rng.random() ** 3))
                frontier.append((child, (*path, int(world.scratch.work.nodes[child]["token"]))))
            num_nodes = end
            nodes_seen += 1
            deep += len(path) >= DEPTH // 2
    assert nodes_seen > 9 * NUM_WORLDS
    assert deep > NUM_WORLDS / 4


def successor_of(tables: Tables, entry: int, token: int) -> int:
    """Call the kernel as others do: with a token of four bytes."""
    wanted: Any = np.int32(token)
    return int(find_successor(tables.starts1, tables.tokens2, entry, wanted))


@pytest.mark.parametrize("vocabulary_size", [5000, 70_000])
def test_a_successor_is_found_among_thousands(vocabulary_size: int) -> None:
    rng = np.random.default_rng(72)
    others = rng.choice(np.arange(1, vocabulary_size), 2000, replace=False).tolist()
    tokens = [token for other in others for token in (0, other)]
    phrases = tables_of_tokens(tokens, vocabulary_size)
    assert phrases.starts[0][1] == 2000
    tables = writable(to_kernel(phrases))
    for token in [*others[::20], *rng.integers(1, vocabulary_size, 100).tolist()]:
        found = successor_of(tables, 0, token)
        assert found == linear_search(phrases, 0, token)


def linear_search(phrases: PhraseTables, entry: int, token: int) -> int:
    begin, end = (int(place) for place in phrases.starts[0][entry : entry + 2])
    tokens = phrases.tokens[1][begin:end].tolist()
    return begin + tokens.index(token) if token in tokens else -1


def test_what_does_not_exist_has_no_successor() -> None:
    tables = writable(to_kernel(tables_of_tokens([0, 1, 0, 2], 4)))
    for entry in (-2, -1, 4, 1 << 30):
        assert successor_of(tables, entry, 1) == -1
    assert successor_of(tables, 3, 1) == -1


@pytest.mark.seeds
def test_candidates_beyond_the_room_for_them_are_left_out() -> None:
    rng = np.random.default_rng(73)
    short = 0
    for _ in range(NUM_WORLDS):
        max_nodes = int(rng.integers(2, 12))
        world = random_world(rng, max_nodes=max_nodes)
        world.plant()
        end = world.gather(0, 1)
        assert end <= max_nodes
        known = world.twin().gather(world.rows, (), ESCAPE, 1.0)
        found = evidence_of(world, 1, end)
        assert len(found) == min(max_nodes - 1, len(known.candidates))
        for token, values in found.items():
            np.testing.assert_allclose(values, known.candidates[token], rtol=1e-4, atol=1e-7)
        assert (world.scratch.work.slots == -1).all()
        short += len(found) < len(known.candidates)
    assert short > NUM_WORLDS / 10


def test_the_table_of_siblings_is_never_full() -> None:
    """It has room for the rows and for all that tables, sequence and outputs can add to them."""
    assert sum(MOST_SUCCESSORS) + sum(MOST_FOLLOWERS) + 2 * WAYS == MAX_SUCCESSORS
    for max_rows in (1, 2, 55, 56, 57, 64, 952, 953, 1024):
        slots = Scratch(1, max_rows=max_rows, max_nodes=1).work.slots
        assert len(slots) > max_rows + MAX_SUCCESSORS
        assert len(slots).bit_count() == 1
