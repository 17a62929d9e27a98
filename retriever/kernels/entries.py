"""The kernels that Python calls: they take packed arrays, and do several things at once.

A call from Python takes longer than much of what is done in it.
"""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from retriever.kernels import affinity, chains, cursors, mixing, suffixes
from retriever.kernels import tree_growth as growth
from retriever.kernels.compiling import kernel
from retriever.kernels.layout import Chains, SegmentArrays, Tables, Work, borrow


@kernel()
def count_outcome(
    token_ids: NDArray[np.int32],
    parents: NDArray[np.int32],
    sources: NDArray[np.uint8],
    tokens: NDArray[np.int32],
    counts: NDArray[np.int64],
) -> int:
    """Count the nodes of a tree, and those on the longest path that came true.

    Args:
        token_ids: int32[N], the tree's tokens.
        parents: int32[N], their parents, each before its children; -1 for the root.
        sources: uint8[N], which database spoke for each.
        tokens: int32[n], what came after the last committed token.
        counts: int64[2, sources], nodes and those that came true by source; updated.

    Returns:
        How many of the tokens the tree had.
    """
    node, depth = -1, 0
    for each in range(token_ids.shape[0]):
        counts[0, sources[each]] += 1
        if depth < tokens.shape[0] and parents[each] == node and token_ids[each] == tokens[depth]:
            counts[1, sources[each]] += 1
            node = each
            depth += 1
    return depth


@kernel()
def append_tokens(
    store: NDArray[Any], orders: NDArray[np.int64], new_tokens: NDArray[np.int32]
) -> None:
    """Append tokens to a store; see `chains.append_tokens`."""
    chains.append_tokens(borrow(store[0], Chains), orders, new_tokens)


@kernel()
def extend_sequence(
    store: NDArray[Any],
    orders: NDArray[np.int64],
    cursor: NDArray[np.int64],
    new_tokens: NDArray[np.int32],
) -> None:
    """Append tokens to a sequence's store and move its cursor."""
    sequence = borrow(store[0], Chains)
    begin = sequence.state[0]
    chains.append_tokens(sequence, orders, new_tokens)
    cursors.move_cursor(cursor, sequence, begin)


@kernel()
def collect_sequence(
    store: NDArray[Any],
    orders: NDArray[np.int64],
    max_rows: NDArray[np.int64],
    cursor: NDArray[np.int64],
    query: NDArray[np.int32],
    rarity: NDArray[np.float32],
    recent: NDArray[np.float32],
    marked: NDArray[np.int32],
    source: int,
    depth: int,
    rows: NDArray[Any],
    continuations: NDArray[np.int32],
) -> int:
    """Mark what is recent and write what followed in the sequence itself and near its cursor.

    Returns the number of rows, the first of a draft.
    """
    affinity.mark_recent(query, rarity, recent, marked)
    sequence = borrow(store[0], Chains)
    num_rows = chains.collect_chains(
        sequence, orders, max_rows, query, recent, source, True, depth, rows, continuations, 0
    )
    cursors.set_cursor(cursor, rows, num_rows)
    return cursors.collect_cursor(cursor, sequence, query, depth, rows, continuations, num_rows)


@kernel()
def collect_outputs(
    store: NDArray[Any],
    orders: NDArray[np.int64],
    max_rows: NDArray[np.int64],
    query: NDArray[np.int32],
    recent: NDArray[np.float32],
    source: int,
    depth: int,
    rows: NDArray[Any],
    continuations: NDArray[np.int32],
    row: int,
) -> int:
    """Write what followed in other sequences; return the first free row."""
    outputs = borrow(store[0], Chains)
    return chains.collect_chains(
        outputs, orders, max_rows, query, recent, source, False, depth, rows, continuations, row
    )


@kernel()
def collect_segment(
    segment: NDArray[Any],
    query: NDArray[np.int32],
    recent: NDArray[np.float32],
    longest: int,
    shortest: int,
    samples: int,
    enough: int,
    source: int,
    depth: int,
    rows: NDArray[Any],
    continuations: NDArray[np.int32],
    row: int,
) -> tuple[int, int]:
    """Write what followed in a segment; see `suffixes.collect_suffixes`."""
    tokens, in_order, starts = borrow(segment[0], SegmentArrays)
    return suffixes.collect_suffixes(
        tokens, in_order, starts, query, recent, longest, shortest, samples, enough, source, depth,
        rows, continuations, row,
    )  # fmt: skip


@kernel()
def grow_tree(
    rows: NDArray[Any],
    continuations: NDArray[np.int32],
    num_rows: int,
    trust: NDArray[np.float64],
    escape: float,
    counts: NDArray[np.float64],
    query: NDArray[np.int32],
    tables: NDArray[Any],
    live: NDArray[np.int64],
    context: NDArray[Any],
    weights: NDArray[Any],
    doubt: float,
    budget: int,
    min_probability: float,
    work: NDArray[Any],
    token_ids: NDArray[np.int32],
    parents: NDArray[np.int32],
    probabilities: NDArray[np.float32],
    sources: NDArray[np.uint8],
) -> int:
    """Weigh the rows and grow a tree; see `growth.weigh_rows` and `growth.grow_tree`."""
    growth.weigh_rows(rows, num_rows, trust, escape, counts)
    return growth.grow_tree(
        rows, continuations, num_rows, query, borrow(tables[0], Tables), live,
        borrow(context[0], Chains), weights, doubt, budget, min_probability, borrow(work[0], Work),
        token_ids, parents, probabilities, sources,
    )  # fmt: skip


@kernel()
def learn(weights: NDArray[Any], work: NDArray[Any], tokens: NDArray[np.int32], rate: float) -> int:
    """Move the weights by what came next; see `mixing.learn`."""
    return mixing.learn(weights, borrow(work[0], Work), tokens, rate)
