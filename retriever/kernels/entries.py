"""The kernels that Python calls: each takes packed arrays and does all work of one call.

A call from Python often costs more than the work in it.
"""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from retriever.kernels import chains, cursors, mixing, phrase_matching, similarity, suffixes
from retriever.kernels import tree_growth as growth
from retriever.kernels.compiling import kernel
from retriever.kernels.layout import (
    Chains,
    Cursor,
    Found,
    Grown,
    Orders,
    PhraseArrays,
    SegmentArrays,
    Tables,
    TextCursors,
    Work,
    unpack,
)


@kernel()
def count_outcome(
    token_ids: NDArray[np.int32],
    parents: NDArray[np.int32],
    sources: NDArray[np.uint8],
    tokens: NDArray[np.int32],
    counts: NDArray[np.int64],
) -> int:
    """Count the nodes of a tree, and those on the longest accepted path.

    Args:
        token_ids: int32[N], the tree's tokens.
        parents: int32[N], their parents, each before its children; -1 for the root.
        sources: uint8[N], the database of each.
        tokens: int32[n], the tokens after the last committed one.
        counts: int64[2, MAX_SOURCES], nodes and accepted nodes by source; updated.

    Returns:
        Number of tokens that the tree contained.
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
def append_tokens(store: NDArray[Any], new_tokens: NDArray[np.int32]) -> None:
    """Append tokens to a store; see `chains.append_tokens`."""
    chains.append_tokens(unpack(store[0], Chains), unpack(store[0], Orders).orders, new_tokens)


@kernel()
def extend_sequence(store: NDArray[Any], new_tokens: NDArray[np.int32]) -> None:
    """Append tokens to a sequence's store and move its cursor."""
    sequence = unpack(store[0], Chains)
    begin = sequence.state[0]
    chains.append_tokens(sequence, unpack(store[0], Orders).orders, new_tokens)
    cursors.move_cursor(unpack(store[0], Cursor).cursor, sequence, begin)


@kernel()
def suppose_tokens(
    store: NDArray[Any], tokens: NDArray[np.int32], before: NDArray[np.int64]
) -> None:
    """Append tokens to a sequence's store as `extend_sequence` does, to be taken back.

    Args:
        store: of a sequence, with room for them.
        tokens: int32[n].
        before: int64[2 + n], written: the cursor, and where each token stood last.
    """
    last, cursor = unpack(store[0], Chains).last, unpack(store[0], Cursor).cursor
    before[0], before[1] = cursor[0], cursor[1]
    for index in range(tokens.shape[0]):
        before[2 + index] = last[tokens[index] & (last.shape[0] - 1)]
    extend_sequence(store, tokens)


@kernel()
def withdraw_tokens(
    store: NDArray[Any], tokens: NDArray[np.int32], before: NDArray[np.int64]
) -> None:
    """Take back what `suppose_tokens` appended; arguments as there."""
    sequence, cursor = unpack(store[0], Chains), unpack(store[0], Cursor).cursor
    chains.withdraw_tokens(sequence, unpack(store[0], Orders).orders, tokens.shape[0])
    for index in range(tokens.shape[0]):
        sequence.last[tokens[index] & (sequence.last.shape[0] - 1)] = before[2 + index]
    cursor[0], cursor[1] = before[0], before[1]


@kernel()
def collect_sequence(
    store: NDArray[Any],
    query: NDArray[np.int32],
    rarity: NDArray[np.float32],
    depth: int,
    scratch: NDArray[Any],
    row: int,
) -> int:
    """Mark recent tokens, and write continuations in the sequence itself and near its cursor.

    Returns the first free row; the sequence comes before all other databases.
    """
    sequence, cursor = unpack(store[0], Chains), unpack(store[0], Cursor).cursor
    found = unpack(scratch[0], Found)
    similarity.mark_recent(query, rarity, found.recent, found.marked)
    end = chains.collect_chains(
        sequence, unpack(store[0], Orders), query, cursors.CONTEXT, True, depth, found, row
    )
    cursors.set_cursor(cursor, found.rows, end)
    return cursors.collect_cursor(
        cursor, sequence, query, depth, found.rows, found.continuations, end
    )


@kernel()
def collect_outputs(
    store: NDArray[Any],
    source: int,
    query: NDArray[np.int32],
    depth: int,
    scratch: NDArray[Any],
    row: int,
) -> int:
    """Write continuations in other sequences; return the first free row."""
    return chains.collect_chains(
        unpack(store[0], Chains), unpack(store[0], Orders), query, source, False, depth,
        unpack(scratch[0], Found), row,
    )  # fmt: skip


@kernel()
def follow_texts(store: NDArray[Any], new_tokens: NDArray[np.int32]) -> None:
    """Move a sequence's cursors in predicted texts by tokens that were appended to it."""
    cursors.move_text_cursors(
        unpack(store[0], TextCursors), unpack(store[0], Chains).tokens, new_tokens
    )


@kernel()
def collect_texts(
    store: NDArray[Any],
    source: int,
    query: NDArray[np.int32],
    depth: int,
    scratch: NDArray[Any],
    row: int,
) -> int:
    """Write continuations in predicted texts and at cursors; return the first free row."""
    texts, found = unpack(store[0], TextCursors), unpack(scratch[0], Found)
    predicted = unpack(store[0], Chains)
    indexed = unpack(store[0], Orders)
    end = chains.collect_chains(predicted, indexed, query, source, False, depth, found, row)
    cursors.set_text_cursors(texts, found.rows, row, end)
    return cursors.collect_text_cursors(
        texts, predicted.tokens, source, query, depth, found, row, end
    )


@kernel()
def collect_phrases(
    phrases: NDArray[Any],
    source: int,
    longest: int,
    max_rows: int,
    depth: int,
    scratch: NDArray[Any],
    row: int,
) -> int:
    """Write continuations of listed phrases; see `phrase_matching.collect_phrases`."""
    return phrase_matching.collect_phrases(
        unpack(phrases[0], PhraseArrays), source, longest, max_rows, depth,
        unpack(scratch[0], Found), row,
    )  # fmt: skip


@kernel()
def collect_segment(
    segment: NDArray[Any],
    query: NDArray[np.int32],
    longest: int,
    depth: int,
    scratch: NDArray[Any],
    row: int,
) -> tuple[int, int]:
    """Write continuations in a segment; see `suffixes.collect_suffixes`."""
    return suffixes.collect_suffixes(
        unpack(segment[0], SegmentArrays), query, longest, depth, unpack(scratch[0], Found), row
    )


@kernel()
def grow_tree(
    scratch: NDArray[Any],
    sequence: NDArray[Any],
    live: NDArray[np.int64],
    tables: NDArray[Any],
    weights: NDArray[Any],
    prior: NDArray[Any],
    num_rows: int,
    budget: int,
    min_probability: float,
) -> int:
    """Weigh the rows and grow a tree; see `tree_growth.weigh_rows` and `tree_growth.grow_tree`.

    Args:
        scratch: `Found`, `Work` and `Grown`, packed.
        sequence: `Chains`, packed.
        live: int64[sets, WAYS], of generations.
        tables: `Tables`, packed.
        weights: WEIGHTS[1].
        prior: PRIOR[1].
        num_rows: rows in use.
        budget: most nodes to take.
        min_probability: candidates below it are not considered.
    """
    found = unpack(scratch[0], Found)
    growth.weigh_rows(found.rows, num_rows, prior[0].trust, prior[0].backoff, found.counts)
    return growth.grow_tree(
        found, num_rows, unpack(sequence[0], Chains), live, unpack(tables[0], Tables), weights,
        prior[0].escape, unpack(scratch[0], Work), unpack(scratch[0], Grown), budget,
        min_probability,
    )  # fmt: skip


@kernel()
def learn(
    weights: NDArray[Any], scratch: NDArray[Any], tokens: NDArray[np.int32], rate: float
) -> int:
    """Update the weights by the tokens that followed; see `mixing.learn`."""
    return mixing.learn(weights, unpack(scratch[0], Work), tokens, rate)
