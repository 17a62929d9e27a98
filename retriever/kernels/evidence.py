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

from retriever.kernels.chains import bucket_of, bucket_of_token, head_position
from retriever.kernels.layout import Chains, Evidence, Tables, Traits, Work
from retriever.kernels.successors import (
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
    root.depth, root.place, root.parent, root.pair = 0, -1, 0, -1
    root.end_child = 0
    root.probability = 1.0
    root.first_row = 0 if num_rows > 0 else -1
    for index in range(num_rows):
        rows[index].next = index + 1 if index + 1 < num_rows else -1


@njit(cache=True, nogil=True)
def gather(
    rows: NDArray[Any],
    continuations: NDArray[np.int32],
    tables: Tables,
    live: NDArray[np.int64],
    context: Chains,
    doubt: float,
    work: Work,
    current: int,
    num_nodes: int,
) -> int:
    """Add the candidates for a node's next token, with their evidence; return the node count.

    Args:
        rows: ROW[max_rows], weighed evidence; those of the node are divided among its children.
        continuations: int32[max_rows, max_depth].
        tables: phrase tables.
        live: int64[sets, WAYS], of recent outputs.
        context: of the sequence.
        doubt: weight that stands for whatever no row predicts.
        work: `nodes`, `evidence` and `traits` are written.
        current: the node, expanded before any of its descendants.
        num_nodes: candidates so far; new ones stand after them.
    """
    first = num_nodes
    node = work.nodes[current]
    node.first_child = first
    traits = work.traits[node.place + 1]
    work.tail[0], work.tail[1], work.tail[2] = node.earlier, node.before, node.token
    num_nodes, total, kindred = _add_rows(rows, continuations, work, current, num_nodes, traits)
    num_nodes, left = _add_tables(tables, work, current, num_nodes, traits)
    num_nodes, live_left = _add_recent(live, context, work, current, num_nodes, traits)
    node.end_child = num_nodes
    traits[Traits.ROWS] = total + doubt
    for child in range(first, num_nodes):
        work.slots[work.nodes[child].slot] = -1
    _complete(tables, context, doubt, left, live_left, total, kindred, work, first, num_nodes)
    return num_nodes


@njit(cache=True, nogil=True)
def _add_rows(
    rows: NDArray[Any],
    continuations: NDArray[np.int32],
    work: Work,
    current: int,
    num_nodes: int,
    traits: NDArray[np.float32],
) -> tuple[int, float, float]:
    """Divide a node's rows among its children; return the node count and the sums of weights."""
    node = work.nodes[current]
    depth = node.depth
    total, kindred, longest, node.voice = 0.0, 0.0, 0, 0
    index = node.first_row
    while index >= 0:
        row = rows[index]
        following = row.next
        weight = row.weight
        affine = weight * row.affinity
        total += weight
        kindred += affine
        if row.match > longest:
            longest, node.voice = row.match, row.source
        if depth < row.length:
            child, num_nodes = _child_with(
                continuations[index, depth], work, current, num_nodes, row.source
            )
            if child >= 0:
                _join(rows, index, work.nodes[child])
                work.evidence[Evidence.ROWS, child] += weight
                work.evidence[Evidence.AFFINE, child] += affine
        index = following
    traits[Traits.MATCH] = longest + depth if longest > 0 else 0
    traits[Traits.DEPTH] = depth
    return num_nodes, total, kindred


@njit(cache=True, nogil=True)
def _child_with(
    token: int, work: Work, parent: int, num_nodes: int, source: int
) -> tuple[int, int]:
    """Return the parent's child with this token, made if need be, and the node count.

    The child is -1 where there is no room left.
    """
    nodes, slots = work.nodes, work.slots
    mask = slots.shape[0] - 1
    slot = (token * _SLOT_MULTIPLIER) & mask
    while slots[slot] >= 0 and nodes[slots[slot]].token != token:
        slot = (slot + 1) & mask
    if slots[slot] >= 0:
        return slots[slot], num_nodes
    if num_nodes == nodes.shape[0] or 2 * (num_nodes - nodes[parent].first_child) > mask:
        return -1, num_nodes
    slots[slot] = num_nodes
    node = nodes[num_nodes]
    node.token, node.slot, node.parent = token, slot, parent
    node.first_row, node.heaviest, node.source = -1, -1.0, source
    work.evidence[:, num_nodes] = 0.0
    return num_nodes, num_nodes + 1


@njit(cache=True, nogil=True)
def _join(rows: NDArray[Any], index: int, node: Any) -> None:
    """Append a row to a node."""
    row = rows[index]
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
def _add_tables(
    tables: Tables, work: Work, current: int, num_nodes: int, traits: NDArray[np.float32]
) -> tuple[int, float]:
    """Add the phrase tables' successors; return the node count and the unigrams' coefficient."""
    node = work.nodes[current]
    single, pair, triple = _states(tables, work, current)
    node.pair = pair
    traits[Traits.CORPUS_1] = tables.values[tables.counts1[single]] if single >= 0 else 0.0
    traits[Traits.CORPUS_2] = tables.values[tables.counts2[pair]] if pair >= 0 else 0.0
    traits[Traits.CORPUS_3] = tables.values[tables.counts3[triple]] if triple >= 0 else 0.0
    left = np.float32(1.0)
    if triple >= 0:
        share = left / (traits[Traits.CORPUS_3] + np.float32(_CORPUS_STRENGTH[2]))
        num_nodes = _add_successors(
            tables.starts3, tables.tokens4, tables.counts4, tables.values, triple, _MOST[2], share,
            work, current, num_nodes,
        )  # fmt: skip
        left = share * np.float32(_CORPUS_STRENGTH[2])
    if pair >= 0:
        share = left / (traits[Traits.CORPUS_2] + np.float32(_CORPUS_STRENGTH[1]))
        num_nodes = _add_successors(
            tables.starts2, tables.tokens3, tables.counts3, tables.values, pair, _MOST[1], share,
            work, current, num_nodes,
        )  # fmt: skip
        left = share * np.float32(_CORPUS_STRENGTH[1])
    if single >= 0:
        share = left / (traits[Traits.CORPUS_1] + np.float32(_CORPUS_STRENGTH[0]))
        num_nodes = _add_successors(
            tables.starts1, tables.tokens2, tables.counts2, tables.values, single, _MOST[0], share,
            work, current, num_nodes,
        )  # fmt: skip
        left = share * np.float32(_CORPUS_STRENGTH[0])
    return num_nodes, left


@njit(cache=True, nogil=True)
def _states(tables: Tables, work: Work, current: int) -> tuple[int, int, int]:
    """Return the entries of the last one, two and three tokens, -1 where there is none."""
    node = work.nodes[current]
    known = tables.counts1.shape[0]
    single = node.token if 0 <= node.token < known else -1
    before = node.before if 0 <= node.before < known else -1
    pair = _find(tables.starts1, tables.tokens2, before, node.token)
    above = work.nodes[node.parent].pair
    if current == 0:
        earlier = node.earlier if 0 <= node.earlier < known else -1
        above = _find(tables.starts1, tables.tokens2, earlier, node.before)
    return single, pair, _find(tables.starts2, tables.tokens3, above, node.token)


@njit(cache=True, nogil=True)
def _find(starts: NDArray[np.uint32], tokens: NDArray[Any], entry: int, token: int) -> int:
    """Return the entry of a successor one level further, or -1."""
    if entry < 0:
        return -1
    for successor in range(starts[entry], min(starts[entry + 1], tokens.shape[0])):
        if tokens[successor] == token:
            return successor
    return -1


@njit(cache=True, nogil=True)
def _add_successors(
    starts: NDArray[np.uint32],
    tokens: NDArray[Any],
    counts: NDArray[np.uint8],
    values: NDArray[np.float32],
    entry: int,
    most: int,
    share: float,
    work: Work,
    current: int,
    num_nodes: int,
) -> int:
    """Add the most frequent successors of an entry, each occurrence counting `share`."""
    begin = np.int64(starts[entry])
    end = min(np.int64(starts[entry + 1]), begin + most, tokens.shape[0])
    for successor in range(begin, end):
        child, num_nodes = _child_with(
            np.int64(tokens[successor]), work, current, num_nodes, _PHRASES
        )
        if child >= 0:
            work.evidence[Evidence.CORPUS, child] += share * values[counts[successor]]
    return num_nodes


@njit(cache=True, nogil=True)
def _add_recent(
    live: NDArray[np.int64],
    context: Chains,
    work: Work,
    current: int,
    num_nodes: int,
    traits: NDArray[np.float32],
) -> tuple[int, float]:
    """Add what followed in the sequence and in recent outputs, the sequence's longest context first.

    Returns the node count and the coefficient of the corpus's estimate.
    """
    left = np.float32(1.0)
    num_nodes, left = _add_chain(context, 1, work, current, num_nodes, traits, left)
    num_nodes, left = _add_chain(context, 0, work, current, num_nodes, traits, left)
    num_nodes, left = _add_live(live, 3, work, current, num_nodes, traits, left)
    return _add_live(live, 2, work, current, num_nodes, traits, left)


@njit(cache=True, nogil=True)
def _add_chain(
    context: Chains,
    which: int,
    work: Work,
    current: int,
    num_nodes: int,
    traits: NDArray[np.float32],
    left: float,
) -> tuple[int, float]:
    """Add what followed the last one (`which` 0) or two (1) tokens in the sequence itself."""
    order = which + 1
    trait = Traits.CONTEXT_1 if which == 0 else Traits.CONTEXT_2
    traits[trait] = 0.0
    if work.tail[3 - order] < 0:
        return num_nodes, left
    followers = work.followers
    found = _followers(context, _CONTEXT_ROWS[which], order, _CONTEXT_MOST[which], work)
    traits[trait] = found
    strength = np.float32(_CONTEXT_STRENGTH[which])
    share = left / (np.float32(found) + strength)
    for index in range(found):
        child, num_nodes = _child_with(followers[index], work, current, num_nodes, _CONTEXT)
        if child >= 0:
            work.evidence[Evidence.LIVE, child] += share
    return num_nodes, share * strength


@njit(cache=True, nogil=True)
def _followers(context: Chains, row: int, order: int, most: int, work: Work) -> int:
    """Write what followed the last occurrences of the tail's end; return how many were found."""
    tokens, mask, total = context.tokens, context.tokens.shape[0] - 1, context.state[0]
    bucket = bucket_of(work.tail, 3 - order, -1, order, context.heads.shape[1])
    position = head_position(context.heads[row, bucket], total)
    found, probes = 0, _PROBES * most
    while position >= 0 and found < most and probes > 0:
        probes -= 1
        same = position + 1 < total
        for back in range(order):
            same = same and tokens[(position - back) & mask] == work.tail[2 - back]
        if same:
            work.followers[found] = tokens[(position + 1) & mask]
            found += 1
        distance = context.links[row, position & mask]
        if distance == 0:
            break
        position -= distance
    return found


@njit(cache=True, nogil=True)
def _add_live(
    live: NDArray[np.int64],
    order: int,
    work: Work,
    current: int,
    num_nodes: int,
    traits: NDArray[np.float32],
    left: float,
) -> tuple[int, float]:
    """Add what followed the last `order` tokens in recent outputs."""
    trait = Traits.LIVE_3 if order == 3 else Traits.LIVE_2  # noqa: PLR2004
    traits[trait] = 0.0
    if work.tail[3 - order] < 0:
        return num_nodes, left
    key = hash_context(work.tail, order)
    ways, check, total = live[key & (live.shape[0] - 1)], check_of(key), 0
    for way in range(ways.shape[0]):
        total += entry_count(ways[way], check)
    traits[trait] = total
    strength = np.float32(_LIVE_STRENGTH[order - 2])
    share = left / (np.float32(total) + strength)
    for way in range(ways.shape[0]):
        count = entry_count(ways[way], check)
        if count > 0:
            child, num_nodes = _child_with(
                entry_token(ways[way]), work, current, num_nodes, _GENERATIONS
            )
            if child >= 0:
                work.evidence[Evidence.LIVE, child] += share * np.float32(count)
    return num_nodes, share * strength


@njit(cache=True, nogil=True)
def _complete(
    tables: Tables,
    context: Chains,
    doubt: float,
    left: float,
    live_left: float,
    total: float,
    kindred: float,
    work: Work,
    first: int,
    end: int,
) -> None:
    """Turn a node's sums into probabilities and distances."""
    known = tables.shares.shape[0]
    now = context.state[0] + work.nodes[work.nodes[first].parent].depth if first < end else 0
    scale = np.float32(1.0 / (total + doubt))
    kin_scale = np.float32(1.0 / kindred) if kindred > 0 else np.float32(0.0)
    for child in range(first, end):
        token = work.nodes[child].token
        unigram = tables.shares[token] if token < known else np.float32(_UNKNOWN_SHARE)
        corpus = work.evidence[Evidence.CORPUS, child] + left * unigram
        recent = work.evidence[Evidence.LIVE, child] + live_left * corpus
        work.evidence[Evidence.UNIGRAM, child] = unigram
        work.evidence[Evidence.CORPUS, child] = corpus
        work.evidence[Evidence.LIVE, child] = recent
        weight = work.evidence[Evidence.ROWS, child] + np.float32(doubt) * recent
        work.evidence[Evidence.ROWS, child] = scale * weight
        work.evidence[Evidence.AFFINE, child] *= kin_scale
        work.evidence[Evidence.RECENCY, child] = _distance(context, token, now)


@njit(cache=True, nogil=True)
def _distance(context: Chains, token: int, now: int) -> float:
    """Return how many tokens ago a token occurred in the sequence."""
    row, mask = _CONTEXT_ROWS[0], context.tokens.shape[0] - 1
    bucket = bucket_of_token(token, context.heads.shape[1])
    position = head_position(context.heads[row, bucket], context.state[0])
    for _ in range(_PROBES):
        if position < 0:
            break
        if context.tokens[position & mask] == token:
            return np.float32(now - position)
        distance = context.links[row, position & mask]
        if distance == 0:
            break
        position -= distance
    return np.float32(_NEVER)
