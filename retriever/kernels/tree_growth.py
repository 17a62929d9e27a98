"""Weighs the evidence, and grows the most probable tree from it best-first.

The frontier of a tree is a heap of candidates, the most probable first. A key is the bits of the
probability, then the candidate's number, so that among equals the earlier candidate comes first. We
count the candidates of each rank (a sixteenth of an octave of probability). From the top rank down,
the counts reach the remaining budget at some rank. Candidates below that rank can never be taken.
"""

from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from retriever.kernels.candidates import slots_for
from retriever.kernels.compiling import fast_exp2, fast_log2, kernel
from retriever.kernels.evidence import gather, plant
from retriever.kernels.layout import NUM_RANKS, Chains, Found, Grown, Tables, Work
from retriever.kernels.mixing import mix
from retriever.kernels.succession import call_from_memory

_LAST: Final = 0xFFFFFFFF
_NUMBER_BITS: Final = 32


@kernel()
def rank_of(probability: float) -> int:
    """Return the rank of a probability: which sixteenth of an octave below 1 it is in."""
    return min(NUM_RANKS - 1, max(0, np.int64(np.float32(-16.0) * fast_log2(probability))))


@kernel()
def least_of(rank: int) -> float:
    """Return the lowest probability of a rank."""
    if rank == NUM_RANKS - 1:
        return np.float32(0.0)
    octaves = np.float32(rank + 1) / np.float32(16.0)
    whole = np.ceil(octaves)
    # As in `fast_log2`: linear between powers of two.
    return fast_exp2(-whole) * (np.float32(1.0) + whole - octaves)


@kernel(inline="always")
def key_of(probability: float, candidate: int) -> int:
    """Return the key of a candidate."""
    bits = np.int64(np.float32(probability).view(np.int32))
    return (bits << _NUMBER_BITS) | (_LAST - candidate)


@kernel(inline="always")
def candidate_of(key: int) -> int:
    """Return the candidate of a key."""
    return _LAST - (key & _LAST)


@kernel(inline="always")
def push(heap: NDArray[np.int64], size: int, key: int) -> None:
    """Add a key to a heap of `size`."""
    place = size
    while place > 0 and key > heap[(place - 1) >> 1]:
        heap[place] = heap[(place - 1) >> 1]
        place = (place - 1) >> 1
    heap[place] = key


@kernel(inline="always")
def pop(heap: NDArray[np.int64], size: int) -> int:
    """Take the highest key from a heap of `size`."""
    best, last = heap[0], heap[size - 1]
    place = 0
    while 2 * place + 1 < size - 1:
        child = 2 * place + 1
        if child + 1 < size - 1 and heap[child + 1] > heap[child]:
            child += 1
        if heap[child] <= last:
            break
        heap[place] = heap[child]
        place = child
    heap[place] = last
    return best


_NEXT: Final = 3  # candidates at the top of the heap that are prefetched
LIKELY_CHILD_BOUND: Final = 0.33  # in practice, children are rarely more probable
_LEAST: Final = 1e-6  # less probable candidates are dropped


@kernel()
def weigh_rows(
    rows: NDArray[Any],
    num_rows: int,
    trust: NDArray[np.float64],
    backoff: float,
    counts: NDArray[np.float64],
) -> None:
    """Set the rows' weights by interpolating match lengths, the longest first.

    Matches of length k with trusted count N take the share N / (N + backoff / k) of what longer
    matches left over. This share is divided among their rows. This is Witten-Bell back-off with an
    escape probability that shrinks with the match length.

    Args:
        rows: ROW[max_rows], the evidence.
        num_rows: number of rows in use.
        trust: float64[MAX_SOURCES], weight of one occurrence in each database.
        backoff: count at which a match of one token takes half of the remaining weight.
        counts: float64[longest match + 1], scratch.
    """
    counts[:] = 0.0
    for index in range(num_rows):
        row = rows[index]
        row.weight = row.count * trust[row.source]
        counts[row.match] += row.weight
    left = 1.0
    for match in range(counts.shape[0] - 1, 0, -1):
        if counts[match] > 0:
            scale = left / (counts[match] + backoff / match)
            left -= scale * counts[match]
            counts[match] = scale
    for index in range(num_rows):
        rows[index].weight *= counts[rows[index].match]


@kernel(forceinline=True)
def grow_tree(
    found: Found,
    num_rows: int,
    sequence: Chains,
    live: NDArray[np.int64],
    tables: Tables,
    weights: NDArray[Any],
    escape: float,
    work: Work,
    grown: Grown,
    budget: int,
    min_probability: float,
) -> int:
    """Grow a tree best-first: take the most probable candidate, then compute its children.

    The probabilities at each node mix all evidence for the path so far. Among equals, the candidate
    that was added first is taken.

    Args:
        found: weighed evidence; `next` of the rows is overwritten.
        num_rows: number of rows in use.
        sequence: chains of the sequence, of at least one token.
        live: int64[sets, WAYS], live table of generations.
        tables: phrase tables.
        weights: WEIGHTS[1].
        escape: weight of tokens that no row predicts.
        work: scratch; once its nodes are used up, no further candidates are added. It holds the
            data for learning until the next call.
        grown: the tree; written. It has room for `budget` nodes.
        budget: most nodes to take.
        min_probability: less probable candidates are dropped.

    Returns:
        The number of nodes taken.
    """
    nodes, heap, ranks = work.nodes, work.heap, work.ranks
    rows, continuations = found.rows, found.continuations
    token_ids, parents = grown.token_ids, grown.parents
    probabilities, sources = grown.probabilities, grown.sources
    plant(rows, num_rows, sequence, nodes)
    ranks[:] = 0
    num_slots = slots_for(num_rows)
    num_nodes, heap_size, size, current = np.int64(1), np.int64(0), np.int64(0), np.int64(0)
    lowest, spare = np.int64(NUM_RANKS - 1), -budget
    while True:
        if rank_of(nodes[current].probability * LIKELY_CHILD_BOUND) <= lowest:
            num_nodes = gather(
                rows, continuations, tables, live, sequence, escape, work, num_slots, current,
                num_nodes,
            )  # fmt: skip
            mix(weights[0], work, current)
            num_offered = _offer_children(work, current, heap_size, lowest, min_probability)
            heap_size += num_offered
            spare += num_offered
            _call_next(tables, live, sequence, work, heap_size)
            while spare >= ranks[lowest]:
                spare -= ranks[lowest]
                lowest -= 1
        if heap_size == 0:
            break
        current = candidate_of(pop(heap, heap_size))
        heap_size -= 1
        node = nodes[current]
        ranks[rank_of(node.probability)] -= 1
        node.place = size
        token_ids[size] = node.token
        parents[size] = nodes[node.parent].place
        probabilities[size] = node.probability
        sources[size] = node.source
        size += 1
        if size == budget:
            break
    return size


@kernel()
def _offer_children(
    work: Work,
    current: int,
    heap_size: int,
    lowest: int,
    min_probability: float,
) -> int:
    """Push the candidates of a node that can still be taken; return how many.

    Ranks after `lowest` are skipped, because enough other candidates are more probable.
    """
    nodes, shares, heap, ranks = work.nodes, work.shares, work.heap, work.ranks
    parent, num_offered = nodes[current], 0
    above, depth = parent.probability, parent.depth + 1
    least = np.float32(max(min_probability, _LEAST, least_of(lowest)))
    for child in range(parent.first_child, parent.end_child):
        probability = above * shares[child]
        if probability >= least:
            node = nodes[child]
            node.probability, node.depth = probability, depth
            node.before, node.earlier = parent.token, parent.before
            ranks[rank_of(probability)] += 1
            push(heap, heap_size + num_offered, key_of(probability, child))
            num_offered += 1
    return num_offered


@kernel()
def _call_next(
    tables: Tables, live: NDArray[np.int64], context: Chains, work: Work, heap_size: int
) -> None:
    """Prefetch the data of the next candidates on the heap.

    Prefetching for all candidates whose children may be taken would exceed the memory bandwidth.
    """
    nodes, heap = work.nodes, work.heap
    size = min(heap_size, _NEXT)
    for place in range(size):
        node = nodes[candidate_of(heap[place])]
        if node.is_called == 0:
            node.is_called = 1
            call_from_memory(tables, live, context, work.tail, node)
