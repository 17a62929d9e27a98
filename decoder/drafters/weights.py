"""How much each source of a fused draft is worth, and where that is learned from."""

from importlib.resources import files
from typing import Final

import numpy as np
from numpy.typing import NDArray

from decoder.drafters.kernels.siblings import NUM_SETS, NUM_TABLE_SOURCES, NUM_WEIGHTS

RATE: Final = 0.2
"""Size of a step of learning, before it is divided by the root of the squared gradients."""

_PRIOR: Final = "prior.npy"
_PRIOR_STRENGTH: Final = 200.0
"""Sum of squared gradients that the prior counts for: it was fitted to thousands of tokens."""


class SourceWeights:
    """The weights of a logistic model over sources: trees, recycled logits and hints.

    They begin as a prior that `python -m benchmarks.fit_fusion` fitted to passes with one tree;
    what several trees say overlaps, so at first each of n counts for 1/√n.

    Args:
        num_trees: trees that are fused.

    Attributes:
        values: float64[NUM_SETS, S + 1, NUM_WEIGHTS], S sources and what all share.
        curvature: the same shape, sums of squared gradients.
    """

    def __init__(self, num_trees: int) -> None:
        prior = _prior()
        self.values = np.empty((NUM_SETS, num_trees + NUM_TABLE_SOURCES + 1, NUM_WEIGHTS))
        self.values[:, :num_trees] = prior[:, :1] / np.sqrt(max(num_trees, 1))
        self.values[:, num_trees:] = prior[:, 1:]
        self.curvature = np.full_like(self.values, _PRIOR_STRENGTH)


def _prior() -> NDArray[np.float64]:
    """Return float64[NUM_SETS, 1 + NUM_TABLE_SOURCES + 1, NUM_WEIGHTS]."""
    with (files(__package__) / _PRIOR).open("rb") as stream:
        prior: NDArray[np.float64] = np.load(stream, allow_pickle=False)
    return prior
