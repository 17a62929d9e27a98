"""The weights of the sources of a fused draft, and their prior."""

from collections.abc import Sequence
from importlib.resources import files
from typing import BinaryIO, Final

import numpy as np
from numpy.typing import NDArray

from decoder.drafters.kernels.readings import DRAFT_MODEL, SPECULATOR
from decoder.drafters.kernels.siblings import NUM_TABLE_SOURCES

PRIOR_ROWS: Final = ("tree", "one", "two", "three", "hints", "speculator", "draft_model", "shared")
"""Names of the prior's rows in its file: a retrieved tree, recycled logits after one, two and three
tokens, hints, both kinds of drafting models, and a row that is added for every candidate."""

_PRIOR: Final = "fusion_prior.npz"
_PRIOR_STRENGTH: Final = 200.0
"""Weight of the prior, as a sum of squared gradients: the prior was fitted to thousands of
tokens."""

_READER_ROWS: Final = {
    SPECULATOR: PRIOR_ROWS.index("speculator"),
    DRAFT_MODEL: PRIOR_ROWS.index("draft_model"),
}


class SourceWeights:
    """Weights of a logistic model over sources: trees, recycled logits, hints, drafting models.

    The weights start from a prior, which `benchmarks.decoding.fit_fusion` fitted to passes with one
    tree and at most one drafting model of each kind. Sources of the same kind overlap, so the
    initial weights of each of n such sources are divided by √n.

    Args:
        num_trees: number of fused trees.
        kinds: kind of each drafting model, `SPECULATOR` or `DRAFT_MODEL`.

    Attributes:
        values: float64[NUM_SETS, S + 1, NUM_WEIGHTS], the weights of S sources and of the shared
            row.
        curvature: float64 of the same shape, the sum of each weight's squared gradients.
    """

    def __init__(self, num_trees: int, kinds: Sequence[int] = ()) -> None:
        rows = prior_rows(num_trees, kinds)
        shared = np.sqrt([rows.count(row) for row in rows])
        self.values = load_prior()[:, rows] / shared[:, None]
        self.curvature = np.full_like(self.values, _PRIOR_STRENGTH)


def prior_rows(num_trees: int, kinds: Sequence[int] = ()) -> list[int]:
    """Return the number of the prior's row for each source and for the shared row."""
    tables = range(1, 1 + NUM_TABLE_SOURCES)
    return [0] * num_trees + [*tables, *(_READER_ROWS[kind] for kind in kinds), len(PRIOR_ROWS) - 1]


def load_prior() -> NDArray[np.float64]:
    """Return the prior weights, float64[NUM_SETS, len(PRIOR_ROWS), NUM_WEIGHTS]."""
    with (files(__package__) / _PRIOR).open("rb") as stream:
        rows = np.load(stream, allow_pickle=False)
        return np.stack([rows[name] for name in PRIOR_ROWS], axis=1)


def save_prior(stream: BinaryIO, prior: NDArray[np.float64]) -> None:
    """Write prior weights in the format that `load_prior` reads: one named array for each row."""
    rows = {name: prior[:, row] for row, name in enumerate(PRIOR_ROWS)}
    np.savez(stream, **rows)  # type: ignore[arg-type]  # no row is called allow_pickle
