"""Calibration of probabilities: of nodes with probability p, a share p should be accepted.

A recording shows the outcome of a node: it is accepted if it is on the path of the output, and not
otherwise. Nodes beyond the end of an output are not accepted.
"""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from retriever.tree import MAX_SOURCES, DraftTree, Source

NUM_EQUAL_BINS: Final = 20
"""Number of equal-width bins for the expected calibration error."""

BIN_EDGES: Final = (0.0, 0.01, 0.02, 0.05, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 0.95, 0.99)
"""Start of each bin of the table: finer at the ends, where most nodes are."""

DEPTH_STARTS: Final = (1, 2, 3, 5, 9)
"""Start of each bucket of depths; the children of the last committed token have depth 1."""

_EQUAL_EDGES: Final = np.arange(NUM_EQUAL_BINS) / NUM_EQUAL_BINS
_CELL_EDGES: Final = np.union1d(_EQUAL_EDGES, BIN_EDGES)
_SHAPE: Final = (len(_CELL_EDGES), MAX_SOURCES, len(DEPTH_STARTS))


@dataclass(frozen=True, slots=True)
class Bin:
    """Nodes of similar probability.

    Attributes:
        start: lowest probability.
        end: end of the range; this probability belongs to the next bin, except 1.
        nodes: number of nodes.
        probability: mean predicted probability.
        accepted: share of accepted nodes.
    """

    start: float
    end: float
    nodes: int
    probability: float
    accepted: float


@dataclass(frozen=True, slots=True)
class Group:
    """A group of nodes.

    Attributes:
        nodes: number of nodes.
        probability: mean predicted probability.
        accepted: share of accepted nodes.
        ece: their expected calibration error.
    """

    nodes: int
    probability: float
    accepted: float
    ece: float


class Reliability:
    """Counts drafted nodes and accepted nodes by probability, source and depth."""

    def __init__(self) -> None:
        # float64[3, cells, sources, depths]: nodes, sums of their probabilities, accepted nodes
        self._sums = np.zeros((3, *_SHAPE))

    def add(self, tree: DraftTree, path: NDArray[np.int64]) -> None:
        """Count a draft.

        Args:
            tree: drafted tree.
            path: int64[k], accepted nodes.
        """
        accepted = np.zeros(len(tree))
        accepted[path] = 1
        places = (
            np.searchsorted(_CELL_EDGES[1:], tree.probabilities, side="right"),
            tree.sources,
            np.searchsorted(DEPTH_STARTS[1:], tree.depths(), side="right"),
        )
        flat = np.ravel_multi_index(places, _SHAPE)
        for row, values in enumerate((None, tree.probabilities, accepted)):
            counts = np.bincount(flat, values, self._sums[row].size)
            self._sums[row] += counts.reshape(_SHAPE)

    @property
    def nodes(self) -> int:
        """The number of counted nodes."""
        return int(self._sums[0].sum())

    def ece(self) -> float:
        """Return the expected calibration error; 0 if nothing was counted.

        It is the mean absolute difference between mean probability and accepted share, over 20 bins
        of equal width, weighted by their numbers of nodes (Naeini et al. 2015, Guo et al. 2017).
        """
        return _ece(self._sums.sum(axis=(2, 3)))

    def bins(self) -> list[Bin]:
        """Return the non-empty bins, the least probable first."""
        starts = np.searchsorted(_CELL_EDGES, BIN_EDGES)
        sums = np.add.reduceat(self._sums.sum(axis=(2, 3)), starts, axis=1)
        edges = zip(BIN_EDGES, (*BIN_EDGES[1:], 1.0), strict=True)
        return [
            Bin(*edge, int(nodes), probability / nodes, accepted / nodes)
            for edge, (nodes, probability, accepted) in zip(edges, sums.T.tolist(), strict=True)
            if nodes
        ]

    def by_source(self) -> dict[str, Group]:
        """Return the nodes of each database, by name."""
        names = [source.label for source in Source]
        return _groups(names, self._sums.sum(axis=3).transpose(2, 0, 1)[: len(names)])

    def by_depth(self) -> dict[str, Group]:
        """Return the nodes of each non-empty bucket of depths, such as `3-4`."""
        ends = (*(start - 1 for start in DEPTH_STARTS[1:]), None)
        names = [_span(*span) for span in zip(DEPTH_STARTS, ends, strict=True)]
        return _groups(names, self._sums.sum(axis=2).transpose(2, 0, 1))

    def as_json(self) -> dict[str, Any]:
        """Return the figures that are reported."""
        return {
            "ece": self.ece(),
            "nodes": self.nodes,
            "bins": [asdict(each) for each in self.bins()],
            "by_source": _as_json(self.by_source()),
            "by_depth": _as_json(self.by_depth()),
        }


def _ece(sums: NDArray[np.float64]) -> float:
    """Return the expected calibration error of float64[3, cells]."""
    starts = np.searchsorted(_CELL_EDGES, _EQUAL_EDGES)
    nodes, probability, accepted = np.add.reduceat(sums, starts, axis=1)
    return float(np.abs(probability - accepted).sum() / max(1.0, nodes.sum()))


def _groups(names: list[str], sums: NDArray[np.float64]) -> dict[str, Group]:
    """Return the non-empty groups of float64[groups, 3, cells]."""
    groups = {}
    for name, each in zip(names, sums, strict=True):
        nodes, probability, accepted = each.sum(axis=1).tolist()
        if nodes:
            groups[name] = Group(int(nodes), probability / nodes, accepted / nodes, _ece(each))
    return groups


def _span(start: int, end: int | None) -> str:
    if end is None:
        return f"{start}+"
    return str(start) if start == end else f"{start}-{end}"


def _as_json(groups: Mapping[str, Group]) -> dict[str, Any]:
    return {name: asdict(group) for name, group in groups.items()}
