"""The kernels that Python calls: each takes packed arrays and does all work of one call.

A call from Python often costs more than the work in it.
"""

from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from retriever.kernels import (
    chains as chains_,
    cursors,
    mixing,
    phrase_matching,
    similarity,
    suffixes,
    tree_growth as growth,
)
from retriever.kernels.compiling import kernel, take_number
from retriever.kernels.layout import (
    LANE_LAYOUT,
    MAX_MATCH,
    SCRATCH_LAYOUT,
    STORE_LAYOUT,
    Chains,
    Cursor,
    Found,
    Grown,
    Lane,
    Lanes,
    Orders,
    PhraseArrays,
    Priors,
    SegmentArrays,
    Shared,
    Tables,
    TextCursors,
    Work,
    unpack,
    unpack_at,
)
from retriever.kernels.succession import call_root, call_root_entries, call_root_successors
from retriever.tree import Source


@kernel()
def count_outcome(
    token_ids: NDArray[np.int32],
    parents: NDArray[np.int32],
    sources: NDArray[np.uint8],
    tokens: NDArray[np.int32],
    counts: NDArray[np.int64],
    by_index: NDArray[np.int64],
) -> int:
    """Count the nodes of a tree, and those on the longest accepted path, in two places.

    Args:
        token_ids: int32[N], the tree's tokens.
        parents: int32[N], their parents, each before its children; -1 for the root.
        sources: uint8[N], the database of each.
        tokens: int32[n], the tokens after the last committed one.
        counts: int64[2, MAX_SOURCES], nodes and accepted nodes by source; updated.
        by_index: int64[2, MAX_SOURCES], another such count; updated.

    Returns:
        Number of tokens that the tree contained.
    """
    node, depth = -1, 0
    for each in range(token_ids.shape[0]):
        counts[0, sources[each]] += 1
        by_index[0, sources[each]] += 1
        if depth < tokens.shape[0] and parents[each] == node and token_ids[each] == tokens[depth]:
            counts[1, sources[each]] += 1
            by_index[1, sources[each]] += 1
            node = each
            depth += 1
    return depth


@kernel()
def append_tokens(store: NDArray[Any], new_tokens: NDArray[np.int32]) -> None:
    """Append tokens to a store; see `chains.append_tokens`."""
    chains_.append_tokens(unpack(store[0], Chains), unpack(store[0], Orders).orders, new_tokens)


@kernel()
def extend_sequence(store: NDArray[Any], new_tokens: NDArray[np.int32]) -> None:
    """Append tokens to a sequence's store, and move its cursor and its trail."""
    _extend(
        unpack(store[0], Chains), unpack(store[0], Orders), unpack(store[0], Cursor), new_tokens
    )


@kernel()
def _extend(chains: Chains, orders: Orders, of: Cursor, new_tokens: NDArray[np.int32]) -> None:
    """Append tokens to a sequence, and move its cursor and its trail."""
    begin = chains.state[0]
    chains_.append_tokens(chains, orders.orders, new_tokens)
    cursors.move_cursor(of.cursor, chains, begin)
    cursors.move_trail(of.trail, of.edits, chains, begin)


@kernel()
def suppose_tokens(
    store: NDArray[Any], tokens: NDArray[np.int32], before: NDArray[np.int64]
) -> None:
    """Append tokens to a sequence's store as `extend_sequence` does, to be taken back.

    The cursor and the trail move with them, and are not put back.

    Args:
        store: of a sequence, with room for them.
        tokens: int32[n].
        before: int64[n], written: where each token stood last.
    """
    last = unpack(store[0], Chains).last
    for index in range(tokens.shape[0]):
        before[index] = last[tokens[index] & (last.shape[0] - 1)]
    extend_sequence(store, tokens)


@kernel()
def withdraw_tokens(
    store: NDArray[Any], tokens: NDArray[np.int32], before: NDArray[np.int64]
) -> None:
    """Take back what `suppose_tokens` appended; arguments as there."""
    sequence = unpack(store[0], Chains)
    chains_.withdraw_tokens(sequence, unpack(store[0], Orders).orders, tokens.shape[0])
    for index in range(tokens.shape[0]):
        sequence.last[tokens[index] & (sequence.last.shape[0] - 1)] = before[index]


@kernel()
def _collect_own(
    chains: Chains,
    orders: Orders,
    of: Cursor,
    query: NDArray[np.int32],
    depth: int,
    found: Found,
    row: int,
) -> int:
    """Write continuations in the sequence itself, along its trail and near its cursor."""
    end = chains_.collect_chains(chains, orders, query, cursors.CONTEXT, True, depth, found, row)
    cursors.set_cursor(of.cursor, found.rows, end)
    cursors.set_trail(of.trail, of.edits, chains, found.rows, end)
    end = cursors.collect_trail(of.trail, of.edits, chains, depth, found, end)
    return cursors.collect_cursor(
        of.cursor, chains, query, depth, found.rows, found.continuations, end
    )


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
    sequence, of = unpack(store[0], Chains), unpack(store[0], Cursor)
    found = unpack(scratch[0], Found)
    similarity.mark_recent(query, rarity, found.recent, found.marked)
    return _collect_own(sequence, unpack(store[0], Orders), of, query, depth, found, row)


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
    return chains_.collect_chains(
        unpack(store[0], Chains), unpack(store[0], Orders), query, source, False, depth,
        unpack(scratch[0], Found), row,
    )  # fmt: skip


@kernel()
def append_to_lane(
    running: NDArray[Any], lane: int, sequence: int, first: int, end: int, linked_from: int
) -> None:
    """Append tokens of a sequence to its lane; see `chains.append_lane`.

    Args:
        running: `Lanes` and their `Orders`, packed.
        lane: address of the packed lane.
        sequence: address of the sequence's packed store.
        first: position of the first token.
        end: position after the last one.
        linked_from: n-grams that end before this position are not linked.
    """
    chains_.append_lane(
        unpack(running[0], Lanes), unpack(running[0], Orders).orders,
        unpack_at(lane, LANE_LAYOUT, Lane).lane,
        unpack_at(sequence, STORE_LAYOUT, Chains).tokens, first, end, linked_from,
    )  # fmt: skip


@kernel()
def withdraw_lane(running: NDArray[Any], lane: int) -> None:
    """Overwrite a lane's tokens; see `chains.withdraw_lane`."""
    chains_.withdraw_lane(unpack(running[0], Lanes), unpack_at(lane, LANE_LAYOUT, Lane).lane)


@kernel()
def collect_running(
    running: NDArray[Any],
    lane: int,
    source: int,
    query: NDArray[np.int32],
    depth: int,
    scratch: NDArray[Any],
    row: int,
) -> int:
    """Write continuations in running sequences, for one with this lane; return the free row."""
    return chains_.collect_lanes(
        unpack(running[0], Lanes), unpack(running[0], Orders),
        unpack_at(lane, LANE_LAYOUT, Lane).lane, query, source, depth, unpack(scratch[0], Found),
        row,
    )  # fmt: skip


@kernel(allocates=True)
def move_lanes(running: NDArray[Any], grown: NDArray[Any]) -> None:
    """Move all lanes to an empty ring of more blocks; see `chains.move_lanes`."""
    chains_.move_lanes(
        unpack(running[0], Lanes), unpack(grown[0], Lanes), unpack(running[0], Orders).orders
    )


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
    end = chains_.collect_chains(predicted, indexed, query, source, False, depth, found, row)
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
    shortest: int,
    longest: int,
    depth: int,
    scratch: NDArray[Any],
    row: int,
) -> tuple[int, int, int]:
    """Write continuations in a segment; see `suffixes.collect_suffixes`."""
    return suffixes.collect_suffixes(
        unpack(segment[0], SegmentArrays), query, shortest, longest, depth,
        unpack(scratch[0], Found), row,
    )  # fmt: skip


CONTEXT, GENERATIONS, CORPUS, TREE = 1, 2, 4, 8
"""Stages of a draft, to be added up: what each database finds, and the tree of all rows. That of
generations asks the sequences that are running, too."""

_ALL: Final = CONTEXT + GENERATIONS + CORPUS + TREE

_GENERATIONS: Final = int(Source.GENERATIONS)
_SIBLINGS: Final = int(Source.SIBLINGS)


@kernel(inline="always")
def _collect_running(
    running: NDArray[Any],
    lane: NDArray[np.int64],
    query: NDArray[np.int32],
    depth: int,
    found: Found,
    row: int,
) -> int:
    """Write continuations in running sequences, if there are any."""
    if running.shape[0] > 0:
        row = chains_.collect_lanes(
            unpack(running[0], Lanes), unpack(running[0], Orders), lane, query, _SIBLINGS, depth,
            found, row,
        )  # fmt: skip
    return row


@kernel(forceinline=True)
def draft_tree(
    shared: NDArray[Any],
    sequence: int,
    lane: int,
    scratch: int,
    stages: int,
    row: int,
    longest: int,
    budget: int,
    min_probability: float,
    token_ids: NDArray[np.int32],
    parents: NDArray[np.int32],
    probabilities: NDArray[np.float32],
    sources: NDArray[np.uint8],
) -> tuple[int, int, int]:
    """Do stages of a draft, in their order: one call, for it costs as much as a node.

    Args:
        shared: `Shared`, packed.
        sequence: address of a packed store.
        lane: address of a packed lane.
        scratch: address of a packed scratch memory.
        stages: what to do.
        row: first free row.
        longest: no match in the corpus is longer than this.
        budget: most nodes to take, and most tokens to copy after an occurrence.
        min_probability: candidates below it are not considered.
        token_ids: int32[budget], the tree, written with the following; see `layout.Grown`.
        parents: int32[budget].
        probabilities: float32[budget].
        sources: uint8[budget].

    Returns:
        The number of nodes, the first free row, and the longest match in the corpus.
    """
    of = unpack(shared[0], Shared)
    chains = unpack_at(sequence, STORE_LAYOUT, Chains)
    found = unpack_at(scratch, SCRATCH_LAYOUT, Found)
    tables = unpack(of.tables[0], Tables)
    fields = unpack_at(lane, LANE_LAYOUT, Lane).lane
    query = chains.tokens[max(0, chains.state[0] - MAX_MATCH) : chains.state[0]]
    if stages & TREE:
        call_root(tables.starts1, of.live, query, unpack_at(scratch, SCRATCH_LAYOUT, Work).tail)
    if stages & CONTEXT:
        of_sequence = unpack_at(sequence, STORE_LAYOUT, Cursor)
        similarity.mark_recent(query, tables.rarity, found.recent, found.marked)
        orders = unpack_at(sequence, STORE_LAYOUT, Orders)
        row = _collect_own(chains, orders, of_sequence, query, budget, found, row)
    if stages & TREE:
        call_root_successors(tables.starts1, tables.tokens2, tables.counts2, query)
    if stages & GENERATIONS:
        first = row
        row = chains_.collect_chains(
            unpack(of.outputs[0], Chains), unpack(of.outputs[0], Orders), query, _GENERATIONS,
            False, budget, found, row,
        )  # fmt: skip
        if fields[chains_.VERSION] >= 0:
            row = chains_.fade_rows(found, first, row, of.versions, fields)
        row = _collect_running(of.running, fields, query, budget, found, row)
    if stages & TREE:
        call_root_entries(
            tables.starts1, tables.starts2, tables.starts3, tables.tokens2, tables.tokens3,
            tables.counts3, query,
        )  # fmt: skip
    if stages & CORPUS:
        bound, longest, shortest = longest, 0, 0
        for index in range(of.segments.shape[0]):
            segment = unpack(of.segments[index], SegmentArrays)
            row, match, shortest = suffixes.collect_suffixes(
                segment, query, shortest, bound, budget, found, row
            )
            longest = max(longest, match)
    size = 0
    if stages & TREE:
        prior = unpack_at(scratch, SCRATCH_LAYOUT, Priors).prior[0]
        growth.weigh_rows(found.rows, row, prior.trust, prior.backoff, found.counts)
        size = growth.grow_tree(
            found, row, chains, of.live, tables, of.weights, prior.escape,
            unpack_at(scratch, SCRATCH_LAYOUT, Work),
            Grown(token_ids, parents, probabilities, sources), budget, min_probability,
        )  # fmt: skip
    return size, row, longest


@kernel()
def _append(sequence: int, tokens: NDArray[np.int32]) -> None:
    """Append tokens to the sequence whose packed store is at an address; there is room for them."""
    chains = unpack_at(sequence, STORE_LAYOUT, Chains)
    orders = unpack_at(sequence, STORE_LAYOUT, Orders)
    _extend(chains, orders, unpack_at(sequence, STORE_LAYOUT, Cursor), tokens)


@kernel()
def draft_sequences(
    shared: NDArray[Any],
    scratch: int,
    asked: NDArray[np.int64],
    min_probabilities: NDArray[np.float64],
    new_tokens: NDArray[np.int32],
    turn: NDArray[np.int64],
    found: NDArray[np.int64],
    token_ids: NDArray[np.int32],
    parents: NDArray[np.int32],
    probabilities: NDArray[np.float32],
    sources: NDArray[np.uint8],
) -> int:
    """Append to those of n sequences that no other thread takes, and draft for them.

    Args:
        shared: `Shared`, packed.
        scratch: address of this thread's packed scratch memory.
        asked: int64[n, 6], the addresses of each sequence's packed store and lane, a bound of its
            longest match in the corpus, the most nodes of its tree, and where in `new_tokens` those
            that are appended to it begin and end: there is room for them.
        min_probabilities: float64[n], candidates below them are not considered.
        new_tokens: int32[m], of all sequences.
        turn: int64[1], the next sequence to be taken by any thread; 0 at first.
        found: int64[n, 3], written: nodes, rows of evidence, and longest match in the corpus.
        token_ids: int32[n, budget], the trees, written with the following; see `layout.Grown`.
        parents: int32[n, budget].
        probabilities: float32[n, budget].
        sources: uint8[n, budget].

    Returns:
        The last sequence that was drafted for, -1 if there was none.
    """
    last = -1
    while True:
        index = take_number(turn)
        if index >= asked.shape[0]:
            return last
        budget = asked[index, 3]
        begin, end = asked[index, 4], asked[index, 5]
        if end > begin:
            _append(asked[index, 0], new_tokens[begin:end])
        size, rows, match = draft_tree(
            shared, asked[index, 0], asked[index, 1], scratch, _ALL, 0,
            min(MAX_MATCH, asked[index, 2] + end - begin), budget, min_probabilities[index],
            token_ids[index, :budget], parents[index, :budget], probabilities[index, :budget],
            sources[index, :budget],
        )  # fmt: skip
        found[index, 0], found[index, 1], found[index, 2] = size, rows, match
        last = index


@kernel()
def commit_tokens(
    weights: NDArray[Any],
    sequence: int,
    scratch: int,
    tokens: NDArray[np.int32],
    rate: float,
) -> int:
    """Learn from the tokens that followed the last draft, and append them to its sequence.

    Args:
        weights: WEIGHTS[1], updated; see `mixing.learn`.
        sequence: address of a packed store, with room for the tokens.
        scratch: address of the packed scratch memory of the draft; 0 to learn nothing.
        tokens: int32[n].
        rate: size of a step.

    Returns:
        The number of updated nodes.
    """
    learned = 0
    if scratch != 0:
        learned = mixing.learn(weights, unpack_at(scratch, SCRATCH_LAYOUT, Work), tokens, rate)
    _append(sequence, tokens)
    return learned


@kernel()
def step_sequence(
    shared: NDArray[Any],
    sequence: int,
    lane: int,
    scratch: int,
    new_tokens: NDArray[np.int32],
    longest: int,
    rate: float,
    drafted_ids: NDArray[np.int32],
    drafted_parents: NDArray[np.int32],
    drafted_sources: NDArray[np.uint8],
    counts: NDArray[np.int64],
    by_index: NDArray[np.int64],
    budget: int,
    min_probability: float,
    token_ids: NDArray[np.int32],
    parents: NDArray[np.int32],
    probabilities: NDArray[np.float32],
    sources: NDArray[np.uint8],
) -> tuple[int, int, int, int, int]:
    """Do a whole step of one sequence: count, learn, append and draft.

    As `count_outcome`, `commit_tokens` and `draft_tree` one after the other, in one call.

    Args:
        shared: `Shared`, packed; its weights are updated.
        sequence: address of a packed store, with room for the new tokens.
        lane: address of a packed lane.
        scratch: address of a packed scratch memory.
        new_tokens: int32[n], what followed the last draft.
        longest: no match in the corpus was longer than this before them.
        rate: size of a learning step; 0 to learn nothing: the last draft in this scratch memory was
            of another sequence.
        drafted_ids: int32[N], the last draft of the sequence; without nodes, nothing is counted.
        drafted_parents: int32[N].
        drafted_sources: uint8[N].
        counts: as for `count_outcome`.
        by_index: the same.
        budget: as for `draft_tree`, with all that follow.
        min_probability: the same.
        token_ids: the same.
        parents: the same.
        probabilities: the same.
        sources: the same.

    Returns:
        The number of nodes, of rows, the longest match in the corpus, how many tokens the last
        draft contained, and the number of updated nodes.
    """
    depth = count_outcome(
        drafted_ids, drafted_parents, drafted_sources, new_tokens, counts, by_index
    )
    learned = 0
    if rate > 0:
        weights = unpack(shared[0], Shared).weights
        work = unpack_at(scratch, SCRATCH_LAYOUT, Work)
        learned = mixing.learn(weights, work, new_tokens, rate)
    if new_tokens.shape[0] > 0:
        _append(sequence, new_tokens)
    size, rows, match = draft_tree(
        shared, sequence, lane, scratch, _ALL, 0, min(MAX_MATCH, longest + new_tokens.shape[0]),
        budget, min_probability, token_ids, parents, probabilities, sources,
    )  # fmt: skip
    return size, rows, match, depth, learned


@kernel()
def learn(
    weights: NDArray[Any], scratch: NDArray[Any], tokens: NDArray[np.int32], rate: float
) -> int:
    """Update the weights by the tokens that followed; see `mixing.learn`."""
    return mixing.learn(weights, unpack(scratch[0], Work), tokens, rate)
