"""A table of the target's likely next tokens after the last one, two or three tokens."""

from typing import Any, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from retriever.kernels.compiling import kernel

NUM_ORDERS: Final = 3
"""Contexts of one, two and three tokens are stored. Longer contexts predict better if they recur,
but they recur less often, and each length takes the same number of table entries."""

WAYS: Final = 4
"""Number of entries in which a context may be, as in a set-associative cache; the least recently
written entry is evicted. Four entries of 16 bytes fill one cache line of a processor."""

ENTRY: Final = np.dtype(
    [
        ("key", np.int64),  # key of the context; 0 if the entry is free
        ("written", np.int64),  # number of the pass that wrote it
    ],
    align=True,
)
NOT_FOUND: Final = -1
_PRIME: Final = 0x9E3779B97F4A7C15
"""2**64 divided by the golden ratio, as in Fibonacci hashing, which spreads neighbouring tokens far
apart."""

_SEED: Final = 0xD1B54A32D192ED03
"""Another odd number without a pattern. The hash of each context length starts with a different
multiple of it; contexts would collide if all hashes started at zero."""


LEAST_SHARE: Final = np.float32(1e-3)
"""Probabilities are clipped to this distance from 0 and 1, so that log-odds stay between -7 and
7."""

TAIL: Final = np.float32(8.0)
"""Probability of all tokens that are not listed, as a multiple of the last listed token's. This
rough guess avoids a sum over the vocabulary; learned weights correct it."""


class Table(NamedTuple):
    """Likely tokens by context.

    Attributes:
        entries: ENTRY[E], key and write number of each context, E a power of two.
        tokens: int32[E, K], likely next tokens of each context.
        log_odds: float32[E, K], log-odds of each likely token.
    """

    entries: NDArray[np.void]
    tokens: NDArray[np.int32]
    log_odds: NDArray[np.float32]

    @classmethod
    def of(cls, capacity: int, num_likely: int) -> "Table":
        """Return an empty table of `capacity` contexts with `num_likely` tokens each."""
        return cls(
            np.zeros(capacity, ENTRY),
            np.zeros((capacity, num_likely), np.int32),
            np.zeros((capacity, num_likely), np.float32),
        )


@kernel()
def key_of(context: NDArray[np.int32], order: int) -> int:
    """Return the key of the first `order` tokens of a context, the latest first; never 0."""
    mixed = np.uint64(order) * np.uint64(_SEED)
    for place in range(order):
        mixed = (mixed ^ np.uint64(context[place] + 1)) * np.uint64(_PRIME)
        mixed ^= mixed >> np.uint64(29)
    return np.int64(mixed >> np.uint64(1)) | 1


@kernel()
def find(entries: NDArray[np.void], key: int) -> int:
    """Return the number of a key's entry, or `NOT_FOUND`; entries are a power of two in number."""
    first = (key >> 1) & (len(entries) - 1) & ~(WAYS - 1)
    for entry in range(first, first + WAYS):
        if entries[entry].key == key:
            return entry
    return NOT_FOUND


@kernel()
def claim(entries: NDArray[np.void], key: int, now: int) -> int:
    """Return a key's entry; if it has none, claim the oldest of the entries that it may use."""
    first = (key >> 1) & (len(entries) - 1) & ~(WAYS - 1)
    oldest = first
    for entry in range(first, first + WAYS):
        if entries[entry].key == key:
            oldest = entry
            break
        if entries[entry].written < entries[oldest].written:
            oldest = entry
    entries[oldest].key = key
    entries[oldest].written = now
    return oldest


@kernel()
def write_rows(
    table: Table,
    contexts: NDArray[np.int32],
    tokens: NDArray[np.int32],
    log_odds: NDArray[np.float32],
    now: int,
) -> None:
    """Store rows of likely tokens under their contexts of each length.

    Args:
        table: the table to write into.
        contexts: int32[R, NUM_ORDERS], the tokens before each row, the latest first; -1 for none.
        tokens: int32[R, K], likely tokens of each row, K at least 1. If the table stores more per
            row, for example because the vocabulary is small, the last token is repeated, which adds
            no information.
        log_odds: float32[R, K], log-odds of these tokens.
        now: write number of the pass, ascending.
    """
    for row in range(len(contexts)):
        for order in range(1, NUM_ORDERS + 1):
            if contexts[row, order - 1] < 0:
                break
            entry = claim(table.entries, key_of(contexts[row], order), now)
            for column in range(table.tokens.shape[1]):
                given = min(column, tokens.shape[1] - 1)
                table.tokens[entry, column] = tokens[row, given]
                table.log_odds[entry, column] = log_odds[row, given]


@kernel()
def describe_rows(
    tokens: NDArray[np.int32],
    parents: NDArray[np.int32],
    contexts: NDArray[np.int32],
    logits: NDArray[np.float32],
    log_odds: NDArray[np.float32],
) -> None:
    """Set the context of each row of a pass over a tree, and the log-odds of its likeliest tokens.

    Args:
        tokens: int32[N], tokens of the tree's nodes.
        parents: int32[N], parent of each node; -1 for none.
        contexts: int32[1 + N, NUM_ORDERS], the last tokens at the root and at each node, the latest
            first. The root's row is given, the others are set.
        logits: float32[R, K], logits of the likeliest tokens of each row, the greatest first.
        log_odds: float32[R, K], set to the log-odds of these tokens.
    """
    for node in range(len(tokens)):
        contexts[node + 1, 0] = tokens[node]
        for order in range(1, NUM_ORDERS):
            contexts[node + 1, order] = contexts[parents[node] + 1, order - 1]
    for row in range(len(logits)):
        total = np.float32(0.0)
        for column in range(logits.shape[1]):
            log_odds[row, column] = np.exp(logits[row, column] - logits[row, 0])
            total += log_odds[row, column]
        total += TAIL * log_odds[row, logits.shape[1] - 1]
        for column in range(logits.shape[1]):
            share = log_odds[row, column] / total
            bounded = min(max(share, LEAST_SHARE), np.float32(1) - LEAST_SHARE)
            log_odds[row, column] = np.log(bounded / (np.float32(1) - bounded))


@kernel()
def enter(
    table: Table,
    keys: NDArray[np.int64],
    tokens: NDArray[np.int32],
    log_odds: NDArray[np.float32],
    first: int,
) -> None:
    """Store likely tokens under the keys of their contexts; of a repeated key, the last row stays.

    Write numbers rise by two per row, so that the last rows are evicted last.

    Args:
        table: the table to write into.
        keys: int64[N], keys of the contexts, from `key_of`.
        tokens: int32[N, K], likely next tokens of each context.
        log_odds: float32[N, K], log-odds of these tokens.
        first: write number of the first row.
    """
    for row in range(len(keys)):
        entry = claim(table.entries, keys[row], first + 2 * row)
        for column in range(table.tokens.shape[1]):
            table.tokens[entry, column] = tokens[row, column]
            table.log_odds[entry, column] = log_odds[row, column]


_BLOCK: Final = 64
_LEAST: Final = np.iinfo(np.int32).min
_BYTES_16: Final = 2
_MAGNITUDE_16: Final = 0x7FFF
_MAGNITUDE_32: Final = 0x7FFFFFFF


@kernel(allocates=True)
def rank_columns(bits: NDArray[Any], columns: NDArray[np.int32]) -> None:
    """Set the columns of the greatest values of each row, the greatest first.

    Read as signed integers, the bits of positive floats are in the order of the floats, those of
    negative floats in the opposite order. Inverting all bits but the sign of negative floats
    corrects that. Whole blocks of columns are compared first, with vector instructions.

    Args:
        bits: int16[R, V], the bits of bfloat16 values, or int32[R, V], those of float32 values.
        columns: int32[R, K], set to column numbers; K is at most V.
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
    """Return an integer that sorts as the float does."""
    wide = np.int32(bits)
    return wide ^ ((wide >> np.int32(31)) & magnitude)


@kernel()
def _greatest(bits: NDArray[Any], magnitude: int) -> int:
    """Return the greatest rank of the values."""
    greatest = np.int32(_LEAST)
    for column in range(len(bits)):
        greatest = max(greatest, _rank(bits[column], magnitude))
    return greatest


@kernel()
def _insert(ranks: NDArray[np.int32], columns: NDArray[np.int32], rank: int, column: int) -> None:
    """Insert a value that exceeds the last value, and drop the last value."""
    place = len(ranks) - 1
    while place > 0 and ranks[place - 1] < rank:
        ranks[place] = ranks[place - 1]
        columns[place] = columns[place - 1]
        place -= 1
    ranks[place] = rank
    columns[place] = column
