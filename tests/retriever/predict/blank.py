"""Weights that have learned nothing."""

import numpy as np

from retriever.kernels.layout import WEIGHTS
from retriever.predict.weights import Weights


def blank_weights() -> Weights:
    """Return weights that know nothing: they go by the rows alone."""
    weights = np.zeros(1, WEIGHTS)
    weights["evidence"][0, 0, 0] = 1.0
    weights["bias"][0, 0] = 3.0
    weights["output"][0, 0] = 4.0
    weights["escape"][:] = 15.0
    return weights
