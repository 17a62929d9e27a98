"""Growing the trie of many continuations, the most frequent node first."""

from heapq import heappop, heappush
from typing import Any

import numpy as np
from numba import njit
from numpy.typing import NDArray


@njit(cache=True, nogil=True)
def grow(
    rows: NDArray[Any], token_ids: NDArray[Any], parents: NDArray[Any], shares: NDArray[Any]
) -> int:
    """Take the most frequent node of a heap, divide its rows by their next token, push these.

    Returns:
        Nodes written.
    """
    order = np.arange(len(rows))
    # of a node: minus its rows, depth, age, first and last place in `order`, parent, token
    heap = [(np.int64(0), np.int64(0), np.int64(0), np.int64(0), np.int64(0), np.int64(0), 0)]
    heap.pop()
    pushed = _divide(rows, order, 0, len(rows), 0, -1, heap, 0)
    size = 0
    while size < len(token_ids) and len(heap) > 0:
        count, depth, _, begin, end, parent, token = heappop(heap)
        token_ids[size], parents[size] = token, parent
        shares[size] = -count / len(rows)
        if depth < rows.shape[1]:
            pushed = _divide(rows, order, begin, end, depth, size, heap, pushed)
        size += 1
    return size


@njit(cache=True, nogil=True)
def _divide(
    rows: NDArray[Any],
    order: NDArray[Any],
    begin: int,
    end: int,
    depth: int,
    parent: int,
    heap: list[Any],
    pushed: int,
) -> int:
    """Push the children of a node; return how many nodes were pushed so far."""
    column = rows[order[begin:end], depth]
    ranks = np.argsort(column, kind="mergesort")
    order[begin:end] = order[begin:end][ranks]
    first = begin
    for place in range(begin + 1, end + 1):
        token = rows[order[first], depth]
        if place < end and rows[order[place], depth] == token:
            continue
        if token >= 0:
            child = (first - place, depth + 1, pushed, first, place, parent, np.int64(token))
            heappush(heap, child)
            pushed += 1
        first = place
    return pushed
