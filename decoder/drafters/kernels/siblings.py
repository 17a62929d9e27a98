"""The candidates for one node's children, with probabilities combined from all sources."""

from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from decoder.drafters.kernels.forest import NOWHERE, Forest
from decoder.drafters.kernels.readings import (
    KIND,
    LIKELY,
    NUM_KNOWING,
    NUM_LIKELY_COLUMNS,
    SOURCE,
    Readings,
    reader_log_odds,
)
from decoder.drafters.kernels.recycled import NOT_FOUND, NUM_ORDERS, Table, find, key_of
from retriever.kernels.compiling import kernel

NUM_TABLE_SOURCES: Final = NUM_ORDERS + 1
"""Number of sources other than trees and drafting models: the table after one, two and three
tokens, and the hints."""

NUM_UNREAD_SETS: Final = 2 * (NUM_ORDERS + 1)
NUM_SETS: Final = NUM_KNOWING * NUM_UNREAD_SETS
"""Number of weight sets. A node's set depends on its longest context in the table, on whether a
tree knows the node, and on which kinds of drafting models have read it. The first `NUM_UNREAD_SETS`
sets are for nodes that no model has read."""

BIAS: Final = 0
SLOPE: Final = 1
UNLISTED: Final = 2
NUM_WEIGHTS: Final = 3
"""The weights of a source: for listing a candidate, for the candidate's log-odds, and for not
listing it."""


ABSENT: Final = -1e9
"""Stands for the log-odds of a candidate that a source does not list."""

MAX_SIBLINGS: Final = 192
"""Most candidates below one node, apart from those that drafting models propose; further candidates
are dropped. The table and the hints list at most 32, so at least 160 places are left for the
trees."""


class Siblings(NamedTuple):
    """The candidates below one node.

    The sources are the trees, the table by context length, the hints and the drafting models, in
    this order.

    Attributes:
        tokens: int32[C], token id of each candidate.
        log_odds: float64[C, S], each source's log-odds of a candidate; `ABSENT` if the source does
            not list it.
        known: bool[S], whether each source knows the node.
        probabilities: float64[C], combined probability of each candidate.
        sources: uint8[C], the `Source` that listed each candidate first, in the order of the
            sources.
    """

    tokens: NDArray[np.int32]
    log_odds: NDArray[np.float64]
    known: NDArray[np.bool_]
    probabilities: NDArray[np.float64]
    sources: NDArray[np.uint8]

    @classmethod
    def of(cls, num_trees: int, num_readers: int = 0) -> "Siblings":
        """Allocate arrays for the candidates of a node."""
        num_sources = num_trees + NUM_TABLE_SOURCES + num_readers
        room = MAX_SIBLINGS + num_readers * NUM_LIKELY_COLUMNS
        return cls(
            np.zeros(room, np.int32),
            np.zeros((room, num_sources)),
            np.zeros(num_sources, np.bool_),
            np.zeros(room),
            np.zeros(room, np.uint8),
        )


class Hints(NamedTuple):
    """The target's other likely tokens at the position of the last token.

    The target often chooses such a token next (LogitSpec, arXiv:2507.01449).

    Attributes:
        tokens: int32[K], the likely tokens.
        log_odds: float32[K], log-odds of each likely token.
    """

    tokens: NDArray[np.int32]
    log_odds: NDArray[np.float32]


@kernel()
def _note(
    siblings: Siblings, count: int, source: int, token: int, log_odds: float, speaker: int
) -> int:
    """Enter a source's log-odds of a candidate; return the number of candidates."""
    for candidate in range(count):
        if siblings.tokens[candidate] == token:
            siblings.log_odds[candidate, source] = log_odds
            return count
    if count == len(siblings.tokens):
        return count
    siblings.tokens[count] = token
    siblings.log_odds[count, :] = ABSENT
    siblings.log_odds[count, source] = log_odds
    siblings.sources[count] = speaker
    return count + 1


@kernel()
def gather(
    siblings: Siblings,
    forest: Forest,
    places: NDArray[np.int32],
    table: Table,
    context: NDArray[np.int32],
    hints: Hints,
    table_source: int,
) -> int:
    """Collect a node's candidates from all sources but drafting models; return how many there are.

    Args:
        siblings: arrays that are filled with the candidates.
        forest: the trees.
        places: int32[trees], the node's number in each tree, or `NOWHERE`.
        table: the recycled logits.
        context: int32[NUM_ORDERS], the last tokens at the node, the latest first; -1 for none.
        hints: hints for the root's children; empty for other nodes.
        table_source: the `Source` label of candidates that only the table or a hint lists.
    """
    siblings.known[:] = False
    count = _note_trees(siblings, forest, places)
    count = _note_table(siblings, count, len(places), table, context, table_source)
    source = len(places) + NUM_ORDERS
    siblings.known[source] = len(hints.tokens) > 0
    for column in range(len(hints.tokens)):
        token, odds = hints.tokens[column], hints.log_odds[column]
        count = _note(siblings, count, source, token, odds, table_source)
    return count


@kernel()
def add_readers(siblings: Siblings, count: int, readings: Readings, rows: NDArray[np.int32]) -> int:
    """Add the drafting models to the other sources; return the number of candidates.

    Each model proposes candidates and then gives its log-odds of all candidates. This is a separate
    function, because passing `readings` costs more than all the work without drafting models.

    Args:
        siblings: the candidates that `gather` found; more are added.
        count: number of candidates.
        readings: the drafting models' logits.
        rows: int32[readers], the node's row in each drafting model, or `NOWHERE`.
    """
    for reader in range(len(rows)):
        if rows[reader] != NOWHERE:
            count = _propose(siblings, count, readings, reader, rows[reader])
    for reader in range(len(rows)):
        if rows[reader] != NOWHERE:
            _judge(siblings, count, readings, reader, rows[reader])
    return count


@kernel()
def _note_trees(siblings: Siblings, forest: Forest, places: NDArray[np.int32]) -> int:
    """Enter the node's children in the trees; return the number of candidates."""
    count = 0
    for tree in range(len(places)):
        if places[tree] == NOWHERE:
            continue
        child = forest.first_child[places[tree]]
        siblings.known[tree] = child >= 0
        while child >= 0:
            odds, speaker = forest.log_odds[child], forest.sources[child]
            count = _note(siblings, count, tree, forest.tokens[child], odds, speaker)
            child = forest.next_sibling[child]
    return count


@kernel()
def _note_table(
    siblings: Siblings,
    count: int,
    num_trees: int,
    table: Table,
    context: NDArray[np.int32],
    table_source: int,
) -> int:
    """Enter likely tokens from the recycled logits; return the number of candidates."""
    for order in range(NUM_ORDERS, 0, -1):
        if context[order - 1] < 0:
            continue
        entry = find(table.entries, key_of(context, order))
        if entry == NOT_FOUND:
            continue
        source = num_trees + order - 1
        siblings.known[source] = True
        for column in range(table.tokens.shape[1]):
            token, odds = table.tokens[entry, column], table.log_odds[entry, column]
            count = _note(siblings, count, source, token, odds, table_source)
    return count


@kernel()
def _propose(siblings: Siblings, count: int, readings: Readings, reader: int, row: int) -> int:
    """Enter a drafting model's likeliest tokens; return the number of candidates."""
    source = len(siblings.known) - readings.labels.shape[1] + reader
    siblings.known[source] = True
    for place in range(NUM_LIKELY_COLUMNS):
        column = readings.rows[reader, row, LIKELY + place]
        if column < 0:
            break
        token = readings.token_of[reader, column]
        count = _note(siblings, count, source, token, ABSENT, readings.labels[SOURCE, reader])
    return count


@kernel()
def _judge(siblings: Siblings, count: int, readings: Readings, reader: int, row: int) -> None:
    """Enter a drafting model's log-odds of every candidate that its vocabulary has."""
    source = len(siblings.known) - readings.labels.shape[1] + reader
    for candidate in range(count):
        token = siblings.tokens[candidate]
        siblings.log_odds[candidate, source] = reader_log_odds(readings, reader, row, token, ABSENT)


@kernel()
def set_of(known: NDArray[np.bool_], labels: NDArray[np.uint8]) -> int:
    """Return the number of the weight set for a node.

    Args:
        known: bool[S], whether each source knows the node.
        labels: uint8[2, readers], labels of the drafting models; see `Readings`.
    """
    num_readers = labels.shape[1]
    num_trees = len(known) - NUM_TABLE_SOURCES - num_readers
    longest, by_trees, knowing = 0, 0, 0
    for order in range(NUM_ORDERS):
        if known[num_trees + order]:
            longest = order + 1
    for tree in range(num_trees):
        if known[tree]:
            by_trees = NUM_ORDERS + 1
    for reader in range(num_readers):
        if known[num_trees + NUM_TABLE_SOURCES + reader]:
            knowing |= labels[KIND, reader]
    return knowing * NUM_UNREAD_SETS + by_trees + longest


@kernel()
def score(siblings: Siblings, count: int, weights: NDArray[np.float64]) -> float:
    """Set the candidates' probabilities and return their sum.

    Args:
        siblings: the candidates.
        count: number of candidates.
        weights: float64[S + 1, NUM_WEIGHTS], the weights of the node's set; the last row applies to
            every candidate.
    """
    num_sources = len(siblings.known)
    total = 0.0
    for candidate in range(count):
        added = weights[num_sources, BIAS]
        for source in range(num_sources):
            if not siblings.known[source]:
                continue
            log_odds = siblings.log_odds[candidate, source]
            if log_odds == ABSENT:
                added += weights[source, UNLISTED]
            else:
                added += weights[source, BIAS] + weights[source, SLOPE] * log_odds
        siblings.probabilities[candidate] = 1.0 / (1.0 + np.exp(-added))
        total += siblings.probabilities[candidate]
    return total
