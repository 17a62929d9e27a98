"""Weights that have learned nothing, and random ones."""

import numpy as np

from retriever.kernels.layout import WEIGHTS
from retriever.predict.weights import Weights, from_values, values_of
from retriever.tree import Source


def blank_weights() -> Weights:
    """Return weights that know nothing: they go by the rows alone."""
    weights = np.zeros(1, WEIGHTS)
    weights["evidence"][0, 0, 0] = 1.0
    weights["bias"][0, 0] = 3.0
    weights["output"][0, 0] = 4.0
    weights["escape"][:] = 15.0
    return weights


def random_weights(rng: np.random.Generator, spread: float = 0.8) -> Weights:
    """A whole network whose scores are of the size of logarithms."""
    weights = blank_weights()
    values = values_of(weights)
    values += rng.normal(0, rng.uniform(0.1, spread), len(values)).astype(np.float32)
    weights = from_values(values)
    rows = weights["escape"][0, : len(Source)]
    rows[:] = rng.normal(0, 2, rows.shape)
    return weights
