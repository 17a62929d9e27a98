"""Hash chains: every earlier occurrence of the last tokens, newest first.

A store holds tokens at absolute positions 0, 1, 2, … in a ring whose capacity is a power of two.
It indexes n-grams of a few lengths, called orders. For each order, `heads` holds the newest
position of every hash bucket. `links` holds for every position the distance back to the previous
position in the same bucket (0 for none). A `SEPARATOR` follows each document; no match and no
continuation crosses a separator.

A head stores the low 31 bits of its position. If a bucket gets no entry for 2^31 tokens, it may
appear to point into the ring again. Such positions do not match, so this costs only probes.

Lanes are texts that are written concurrently, a few tokens at a time, and searched in the same way.
Each lane fills blocks of one shared ring. A block links to the lane's previous and next blocks, and
matches and continuations follow these links. An n-gram is linked twice: immediately in its group's
bucket, and in a bucket of all groups once its block is full. Links follow the order in which they
were made, so a link may lead to a later position.
"""

from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from retriever.kernels.compiling import kernel, prefetch
from retriever.kernels.layout import LANE_BLOCK, RECENT_SIZE, Chains, Found, Lanes, Orders
from retriever.kernels.similarity import WINDOW, similarity_of

SEPARATOR: Final = -1
"""Marks the end of a document in a store; no token has this id."""

_MULTIPLIER: Final = np.uint64(0x9E3779B97F4A7C15)
_SHIFT: Final = np.uint64(29)
_PROBES_PER_ROW: Final = 4  # bounds the time spent on hash collisions
_HEAD_BITS: Final = 0x7FFFFFFF
_BLOCK: Final = 4096
"""Tokens whose buckets are computed together."""
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
    """Write the buckets, int32[n], of the n-grams that end at `first` and later positions.

    N-grams that cross documents are included. This keeps the loop free of branches and vectorized,
    which makes bulk loading several times faster.
    """
    mask = tokens.shape[0] - 1
    for offset in range(buckets.shape[0]):
        begin = first + offset - order + 1
        buckets[offset] = bucket_of(tokens, begin, mask, order, num_buckets)


@kernel(inline="always")
def _link(chains: Chains, order: int, row: int, first: int, document: int) -> None:
    """Link the n-grams that end at or after `first`; their buckets are already written.

    Args:
        chains: the store.
        order: length of the n-grams.
        row: row of this order in `heads` and `links`.
        first: position where the first n-gram ends.
        document: start of the document that contains `first`.
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
    """Remove the last tokens of a sequence's store and unlink the n-grams that end at them.

    Each head returns to the position that its token was linked to. `last` does not change, because
    a token's previous position is unknown here.

    Args:
        chains: the store, a ring that has not wrapped; updated.
        orders: int64[orders], the indexed n-gram orders, longest first.
        count: number of tokens to remove; all belong to the current document.
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
def call_heads(
    heads: NDArray[np.int32], orders: NDArray[np.int64], query: NDArray[np.int32]
) -> None:
    """Prefetch the heads that `collect_chains` reads first, for all orders at once.

    Args:
        heads: int32[orders, buckets], of a store.
        orders: int64[orders], the indexed n-gram orders.
        query: int32[q], the last tokens of the context.
    """
    for index in range(orders.shape[0]):
        order = orders[index]
        if query.shape[0] >= order:
            bucket = bucket_of(query, query.shape[0] - order, -1, order, heads.shape[1])
            prefetch(heads, index * heads.shape[1] + bucket)


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
    """Write what followed earlier occurrences of the query's last tokens, longest matches first.

    Args:
        chains: a store.
        indexed: orders of n-grams that it indexes.
        query: int32[q], the last tokens of the context.
        source: database that the rows are marked with.
        wrap: whether the store is the context itself. Then its end is not an occurrence. Also, a
            continuation that reaches the end starts over, so that loops are predicted to repeat.
        depth: most tokens to copy for each occurrence.
        found: rows and continuations are written from index `row` on.
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
    too_long = query.shape[0] + 1  # longer matches were written for a longer order
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


@kernel(inline="always")
def faded(written_by: int, lane: NDArray[np.int64]) -> float:
    """Return the weight, for a lane, of an occurrence written by a model version; see `FADING`."""
    weight = np.float64(1.0)
    if lane[VERSION] >= 0:
        if written_by < lane[OLDEST]:
            return np.float64(0.0)
        left = abs(lane[VERSION] - written_by)
        while left > 0 and weight > LEAST_FADED:
            weight *= FADING
            left -= 1
    return weight


@kernel()
def fade_rows(
    found: Found, first: int, end: int, versions: NDArray[np.int64], lane: NDArray[np.int64]
) -> int:
    """Set the counts of rows from generations by the model versions that wrote them.

    Args:
        found: rows and continuations, updated; the rows from `first` to `end` are from generations.
            Rows with a count of 0 are dropped, and later rows move up.
        first: first row.
        end: end of the rows, exclusive.
        versions: int64[n, 2], sorted by position: the first position that a version wrote, and the
            version. Positions before the first pair belong to version 0.
        lane: int64[6], the lane of the querying sequence.

    Returns:
        The end of the remaining rows.
    """
    rows, continuations, kept = found.rows, found.continuations, first
    for index in range(first, end):
        count = faded(version_at(versions, rows[index].position), lane)
        if count <= 0:
            continue
        if kept < index:
            rows[kept] = rows[index]
            for depth in range(rows[index].length):
                continuations[kept, depth] = continuations[index, depth]
        rows[kept].count = count
        kept += 1
    return kept


@kernel()
def version_at(versions: NDArray[np.int64], position: int) -> int:
    """Return the version that wrote a position; arguments as for `fade_rows`."""
    low, high = 0, versions.shape[0]
    while low < high:
        middle = (low + high) >> 1
        if versions[middle, 0] <= position:
            low = middle + 1
        else:
            high = middle
    return versions[low - 1, 1] if low > 0 else np.int64(0)


@kernel()
def head_position(head: int, total: int) -> int:
    """Return the position of a head in a store of `total` tokens, -1 for none."""
    if head < 0:
        return np.int64(-1)
    return total - ((total - head) & _HEAD_BITS)


@kernel(inline="always")
def bucket_of(ring: NDArray[np.int32], begin: int, mask: int, order: int, num_buckets: int) -> int:
    """Hash the `order` tokens that start at `begin`; for arrays that are not rings, mask is -1."""
    return salted_bucket_of(ring, begin, mask, order, num_buckets, 0)


@kernel(inline="always")
def salted_bucket_of(
    ring: NDArray[np.int32], begin: int, mask: int, order: int, num_buckets: int, salt: int
) -> int:
    """Hash like `bucket_of`, but with different buckets for each salt."""
    key = np.uint64(order) ^ np.uint64(salt)
    for offset in range(order):
        token = ring[(begin + offset) & mask]
        key = (key ^ np.uint64(token)) * _MULTIPLIER
        key ^= key >> _SHIFT
    return np.int64(key & np.uint64(num_buckets - 1))


@kernel(inline="always")
def match_length(
    tokens: NDArray[np.int32], position: int, oldest: int, query: NDArray[np.int32]
) -> int:
    """Count equal tokens, going back from `position` and from the end of the query."""
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
    """Copy tokens up to a separator; with `wrap`, start over when the end is reached."""
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


NUMBER, GROUP, LAST_BLOCK, IS_SHARED, VERSION, OLDEST = 0, 1, 2, 3, 4, 5
"""Fields of a lane, int64[6]: its number (-1 for a reader that writes nothing), its group (0 for
none), its last block (-1 for none), whether all groups may see it, the version of the model that
writes it (-1 if not stated), and the oldest version whose evidence counts. A lane without a stated
version writes evidence of version 0, and counts evidence of all versions in full."""

FADING: Final = 0.5
"""Weight factor of evidence for each version between the one that wrote it and the lane's own."""

LEAST_FADED: Final = 0.125
"""Least weight of old evidence: for some prompts, only old texts have evidence."""

_SHIFT_OF_BLOCK: Final = LANE_BLOCK.bit_length() - 1


@kernel()
def append_lane(
    lanes: Lanes,
    orders: NDArray[np.int64],
    lane: NDArray[np.int64],
    sequence: NDArray[np.int32],
    first: int,
    end: int,
    linked_from: int,
) -> None:
    """Append tokens of a sequence to its lane, and link the n-grams that end at each token.

    Args:
        lanes: updated.
        orders: int64[orders], the indexed n-gram orders, longest first.
        lane: int64[6], updated. It holds the sequence's tokens from the lane's start to `first`.
        sequence: int32[n], all tokens of the sequence.
        first: position in the sequence of the first token to append.
        end: position after the last token.
        linked_from: n-grams that end before this position are in the prompt and are not linked.
    """
    blocks = lanes.blocks
    mask, block_mask = lanes.tokens.shape[0] - 1, blocks.shape[0] - 1
    for place in range(first, end):
        block = lane[LAST_BLOCK]
        if block < lanes.state[1] or blocks[block & block_mask].used == LANE_BLOCK:
            block = _begin_block(lanes, lane)
        record = blocks[block & block_mask]
        position = (block << _SHIFT_OF_BLOCK) + record.used
        lanes.tokens[position & mask] = sequence[place]
        record.used += 1
        if place < linked_from:
            record.skipped = record.used
            continue
        _link_lane(lanes, orders, 0, lane[GROUP], sequence, place, position)
        if record.used == LANE_BLOCK and record.is_shared:
            for each in range(place + 1 + record.skipped - LANE_BLOCK, place + 1):
                _link_lane(
                    lanes, orders, orders.shape[0], 0, sequence, each, position - place + each
                )


@kernel()
def _begin_block(lanes: Lanes, lane: NDArray[np.int64]) -> int:
    """Give a lane the next block of the ring, overwrite it, and return the block's number."""
    block, previous = lanes.state[0], lane[LAST_BLOCK]
    blocks, size = lanes.blocks, lanes.blocks.shape[0]
    lanes.state[0] = block + 1
    lanes.state[1] = max(lanes.state[1], block + 1 - size)
    if previous < lanes.state[1]:
        previous = -1
    else:
        blocks[previous & (size - 1)].next = block
    begin = (block & (size - 1)) * LANE_BLOCK
    lanes.tokens[begin : begin + LANE_BLOCK] = SEPARATOR
    lanes.links[:, begin : begin + LANE_BLOCK] = 0
    record = blocks[block & (size - 1)]
    lanes.state[2] += 0 if record.lane >= 0 else 1
    record.number, record.previous, record.next = block, previous, -1
    record.used, record.skipped, record.is_shared = 0, 0, lane[IS_SHARED]
    record.lane, record.group, record.version = lane[NUMBER], lane[GROUP], lane[VERSION]
    lane[LAST_BLOCK] = block
    return block


@kernel(inline="always")
def _link_lane(
    lanes: Lanes,
    orders: NDArray[np.int64],
    first_row: int,
    salt: int,
    sequence: NDArray[np.int32],
    place: int,
    position: int,
) -> None:
    """Link the n-grams that end at `place` in a sequence and at `position` in the lanes."""
    heads, links, mask = lanes.heads, lanes.links, lanes.tokens.shape[0] - 1
    for index in range(orders.shape[0]):
        begin, row = place - orders[index] + 1, first_row + index
        if begin >= 0:
            bucket = salted_bucket_of(sequence, begin, -1, orders[index], heads.shape[1], salt)
            head = head_position(heads[row, bucket], lanes.state[0] << _SHIFT_OF_BLOCK)
            if head >= lanes.state[1] << _SHIFT_OF_BLOCK:
                links[row, position & mask] = position - head
            heads[row, bucket] = position & _HEAD_BITS


@kernel()
def withdraw_lane(lanes: Lanes, lane: NDArray[np.int64]) -> None:
    """Overwrite the tokens of a lane that starts over. Its links stay but match nothing."""
    blocks, block_mask = lanes.blocks, lanes.blocks.shape[0] - 1
    block = lane[LAST_BLOCK]
    while block >= lanes.state[1]:
        record, begin = blocks[block & block_mask], (block & block_mask) * LANE_BLOCK
        lanes.tokens[begin : begin + LANE_BLOCK] = SEPARATOR
        record.lane = -1
        lanes.state[2] -= 1
        block = record.previous
    lane[LAST_BLOCK] = -1


@kernel(allocates=True)
def move_lanes(lanes: Lanes, grown: Lanes, orders: NDArray[np.int64]) -> None:
    """Move all lanes to an empty, larger ring; lanes and blocks keep their numbers.

    N-grams are linked anew in order of position, except those that start before their lane.

    Args:
        lanes: the current lanes.
        grown: the empty ring; written.
        orders: int64[orders], the indexed n-gram orders, longest first.
    """
    grown.state[:] = lanes.state
    tail = np.empty(orders[0], np.int32)
    num_orders = orders.shape[0]
    for block in range(lanes.state[1], lanes.state[0]):
        begin = (block & (lanes.blocks.shape[0] - 1)) * LANE_BLOCK
        to = (block & (grown.blocks.shape[0] - 1)) * LANE_BLOCK
        grown.blocks[to // LANE_BLOCK] = lanes.blocks[begin // LANE_BLOCK]
        grown.tokens[to : to + LANE_BLOCK] = lanes.tokens[begin : begin + LANE_BLOCK]
        record = grown.blocks[to // LANE_BLOCK]
        for offset in range(record.skipped, record.used if record.lane >= 0 else 0):
            position = (block << _SHIFT_OF_BLOCK) + offset
            first, before = tail.shape[0], position
            while first > 0 and before >= 0:
                first -= 1
                tail[first] = grown.tokens[before & (grown.tokens.shape[0] - 1)]
                before = _position_before(grown, before)
            known = tail[first:]
            place = known.shape[0] - 1
            _link_lane(grown, orders, 0, record.group, known, place, position)
            if record.used == LANE_BLOCK and record.is_shared:
                _link_lane(grown, orders, num_orders, 0, known, place, position)


@kernel(inline="always")
def collect_lanes(
    lanes: Lanes,
    indexed: Orders,
    lane: NDArray[np.int64],
    query: NDArray[np.int32],
    source: int,
    depth: int,
    found: Found,
    row: int,
) -> int:
    """Write what followed the query's last tokens in other lanes: first of its group, then others.

    Args:
        lanes: the lanes of one tenant.
        indexed: orders of n-grams that they index.
        lane: int64[6], the lane of the querying sequence.
        query: int32[q], the last tokens of the context.
        source: database that the rows are marked with.
        depth: most tokens to copy for each occurrence.
        found: rows and continuations are written from index `row` on.
        row: first free row.

    Returns:
        The first free row afterwards.
    """
    num_orders = indexed.orders.shape[0]
    for first_row in range(0 if lane[GROUP] > 0 else num_orders, 2 * num_orders, num_orders):
        row = _collect_in(lanes, indexed, first_row, lane, query, source, depth, found, row)
    return row


@kernel()
def _collect_in(
    lanes: Lanes,
    indexed: Orders,
    first_row: int,
    lane: NDArray[np.int64],
    query: NDArray[np.int32],
    source: int,
    depth: int,
    found: Found,
    row: int,
) -> int:
    """Write what followed the query's last tokens in lanes of its group, or of other groups."""
    heads, links, blocks, rows = lanes.heads, lanes.links, lanes.blocks, found.rows
    mask, block_mask = lanes.tokens.shape[0] - 1, blocks.shape[0] - 1
    total, oldest = lanes.state[0] << _SHIFT_OF_BLOCK, lanes.state[1] << _SHIFT_OF_BLOCK
    is_of_group, group = first_row == 0, lane[GROUP]
    too_long = query.shape[0] + 1  # longer matches were written for a longer order
    for index in range(indexed.orders.shape[0]):
        order = indexed.orders[index]
        if query.shape[0] < order:
            continue
        bucket = salted_bucket_of(
            query, query.shape[0] - order, -1, order, heads.shape[1], group if is_of_group else 0
        )
        position = head_position(heads[first_row + index, bucket], total)
        last_row = min(row + indexed.max_rows[index], rows.shape[0])
        probes = _PROBES_PER_ROW * indexed.max_rows[index]
        while position >= oldest and row < last_row and probes > 0:
            block = blocks[(position >> _SHIFT_OF_BLOCK) & block_mask]
            is_own = block.lane == lane[NUMBER] or block.lane < 0
            count = faded(max(block.version, 0), lane)
            if not is_own and (block.group == group) == is_of_group and count > 0:
                match, before = _match_lane(lanes, position, query)
                if order <= match < too_long:
                    length = _copy_lane(lanes, position, depth, found.continuations[row])
                    if length > 0:
                        _write(rows[row], length, match, source)
                        rows[row].count = count
                        rows[row].position = position
                        rows[row].similarity = _similarity_in(lanes, before, found.recent)
                        row += 1
            distance = links[first_row + index, position & mask]
            if distance == 0:
                break
            position -= distance
            probes -= 1
        too_long = order
    return row


@kernel(inline="always")
def _position_before(lanes: Lanes, position: int) -> int:
    """Return the previous position in the same lane, -1 for none."""
    if position & (LANE_BLOCK - 1):
        return position - 1
    block = lanes.blocks[(position >> _SHIFT_OF_BLOCK) & (lanes.blocks.shape[0] - 1)]
    if block.previous < lanes.state[1]:
        return np.int64(-1)
    return (block.previous << _SHIFT_OF_BLOCK) + LANE_BLOCK - 1


@kernel(inline="always")
def _position_after(lanes: Lanes, position: int) -> int:
    """Return the next position in the same lane, -1 for none."""
    block = lanes.blocks[(position >> _SHIFT_OF_BLOCK) & (lanes.blocks.shape[0] - 1)]
    if (position & (LANE_BLOCK - 1)) + 1 < block.used:
        return position + 1
    return block.next << _SHIFT_OF_BLOCK if block.next >= lanes.state[1] else np.int64(-1)


@kernel(inline="always")
def _match_lane(lanes: Lanes, position: int, query: NDArray[np.int32]) -> tuple[int, int]:
    """Count the tokens up to a position that match the query's end; also return where they stop."""
    tokens, mask, length = lanes.tokens, lanes.tokens.shape[0] - 1, 0
    while (
        position >= 0
        and length < query.shape[0]
        and tokens[position & mask] == query[query.shape[0] - 1 - length]
    ):
        length += 1
        position = _position_before(lanes, position)
    return length, position


@kernel(inline="always")
def _copy_lane(lanes: Lanes, position: int, depth: int, out: NDArray[np.int32]) -> int:
    """Copy the tokens after a position in its lane, as far as they are written."""
    tokens, mask, length = lanes.tokens, lanes.tokens.shape[0] - 1, 0
    position = _position_after(lanes, position)
    while position >= 0 and length < depth:
        out[length] = tokens[position & mask]
        length += 1
        position = _position_after(lanes, position)
    return length


@kernel(inline="always")
def _similarity_in(lanes: Lanes, position: int, recent: NDArray[np.float32]) -> float:
    """Return the similarity of a lane's text up to a position; see `similarity_of`."""
    overlap = np.float32(1.0)
    for _ in range(WINDOW):
        if position < 0:
            break
        token = np.int64(lanes.tokens[position & (lanes.tokens.shape[0] - 1)])
        overlap += recent[token & (RECENT_SIZE - 1)]
        position = _position_before(lanes, position)
    return overlap * overlap
