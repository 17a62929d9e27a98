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
    now: int,
) -> None:
    """Keep likely tokens under the keys of their contexts; of a key that recurs, the last.

    Args:
        table: changed.
        keys: int64[N], as `key_of` makes them.
        tokens: int32[N, K].
        log_odds: float32[N, K].
        now: number of the pass that they count as.
    """
    for row in range(len(keys)):
        entry = claim(table.entries, keys[row], now)
        for column in range(table.tokens.shape[1]):
            table.tokens[entry, column] = tokens[row, column]
            table.log_odds[entry, column] = log_odds[row, column]
