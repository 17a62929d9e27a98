"""Hash chains: every earlier occurrence of the last tokens, newest first.

A store holds tokens at absolute positions 0, 1, 2, … in a ring whose capacity is a power of two.
For each indexed n-gram order it keeps the newest position of every hash bucket (`heads`) and, for
every position, the distance back to the previous position of the same bucket (`links`, 0 for
none). A `SEPARATOR` stands after each document; no match and no continuation spans one.

A head keeps the low 31 bits of its position. A bucket without entries for 2^31 tokens may appear to
point into the ring again; such positions do not match, so it costs probes only.
"""

from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from retriever.kernels.compiling import kernel, prefetch
from retriever.kernels.layout import Chains, Found, Orders
from retriever.kernels.similarity import similarity_of

SEPARATOR: Final = -1
"""Ends a document in a store; no token has this id."""

_MULTIPLIER: Final = np.uint64(0x9E3779B97F4A7C15)
_SHIFT: Final = np.uint64(29)
_PROBES_PER_ROW: Final = 4  # bounds the time spent on hash collisions
_HEAD_BITS: Final = 0x7FFFFFFF
_BLOCK: Final = 4096
"""Tokens whose buckets are found together."""
_AHEAD: Final = 16


@kernel()
def append_tokens(
    chains: Chains,
    orders: NDArray[np.int64],
    new_tokens: NDArray[np.int32],
) -> None:
    """Append tokens to a store and link the n-grams that end at each of them.

    Args:
        chains: the store; updated.
        orders: int64[orders], the indexed n-gram orders, longest first.
        new_tokens: int32[n], token ids and separators.
    """
    mask = chains.tokens.shape[0] - 1
    written = 0
    while written < new_tokens.shape[0]:
        first, document = chains.state[0], chains.state[1]
        room = mask + 1 - (first & mask)  # a block does not wrap around the ring
        block = new_tokens[written : written + min(_BLOCK, room, (mask + 1) // 2)]
        _write_tokens(chains, block)
        for row in range(orders.shape[0]):
            place = first & mask
            buckets = chains.links[row, place : place + block.shape[0]]
            num_buckets = chains.heads.shape[1]
            _write_buckets(chains.tokens, first, orders[row], num_buckets, buckets)
            _link(chains, orders[row], row, first, document)
        written += block.shape[0]


@kernel(inline="always")
def _write_tokens(chains: Chains, new_tokens: NDArray[np.int32]) -> None:
    tokens, state, last = chains.tokens, chains.state, chains.last
    mask = tokens.shape[0] - 1
    for token in new_tokens:
        position = state[0]
        tokens[position & mask] = token
        last[token & (last.shape[0] - 1)] = position & mask
        state[0] = position + 1
        if token == SEPARATOR:
            state[1] = position + 1


@kernel()
def _write_buckets(
    tokens: NDArray[np.int32], first: int, order: int, num_buckets: int, buckets: NDArray[np.int32]
) -> None:
    """Write the buckets, int32[n], of the n-grams that end at `first` and the positions after it.

    N-grams that span documents are included, so that the loop has no branches and is vectorized:
    loading many tokens is several times faster.
    """
    mask = tokens.shape[0] - 1
    for offset in range(buckets.shape[0]):
        begin = first + offset - order + 1
        buckets[offset] = bucket_of(tokens, begin, mask, order, num_buckets)


@kernel(inline="always")
def _link(chains: Chains, order: int, row: int, first: int, document: int) -> None:
    """Link the n-grams that end at the positions from `first` on, whose buckets are written.

    Args:
        chains: the store.
        order: of the n-grams.
        row: of the order.
        first: a position.
        document: position where the document begins that goes on there.
    """
    tokens, heads, links = chains.tokens, chains.heads, chains.links
    mask = tokens.shape[0] - 1
    for position in range(first, chains.state[0]):
        bucket = links[row, position & mask]
        prefetch(heads, row * heads.shape[1] + links[row, (position + _AHEAD) & mask])
        links[row, position & mask] = 0
        if tokens[position & mask] == SEPARATOR:
            document = position + 1
        if position - order + 1 >= document:
            head = np.int64(heads[row, bucket])
            distance = (position - head) & _HEAD_BITS
            is_linked = (head >= 0) & (distance <= mask)  # branchless: heads are cache misses
            links[row, position & mask] = distance * is_linked
            heads[row, bucket] = position & _HEAD_BITS


@kernel()
def withdraw_tokens(chains: Chains, orders: NDArray[np.int64], count: int) -> None:
    """Take back the last tokens of a sequence's store: no n-gram that ends at one is found again.

    Each head goes back to the position that its token was linked to. `last` stays as it is: which
    position a token had before is not known here.

    Args:
        chains: the store, a ring that has not wrapped; updated.
        orders: int64[orders], the indexed n-gram orders, longest first.
        count: how many tokens; all of the current document.
    """
    tokens, heads, links, state = chains.tokens, chains.heads, chains.links, chains.state
    mask = tokens.shape[0] - 1
    for position in range(state[0] - 1, state[0] - 1 - count, -1):
        for row in range(orders.shape[0]):
            begin = position - orders[row] + 1
            if begin < state[1]:
                continue
            bucket = bucket_of(tokens, begin, mask, orders[row], heads.shape[1])
            distance = links[row, position]
            heads[row, bucket] = (position - distance) & _HEAD_BITS if distance else -1
    state[0] -= count


@kernel()
def collect_chains(
    chains: Chains,
    indexed: Orders,
    query: NDArray[np.int32],
    source: int,
    wrap: bool,
    depth: int,
    found: Found,
    row: int,
) -> int:
    """Write what followed earlier occurrences of the query's end, longest matches first.

    Args:
        chains: a store.
        indexed: the n-grams that it indexes.
        query: int32[q], the last tokens of the context.
        source: database that the rows are marked with.
        wrap: whether the store is the context itself: its end is then no occurrence, and a
            continuation that reaches the end starts over, so that a loop goes on as a loop.
        depth: most tokens to copy for each occurrence.
        found: rows and continuations are written from `row` on.
        row: first free row.

    Returns:
        The first free row afterwards.
    """
    tokens, heads, links = chains.tokens, chains.heads, chains.links
    state, orders, max_rows = chains.state, indexed.orders, indexed.max_rows
    rows, continuations, recent = found.rows, found.continuations, found.recent
    total = state[0]
    mask = tokens.shape[0] - 1
    oldest = max(state[2], total - tokens.shape[0])
    too_long = query.shape[0] + 1  # longer matches were written with a longer order
    for index in range(orders.shape[0]):
        order = orders[index]
        if query.shape[0] < order:
            continue
        bucket = bucket_of(query, query.shape[0] - order, -1, order, heads.shape[1])
        position = head_position(heads[index, bucket], total)
        last_row = min(row + max_rows[index], rows.shape[0])
        probes = _PROBES_PER_ROW * max_rows[index]
        while position >= oldest and row < last_row and probes > 0:
            match = 0
            if position + 1 < total:
                match = match_length(tokens, position, oldest, query)
            if order <= match < too_long:
                length = copy_tokens(tokens, position + 1, total, wrap, depth, continuations[row])
                if length > 0:
                    _write(rows[row], length, match, source)
                    rows[row].position = position + 1
                    end = position + 1 - match
                    rows[row].similarity = similarity_of(
                        tokens, mask, end, oldest, SEPARATOR, recent
                    )
                    row += 1
            distance = links[index, position & (tokens.shape[0] - 1)]
            if distance == 0:
                break
            position -= distance
            probes -= 1
        too_long = order
    return row


@kernel()
def head_position(head: int, total: int) -> int:
    """Return the position that a head stands for in a store of `total` tokens, -1 for none."""
    if head < 0:
        return np.int64(-1)
    return total - ((total - head) & _HEAD_BITS)


@kernel(inline="always")
def bucket_of(ring: NDArray[np.int32], begin: int, mask: int, order: int, num_buckets: int) -> int:
    """Hash the `order` tokens from `begin` on; a mask of -1 is for arrays that are not rings."""
    key = np.uint64(order)
    for offset in range(order):
        token = ring[(begin + offset) & mask]
        key = (key ^ np.uint64(token)) * _MULTIPLIER
        key ^= key >> _SHIFT
    return np.int64(key & np.uint64(num_buckets - 1))


@kernel(inline="always")
def match_length(
    tokens: NDArray[np.int32], position: int, oldest: int, query: NDArray[np.int32]
) -> int:
    """Count equal tokens backwards from `position` and from the query's end."""
    mask = tokens.shape[0] - 1
    limit = min(query.shape[0], position - oldest + 1)
    length = 0
    while length < limit and tokens[(position - length) & mask] == query[-1 - length]:
        length += 1
    return length


@kernel(inline="always")
def copy_tokens(
    tokens: NDArray[np.int32], begin: int, end: int, wrap: bool, depth: int, out: NDArray[np.int32]
) -> int:
    """Copy tokens up to a separator; with `wrap`, start over at the end."""
    mask = tokens.shape[0] - 1
    position = begin
    length = 0
    while length < depth and (position < end or wrap):
        if position == end:
            position = begin
        token = tokens[position & mask]
        if token == SEPARATOR:
            break
        out[length] = token
        position += 1
        length += 1
    return length


@kernel(inline="always")
def _write(row: Any, length: int, match: int, source: int) -> None:
    row.length = length
    row.match = match
    row.source = source
    row.count = 1.0
