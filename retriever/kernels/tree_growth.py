"""Weighing the evidence, and growing the most probable tree from it, best candidate first.

The frontier of a tree: candidates that may yet be taken, the most probable first. They stand on a
heap as keys that are ordered as they are: the bits of the probability, and below them the
candidate's number, so that of equals the one that was considered first is taken. Beside it stands
how many there are of each rank, a sixteenth of an octave of probability: below the rank at which
there are as many candidates as are still wanted, nothing will be taken.
"""

from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from retriever.kernels.compiling import fast_exp2, fast_log2, kernel
from retriever.kernels.evidence import gather, plant
from retriever.kernels.layout import NUM_RANKS, Chains, Tables, Work
from retriever.kernels.mixing import mix
from retriever.kernels.succession import call_from_memory

_LAST: Final = 0xFFFFFFFF
_NUMBER_BITS: Final = 32


@kernel()
def rank_of(probability: float) -> int:
    """Return which sixteenth of an octave below 1 a probability is in."""
    return min(NUM_RANKS - 1, max(0, np.int64(np.float32(-16.0) * fast_log2(probability))))


@kernel()
def least_of(rank: int) -> float:
    """Return the least probability of a rank."""
    if rank == NUM_RANKS - 1:
        return np.float32(0.0)
    octaves = np.float32(rank + 1) / np.float32(16.0)
    whole = np.ceil(octaves)
    # As `fast_log2` has it: straight between powers of two.
    return fast_exp2(-whole) * (np.float32(1.0) + whole - octaves)


@kernel(inline="always")
def key_of(probability: float, candidate: int) -> int:
    """Return the key of a candidate."""
    bits = np.int64(np.float32(probability).view(np.int32))
    return (bits << _NUMBER_BITS) | (_LAST - candidate)


@kernel(inline="always")
def candidate_of(key: int) -> int:
    """Return whose key it is."""
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


_HOPE: Final = 0.33  # children are seldom more probable than this, where it matters
_LEAST: Final = 1e-6  # candidates below it are never worth their place


@kernel()
def weigh_rows(
    rows: NDArray[Any],
    num_rows: int,
    trust: NDArray[np.float64],
    escape: float,
    counts: NDArray[np.float64],
) -> None:
    """Set the rows' weights by interpolating match lengths, the longest first.

    A length k with the trusted count N takes the share N / (N + escape / k) of what longer matches
    left, and divides it among its rows: Witten-Bell's back-off with an escape that shrinks as
    matches grow.

    Args:
        rows: ROW[max_rows], the evidence.
        num_rows: rows in use.
        trust: float64[sources], what one occurrence in each database counts.
        escape: count at which a match of one token takes half of what is left.
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
            scale = left / (counts[match] + escape / match)
            left -= scale * counts[match]
            counts[match] = scale
    for index in range(num_rows):
        rows[index].weight *= counts[rows[index].match]


@kernel()
def grow_tree(
    rows: NDArray[Any],
    continuations: NDArray[np.int32],
    num_rows: int,
    query: NDArray[np.int32],
    tables: Tables,
    live: NDArray[np.int64],
    context: Chains,
    weights: NDArray[Any],
    doubt: float,
    budget: int,
    min_probability: float,
    work: Work,
    token_ids: NDArray[np.int32],
    parents: NDArray[np.int32],
    probabilities: NDArray[np.float32],
    sources: NDArray[np.uint8],
) -> int:
    """Grow a tree best-first: take the most probable candidate, then consider its children.

    What is probable is mixed at every node from all evidence for the path so far. Of equals the
    candidate that was considered first is taken.

    Args:
        rows: ROW[max_rows], weighed evidence; `next` is overwritten.
        continuations: int32[max_rows, max_depth].
        num_rows: rows in use.
        query: int32[q], the last tokens of the context; at least one.
        tables: phrase tables.
        live: int64[sets, WAYS], of recent outputs.
        context: of the sequence.
        weights: WEIGHTS[1].
        doubt: weight that stands for whatever no row predicts.
        budget: most nodes to take.
        min_probability: candidates below it are not considered.
        work: scratch; when its nodes are used up no further candidates are considered. Holds
            what there is to learn from until the next call.
        token_ids: int32[budget], the tree's tokens; written.
        parents: int32[budget], the tree's parents; written.
        probabilities: float32[budget], written.
        sources: uint8[budget], written.

    Returns:
        The number of nodes taken.
    """
    nodes, heap, ranks = work.nodes, work.heap, work.ranks
    plant(rows, num_rows, query, nodes)
    ranks[:] = 0
    num_nodes, heap_size, size, current = 1, 0, 0, 0
    lowest, spare = NUM_RANKS - 1, -budget
    while True:
        if rank_of(nodes[current].probability * _HOPE) <= lowest:
            num_nodes = gather(
                rows, continuations, tables, live, context, doubt, work, current, num_nodes
            )
            mix(weights[0], work, current)
            num_offered = _offer_children(
                tables, live, work, current, heap_size, lowest, min_probability
            )
            heap_size += num_offered
            spare += num_offered
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
    tables: Tables,
    live: NDArray[np.int64],
    work: Work,
    current: int,
    heap_size: int,
    lowest: int,
    min_probability: float,
) -> int:
    """Put those candidates of a node on the heap that may yet be taken; return how many.

    Those of ranks after `lowest` are not: there are others enough. What will be read of those whose
    children may be taken as well is called from memory.
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
            if probability * np.float32(_HOPE) >= least:
                call_from_memory(tables, live, work.tail, node)
    return num_offered
