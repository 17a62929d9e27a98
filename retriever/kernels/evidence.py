"""What is known of a node: all candidates for its next token, and the evidence for each.

Four kinds of evidence are added up in one pass. The rows that agree with the path give weights.
The phrase tables, the live table and the chains of the sequence each give counts for the last one
to three tokens; they are interpolated from the shortest context to the longest, each estimate
leaning on the one before with a fixed strength (Dirichlet smoothing; MacKay and Peto 1995). As
that is linear, every count contributes its own coefficient and no estimate is made twice.
"""

from typing import Any, Final

import numpy as np
from numba import njit
from numpy.typing import NDArray

from retriever.kernels.chains import bucket_of, head_position
from retriever.kernels.layout import Evidence, Traits
from retriever.kernels.successors import (
    WAYS,
    check_of,
    entry_count,
    entry_token,
    hash_context,
)
from retriever.tree import Source

_SLOT_MULTIPLIER: Final = 40503
_MOST: Final = (16, 8, 8)  # successors to read for contexts of 1, 2 and 3 tokens
_CORPUS_STRENGTH: Final = (20.0, 4.0, 2.0)  # what the shorter context counts, by order
_LIVE_STRENGTH: Final = (3.0, 1.5)  # orders 2 and 3
_CONTEXT_STRENGTH: Final = (4.0, 1.0)  # orders 1 and 2
_CONTEXT_MOST: Final = (16, 8)
_CONTEXT_ROWS: Final = (3, 2)  # where chains of orders 1 and 2 stand in a context's store
_PROBES: Final = 4
_UNKNOWN: Final = -2
_BLOCK: Final = 64  # successors that are compared at once
_UNKNOWN_SHARE: Final = 1e-5  # of a token that the tables do not know
_NEVER: Final = float(1 << 20)  # distance of a token that is not in the sequence

_CONTEXT: Final = int(Source.CONTEXT)
_GENERATIONS: Final = int(Source.GENERATIONS)
_PHRASES: Final = int(Source.PHRASES)


@njit(cache=True, nogil=True)
def plant(rows: NDArray[Any], num_rows: int, query: NDArray[np.int32], nodes: NDArray[Any]) -> None:
    """Make candidate 0 the root, with all rows, after the query's last tokens."""
    root = nodes[0]
    root.token = query[-1]
    root.before = query[-2] if query.shape[0] > 1 else -1
    root.earlier = query[-3] if query.shape[0] > 2 else -1  # noqa: PLR2004
    root.depth, root.place, root.parent = 0, -1, 0
    root.pair, root.triple = _UNKNOWN, _UNKNOWN
    root.end_child = 0
    root.probability = 1.0
    root.first_row = 0 if num_rows > 0 else -1
    for index in range(num_rows):
        rows[index].next = index + 1 if index + 1 < num_rows else -1


@njit(cache=True, nogil=True)
def gather(
    rows: NDArray[Any],
    continuations: NDArray[np.int32],
    starts1: NDArray[np.uint32],
    starts2: NDArray[np.uint32],
    starts3: NDArray[np.uint32],
    tokens2: NDArray[Any],
    tokens3: NDArray[Any],
    tokens4: NDArray[Any],
    counts1: NDArray[np.uint8],
    counts2: NDArray[np.uint8],
    counts3: NDArray[np.uint8],
    counts4: NDArray[np.uint8],
    values: NDArray[np.float32],
    shares: NDArray[np.float32],
    live: NDArray[np.int64],
    sequence: NDArray[np.int32],
    heads: NDArray[np.int32],
    links: NDArray[np.int32],
    last: NDArray[np.int32],
    length: int,
    doubt: float,
    nodes: NDArray[Any],
    evidence: NDArray[np.float32],
    traits: NDArray[np.float32],
    slots: NDArray[np.int32],
    tail: NDArray[np.int32],
    followers: NDArray[np.int32],
    current: int,
    num_nodes: int,
) -> int:
    """Add the candidates for a node's next token, with their evidence; return the node count.

    Arrays are passed one by one: taking them out of tuples for every node costs more than the
    work that is done with them.

    Args:
        rows: ROW[max_rows], weighed evidence; those of the node are divided among its children.
        continuations: int32[max_rows, max_depth].
        starts1: of the phrase tables; see `Tables`.
        starts2: likewise.
        starts3: likewise.
        tokens2: likewise; what is beyond the vocabulary is left out.
        tokens3: likewise.
        tokens4: likewise.
        counts1: likewise.
        counts2: likewise.
        counts3: likewise.
        counts4: likewise.
        values: likewise.
        shares: likewise.
        live: int64[sets, WAYS], of recent outputs.
        sequence: tokens of the sequence; see `Chains`.
        heads: likewise.
        links: likewise.
        last: likewise.
        length: tokens in the sequence.
        doubt: weight that stands for whatever no row predicts.
        nodes: NODE[max_nodes]; children are written from `num_nodes` on.
        evidence: float32[Evidence.SIZE, max_nodes], likewise.
        traits: float32[Traits.SIZE], written.
        slots: int32[power of two], all -1; left so.
        tail: int32[3], scratch.
        followers: int32[MAX_FOLLOWERS], scratch.
        current: the node.
        num_nodes: candidates so far.
    """
    node = nodes[current]
    node.first_child = num_nodes
    tail[0], tail[1], tail[2] = node.earlier, node.before, node.token
    end, total, kindred = _add_rows(
        rows, continuations, nodes, evidence, slots, current, num_nodes, traits
    )
    _set_states(starts1, starts2, tokens2, tokens3, nodes, current)
    left: Any = np.float32(1.0)
    end, left = _add_successors(
        starts3, tokens4, counts3, counts4, values, 4, node.triple, left, shares.shape[0],
        nodes, evidence, slots, current, end, traits,
    )  # fmt: skip
    end, left = _add_successors(
        starts2, tokens3, counts2, counts3, values, 3, node.pair, left, shares.shape[0],
        nodes, evidence, slots, current, end, traits,
    )  # fmt: skip
    known = 0 <= node.token < counts1.shape[0]
    end, corpus_left = _add_successors(
        starts1, tokens2, counts1, counts2, values, 2, node.token if known else -1, left,
        shares.shape[0], nodes, evidence, slots, current, end, traits,
    )  # fmt: skip
    left = np.float32(1.0)
    for order in (2, 1):
        end, left = _add_followers(
            sequence, heads, links, length, order, left,
            nodes, evidence, slots, tail, followers, current, end, traits,
        )  # fmt: skip
    for order in (3, 2):
        end, left = _add_live(live, order, left, nodes, evidence, slots, tail, current, end, traits)
    node.end_child = end
    traits[Traits.ROWS] = total + doubt
    _estimate(shares, doubt, corpus_left, left, total, kindred, nodes, evidence, num_nodes, end)
    _date(sequence, last, length + node.depth, nodes, evidence, num_nodes, end)
    for child in range(num_nodes, end):
        slots[nodes[child].slot] = -1
    return end


@njit(cache=True, nogil=True)
def _add_rows(
    rows: NDArray[Any],
    continuations: NDArray[np.int32],
    nodes: NDArray[Any],
    evidence: NDArray[np.float32],
    slots: NDArray[np.int32],
    current: int,
    num_nodes: int,
    traits: NDArray[np.float32],
) -> tuple[int, float, float]:
    """Divide a node's rows among its children; return the node count and the sums of weights."""
    node = nodes[current]
    depth = node.depth
    total, kindred, longest, node.voice = 0.0, 0.0, 0, 0
    index = node.first_row
    while index >= 0:
        row = rows[index]
        following = row.next
        affine = row.weight * row.affinity
        total += row.weight
        kindred += affine
        if row.match > longest:
            longest, node.voice = row.match, row.source
        if depth < row.length:
            child, num_nodes = _child_with(
                continuations[index, depth], nodes, evidence, slots, current, num_nodes, row.source
            )
            if child >= 0:
                _join(rows, index, nodes, child)
                evidence[Evidence.ROWS, child] += row.weight
                evidence[Evidence.AFFINE, child] += affine
        index = following
    traits[Traits.MATCH] = longest + depth if longest > 0 else 0
    traits[Traits.DEPTH] = depth
    return num_nodes, total, kindred


@njit(cache=True, nogil=True)
def _child_with(
    token: int,
    nodes: NDArray[Any],
    evidence: NDArray[np.float32],
    slots: NDArray[np.int32],
    parent: int,
    num_nodes: int,
    source: int,
) -> tuple[int, int]:
    """Return the parent's child with this token, made if need be, and the node count.

    The child is -1 where there is no room left.
    """
    mask = slots.shape[0] - 1
    slot = (token * _SLOT_MULTIPLIER) & mask
    while slots[slot] >= 0 and nodes[slots[slot]].token != token:
        slot = (slot + 1) & mask
    if slots[slot] >= 0:
        return slots[slot], num_nodes
    if num_nodes == nodes.shape[0]:
        return -1, num_nodes
    slots[slot] = num_nodes
    node = nodes[num_nodes]
    node.token, node.slot, node.parent = token, slot, parent
    node.first_row, node.heaviest, node.source = -1, -1.0, source
    node.pair, node.triple = _UNKNOWN, _UNKNOWN
    for kind in range(Evidence.SIZE):
        evidence[kind, num_nodes] = 0.0
    return num_nodes, num_nodes + 1


@njit(cache=True, nogil=True)
def _join(rows: NDArray[Any], index: int, nodes: NDArray[Any], child: int) -> None:
    """Append a row to a node."""
    row, node = rows[index], nodes[child]
    row.next = -1
    if node.first_row < 0:
        node.first_row = index
    else:
        rows[node.last_row].next = index
    node.last_row = index
    if row.weight > node.heaviest:
        node.heaviest = row.weight
        node.source = row.source


@njit(cache=True, nogil=True)
def _set_states(
    starts1: NDArray[np.uint32],
    starts2: NDArray[np.uint32],
    tokens2: NDArray[Any],
    tokens3: NDArray[Any],
    nodes: NDArray[Any],
    current: int,
) -> None:
    """Find the entries of the last two and three tokens, where they are not known yet."""
    node = nodes[current]
    if node.pair == _UNKNOWN:
        node.pair = find_successor(starts1, tokens2, node.before, node.token)
    if node.triple == _UNKNOWN:
        above = nodes[node.parent].pair
        if current == 0:
            above = find_successor(starts1, tokens2, node.earlier, node.before)
        node.triple = find_successor(starts2, tokens3, above, node.token)


@njit(cache=True, nogil=True)
def find_successor(starts: NDArray[np.uint32], tokens: NDArray[Any], entry: int, token: int) -> int:
    """Return the entry of a token among an entry's successors, one level further, or -1.

    Frequent tokens have thousands of successors: whole blocks are compared at once.
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


@njit(cache=True, nogil=True)
def _add_successors(
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
    """Add the most frequent successors of an entry, which stand in `level`.

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
    end = min(np.int64(starts[entry + 1]), begin + _MOST[level - 2], tokens.shape[0])
    for successor in range(begin, end):
        token = np.int64(tokens[successor])
        if token >= vocabulary_size:
            continue  # damaged
        child, num_nodes = _child_with(token, nodes, evidence, slots, current, num_nodes, _PHRASES)
        if child >= 0:
            evidence[Evidence.CORPUS, child] += share * values[counts[successor]]
            if level == 2:  # noqa: PLR2004
                nodes[child].pair = successor
            elif level == 3:  # noqa: PLR2004
                nodes[child].triple = successor
    return num_nodes, share * strength


@njit(cache=True, nogil=True)
def _add_followers(
    sequence: NDArray[np.int32],
    heads: NDArray[np.int32],
    links: NDArray[np.int32],
    length: int,
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
    """Add what followed the last one or two tokens in the sequence itself.

    Returns the node count and the coefficient of the next shorter context.
    """
    found = 0
    if tail[3 - order] >= 0:
        found = _follow(sequence, heads, links, length, order, tail, followers)
    traits[Traits.CONTEXT_1 + 1 - order] = found
    strength = np.float32(_CONTEXT_STRENGTH[order - 1])
    share = left / (np.float32(found) + strength)
    for index in range(found):
        child, num_nodes = _child_with(
            followers[index], nodes, evidence, slots, current, num_nodes, _CONTEXT
        )
        if child >= 0:
            evidence[Evidence.LIVE, child] += share
    return num_nodes, share * strength


@njit(cache=True, nogil=True)
def _follow(
    tokens: NDArray[np.int32],
    heads: NDArray[np.int32],
    links: NDArray[np.int32],
    total: int,
    order: int,
    tail: NDArray[np.int32],
    followers: NDArray[np.int32],
) -> int:
    """Write what followed the last occurrences of the tail's end; return how many were found."""
    mask, row, most = tokens.shape[0] - 1, _CONTEXT_ROWS[order - 1], _CONTEXT_MOST[order - 1]
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


@njit(cache=True, nogil=True)
def _add_live(
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
    """Add what followed the last `order` tokens in recent outputs."""
    trait = Traits.LIVE_3 if order == 3 else Traits.LIVE_2  # noqa: PLR2004
    traits[trait] = 0.0
    if tail[3 - order] < 0:
        return num_nodes, left
    key = hash_context(tail, order)
    place, check, total = key & (live.shape[0] - 1), check_of(key), 0
    for way in range(WAYS):
        total += entry_count(live[place, way], check)
    traits[trait] = total
    strength = np.float32(_LIVE_STRENGTH[order - 2])
    share = left / (np.float32(total) + strength)
    for way in range(WAYS):
        count = entry_count(live[place, way], check)
        if count > 0:
            child, num_nodes = _child_with(
                entry_token(live[place, way]), nodes, evidence, slots, current, num_nodes,
                _GENERATIONS,
            )  # fmt: skip
            if child >= 0:
                evidence[Evidence.LIVE, child] += share * np.float32(count)
    return num_nodes, share * strength


@njit(cache=True, nogil=True)
def _estimate(
    shares: NDArray[np.float32],
    doubt: float,
    corpus_left: np.float32,
    left: np.float32,
    total: float,
    kindred: float,
    nodes: NDArray[Any],
    evidence: NDArray[np.float32],
    first: int,
    end: int,
) -> None:
    """Turn a node's sums into probabilities."""
    scale = np.float32(1.0 / (total + doubt))
    kindred_scale = np.float32(1.0 / kindred) if kindred > 0 else np.float32(0.0)
    for child in range(first, end):
        token = nodes[child].token
        unigram = shares[token] if token < shares.shape[0] else np.float32(_UNKNOWN_SHARE)
        corpus = evidence[Evidence.CORPUS, child] + corpus_left * unigram
        recent = evidence[Evidence.LIVE, child] + left * corpus
        weight = evidence[Evidence.ROWS, child] + np.float32(doubt) * recent
        evidence[Evidence.UNIGRAM, child] = unigram
        evidence[Evidence.CORPUS, child] = corpus
        evidence[Evidence.LIVE, child] = recent
        evidence[Evidence.ROWS, child] = scale * weight
        evidence[Evidence.AFFINE, child] *= kindred_scale


@njit(cache=True, nogil=True)
def _date(
    tokens: NDArray[np.int32],
    last: NDArray[np.int32],
    now: int,
    nodes: NDArray[Any],
    evidence: NDArray[np.float32],
    first: int,
    end: int,
) -> None:
    """Note how many tokens ago each candidate occurred in the sequence."""
    mask = last.shape[0] - 1
    for child in range(first, end):
        position = last[nodes[child].token & mask]
        distance = np.float32(_NEVER)
        if position >= 0 and tokens[position] == nodes[child].token:
            distance = np.float32(now - position)
        evidence[Evidence.RECENCY, child] = distance
