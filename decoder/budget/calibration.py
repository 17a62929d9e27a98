"""How far a drafter's probabilities can be trusted, learned from what became of them."""

from typing import Final

import numpy as np
from numpy.typing import NDArray

from retriever.tree import DraftTree

_EDGES: Final = np.array([0.05, 0.1, 0.2, 0.4, 0.6, 0.8, 0.9])
_DECAY: Final = 0.98
_PRIOR_NODES: Final = 1.0


class Calibration:
    """Scales probabilities by how often nodes of like probability were accepted lately.

    Histogram binning (Zadrozny and Elkan, 2001) over a fading memory. What is not drafted any
    more is slowly forgotten, so that a drafter that was wrong is tried again after a while.
    """

    def __init__(self) -> None:
        self._expected = np.zeros(len(_EDGES) + 1)
        self._accepted = np.zeros(len(_EDGES) + 1)

    def corrected(self, tree: DraftTree) -> NDArray[np.float64]:
        """Return float64[N], a tree's probabilities corrected; they still fall."""
        trust = (self._accepted + _PRIOR_NODES) / (self._expected + _PRIOR_NODES)
        corrected = tree.probabilities * np.minimum(trust, 1.0)[_bins(tree)]
        return np.minimum.accumulate(corrected)

    def learn(self, tree: DraftTree, path: NDArray[np.int64]) -> None:
        """Take in that of a verified tree the nodes in `path`, int64[k], were accepted."""
        bins, size = _bins(tree), len(self._expected)
        self._expected *= _DECAY
        self._accepted *= _DECAY
        self._expected += np.bincount(bins, tree.probabilities, minlength=size)
        self._accepted += np.bincount(bins[path], minlength=size)


def _bins(tree: DraftTree) -> NDArray[np.int64]:
    return np.searchsorted(_EDGES, tree.probabilities, side="right").astype(np.int64)
