"""The weights of the sources of a fused draft, and what they begin with."""

from collections.abc import Sequence
from importlib.resources import files
from typing import Final

import numpy as np
from numpy.typing import NDArray

from decoder.drafters.kernels.readings import DRAFT_MODEL, SPECULATOR
from decoder.drafters.kernels.siblings import NUM_SETS, NUM_TABLE_SOURCES, NUM_WEIGHTS

PRIOR_ROWS: Final = ("tree", "one", "two", "three", "hints", "speculator", "draft_model", "shared")
"""Rows of the prior's weights, as its file names them: a retrieved tree, recycled logits by
context, hints, both kinds of readers, and what is added for every candidate."""

_PRIOR: Final = "fusion_prior.npz"
_PRIOR_STRENGTH: Final = 200.0
"""Sum of squared gradients that the prior counts for: it was fitted to thousands of tokens."""

_READER_ROWS: Final = {
    SPECULATOR: PRIOR_ROWS.index("speculator"),
    DRAFT_MODEL: PRIOR_ROWS.index("draft_model"),
}


class SourceWeights:
    """The weights of a logistic model over sources: trees, recycled logits, hints and readers.

    They begin as a prior that `benchmarks.decoding.fit_fusion` fitted to passes with one tree and
    at most one reader of a kind. Several sources of a kind overlap, so at first each of n counts
    for 1/√n.

    Args:
        num_trees: trees that are fused.
        kinds: of the readers.

    Attributes:
        values: float64[NUM_SETS, S + 1, NUM_WEIGHTS], S sources and a row that all share.
        curvature: the same shape, sums of squared gradients.
    """

    def __init__(self, num_trees: int, kinds: Sequence[int] = ()) -> None:
        prior = load_prior()
        tables = num_trees + NUM_TABLE_SOURCES
        self.values = np.empty((NUM_SETS, tables + len(kinds) + 1, NUM_WEIGHTS))
        self.values[:, :num_trees] = prior[:, :1] / np.sqrt(max(num_trees, 1))
        self.values[:, num_trees:tables] = prior[:, 1 : 1 + NUM_TABLE_SOURCES]
        for reader, kind in enumerate(kinds):
            shared = np.sqrt(sum(other == kind for other in kinds))
            self.values[:, tables + reader] = prior[:, _READER_ROWS[kind]] / shared
        self.values[:, -1] = prior[:, -1]
        self.curvature = np.full_like(self.values, _PRIOR_STRENGTH)


def load_prior() -> NDArray[np.float64]:
    """Return float64[NUM_SETS, len(PRIOR_ROWS), NUM_WEIGHTS]."""
    with (files(__package__) / _PRIOR).open("rb") as stream:
        rows = np.load(stream, allow_pickle=False)
        return np.stack([rows[name] for name in PRIOR_ROWS], axis=1)
