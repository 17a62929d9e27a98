"""The weights by which evidence is mixed: what all begin with, and what each has learned."""

from importlib import resources
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from retriever.kernels.layout import WEIGHTS

_PRIOR_FILE: Final = "prior.npy"

_MARK: Final = b"weights2"
"""Begins kept weights; its number changes with what they mean."""

Weights = NDArray[Any]
"""WEIGHTS[1]."""


def prior_weights() -> Weights:
    """Return a copy of the weights that come with the package."""
    with resources.files("retriever.predict").joinpath(_PRIOR_FILE).open("rb") as file:
        values = np.load(file)
    return from_values(values)


def from_values(values: NDArray[np.float32]) -> Weights:
    """Return weights from float32[n], all fields in order.

    Raises:
        ValueError: these are not as many as there are.
    """
    if values.nbytes != WEIGHTS.itemsize:
        raise ValueError(f"{values.size} weights instead of {WEIGHTS.itemsize // 4}")
    return np.ascontiguousarray(values, "<f4").view(WEIGHTS).copy()


def to_bytes(weights: Weights) -> bytes:
    """Return weights as they are kept in a log."""
    return _MARK + weights.tobytes()


def from_bytes(kept: bytes | None) -> Weights:
    """Return weights that were kept; those that all begin with, if they cannot be these."""
    if kept is None or not kept.startswith(_MARK) or len(kept) != len(_MARK) + WEIGHTS.itemsize:
        return prior_weights()
    values = np.frombuffer(kept, "<f4", offset=len(_MARK))
    return from_values(values) if np.isfinite(values).all() else prior_weights()


def blank_weights() -> Weights:
    """Return weights that know nothing: they go by the rows alone."""
    weights = np.zeros(1, WEIGHTS)
    weights["evidence"][0, 0, 0] = 1.0
    weights["bias"][0, 0] = 3.0
    weights["output"][0, 0] = 4.0
    weights["doubt"][:] = 15.0
    return weights
