"""A table of the target's likely next tokens after its last one, two or three tokens."""

from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from retriever.kernels.compiling import kernel

NUM_ORDERS: Final = 3
"""Contexts of one, two and three tokens are kept: longer ones say more where they are seen again,
but that is rarer, and each order takes as many entries of the table."""

WAYS: Final = 4
"""Entries that a context may stand in, as in a set-associative cache; the least recently written
one is evicted. Four entries of 16 bytes are as much as a line of a processor's cache."""

ENTRY: Final = np.dtype(
    [
        ("key", np.int64),  # of the context, 0 where the entry is free
        ("written", np.int64),  # number of the pass that it is from
    ],
    align=True,
)
NOT_FOUND: Final = -1
_PRIME: Final = 0x9E3779B97F4A7C15
"""2**64 divided by the golden ratio, as in Fibonacci hashing: neighbouring tokens spread far."""

_SEED: Final = 0xD1B54A32D192ED03
"""Another odd number without pattern: contexts of each order begin with a multiple of their own, as
they would collide if all began at zero."""


class Table(NamedTuple):
    """Likely tokens by context.

    Attributes:
        entries: ENTRY[E], E a power of two.
        tokens: int32[E, K], the likely tokens of each entry.
        log_odds: float32[E, K], of each of them.
    """

    entries: NDArray[np.void]
    tokens: NDArray[np.int32]
    log_odds: NDArray[np.float32]

    @classmethod
    def of(cls, capacity: int, num_likely: int) -> "Table":
        """Return an empty table of so many contexts, with so many tokens of each."""
        return cls(
            np.zeros(capacity, ENTRY),
            np.zeros((capacity, num_likely), np.int32),
            np.zeros((capacity, num_likely), np.float32),
        )


@kernel()
def key_of(context: NDArray[np.int32], order: int) -> int:
    """Return a number for the first `order` tokens of a context, the latest first; never 0."""
    mixed = np.uint64(order) * np.uint64(_SEED)
    for place in range(order):
        mixed = (mixed ^ np.uint64(context[place] + 1)) * np.uint64(_PRIME)
        mixed ^= mixed >> np.uint64(29)
    return np.int64(mixed >> np.uint64(1)) | 1


@kernel()
def find(entries: NDArray[np.void], key: int) -> int:
    """Return the entry of a key, or `NOT_FOUND`; the number of entries is a power of two."""
    first = (key >> 1) & (len(entries) - 1) & ~(WAYS - 1)
    for entry in range(first, first + WAYS):
        if entries[entry].key == key:
            return entry
    return NOT_FOUND


@kernel()
def claim(entries: NDArray[np.void], key: int, now: int) -> int:
    """Return the entry of a key; where there is none, the oldest of those that it may have."""
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
    """Keep rows of likely tokens under each order of their contexts.

    Args:
        table: changed.
        contexts: int32[R, NUM_ORDERS], the tokens before each row, the latest first; -1: none.
        tokens: int32[R, K].
        log_odds: float32[R, K].
        now: number of the pass, rising from 1.
    """
    for row in range(len(contexts)):
        for order in range(1, NUM_ORDERS + 1):
            if contexts[row, order - 1] < 0:
                break
            entry = claim(table.entries, key_of(contexts[row], order), now)
            for column in range(table.tokens.shape[1]):
                table.tokens[entry, column] = tokens[row, column]
                table.log_odds[entry, column] = log_odds[row, column]
