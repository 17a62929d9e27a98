"""Slow, obvious twins of the kernels that fuse draft trees."""

import heapq
import math
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from decoder.drafters.kernels.readings import NUM_LIKELY_COLUMNS
from decoder.drafters.kernels.recycled import NUM_ORDERS
from decoder.drafters.kernels.siblings import BIAS, NUM_UNREAD_SETS, SLOPE, UNLISTED
from retriever.tree import ROOT, DraftTree, Source

Path = tuple[int, ...]
Odds = dict[int, float]


def log_odds(share: float) -> float:
    clipped = min(max(share, 1e-4), 0.9995)
    return math.log(clipped / (1 - clipped))


@dataclass
class ReaderNotes:
    """What a model said of the nodes that it read: logits of its tokens, by path."""

    kind: int
    source: int
    logits: dict[Path, Odds]

    def odds(self, path: Path) -> Odds | None:
        """Return its log-odds for every token that it knows, the likeliest first."""
        if path not in self.logits:
            return None
        said = self.logits[path]
        total = sum(math.exp(logit) for logit in said.values())
        ranked = sorted(said, key=lambda token: -said[token])
        return {token: log_odds(math.exp(said[token]) / total) for token in ranked}


@dataclass
class Knowledge:
    """All that a fused draft is made from, as plain dictionaries."""

    trees: list[DraftTree]
    table: dict[Path, Odds]  # likely tokens by the last tokens, in the order of the text
    context: Path  # the last tokens of the sequence
    hints: Odds
    weights: NDArray[np.float64]
    readers: list[ReaderNotes] = field(default_factory=list)
    listed: list[dict[Path, dict[int, tuple[float, int]]]] = field(init=False)

    def __post_init__(self) -> None:
        self.listed = [children_by_path(tree) for tree in self.trees]

    def opinions(self, path: Path) -> list[Odds | None]:
        """Return what each source says of a node's children, `None` where it knows nothing."""
        trees: list[Odds | None] = [
            {token: odds for token, (odds, _) in children[path].items()}
            if path in children
            else None
            for children in self.listed
        ]
        text = (*self.context, *path)
        orders = [
            self.table.get(text[-order:]) if len(text) >= order else None
            for order in range(1, NUM_ORDERS + 1)
        ]
        hints = self.hints if self.hints and not path else None
        return [*trees, *orders, hints, *(reader.odds(path) for reader in self.readers)]

    def chosen(self, opinions: list[Odds | None]) -> int:
        count = len(self.trees)
        orders = opinions[count : count + NUM_ORDERS]
        longest = max(
            (order for order, said in enumerate(orders, 1) if said is not None), default=0
        )
        has_tree = any(said is not None for said in opinions[:count])
        knowing = 0
        for reader, said in zip(self.readers, opinions[count + NUM_ORDERS + 1 :], strict=True):
            if said is not None:
                knowing |= reader.kind
        return longest + (NUM_ORDERS + 1 if has_tree else 0) + knowing * NUM_UNREAD_SETS

    def children(self, path: Path) -> dict[int, float]:
        """Return how probable each candidate below a node is, given the node."""
        opinions = self.opinions(path)
        weights = self.weights[self.chosen(opinions)]
        tokens = {token for said in self.proposals(opinions) for token in said}
        return {token: sigmoid(added_up(opinions, weights, token)) for token in tokens}

    def proposals(self, opinions: list[Odds | None]) -> list[list[int]]:
        """Return the candidates that each source names: a reader only those likeliest to it."""
        named = [list(said or ()) for said in opinions]
        first = len(opinions) - len(self.readers)
        return [*named[:first], *(tokens[:NUM_LIKELY_COLUMNS] for tokens in named[first:])]

    def speaker(self, path: Path, token: int) -> int:
        for children in self.listed:
            if path in children and token in children[path]:
                return children[path][token][1]
        proposals = self.proposals(self.opinions(path))
        first = len(proposals) - len(self.readers)
        if any(token in said for said in proposals[:first]):
            return int(Source.MODEL)
        for reader, said in zip(self.readers, proposals[first:], strict=True):
            if token in said:
                return reader.source
        raise AssertionError(token)

    def grown(self, budget: int, min_probability: float) -> list[tuple[Path, float, int]]:
        """Return the nodes of the fused tree: path, probability and source."""
        nodes: list[tuple[Path, float, int]] = []
        heap: list[tuple[float, Path]] = []
        path: Path = ()
        above = 1.0
        while True:
            children = self.children(path)
            total = sum(children.values())
            scale = above * (1.0 - math.exp(-4.0 * total)) / total if children else 0.0
            for token, share in children.items():
                if share * scale >= min_probability:
                    heapq.heappush(heap, (-share * scale, (*path, token)))
            if not heap or len(nodes) == budget:
                return nodes
            negative, path = heapq.heappop(heap)
            above = -negative
            nodes.append((path, above, self.speaker(path[:-1], path[-1])))


def children_by_path(tree: DraftTree) -> dict[Path, dict[int, tuple[float, int]]]:
    paths: list[Path] = []
    children: dict[Path, dict[int, tuple[float, int]]] = {}
    for node, parent in enumerate(tree.parents.tolist()):
        above = () if parent == ROOT else paths[parent]
        base = 1.0 if parent == ROOT else float(tree.probabilities[parent])
        token = int(tree.token_ids[node])
        odds = log_odds(float(tree.probabilities[node]) / max(base, 1e-4))
        children.setdefault(above, {})[token] = (odds, int(tree.sources[node]))
        paths.append((*above, token))
    return children


def added_up(opinions: list[Odds | None], weights: NDArray[np.float64], token: int) -> float:
    added = float(weights[-1, BIAS])
    for source, said in enumerate(opinions):
        if said is None:
            continue
        if token in said:
            added += float(weights[source, BIAS] + weights[source, SLOPE] * said[token])
        else:
            added += float(weights[source, UNLISTED])
    return added


def sigmoid(value: float) -> float:
    return 1 / (1 + math.exp(-value))
