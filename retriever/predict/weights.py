"""The weights by which evidence is mixed: what all begin with, and what each has learned.

Most weights concern evidence of any database. One part of the escape has a row for each source
(`Source`), the one that is dominant at a node. In memory there are rows for all numbers that a
source can have. What is kept says whose its rows are, so that it can be read when there are more:

    b"weights3" | uint8 number of rows | for each row uint8 length and ASCII name of its source |
    float32[network] | float32[rows, MATCH_BUCKETS, DEPTH_BUCKETS], all little-endian

A source without a row begins with the mean of those that databases have in `prior.npy`. Rows of
sources that are not registered are left out. What begins with `weights2` has the rows of the first
six sources in the order of their numbers, and does not name them.
"""

from collections.abc import Mapping
from functools import cache
from importlib import resources
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from retriever.kernels.layout import DEPTH_BUCKETS, MATCH_BUCKETS, WEIGHTS
from retriever.tree import MAX_SOURCES, Source, drafted_sources

_PRIOR_FILE: Final = "prior.npy"
"""float32[n], the values of `values_of`: rows in the order of the sources' numbers."""

_MARK: Final = b"weights3"
"""Begins kept weights; its number changes with what they mean."""

_UNNAMED_MARK: Final = b"weights2"
_UNNAMED: Final = ("UNSPECIFIED", "CONTEXT", "GENERATIONS", "PHRASES", "CORPUS", "MODEL")

_ROW_SIZE: Final = MATCH_BUCKETS * DEPTH_BUCKETS
_OFFSETS: Final[Mapping[str, Any]] = WEIGHTS.fields or {}
_NETWORK_SIZE: Final[int] = _OFFSETS["escape"][1] // 4
"""Values before the rows of sources; fields behind these rows would not be kept."""

Weights = NDArray[Any]
"""WEIGHTS[1]."""


def prior_weights() -> Weights:
    """Return a copy of the weights that come with the package."""
    return from_values(_load_prior())


def from_values(values: NDArray[np.float32]) -> Weights:
    """Return weights from float32[n]: all fields in order, of the last one the first rows.

    Raises:
        ValueError: these are not as many as there can be.
    """
    rows = (values.size - _NETWORK_SIZE) / _ROW_SIZE
    if not (rows.is_integer() and 1 <= rows <= MAX_SOURCES):
        raise ValueError(
            f"{values.size} weights: there must be {_NETWORK_SIZE}, and {_ROW_SIZE} for each of "
            f"1 to {MAX_SOURCES} sources"
        )
    weights = np.zeros(1, WEIGHTS)
    weights.view("<f4")[: values.size] = values
    weights["escape"][0, int(rows) :] = _default_row(weights, int(rows))
    return weights


def values_of(weights: Weights) -> NDArray[np.float32]:
    """Return float32[n], a copy of the weights with the rows of the sources that there are."""
    values: NDArray[np.float32] = weights.view("<f4")[: _NETWORK_SIZE + len(Source) * _ROW_SIZE]
    return values.copy()


def to_bytes(weights: Weights) -> bytes:
    """Return weights as they are kept in a log."""
    names = (source.name.encode("ascii") for source in Source)
    named = b"".join(bytes([len(name)]) + name for name in names)
    return _MARK + bytes([len(Source)]) + named + values_of(weights).tobytes()


def from_bytes(kept: bytes | None) -> Weights:
    """Return weights that were kept; those that all begin with, if they cannot be these."""
    weights = prior_weights()
    names, begin = _names_in(kept or b"")
    size = 4 * (_NETWORK_SIZE + len(names) * _ROW_SIZE)
    if kept is None or not names or len(kept) != begin + size:
        return weights
    values = np.frombuffer(kept, "<f4", offset=begin)
    if not np.isfinite(values).all():
        return weights
    weights.view("<f4")[:_NETWORK_SIZE] = values[:_NETWORK_SIZE]
    numbers = {source.name: int(source) for source in Source}
    rows = values[_NETWORK_SIZE:].reshape(-1, MATCH_BUCKETS, DEPTH_BUCKETS)
    for name, row in zip(names, rows, strict=True):
        if name in numbers:
            weights["escape"][0, numbers[name]] = row
    return weights


@cache
def _load_prior() -> NDArray[np.float32]:
    with resources.files("retriever.predict").joinpath(_PRIOR_FILE).open("rb") as file:
        values: NDArray[np.float32] = np.load(file)
    return values


def _default_row(weights: Weights, num_rows: int) -> NDArray[np.float32]:
    """Return the mean of the databases' rows among the first ones."""
    rows = [int(source) for source in drafted_sources() if source < num_rows] or [0]
    mean: NDArray[np.float32] = weights["escape"][0, rows].mean(axis=0)
    return mean


def _names_in(kept: bytes) -> tuple[tuple[str, ...], int]:
    """Return the names of the sources that kept weights have rows of, and where values begin.

    There are no names where it is not in this form.
    """
    if kept.startswith(_UNNAMED_MARK):
        return _UNNAMED, len(_UNNAMED_MARK)
    if not kept.startswith(_MARK) or len(kept) == len(_MARK):
        return (), 0
    names, place = [], len(_MARK) + 1
    for _ in range(kept[place - 1]):
        size = kept[place] if place < len(kept) else 0
        name = kept[place + 1 : place + 1 + size].decode("ascii", "replace")
        names.append(name)
        place += 1 + size
    return tuple(names), place
