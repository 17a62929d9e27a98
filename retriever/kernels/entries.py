"""The kernels that Python calls.

A call from Python often costs more than the work in it. So `step_sequences` does a whole step of
any number of sequences: it checks, counts, learns, commits, looks up and grows. The other kernels
are called rarely.
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
from retriever.kernels.compiling import add_to, kernel, take_number
from retriever.kernels.layout import (
    BOUNDS,
    FLOAT32,
    INT32,
    INT64,
    LANE_LAYOUT,
    MAX_MATCH,
    MAX_POSITIONS,
    SCRATCH_LAYOUT,
    STEP,
    STORE_LAYOUT,
    UINT8,
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
    array_at,
    record_at,
    unpack,
    unpack_at,
)
from retriever.kernels.live_table import count_tokens
from retriever.kernels.succession import call_root, call_root_entries, call_root_successors
from retriever.tree import MAX_SOURCES, Source

CHECK, OUTCOME, APPEND, CONTEXT, GENERATIONS, CORPUS, TREE = 1, 2, 4, 8, 16, 32, 64
"""Stages of a step, in order; a step's stages are a sum of these. They check the request; count the
last tree's outcome and learn from it; append the tokens; search each database; and grow the tree
from all rows. `GENERATIONS` also searches running sequences."""

DRAFT: Final = CONTEXT + GENERATIONS + CORPUS + TREE
"""All stages of a draft."""

FITS, BUDGET, PROBABILITY, LENGTH, ROOM, TOKEN = 0, 1, 2, 3, 4, 5
"""Why a step is refused: a budget or a probability is out of bounds; a length is too large or not
the sequence's; memory has no room for the tokens; a token is outside the vocabulary."""

# No literals: a kernel is compiled separately for each literal that it is called with.
_OWN, _GENERATIONS, _SIBLINGS = (
    np.int64(each) for each in (Source.CONTEXT, Source.GENERATIONS, Source.SIBLINGS)
)
_WRAPS, _ENDS = np.bool_(True), np.bool_(False)


@kernel()
def step_sequences(
    shared: NDArray[Any],
    scratch: int,
    steps: NDArray[np.int64],
    turn: NDArray[np.int64],
) -> int:
    """Do the steps of n sequences, except those that other threads take.

    A refused step changes nothing. `STEP` holds the request and the answer.

    Args:
        shared: `Shared`, packed.
        scratch: address of this thread's packed scratch memory.
        steps: int64[n], the address of each sequence's `STEP`.
        turn: int64[1], index of the next sequence that any thread may take; 0 at first.

    Returns:
        The index of the last sequence that this thread took, -1 for none.
    """
    of, last, is_alone = unpack(shared[0], Shared), np.int64(-1), steps.shape[0] == 1
    while True:
        index = last + 1 if is_alone else take_number(turn)
        if index >= steps.shape[0]:
            return last
        _step(of, scratch, record_at(steps[index], STEP))
        last = index


@kernel()
def check_steps(bounds: NDArray[np.int64], steps: NDArray[np.int64]) -> int:
    """Return the index of the first refused step, -1 for none; arguments as `step_sequences`."""
    for index in range(steps.shape[0]):
        if refusal_of(bounds, record_at(steps[index], STEP)) != FITS:
            return index
    return -1


@kernel()
def first_outside(tokens: NDArray[np.int32], bound: int) -> int:
    """Return the index of the first token that is negative or not below a bound, -1 for none."""
    for place in range(tokens.shape[0]):
        if tokens[place] < 0 or tokens[place] >= bound:
            return place
    return -1


@kernel()
def refusal_of(bounds: NDArray[np.int64], step: Any) -> int:
    """Return why a step is refused, or `FITS`."""
    chains = unpack_at(step.sequence, STORE_LAYOUT, Chains)
    length = chains.state[0] + step.num_tokens
    if step.budget < 0 or step.budget > bounds[BOUNDS.NODES]:
        return BUDGET
    if not 0.0 <= step.min_probability <= 1.0:
        return PROBABILITY
    if length > bounds[BOUNDS.TOKENS] or length != step.length:
        return LENGTH
    if length > chains.tokens.shape[0]:
        return ROOM
    tokens = array_at(step.tokens, step.num_tokens, INT32)
    return FITS if first_outside(tokens, bounds[BOUNDS.VOCABULARY]) < 0 else TOKEN


@kernel(inline="always")
def _step(of: Shared, scratch: int, step: Any) -> None:
    """Run the stages of a sequence's step."""
    stages = step.stages
    tokens = array_at(step.tokens, step.num_tokens, INT32)
    step.learned = 0
    step.refusal = refusal_of(of.bounds, step) if stages & CHECK else FITS
    if step.refusal != FITS:
        return
    if stages & OUTCOME:
        work = unpack_at(scratch, SCRATCH_LAYOUT, Work)
        if step.tree_size >= 0:
            nodes = tree_nodes(step.tree, step.tree_budget)
            depth = count_outcome(nodes, step.tree_size, tokens, work.counted)
            count(work.counted, of.by_source, of.by_index)
            add_to(of.by_accepted, min(depth, MAX_POSITIONS), 1)
            add_to(of.by_accepted, MAX_POSITIONS + 1, tokens.shape[0])
            step.tree_size = -1
        if step.rate > 0:
            step.learned = mixing.learn(of.weights, work, tokens, step.rate)
    if stages & APPEND and tokens.shape[0] > 0:
        chains = unpack_at(step.sequence, STORE_LAYOUT, Chains)
        orders = unpack_at(step.sequence, STORE_LAYOUT, Orders)
        _extend(chains, orders, unpack_at(step.sequence, STORE_LAYOUT, Cursor), tokens)
        step.longest = min(MAX_MATCH, step.longest + tokens.shape[0])
    if stages & DRAFT:
        _draft(of, scratch, step)


@kernel()
def count_outcome(
    nodes: Grown, size: int, tokens: NDArray[np.int32], counted: NDArray[np.int64]
) -> int:
    """Count the nodes of a tree by source, and those on the longest accepted path.

    Args:
        nodes: nodes of the tree.
        size: number of nodes.
        tokens: int32[n], the tokens that followed the tree's root.
        counted: int64[2, MAX_SOURCES], nodes and accepted nodes; written.

    Returns:
        The number of these tokens that the tree contained.
    """
    for source in range(MAX_SOURCES):
        counted[0, source] = counted[1, source] = 0
    node, depth = np.int64(-1), np.int64(0)
    for each in range(size):
        source = nodes.sources[each]
        counted[0, source] += 1
        is_next = depth < tokens.shape[0] and nodes.parents[each] == node
        if is_next and nodes.token_ids[each] == tokens[depth]:
            counted[1, source] += 1
            node = each
            depth += 1
    return depth


@kernel()
def count(
    counted: NDArray[np.int64], by_source: NDArray[np.int64], by_index: NDArray[np.int64]
) -> None:
    """Add counts, int64[2, MAX_SOURCES], to two arrays; other threads may add at the same time."""
    for kind in range(2):
        for source in range(MAX_SOURCES):
            number = counted[kind, source]
            if number > 0:
                add_to(by_source, kind * MAX_SOURCES + source, number)
                add_to(by_index, kind * MAX_SOURCES + source, number)


@kernel()
def tree_nodes(address: int, budget: int) -> Grown:
    """Return the arrays of a tree of at most `budget` nodes; they are adjacent in memory."""
    return Grown(
        array_at(address, budget, INT32),
        array_at(address + 4 * budget, budget, INT32),
        array_at(address + 8 * budget, budget, FLOAT32),
        array_at(address + 12 * budget, budget, UINT8),
    )


@kernel(inline="always")
def _extend(chains: Chains, orders: Orders, of: Cursor, new_tokens: NDArray[np.int32]) -> None:
    """Append tokens to a sequence, and move its cursor and its trail."""
    begin = chains.state[0]
    chains_.append_tokens(chains, orders.orders, new_tokens)
    cursors.move_cursor(of.cursor, chains, begin)
    cursors.move_trail(of.trail, of.edits, chains, begin)


@kernel(inline="always")
def _draft(of: Shared, scratch: int, step: Any) -> None:
    """Run the stages of a draft, and write the tree."""
    stages, row, budget = step.stages, step.row, step.budget
    chains = unpack_at(step.sequence, STORE_LAYOUT, Chains)
    found = unpack_at(scratch, SCRATCH_LAYOUT, Found)
    work = unpack_at(scratch, SCRATCH_LAYOUT, Work)
    tables = unpack(of.tables[0], Tables)
    query = chains.tokens[max(0, chains.state[0] - MAX_MATCH) : chains.state[0]]
    if stages & TREE:
        call_root(tables.starts1, of.live, query, work.tail)
    if stages & GENERATIONS:
        outputs = unpack(of.outputs[0], Chains)
        chains_.call_heads(outputs.heads, unpack(of.outputs[0], Orders).orders, query)
    if stages & CONTEXT:
        chains_.call_heads(
            chains.heads, unpack_at(step.sequence, STORE_LAYOUT, Orders).orders, query
        )
        similarity.mark_recent(query, tables.rarity, found.recent, found.marked)
        row = collect_own(step.sequence, chains, query, budget, found, row)
    if stages & TREE:
        call_root_successors(tables.starts1, tables.tokens2, tables.counts2, query)
    if stages & GENERATIONS:
        fields = unpack_at(step.lane, LANE_LAYOUT, Lane).lane
        row = collect_generations(
            of.outputs, of.versions, of.running, fields, query, budget, found, row
        )
    if stages & TREE:
        call_root_entries(
            tables.starts1, tables.starts2, tables.starts3, tables.tokens2, tables.tokens3,
            tables.counts3, query,
        )  # fmt: skip
    if stages & CORPUS:
        row, step.longest = collect_corpus(of.segments, query, step.longest, budget, found, row)
    step.num_rows = row
    if stages & TREE:
        prior = unpack_at(scratch, SCRATCH_LAYOUT, Priors).prior[0]
        growth.weigh_rows(found.rows, row, prior.trust, prior.backoff, found.counts)
        step.size = step.tree_size = growth.grow_tree(
            found, row, chains, of.live, tables, of.weights, prior.escape, work,
            tree_nodes(step.tree, budget), budget, step.min_probability,
        )  # fmt: skip
        step.tree_budget = budget


@kernel(inline="always")
def collect_own(
    sequence: int,
    chains: Chains,
    query: NDArray[np.int32],
    depth: int,
    found: Found,
    row: int,
) -> int:
    """Write continuations from the sequence itself, from its trail and near its cursor."""
    orders = unpack_at(sequence, STORE_LAYOUT, Orders)
    of = unpack_at(sequence, STORE_LAYOUT, Cursor)
    end = chains_.collect_chains(chains, orders, query, _OWN, _WRAPS, depth, found, row)
    cursors.set_cursor(of.cursor, found.rows, end)
    cursors.set_trail(of.trail, of.edits, chains, found.rows, end)
    end = cursors.collect_trail(of.trail, of.edits, chains, depth, found, end)
    return cursors.collect_cursor(
        of.cursor, chains, query, depth, found.rows, found.continuations, end
    )


@kernel(inline="always")
def collect_generations(
    outputs: NDArray[Any],
    versions: NDArray[np.int64],
    running: NDArray[Any],
    lane: NDArray[np.int64],
    query: NDArray[np.int32],
    depth: int,
    found: Found,
    row: int,
) -> int:
    """Write continuations from generations, and from running sequences if there are any."""
    first = row
    row = chains_.collect_chains(
        unpack(outputs[0], Chains), unpack(outputs[0], Orders), query, _GENERATIONS, _ENDS, depth,
        found, row,
    )  # fmt: skip
    if lane[chains_.VERSION] >= 0:
        row = chains_.fade_rows(found, first, row, versions, lane)
    if running.shape[0] > 0:
        row = chains_.collect_lanes(
            unpack(running[0], Lanes), unpack(running[0], Orders), lane, query, _SIBLINGS, depth,
            found, row,
        )  # fmt: skip
    return row


@kernel(inline="always")
def collect_corpus(
    segments: NDArray[Any],
    query: NDArray[np.int32],
    longest: int,
    depth: int,
    found: Found,
    row: int,
) -> tuple[int, int]:
    """Write continuations from all segments; return the free row and the longest possible match."""
    match, shortest, least = np.int64(0), np.int64(0), np.int64(0)
    for index in range(segments.shape[0]):
        segment = unpack(segments[index], SegmentArrays)
        row, found_here, shortest = suffixes.collect_suffixes(
            segment, query, shortest, longest, depth, found, row
        )
        match, least = max(match, found_here), segment.limits[0].shortest - 1
    return row, max(match, least)


@kernel(inline="always")
def begin_store(
    store: int, record: NDArray[np.int64], is_inside: NDArray[np.int64], start: int
) -> None:
    """Create a store in a block of zeros.

    Args:
        store: address of the block.
        record: int64[n], the packed store as if its block had address 0; written at the block's
            start.
        is_inside: int64[n], 1 for each word that is an address within the block.
        start: position of the first token.
    """
    words = array_at(store, record.shape[0], INT64)
    for place in range(record.shape[0]):
        words[place] = record[place] + is_inside[place] * store
    chains = unpack_at(store, STORE_LAYOUT, Chains)
    cursors.begin_cursor(unpack_at(store, STORE_LAYOUT, Cursor))
    for row in range(chains.heads.shape[0]):
        chains.heads[row, :] = -1
    chains.last[:] = -1
    chains.state[:] = start


@kernel()
def begin_filled_store(
    store: int,
    record: NDArray[np.int64],
    is_inside: NDArray[np.int64],
    start: int,
    tokens: NDArray[np.int32],
) -> None:
    """Create a store as `begin_store` does, and append tokens, int32[n].

    Empty stores have a separate kernel, because opening a drafter needs only that kernel. This one
    takes three times as long to compile.
    """
    begin_store(store, record, is_inside, start)
    append_tokens(store, tokens)


@kernel(inline="always")
def append_tokens(store: int, new_tokens: NDArray[np.int32]) -> None:
    """Append tokens to the store at an address; see `chains.append_tokens`."""
    orders = unpack_at(store, STORE_LAYOUT, Orders).orders
    chains_.append_tokens(unpack_at(store, STORE_LAYOUT, Chains), orders, new_tokens)


@kernel()
def extend_sequence(store: int, new_tokens: NDArray[np.int32]) -> None:
    """Append tokens to a sequence's store, and move its cursor and its trail."""
    _extend(
        unpack_at(store, STORE_LAYOUT, Chains), unpack_at(store, STORE_LAYOUT, Orders),
        unpack_at(store, STORE_LAYOUT, Cursor), new_tokens,
    )  # fmt: skip


@kernel(allocates=True)
def add_tokens(
    store: int,
    live: NDArray[np.int64],
    tokens: NDArray[np.int32],
    counted_from: int,
    margin: int,
) -> int:
    """Append tokens to a store that may wrap, and count them in its live table.

    Tokens are appended in parts of at most half of the ring. Before a part overwrites tokens, they
    are subtracted from the counts.

    Args:
        store: address of the store.
        live: int64[sets, WAYS], updated.
        tokens: int32[n].
        counted_from: position of the first token that is counted.
        margin: how many tokens before they are overwritten tokens are subtracted.

    Returns:
        The new position of the first token that is counted.
    """
    chains = unpack_at(store, STORE_LAYOUT, Chains)
    orders = unpack_at(store, STORE_LAYOUT, Orders).orders
    capacity, size, begin = chains.tokens.shape[0], tokens.shape[0], np.int64(0)
    num_parts = max(1, (size + capacity // 2 - 1) // (capacity // 2))
    for number in range(num_parts):
        part = tokens[begin : begin + size // num_parts + (number < size % num_parts)]
        begin += part.shape[0]
        first = chains.state[0]
        until = min(first + part.shape[0] - capacity + margin, first)
        if until > counted_from:
            count_tokens(live, chains.tokens, counted_from, until, np.int64(-1))
            counted_from = until
        chains_.append_tokens(chains, orders, part)
        count_tokens(live, chains.tokens, first, chains.state[0], np.int64(1))
    return counted_from


@kernel()
def suppose_tokens(store: int, tokens: NDArray[np.int32], before: NDArray[np.int64]) -> None:
    """Append tokens tentatively to a sequence's store; `withdraw_tokens` removes them.

    The cursor and the trail move too, as in `extend_sequence`, and are not restored.

    Args:
        store: address of a sequence's store, with room for the tokens.
        tokens: int32[n].
        before: int64[n], written: the last position of each token before this call.
    """
    last = unpack_at(store, STORE_LAYOUT, Chains).last
    for index in range(tokens.shape[0]):
        before[index] = last[tokens[index] & (last.shape[0] - 1)]
    extend_sequence(store, tokens)


@kernel()
def withdraw_tokens(store: int, tokens: NDArray[np.int32], before: NDArray[np.int64]) -> None:
    """Remove the tokens that `suppose_tokens` appended; it has the same arguments."""
    sequence, orders = (
        unpack_at(store, STORE_LAYOUT, Chains),
        unpack_at(store, STORE_LAYOUT, Orders),
    )
    chains_.withdraw_tokens(sequence, orders.orders, tokens.shape[0])
    for index in range(tokens.shape[0]):
        sequence.last[tokens[index] & (sequence.last.shape[0] - 1)] = before[index]


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


@kernel(allocates=True)
def move_lanes(running: NDArray[Any], grown: NDArray[Any]) -> None:
    """Move all lanes to an empty ring of more blocks; see `chains.move_lanes`."""
    chains_.move_lanes(
        unpack(running[0], Lanes), unpack(grown[0], Lanes), unpack(running[0], Orders).orders
    )


@kernel()
def follow_texts(store: NDArray[Any], new_tokens: NDArray[np.int32]) -> None:
    """Move a sequence's cursors in predicted texts past the tokens just appended to it."""
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
    """Write continuations from predicted texts and at cursors; return the first free row."""
    texts, found = unpack(store[0], TextCursors), unpack(scratch[0], Found)
    predicted = unpack(store[0], Chains)
    indexed = unpack(store[0], Orders)
    end = chains_.collect_chains(predicted, indexed, query, source, _ENDS, depth, found, row)
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
    """Write continuations from listed phrases; see `phrase_matching.collect_phrases`."""
    return phrase_matching.collect_phrases(
        unpack(phrases[0], PhraseArrays), source, longest, max_rows, depth,
        unpack(scratch[0], Found), row,
    )  # fmt: skip
