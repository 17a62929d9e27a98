"""The greatest values of each row of logits, read as integers of their order."""

from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from retriever.kernels.compiling import kernel

_BLOCK: Final = 64
"""Columns that are compared at once: a few vector registers, and few enough that a block with a
great value is soon searched."""

_LEAST: Final = np.iinfo(np.int32).min
_BYTES_16: Final = 2
_MAGNITUDE_16: Final = 0x7FFF
_MAGNITUDE_32: Final = 0x7FFFFFFF


@kernel(allocates=True)
def rank_columns(bits: NDArray[Any], columns: NDArray[np.int32]) -> None:
    """Set the columns of the greatest values of each row, the greatest first.

    The bits of floats, read as signed integers, have the floats' order where they are positive
    and the opposite one where they are negative, so all bits but the sign are flipped there. Whole
    blocks of columns are compared first, in vector instructions.

    Args:
        bits: int16[R, V] of bfloat16 values, or int32[R, V] of float32 ones.
        columns: int32[R, K], set; K at most V.
    """
    magnitude = np.int32(_MAGNITUDE_16 if bits.itemsize == _BYTES_16 else _MAGNITUDE_32)
    ranks = np.empty(columns.shape[1], np.int32)
    for row in range(len(bits)):
        ranks[:] = _LEAST
        columns[row] = np.arange(columns.shape[1])
        for first in range(0, bits.shape[1], _BLOCK):
            end = min(first + _BLOCK, bits.shape[1])
            if _greatest(bits[row, first:end], magnitude) <= ranks[-1]:
                continue
            for column in range(first, end):
                rank = _rank(bits[row, column], magnitude)
                if rank > ranks[-1]:
                    _insert(ranks, columns[row], rank, column)


@kernel(inline="always")
def _rank(bits: int, magnitude: int) -> int:
    """Return an integer that orders values as floats are ordered."""
    wide = np.int32(bits)
    return wide ^ ((wide >> np.int32(31)) & magnitude)


@kernel()
def _greatest(bits: NDArray[Any], magnitude: int) -> int:
    """Return the greatest rank."""
    greatest = np.int32(_LEAST)
    for column in range(len(bits)):
        greatest = max(greatest, _rank(bits[column], magnitude))
    return greatest


@kernel()
def _insert(ranks: NDArray[np.int32], columns: NDArray[np.int32], rank: int, column: int) -> None:
    """Enter a value that is greater than the last one, before which it drops out."""
    place = len(ranks) - 1
    while place > 0 and ranks[place - 1] < rank:
        ranks[place] = ranks[place - 1]
        columns[place] = columns[place - 1]
        place -= 1
    ranks[place] = rank
    columns[place] = column
