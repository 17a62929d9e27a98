"""Entering likely next tokens whose contexts are known by their keys alone."""

import numpy as np
from numpy.typing import NDArray

from decoder.drafters.kernels.recycled import Table, claim
from retriever.kernels.compiling import kernel


@kernel()
def enter(
    table: Table,
    keys: NDArray[np.int64],
    tokens: NDArray[np.int32],
    log_odds: NDArray[np.float32],
    first: int,
) -> None:
    """Keep likely tokens under the keys of their contexts; of a key that recurs, the last.

    Each row counts as written two later than the one before, so that the last stay.

    Args:
        table: changed.
        keys: int64[N], as `key_of` makes them.
        tokens: int32[N, K].
        log_odds: float32[N, K].
        first: number that the first row counts as written by.
    """
    for row in range(len(keys)):
        entry = claim(table.entries, keys[row], first + 2 * row)
        for column in range(table.tokens.shape[1]):
            table.tokens[entry, column] = tokens[row, column]
            table.log_odds[entry, column] = log_odds[row, column]
