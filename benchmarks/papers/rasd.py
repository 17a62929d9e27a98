"""RASD as published: a model's tree, and retrieval pruned by the model's first distribution.

Quan et al., 2025, arXiv:2503.03434: of the retrieved tree only those branches are kept whose first
token is among the k that the model finds likeliest; what is left is merged with the model's own
tree by longest prefix. There are no weights, nothing is learned, and the model is always asked.
"""

from collections.abc import Sequence
from typing import Final

import numpy as np

from decoder.drafters.drawing import Children, Frontier
from decoder.drafters.fusion import FusedDrafter, FusedSequence
from decoder.drafters.kernels.readings import LIKELY, NUM_LIKELY_COLUMNS, ROOT_ROW, Readings
from decoder.drafters.readers import ReadTree, TreeReader
from retriever.drafter import Drafter, TokenIds
from retriever.follower import DraftLimits
from retriever.tree import ROOT, DraftTree

DEFAULT_TOP_K: Final = NUM_LIKELY_COLUMNS
"""First tokens that retrieval may begin with. Ten is what a node of EAGLE-2 is expanded by
(arXiv:2406.16858), over which RASD is published; whether it prunes by as many is not known here."""

_WIDTH: Final = 10
_MAX_PASSES: Final = 5
"""EAGLE-2's tree: ten nodes of each depth are expanded, down to a depth of six."""

_RETRIEVED_SHARE: Final = 0.5
"""Most of the budget that retrieval takes. The paper adds both trees up; at a fixed number of nodes
they must share it, and half keeps either from crowding the other out."""


class RasdDrafter(FusedDrafter):
    """Merges what was retrieved with the tree of one model, by RASD's rules.

    Args:
        retrieval: what is pruned.
        reader: the model.
        limits: which tokens target and drafters know.
        top_k: first tokens that retrieval may begin with, at most ten.
    """

    def __init__(
        self,
        retrieval: Drafter,
        reader: TreeReader,
        limits: DraftLimits,
        *,
        top_k: int = DEFAULT_TOP_K,
    ) -> None:
        super().__init__([retrieval], limits, readers=[reader])
        self._top_k = top_k

    def fuse(self, sequence: FusedSequence, budget_nodes: int, min_probability: float) -> DraftTree:
        """Return the merged tree; what was retrieved alone where the model says nothing."""
        [retrieved] = sequence.trees
        sequence.read.drop()
        if not sequence.read.present() or not sequence.read.begin(0):
            return retrieved.prefix(budget_nodes)
        frontier = self._grown_by_model(sequence.read, budget_nodes)
        first = sequence.read.readings
        likely = first.token_of[0, first.rows[0, ROOT_ROW, LIKELY : LIKELY + self._top_k]]
        kept = pruned(retrieved, likely).prefix(int(_RETRIEVED_SHARE * budget_nodes))
        merged = merge(kept, _tree(frontier, int(self._readers.all[0].source)), budget_nodes)
        return merged.prefix(int((merged.probabilities >= min_probability).sum()))

    def _grown_by_model(self, read: ReadTree, budget_nodes: int) -> Frontier:
        """Return the model's own tree, expanded as EAGLE-2 does."""
        frontier = Frontier(budget_nodes, max_depth=self._readers.all[0].max_depth)
        frontier.expand([ROOT], [_children(read.readings, ROOT_ROW)])
        for _ in range(_MAX_PASSES):
            nodes = frontier.worth_expanding(_WIDTH)
            if not nodes:
                break
            tokens, parents = _edges(frontier, nodes)
            first = int(read.num_rows[0])
            behind = np.array(parents, np.int32) + 1
            if not read.read(0, np.array(tokens, np.int32), behind):
                break
            rows = range(first, first + len(nodes))
            frontier.expand(nodes, [_children(read.readings, row) for row in rows])
        return frontier

    def _learn_weights(self, sequence: FusedSequence, came: TokenIds) -> None:
        """Learn nothing: there are no weights."""


def pruned(tree: DraftTree, likely: TokenIds) -> DraftTree:
    """Return a tree without the branches whose first token is not among int32[k]."""
    kept = np.zeros(len(tree), np.bool_)
    for node, parent in enumerate(tree.parents.tolist()):
        kept[node] = tree.token_ids[node] in likely if parent == ROOT else kept[parent]
    return tree.among(kept)


def merge(first: DraftTree, second: DraftTree, max_nodes: int) -> DraftTree:
    """Merge two trees by longest prefix.

    All of the first is kept, and of the second what is most probable. A node of both has the higher
    of its probabilities, and the first one's source.

    Args:
        first: at most `max_nodes`.
        second: a path that both have is one path.
        max_nodes: most nodes of the result.
    """
    places: dict[tuple[int, int], int] = {}
    nodes: list[tuple[int, int, float, int]] = []  # token, parent, probability, source
    for tree in (first, second):
        own = np.empty(len(tree) + 1, np.int64)
        own[ROOT] = ROOT
        columns = (tree.token_ids, tree.parents, tree.probabilities, tree.sources)
        edges = zip(*(column.tolist() for column in columns), strict=True)
        for node, (token, parent, probability, source) in enumerate(edges):
            edge = (int(own[parent]), token)
            if edge not in places:
                places[edge] = len(nodes)
                nodes.append((token, edge[0], probability, source))
            own[node] = place = places[edge]
            known = nodes[place]
            nodes[place] = (*known[:2], max(known[2], probability), known[3])
    kept = list(range(len(nodes)))[: max(max_nodes, len(first))]
    return _by_probability([nodes[place] for place in kept])


def _by_probability(nodes: Sequence[tuple[int, int, float, int]]) -> DraftTree:
    """Return a tree of nodes whose parents precede them, the most probable first."""
    order = sorted(range(len(nodes)), key=lambda place: -nodes[place][2])
    numbers = {ROOT: ROOT} | {place: number for number, place in enumerate(order)}
    return DraftTree(
        np.array([nodes[place][0] for place in order], np.int32),
        np.array([numbers[nodes[place][1]] for place in order], np.int32),
        np.array([nodes[place][2] for place in order], np.float32),
        np.array([nodes[place][3] for place in order], np.uint8),
    )


def _children(readings: Readings, row: int) -> Children:
    """Return what the model finds likeliest after a row."""
    columns = readings.rows[0, row, LIKELY:]
    columns = columns[columns >= 0]
    log_shares = readings.logits[0, row, columns] - readings.log_sums[0, row]
    is_possible = np.isfinite(log_shares)
    tokens = readings.token_of[0, columns[is_possible]]
    return tokens, np.minimum(log_shares[is_possible], 0.0).astype(np.float64)


def _edges(frontier: Frontier, nodes: list[int]) -> tuple[list[int], list[int]]:
    """Return the tokens of nodes, and their parents' numbers among the expanded ones."""
    rows = [frontier.rows[frontier.parents[node]] for node in nodes]
    return [frontier.tokens[node] for node in nodes], rows


def _tree(frontier: Frontier, source: int) -> DraftTree:
    """Return the kept nodes, with parents by their numbers among these."""
    kept = frontier.kept
    places = np.full(len(frontier.tokens) + 1, ROOT, np.int32)
    places[kept] = np.arange(len(kept))
    return DraftTree(
        np.array(frontier.tokens, np.int32)[kept],
        places[np.array(frontier.parents, np.int64)[kept]],
        np.exp(frontier.log_probabilities(kept)).astype(np.float32),
        np.full(len(kept), source, np.uint8),
    )
