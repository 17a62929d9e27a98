"""Drafting models' logits at the tree nodes that they read, as arrays for kernels."""

from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from decoder.drafters.kernels.forest import LEAST_SHARE, MOST_SHARE, NOWHERE, Forest, step_down
from retriever.kernels.compiling import fast_exp2, kernel

SPECULATOR: Final = 1
DRAFT_MODEL: Final = 2
NUM_KNOWING: Final = 4
"""The kinds of drafting models as bits, and the number of combinations of kinds. The combination
that has read a node selects the sources' weights there."""

NUM_LIKELY_COLUMNS: Final = 10
"""Candidates that a drafting model proposes below a node, as many as EAGLE-2 (arXiv:2406.16858)
expands."""

MAX_READ: Final = 128
"""Most nodes that a drafting model reads per draft: more than 64 in the first pass plus eight in
each later pass. Each node read takes four bytes per column."""

ROOT_ROW: Final = 0
_LOG2_E: Final = np.float32(1.4426950408889634)


TOKEN: Final = 0
FIRST_CHILD: Final = 1
NEXT_SIBLING: Final = 2
LIKELY: Final = 3
"""Columns of `Readings.rows`; from the last one on, a row lists its likeliest columns of logits."""

KIND: Final = 0
SOURCE: Final = 1
"""Rows of `Readings.labels`."""


class Readings(NamedTuple):
    """Logits of each drafting model: a row for the root, then one for each node that was read.

    If a model has fewer columns than others, its unused columns are never read. Kernels start
    faster with few arguments, so data of one type shares an array.

    Attributes:
        rows: int32[readers, 1 + M, LIKELY + NUM_LIKELY_COLUMNS]: a node's token, the rows of its
            first child and next sibling (`NOWHERE` for none), and its likeliest columns, the
            likeliest first, `NOWHERE` after a model's last column.
        logits: float32[readers, 1 + M, C], the logits after each node.
        log_sums: float32[readers, 1 + M], log-sum-exp of each row of logits.
        token_of: int32[readers, C], the token id of each column; `NOWHERE` after a model's last
            column.
        column_of: int32[readers, V], the column of each token id; `NOWHERE` for tokens without a
            column.
        labels: uint8[2, readers], each model's kind and the `Source` of its proposals.
    """

    rows: NDArray[np.int32]
    logits: NDArray[np.float32]
    log_sums: NDArray[np.float32]
    token_of: NDArray[np.int32]
    column_of: NDArray[np.int32]
    labels: NDArray[np.uint8]

    @classmethod
    def of(
        cls, columns: list[NDArray[np.int32]], kinds: list[int], sources: list[int]
    ) -> "Readings":
        """Allocate rows for drafting models, given each model's columns as int32[C].

        Rows take up memory only once they are written.
        """
        num_readers = len(columns)
        width = max((len(each) for each in columns), default=0)
        token_of = np.full((num_readers, width), NOWHERE, np.int32)
        vocabulary = max((int(each.max()) + 1 for each in columns if len(each)), default=0)
        column_of = np.full((num_readers, vocabulary), NOWHERE, np.int32)
        for reader, each in enumerate(columns):
            token_of[reader, : len(each)] = each
            column_of[reader, each] = np.arange(len(each), dtype=np.int32)
        return _unread(token_of, column_of, np.array([kinds, sources], np.uint8))

    def unread(self) -> "Readings":
        """Allocate new rows for the same drafting models."""
        return _unread(self.token_of, self.column_of, self.labels)


def _unread(
    token_of: NDArray[np.int32], column_of: NDArray[np.int32], labels: NDArray[np.uint8]
) -> Readings:
    num_readers, width = token_of.shape
    shape = (num_readers, 1 + MAX_READ)
    return Readings(
        np.full((*shape, LIKELY + NUM_LIKELY_COLUMNS), NOWHERE, np.int32),
        np.empty((*shape, width), np.float32),
        np.zeros(shape, np.float32),
        token_of,
        column_of,
        labels,
    )


@kernel()
def enter_rows(
    readings: Readings,
    reader: int,
    first: int,
    tokens: NDArray[np.int32],
    parents: NDArray[np.int32],
) -> bool:
    """Enter nodes whose logits are already written; return whether the logits are finite.

    The nodes' likeliest columns are already written too; the first has the greatest logit.

    Args:
        readings: the arrays to enter the nodes into.
        reader: number of the drafting model.
        first: row of the first node.
        tokens: int32[n], token ids of the nodes.
        parents: int32[n], row of each node's parent; `NOWHERE` for the root itself.
    """
    width = readings.token_of.shape[1]
    while width and readings.token_of[reader, width - 1] == NOWHERE:
        width -= 1
    are_numbers = True
    for node in range(len(tokens)):
        row, parent = first + node, parents[node]
        rows = readings.rows[reader]
        greatest = readings.logits[reader, row, rows[row, LIKELY]]
        log_sum = _log_sum(readings.logits[reader, row, :width], greatest)
        are_numbers &= np.isfinite(log_sum)
        readings.log_sums[reader, row] = log_sum
        rows[row, TOKEN] = tokens[node]
        rows[row, FIRST_CHILD] = rows[row, NEXT_SIBLING] = NOWHERE
        if parent != NOWHERE:
            rows[row, NEXT_SIBLING] = rows[parent, FIRST_CHILD]
            rows[parent, FIRST_CHILD] = row
    return are_numbers


@kernel(fastmath={"contract", "reassoc", "nsz"})
def _log_sum(logits: NDArray[np.float32], greatest: float) -> float:
    """Return the log-sum-exp, exact to 0.0002; it is not finite if the logits are not.

    The loop counts columns instead of iterating over the array, so it vectorizes and takes a tenth
    of the time. A library's exponential would take most of the time of reading a node. So would a
    search for the greatest logit, which must be sequential because of possible NaN.

    Args:
        logits: float32[C], one row of logits.
        greatest: the greatest of the logits, apart from NaN.
    """
    if not np.isfinite(greatest):
        return np.nan
    total = wrong = np.float32(0.0)
    for column in range(len(logits)):
        logit = logits[column]
        wrong += np.float32(logit != logit)  # noqa: PLR0124  NaN
        total += fast_exp2((logit - greatest) * _LOG2_E)
    return np.nan if wrong else greatest + np.log(total)


@kernel()
def descend(
    forest: Forest,
    readings: Readings,
    places: NDArray[np.int32],
    below: NDArray[np.int32],
    token: int,
) -> None:
    """In each tree and each drafting model, find the node's child that has a given token.

    Args:
        forest: the trees.
        readings: the drafting models' rows.
        places: int32[trees + readers], the node's number in each tree and its row in each model, or
            `NOWHERE`.
        below: int32[trees + readers], set to the child's numbers and rows in the same way.
        token: token id of the child.
    """
    num_trees = len(places) - readings.labels.shape[1]
    step_down(forest, places[:num_trees], below[:num_trees], token)
    for reader in range(readings.labels.shape[1]):
        child, rows = places[num_trees + reader], readings.rows[reader]
        if child != NOWHERE:
            child = rows[child, FIRST_CHILD]
            while child >= 0 and rows[child, TOKEN] != token:
                child = rows[child, NEXT_SIBLING]
        below[num_trees + reader] = child


@kernel()
def reader_log_odds(readings: Readings, reader: int, row: int, token: int, unknown: float) -> float:
    """Return a drafting model's log-odds of a token; `unknown` if the model lacks the token."""
    if token >= readings.column_of.shape[1]:
        return unknown
    column = readings.column_of[reader, token]
    if column == NOWHERE:
        return unknown
    share = np.exp(
        np.float64(readings.logits[reader, row, column]) - readings.log_sums[reader, row]
    )
    share = min(max(share, LEAST_SHARE), MOST_SHARE)
    return np.log(share / (1.0 - share))
