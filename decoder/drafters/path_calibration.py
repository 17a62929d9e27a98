"""How often paths of a draft model come true, by how probable the model finds them."""

from typing import Final

import numpy as np
from numpy.typing import NDArray

from decoder.drafters.outcomes import Outcome

_EDGES: Final = np.exp2(np.arange(-10.0, 0.0))
_DECAY: Final = 0.99
_PRIOR_NODES: Final = 4.0


class PathCalibration:
    """Corrects probabilities by what nodes of like probability came to lately.

    Histogram binning (Zadrozny and Elkan, 2001) over a fading memory, upwards and downwards: where
    a target is decoded greedily, its choice is more certain than a draft model can tell.
    """

    def __init__(self) -> None:
        self._expected = np.zeros(len(_EDGES) + 1)
        self._right = np.zeros(len(_EDGES) + 1)

    def corrected(self, probabilities: NDArray[np.float64]) -> NDArray[np.float64]:
        """Return float64[n], falling probabilities corrected; they still fall."""
        trust = (self._right + _PRIOR_NODES) / (self._expected + _PRIOR_NODES)
        corrected = probabilities * trust[_bins(probabilities)]
        return np.minimum(np.minimum.accumulate(corrected), 1.0)

    def learn(self, outcome: Outcome, probabilities: NDArray[np.float64]) -> None:
        """Take in what became of nodes that had these probabilities, float64[N], uncorrected."""
        known = outcome.is_known
        size = len(self._expected)
        self._expected *= _DECAY
        self._right *= _DECAY
        self._expected += np.bincount(
            _bins(probabilities[known]), probabilities[known], minlength=size
        )
        self._right += np.bincount(_bins(probabilities[outcome.path]), minlength=size)


def _bins(probabilities: NDArray[np.float64]) -> NDArray[np.int64]:
    return np.searchsorted(_EDGES, probabilities, side="right").astype(np.int64)
