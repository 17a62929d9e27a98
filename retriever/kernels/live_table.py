"""The live table: counts of the tokens that follow the last two and three tokens in the ring.

The table has sets of eight entries, one set per cache line. A context's hash chooses its set. An
entry packs a check of the context (15 bits), a count (15 bits) and the token that followed (32
bits). The value 0 is a free entry. If a set is full, a new entry lowers the smallest count by one,
and replaces that entry once its count is zero. With this rule of Misra and Gries, counts are never
too high, and stale entries disappear.
"""

from typing import Final

import numpy as np
from numpy.typing import NDArray

from retriever.kernels.compiling import kernel, prefetch

WAYS: Final = 8
"""Number of entries in a set."""

SHORTEST, LONGEST = 2, 3
"""Lengths of the contexts in the table."""

_ORDERS: Final = LONGEST - SHORTEST + 1
_BLOCK: Final = 64
_SEPARATOR: Final = -1
_MULTIPLIER: Final = np.uint64(0x9E3779B97F4A7C15)
_COUNT_SHIFT: Final = 32
_CHECK_SHIFT: Final = 48
_MAX_COUNT: Final = 0x7FFF
_MAX_CHECK: Final = 0x7FFF


@kernel()
def hash_context(tail: NDArray[np.int32], order: int) -> int:
    """Return 63 hash bits for the last `order` tokens of a tail, int32[3]."""
    key = np.uint64(order)
    for index in range(LONGEST - order, LONGEST):
        key = (key ^ np.uint64(tail[index])) * _MULTIPLIER
        key ^= key >> np.uint64(31)
    return np.int64(key >> np.uint64(1))


@kernel(allocates=True)
def count_tokens(
    table: NDArray[np.int64], tokens: NDArray[np.int32], begin: int, end: int, step: int
) -> None:
    """Count the tokens of a range as successors, or subtract them.

    Args:
        table: int64[sets, WAYS], the number of sets is a power of two; updated.
        tokens: int32[capacity], a ring with a separator (-1) after each document; capacity is a
            power of two.
        begin: position of the first successor. Its context is the text before it in its document.
        end: position after the last successor.
        step: 1 to count, -1 to subtract.
    """
    keys = np.empty((_BLOCK, _ORDERS), np.int64)
    tail = np.empty(LONGEST, np.int32)
    for first in range(begin, end, _BLOCK):
        last = min(first + _BLOCK, end)
        _ask(table, tokens, first, last, tail, keys)
        for position in range(first, last):
            token = tokens[position & (tokens.shape[0] - 1)]
            for index in range(_ORDERS):
                if keys[position - first, index] >= 0:
                    _count(table, keys[position - first, index], token, step)


@kernel(inline="always")
def _ask(
    table: NDArray[np.int64],
    tokens: NDArray[np.int32],
    begin: int,
    end: int,
    tail: NDArray[np.int32],
    keys: NDArray[np.int64],
) -> None:
    """Write the hashes of the contexts before each successor, -1 for none, and prefetch their sets.

    A large table then waits for memory only once per block.
    """
    mask = tokens.shape[0] - 1
    for position in range(begin, end):
        keys[position - begin] = -1
        if tokens[position & mask] == _SEPARATOR:
            continue
        for back in range(1, LONGEST + 1):
            if back > position or back > mask:
                break
            tail[LONGEST - back] = tokens[(position - back) & mask]
            if tail[LONGEST - back] == _SEPARATOR:
                break
            if back >= SHORTEST:
                key = hash_context(tail, back)
                keys[position - begin, back - SHORTEST] = key
                prefetch(table, (key & (table.shape[0] - 1)) * WAYS)


@kernel()
def _count(table: NDArray[np.int64], key: int, token: int, step: int) -> None:
    ways = table[key & (table.shape[0] - 1)]
    check = check_of(key)
    place = _place_of(ways, _entry(check, np.int64(0), token))
    if place >= 0:
        count = min(((ways[place] >> _COUNT_SHIFT) & _MAX_COUNT) + step, _MAX_COUNT)
        ways[place] = _entry(check, count, token) if count > 0 else 0
        return
    if step < 0:
        return
    least = _least_of(ways)
    if (ways[least] >> _COUNT_SHIFT) & _MAX_COUNT <= 1:
        ways[least] = _entry(check, np.int64(1), token)
    else:
        ways[least] -= np.int64(1) << _COUNT_SHIFT


@kernel(inline="always")
def _place_of(ways: NDArray[np.int64], uncounted: int) -> int:
    """Return the index of an entry in its set, ignoring the count; -1 if it is not there.

    There are no branches, because mispredictions took half of the time to add an output.
    """
    place = np.int64(-1)
    for way in range(WAYS):
        entry = ways[way]
        is_it = (entry & ~(_MAX_COUNT << _COUNT_SHIFT) == uncounted) & (entry != 0)
        place = way if is_it else place
    return place


@kernel(inline="always")
def _least_of(ways: NDArray[np.int64]) -> int:
    """Return the first index with the smallest count."""
    least = np.int64(_MAX_COUNT * WAYS + WAYS)
    for way in range(WAYS):
        least = min(least, ((ways[way] >> _COUNT_SHIFT) & _MAX_COUNT) * WAYS + way)
    return least % WAYS


@kernel()
def check_of(key: int) -> int:
    """Return the 15 bits that distinguish contexts of the same set."""
    return (key >> 40) & _MAX_CHECK


@kernel()
def _entry(check: int, count: int, token: int) -> int:
    return (check << _CHECK_SHIFT) | (count << _COUNT_SHIFT) | token


@kernel()
def entry_count(entry: int, check: int) -> int:
    """Return the count of an entry, or 0 if it is free or belongs to another context."""
    is_counted = (entry != 0) & (entry >> _CHECK_SHIFT == check)  # branchless: unpredictable
    return ((entry >> _COUNT_SHIFT) & _MAX_COUNT) * is_counted


@kernel()
def entry_token(entry: int) -> int:
    """Return the token of an entry."""
    return entry & 0xFFFFFFFF
