"""Merging trees slowly and obviously: paths in dictionaries."""

import numpy as np

from retriever.client.merging import ABSENT_SHARE, EXPONENT
from retriever.tree import ROOT, DraftTree

Path = tuple[int, ...]


def paths_of(tree: DraftTree) -> dict[Path, tuple[float, int]]:
    """Return the probability and the source of each path of a tree, in the tree's order."""
    return {
        tuple(tree.token_ids[tree.path_to(node)].tolist()): (
            float(tree.probabilities[node]),
            int(tree.sources[node]),
        )
        for node in range(len(tree))
    }


def merge_slowly(
    trees: list[DraftTree], budget: int, min_probability: float
) -> list[tuple[Path, float, int]]:
    """Return path, probability and source of each node of the merged tree."""
    known = [paths_of(tree.prefix(budget)) for tree in trees]
    all_paths = list(dict.fromkeys(path for paths in known for path in paths))
    merged: dict[Path, tuple[float, int]] = {}
    for path in sorted(all_paths, key=len):
        values, loudest, source = [], -1.0, 0
        for paths in known:
            is_full = 0 < len(paths) == budget
            least = min(p for p, _ in paths.values()) if is_full else min_probability
            value, speaker = paths.get(path, (ABSENT_SHARE * least, 0))
            values.append(value**EXPONENT)
            if value > loudest:
                loudest, source = value, speaker
        mean = float(np.float32((sum(values) / len(values)) ** (1 / EXPONENT)))
        above = merged[path[:-1]][0] if len(path) > 1 else 1.0
        merged[path] = (min(mean, above), source)
    places = {path: at for at, path in enumerate(all_paths)}
    kept = [path for path in merged if merged[path][0] >= min_probability]
    kept.sort(key=lambda path: (-merged[path][0], places[path]))
    return [(path, *merged[path]) for path in kept[:budget]]


def random_tree(rng: np.random.Generator, budget: int, min_probability: float) -> DraftTree:
    """Grow a tree of few tokens at random, best first, as drafters do."""
    frontier: list[tuple[float, int, int]] = []  # probability, parent, token
    nodes: list[tuple[int, int, float, int]] = []

    def offer(parent: int, probability: float) -> None:
        tokens = rng.permutation(5)[: rng.integers(1, 5)]
        shares = rng.dirichlet(np.full(len(tokens) + 1, 0.4))
        frontier.extend(
            (float(np.float32(probability * share)), parent, int(token))
            for token, share in zip(tokens, shares, strict=False)
        )

    offer(ROOT, 1.0)
    size = int(rng.integers(0, budget + 3))
    while frontier and len(nodes) < min(size, budget):
        best = max(frontier)
        frontier.remove(best)
        probability, parent, token = best
        if probability < min_probability:
            break
        nodes.append((token, parent, probability, int(rng.integers(1, 5))))
        offer(len(nodes) - 1, probability)
    columns = list(zip(*nodes, strict=True)) if nodes else [(), (), (), ()]
    return DraftTree.checked(*columns)
