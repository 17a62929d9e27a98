"""Successors of the last one to three tokens: in the corpus, the sequence and generations.

The `add_` functions add the successors of one context to a node's candidates. They return the share
of the estimate that is left for the next shorter context.
"""

from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from retriever.kernels.candidates import UNKNOWN, child_with
from retriever.kernels.chains import bucket_of, head_position
from retriever.kernels.compiling import kernel, octaves_below_one, prefetch
from retriever.kernels.layout import Chains, Evidence, Tables, Traits
from retriever.kernels.live_table import WAYS, check_of, entry_count, entry_token, hash_context
from retriever.tree import Source

MOST_SUCCESSORS: Final = (32, 16, 16)
"""Successors to read at the root from the phrase tables, for contexts of one, two and three tokens.

At other nodes the number is halved for every octave of the node's probability below one. The n-th
most frequent successor has at most 1/n of that probability, and improbable candidates do not
matter."""

LEAST_SUCCESSORS: Final = (4, 2, 2)
"""Fewest successors to read, even for an improbable node."""

MOST_FOLLOWERS: Final = (8, 4)
"""Most occurrences to read in the sequence, for contexts of one and two tokens."""

_CORPUS_STRENGTH: Final = (20.0, 4.0, 2.0)  # pseudo-count of the shorter context, by order
_LIVE_STRENGTH: Final = (3.0, 1.5)  # orders 2 and 3
_CONTEXT_STRENGTH: Final = (4.0, 1.0)  # orders 1 and 2
_CONTEXT_ROWS: Final = (3, 2)  # rows of the chains of orders 1 and 2 in a context's store
_PROBES: Final = 4  # for each wanted successor: bounds the time spent on hash collisions
_BLOCK: Final = 64  # successors that are compared at once

# No literals: a kernel is compiled separately for each literal that it is called with.
_CONTEXT, _GENERATIONS, _PHRASES = (
    np.int64(each) for each in (Source.CONTEXT, Source.GENERATIONS, Source.PHRASES)
)


@kernel()
def set_states(
    starts1: NDArray[np.uint32],
    starts2: NDArray[np.uint32],
    tokens2: NDArray[Any],
    tokens3: NDArray[Any],
    nodes: NDArray[Any],
    current: int,
) -> None:
    """Find the entries of the last two and three tokens, unless they are already known."""
    node = nodes[current]
    if node.pair == UNKNOWN:
        node.pair = find_successor(starts1, tokens2, np.int64(node.before), node.token)
    if node.triple == UNKNOWN:
        above = np.int64(nodes[node.parent].pair)
        if current == 0:
            above = find_successor(starts1, tokens2, np.int64(node.earlier), node.before)
        node.triple = find_successor(starts2, tokens3, above, node.token)


@kernel(inline="always")
def call_from_memory(
    tables: Tables,
    live: NDArray[np.int64],
    context: Chains,
    tail: NDArray[np.int32],
    node: Any,
) -> None:
    """Prefetch what the functions below read first, in case the node's children are computed.

    The indexes of its pair's and triple's successors were prefetched with its siblings.
    """
    tail[0], tail[1], tail[2] = node.earlier, node.before, node.token
    heads = context.heads
    for order in (2, 1):
        row = _CONTEXT_ROWS[order - 1]
        bucket = bucket_of(tail, 3 - order, -1, order, heads.shape[1])
        prefetch(heads, row * heads.shape[1] + bucket)
    for order in (2, 3):
        prefetch(live, (hash_context(tail, order) & (live.shape[0] - 1)) * WAYS)
    if 0 <= node.triple < tables.starts3.shape[0]:
        begin = np.int64(tables.starts3[node.triple])
        prefetch(tables.tokens4, begin)
        prefetch(tables.counts4, begin)
    if 0 <= node.pair < tables.starts2.shape[0]:
        begin = np.int64(tables.starts2[node.pair])
        prefetch(tables.tokens3, begin)
        prefetch(tables.counts3, begin)
        prefetch(tables.starts3, begin)
    if 0 <= node.token < tables.starts1.shape[0]:
        begin = np.int64(tables.starts1[node.token])
        prefetch(tables.tokens2, begin)
        prefetch(tables.counts2, begin)
        prefetch(tables.starts2, begin)


@kernel()
def call_root(
    starts1: NDArray[np.uint32],
    live: NDArray[np.int64],
    query: NDArray[np.int32],
    tail: NDArray[np.int32],
) -> None:
    """Prefetch the first reads for the root of a tree, before its rows are searched.

    Args:
        starts1: `starts1` of the phrase tables.
        live: int64[sets, WAYS], live table of generations.
        query: int32[q], the last tokens of the context.
        tail: int32[3], scratch.
    """
    for back in range(min(tail.shape[0], query.shape[0])):
        token = query[query.shape[0] - 1 - back]
        tail[tail.shape[0] - 1 - back] = token
        prefetch(starts1, token)
    for order in (2, 3):
        prefetch(live, (hash_context(tail, order) & (live.shape[0] - 1)) * WAYS)


@kernel()
def call_root_successors(
    starts1: NDArray[np.uint32],
    tokens2: NDArray[Any],
    counts2: NDArray[np.uint8],
    query: NDArray[np.int32],
) -> None:
    """Prefetch the first successors of the last three tokens; `call_root` fetched their indexes."""
    for back in range(min(3, query.shape[0])):
        token = query[query.shape[0] - 1 - back]
        if 0 <= token < starts1.shape[0]:
            prefetch(tokens2, np.int64(starts1[token]))
            if back == 0:
                prefetch(counts2, np.int64(starts1[token]))


@kernel()
def call_root_entries(
    starts1: NDArray[np.uint32],
    starts2: NDArray[np.uint32],
    starts3: NDArray[np.uint32],
    tokens2: NDArray[Any],
    tokens3: NDArray[Any],
    counts3: NDArray[np.uint8],
    query: NDArray[np.int32],
) -> None:
    """Prefetch the successors of the pairs in the last three tokens, after the pairs themselves.

    In tables of gigabytes, each look-up waits for memory. These arrive while the corpus is
    searched.
    """
    last = query.shape[0] - 1
    for back in range(min(2, last)):
        before = np.int64(query[last - back - 1])  # same type as other calls: compiled once
        entry = find_successor(starts1, tokens2, before, query[last - back])
        if entry >= 0:
            begin = np.int64(starts2[entry])
            prefetch(tokens3, begin)
            if back == 0:
                prefetch(counts3, begin)
                prefetch(starts3, begin)


@kernel()
def find_successor(starts: NDArray[np.uint32], tokens: NDArray[Any], entry: int, token: int) -> int:
    """Return the entry of a token among an entry's successors, in the next level, or -1.

    Frequent tokens have thousands of successors, so the search compares whole blocks.
    """
    if entry < 0 or entry + 1 >= starts.shape[0]:
        return -1
    begin = np.int64(starts[entry])
    end = min(np.int64(starts[entry + 1]), tokens.shape[0])
    while begin < end:
        block = tokens[begin : min(begin + _BLOCK, end)]
        found = False
        for index in range(block.shape[0]):
            found |= np.int64(block[index]) == token
        if found:
            break
        begin += _BLOCK
    while begin < end and np.int64(tokens[begin]) != token:
        begin += 1
    return begin if begin < end else -1


@kernel()
def add_successors(
    starts: NDArray[np.uint32],
    tokens: NDArray[Any],
    own_counts: NDArray[np.uint8],
    counts: NDArray[np.uint8],
    values: NDArray[np.float32],
    level: int,
    entry: int,
    left: np.float32,
    vocabulary_size: int,
    nodes: NDArray[Any],
    evidence: NDArray[np.float32],
    slots: NDArray[np.int32],
    current: int,
    num_nodes: int,
    traits: NDArray[np.float32],
) -> tuple[int, np.float32]:
    """Add the most frequent successors of an entry; the successors are in `level` of the tables.

    Returns the node count and the coefficient of the next shorter context.
    """
    trait = Traits.CORPUS_1 + 2 - level
    traits[trait] = 0.0
    if entry < 0:
        return num_nodes, left
    total = values[own_counts[entry]]
    traits[trait] = total
    strength = np.float32(_CORPUS_STRENGTH[level - 2])
    share = left / (total + strength)
    begin = np.int64(starts[entry])
    most = MOST_SUCCESSORS[level - 2] >> octaves_below_one(nodes[current].probability)
    most = max(most, LEAST_SUCCESSORS[level - 2])
    end = min(np.int64(starts[entry + 1]), begin + most, tokens.shape[0])
    for successor in range(begin, end):
        token = np.int64(tokens[successor])
        if token >= vocabulary_size:
            continue  # damaged
        child, num_nodes = child_with(token, nodes, evidence, slots, current, num_nodes, _PHRASES)
        if child >= 0:
            evidence[child, Evidence.CORPUS] += share * values[counts[successor]]
            if level == 2:  # noqa: PLR2004
                nodes[child].pair = successor
            elif level == 3:  # noqa: PLR2004
                nodes[child].triple = successor
    return num_nodes, share * strength


@kernel()
def add_followers(
    sequence: NDArray[np.int32],
    heads: NDArray[np.int32],
    links: NDArray[np.int32],
    length: int,
    occurs: bool,
    order: int,
    left: np.float32,
    nodes: NDArray[Any],
    evidence: NDArray[np.float32],
    slots: NDArray[np.int32],
    tail: NDArray[np.int32],
    followers: NDArray[np.int32],
    current: int,
    num_nodes: int,
    traits: NDArray[np.float32],
) -> tuple[int, np.float32]:
    """Add successors of the last one or two tokens in the sequence itself.

    Nothing is searched if `occurs` says that the last token does not occur there.

    Returns the node count and the coefficient of the next shorter context.
    """
    found = 0
    if occurs and tail[3 - order] >= 0:
        found = _follow(sequence, heads, links, length, order, tail, followers)
    traits[Traits.CONTEXT_1 + 1 - order] = found
    strength = np.float32(_CONTEXT_STRENGTH[order - 1])
    share = left / (np.float32(found) + strength)
    for index in range(found):
        child, num_nodes = child_with(
            np.int64(followers[index]), nodes, evidence, slots, current, num_nodes, _CONTEXT
        )
        if child >= 0:
            evidence[child, Evidence.LIVE] += share
    return num_nodes, share * strength


@kernel()
def _follow(
    tokens: NDArray[np.int32],
    heads: NDArray[np.int32],
    links: NDArray[np.int32],
    total: int,
    order: int,
    tail: NDArray[np.int32],
    followers: NDArray[np.int32],
) -> int:
    """Write the tokens after the newest occurrences of the tail's end; return their number."""
    mask, row, most = tokens.shape[0] - 1, _CONTEXT_ROWS[order - 1], MOST_FOLLOWERS[order - 1]
    bucket = bucket_of(tail, 3 - order, -1, order, heads.shape[1])
    position = head_position(heads[row, bucket], total)
    found, probes = 0, _PROBES * most
    while position >= 0 and found < most and probes > 0:
        probes -= 1
        same = position + 1 < total and tokens[position & mask] == tail[2]
        if same and (order == 1 or tokens[(position - 1) & mask] == tail[1]):
            followers[found] = tokens[(position + 1) & mask]
            found += 1
        distance = links[row, position & mask]
        if distance == 0:
            break
        position -= distance
    return found


@kernel()
def add_live(
    live: NDArray[np.int64],
    order: int,
    left: np.float32,
    nodes: NDArray[Any],
    evidence: NDArray[np.float32],
    slots: NDArray[np.int32],
    tail: NDArray[np.int32],
    current: int,
    num_nodes: int,
    traits: NDArray[np.float32],
) -> tuple[int, np.float32]:
    """Add successors of the last `order` tokens in generations."""
    trait = Traits.LIVE_3 if order == 3 else Traits.LIVE_2  # noqa: PLR2004
    traits[trait] = 0.0
    if tail[3 - order] < 0:
        return num_nodes, left
    key = hash_context(tail, order)
    ways, check, total = live[key & (live.shape[0] - 1)], check_of(key), 0
    for way in range(WAYS):
        total += entry_count(ways[way], check)
    traits[trait] = total
    strength = np.float32(_LIVE_STRENGTH[order - 2])
    share = left / (np.float32(total) + strength)
    if total == 0:  # the usual case
        return num_nodes, share * strength
    for way in range(WAYS):
        count = entry_count(ways[way], check)
        if count > 0:
            child, num_nodes = child_with(
                entry_token(ways[way]), nodes, evidence, slots, current, num_nodes, _GENERATIONS
            )
            if child >= 0:
                evidence[child, Evidence.LIVE] += share * np.float32(count)
    return num_nodes, share * strength
