"""Cursors: the position from which a sequence copies itself, kept across edits.

A cursor is the position whose token is expected next. It moves while the text agrees. At an edit (a
token replaced, inserted or left out) it stays, and positions shortly after it where the last token
occurs are candidates for resuming the copy: near the cursor one equal token is stronger evidence
than elsewhere.
"""

from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from retriever.kernels.chains import copy_tokens, match_length
from retriever.kernels.compiling import kernel
from retriever.kernels.layout import Chains
from retriever.tree import Source

POSITION, MISSES = 0, 1
"""Fields of a cursor, int64[2]: the expected position (-1 for none), and the number of tokens since
the last agreement."""

_LONG: Final = 8  # a match that sets the cursor
_REACH: Final = 96  # tokens after the cursor in which a copy may resume
_LOST: Final = 64  # tokens without agreement after which the cursor is given up
_MOST: Final = 4  # places that are offered
_NEAR: Final = 8.0  # occurrences that one near the cursor counts for
_BLIND: Final = 0.5  # and those for which no token speaks
CONTEXT: Final = int(Source.CONTEXT)
"""Marks rows of the sequence itself."""


@kernel()
def move_cursor(cursor: NDArray[np.int64], chains: Chains, begin: int) -> None:
    """Compare tokens appended from `begin` on with the expected ones.

    Args:
        cursor: int64[2], updated.
        chains: of the sequence, which never wraps.
        begin: position of the first new token.
    """
    tokens = chains.tokens
    for position in range(begin, chains.state[0]):
        if cursor[POSITION] < 0:
            return
        if cursor[MISSES] == 0 and tokens[cursor[POSITION]] == tokens[position]:
            cursor[POSITION] += 1
        else:
            cursor[MISSES] += 1
        if cursor[MISSES] > _LOST:
            cursor[POSITION] = -1


@kernel()
def set_cursor(cursor: NDArray[np.int64], rows: NDArray[Any], num_rows: int) -> None:
    """Move a cursor to the longest match, if that is long; among equals it prefers its position.

    Args:
        cursor: int64[2], updated.
        rows: ROW[max_rows], of which the first `num_rows` are the sequence's, in any order; of
            equally long matches the first is taken.
        num_rows: how many.
    """
    longest, place = 0, -1
    for index in range(num_rows):
        row = rows[index]
        expected = cursor[MISSES] == 0 and row.position == cursor[POSITION]
        if row.match > longest or (row.match == longest and expected):
            longest, place = row.match, row.position
    if longest >= _LONG:
        cursor[POSITION], cursor[MISSES] = place, 0


@kernel()
def collect_cursor(
    cursor: NDArray[np.int64],
    chains: Chains,
    query: NDArray[np.int32],
    depth: int,
    rows: NDArray[Any],
    continuations: NDArray[np.int32],
    row: int,
) -> int:
    """Write rows for positions near the cursor where the copy may resume.

    Args:
        cursor: int64[2].
        chains: of the sequence.
        query: int32[q], its last tokens.
        depth: most tokens to copy for each place.
        rows: ROW[max_rows], written from `row` on.
        continuations: int32[max_rows, max_depth], written too.
        row: first free row.

    Returns:
        The first free row afterwards.
    """
    if cursor[POSITION] < 0 or cursor[MISSES] == 0:
        return row
    tokens = chains.tokens
    total, base, found = chains.state[0], cursor[POSITION], 0
    for place in range(base, min(base + _REACH, total)):
        blind = place == base or place == base + cursor[MISSES]
        if found == _MOST or row == rows.shape[0]:
            break
        match = match_length(tokens, place - 1, 0, query)
        if match == 0 and not blind:
            continue
        length = copy_tokens(tokens, place, total, True, depth, continuations[row])
        if length > 0:
            out = rows[row]
            out.length, out.match, out.source = length, max(match, 1), CONTEXT
            out.count = _NEAR if match > 0 else _BLIND
            out.position = place
            out.similarity = 1.0
            found += 1 if match > 0 else 0
            row += 1
    return row
