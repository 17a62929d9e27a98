"""The mixing weights: the shipped prior, and the weights that each tenant has learned.

Most weights apply to evidence of any database. One part of the escape has a row for each possible
dominant source (`Source`) of a node. In memory there are rows for all source numbers. Stored
weights name the source of each row, so that they can still be read after sources are added:

    b"weights3" | uint8 number of rows | for each row uint8 length and ASCII name of its source |
    float32[network] | float32[rows, MATCH_BUCKETS, DEPTH_BUCKETS], all little-endian

A source without a row gets the mean of the databases' rows in `prior.npy`. Rows of unregistered
sources are skipped.
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
"""float32[n], in the form of `values_of`, with rows ordered by source number."""

_MARK: Final = b"weights3"
"""The prefix of stored weights; its number changes with the format."""

_ROW_SIZE: Final = MATCH_BUCKETS * DEPTH_BUCKETS
_OFFSETS: Final[Mapping[str, Any]] = WEIGHTS.fields or {}
_NETWORK_SIZE: Final[int] = _OFFSETS["escape"][1] // 4
"""Number of values before the rows of sources; fields after these rows would not be stored."""

Weights = NDArray[Any]
"""WEIGHTS[1]."""


def prior_weights() -> Weights:
    """Return a copy of the shipped weights."""
    return from_values(_load_prior())


def from_values(values: NDArray[np.float32]) -> Weights:
    """Return weights from float32[n]: all fields in order, but only first rows of the last field.

    Raises:
        ValueError: the number of values does not fit.
    """
    rows = (values.size - _NETWORK_SIZE) / _ROW_SIZE
    if not (rows.is_integer() and 1 <= rows <= MAX_SOURCES):
        raise ValueError(
            f"there are {values.size} weights, and {_NETWORK_SIZE} are needed plus {_ROW_SIZE} for "
            f"each source, of which there are 1 to {MAX_SOURCES}"
        )
    weights = np.zeros(1, WEIGHTS)
    weights.view("<f4")[: values.size] = values
    weights["escape"][0, int(rows) :] = _default_row(weights, int(rows))
    return weights


def values_of(weights: Weights) -> NDArray[np.float32]:
    """Return float32[n], a copy of the weights with the rows of registered sources."""
    values: NDArray[np.float32] = weights.view("<f4")[: _NETWORK_SIZE + len(Source) * _ROW_SIZE]
    return values.copy()


def to_bytes(weights: Weights) -> bytes:
    """Return weights in the format of the log."""
    names = (source.name.encode("ascii") for source in Source)
    named = b"".join(bytes([len(name)]) + name for name in names)
    return _MARK + bytes([len(Source)]) + named + values_of(weights).tobytes()


def from_bytes(kept: bytes | None) -> Weights:
    """Return stored weights, or the prior if they are missing or invalid."""
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
    """Return the mean of the databases' rows among the first rows."""
    rows = [int(source) for source in drafted_sources() if source < num_rows] or [0]
    mean: NDArray[np.float32] = weights["escape"][0, rows].mean(axis=0)
    return mean


def _names_in(kept: bytes) -> tuple[tuple[str, ...], int]:
    """Return the names of the sources of stored rows, and the offset of the values.

    If the format is unknown, there are no names.
    """
    if not kept.startswith(_MARK) or len(kept) == len(_MARK):
        return (), 0
    names, place = [], len(_MARK) + 1
    for _ in range(kept[place - 1]):
        size = kept[place] if place < len(kept) else 0
        name = kept[place + 1 : place + 1 + size].decode("ascii", "replace")
        names.append(name)
        place += 1 + size
    return tuple(names), place
