"""Suffix arrays, searched by bisection: where a pattern occurs, and what follows it.

`tokens` is unsigned[n] with the dtype's maximum after each document, `suffixes` unsigned[m] the
positions in the order of what stands there, or uint8[m, bytes] the same packed into few bytes;
patterns and queries are int32.
"""

from collections.abc import Callable
from typing import Any

import numpy as np
from numba import njit
from numba.extending import overload
from numpy.typing import NDArray


def position_at(suffixes: NDArray[Any], index: int) -> int:
    """Return the position of a suffix; little-endian where it is packed into bytes."""
    if suffixes.ndim == 1:
        return int(suffixes[index])
    return int.from_bytes(suffixes[index].tobytes(), "little")


@overload(position_at, inline="always")
def _position_at(suffixes: Any, index: Any) -> Callable[..., int]:
    def plain(suffixes: Any, index: Any) -> int:
        return np.int64(suffixes[index])

    def packed(suffixes: Any, index: Any) -> int:
        position = np.int64(0)
        for byte in range(suffixes.shape[1]):
            position |= np.int64(suffixes[index, byte]) << (8 * byte)
        return position

    del index
    return plain if suffixes.ndim == 1 else packed


@njit(cache=True, nogil=True)
def longest_end(tokens: NDArray[Any], suffixes: NDArray[Any], query: NDArray[Any]) -> int:
    """Return how many of the last tokens of the query occur together.

    Bisects on the length: where an end occurs, every shorter one does.
    """
    low, high = 0, len(query)
    while low < high:
        middle = (low + high + 1) >> 1
        begin, end = find_range(tokens, suffixes, query[len(query) - middle :])
        if begin < end:
            low = middle
        else:
            high = middle - 1
    return low


@njit(cache=True, nogil=True)
def find_range(
    tokens: NDArray[Any], suffixes: NDArray[Any], pattern: NDArray[Any]
) -> tuple[int, int]:
    """Return the half-open range of suffixes that begin with the pattern."""
    begin = _bisect(tokens, suffixes, pattern, 0, len(suffixes), 0)
    end = _bisect(tokens, suffixes, pattern, begin, len(suffixes), 1)
    return begin, end


@njit(cache=True, nogil=True)
def _bisect(
    tokens: NDArray[Any],
    suffixes: NDArray[Any],
    pattern: NDArray[Any],
    low: int,
    high: int,
    bound: int,
) -> int:
    """Return the first suffix that compares to the pattern as `bound` or greater."""
    while low < high:
        middle = (low + high) >> 1
        if _compare(tokens, position_at(suffixes, middle), pattern) < bound:
            low = middle + 1
        else:
            high = middle
    return low


@njit(cache=True, nogil=True)
def _compare(tokens: NDArray[Any], position: int, pattern: NDArray[Any]) -> int:
    """Order a suffix against a pattern: -1, 0 where it begins so, or 1."""
    for offset in range(len(pattern)):
        if position + offset >= len(tokens):
            return -1
        token, wanted = np.int64(tokens[position + offset]), np.int64(pattern[offset])
        if token != wanted:
            return -1 if token < wanted else 1
    return 0


@njit(cache=True, nogil=True)
def read_rows(
    tokens: NDArray[Any],
    suffixes: NDArray[Any],
    begin: int,
    end: int,
    skip: int,
    rows: NDArray[Any],
) -> None:
    """Write what follows the occurrences of a match of `skip` tokens, an even sample of them.

    Args:
        tokens: of the text.
        suffixes: of the text.
        begin: first suffix of the match.
        end: after its last.
        skip: length of the match.
        rows: int32[n, depth], written; -1 from a document's end on.
    """
    separator = np.int64(np.iinfo(tokens.dtype).max)
    rows[:] = -1
    for row in range(len(rows)):
        position = position_at(suffixes, begin + (end - begin) * row // len(rows)) + skip
        for offset in range(rows.shape[1]):
            if position + offset >= len(tokens) or np.int64(tokens[position + offset]) == separator:
                break
            rows[row, offset] = tokens[position + offset]
