"""Suffix automata of documents: the smallest graph whose paths are all substrings of the documents.

The documents are concatenated, each followed by a separator, -1. No substring crosses a separator:
the automaton returns to its root there, as it does for several texts (Mohri, Moreno and Weinstein,
"General suffix automaton construction algorithm", 2009, after Blumer et al., 1985).

A hash table with open addressing finds edges. So states with many edges, above all the root, cost
no more than others. The edges of a state also form a linked list, for cloning the state.
"""

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from retriever.kernels.chains import SEPARATOR
from retriever.kernels.compiling import kernel

_Ints = NDArray[np.int32]


class Graph(NamedTuple):
    """A growing automaton. State 0 is the root.

    Attributes:
        links: int32[states], the state of the longest suffix that occurs elsewhere; -1 at the root.
        lengths: int32[states], number of tokens in the state's longest substring.
        ends: int32[states], position of the last token of its first occurrence.
        first_edges: int32[states], the state's first edge; -1 for none.
        origins: int32[edges], the state that the edge leaves.
        labels: int32[edges], the edge's token.
        targets: int32[edges], the state that the edge leads to.
        next_edges: int32[edges], the next edge of the same state; -1 for none.
        slots: int32[2^k], edges by a hash of origin and label; -1 for none.
        counts: int64[2], number of states and of edges in use.
    """

    links: _Ints
    lengths: _Ints
    ends: _Ints
    first_edges: _Ints
    origins: _Ints
    labels: _Ints
    targets: _Ints
    next_edges: _Ints
    slots: _Ints
    counts: NDArray[np.int64]


@kernel()
def _slot_of(graph: Graph, state: int, token: int) -> int:
    """Return the slot of an edge, or the free slot for it."""
    mask = len(graph.slots) - 1
    mixed = np.uint64(state) * np.uint64(0x9E3779B97F4A7C15) ^ np.uint64(token) * np.uint64(
        0xC2B2AE3D27D4EB4F
    )
    slot = np.int64((mixed ^ (mixed >> np.uint64(29))) & np.uint64(mask))
    while True:
        edge = graph.slots[slot]
        if edge < 0 or (graph.origins[edge] == state and graph.labels[edge] == token):
            return slot
        slot = (slot + 1) & mask


@kernel()
def _add_state(graph: Graph, length: int, end: int) -> int:
    state = graph.counts[0]
    graph.counts[0] = state + 1
    graph.links[state] = 0
    graph.lengths[state] = length
    graph.ends[state] = end
    graph.first_edges[state] = -1
    return state


@kernel()
def _add_edge(graph: Graph, slot: int, state: int, token: int, target: int) -> None:
    edge = graph.counts[1]
    graph.counts[1] = edge + 1
    graph.origins[edge] = state
    graph.labels[edge] = token
    graph.targets[edge] = target
    graph.next_edges[edge] = graph.first_edges[state]
    graph.first_edges[state] = edge
    graph.slots[slot] = edge


@kernel()
def _split(graph: Graph, state: int, token: int, target: int) -> int:
    """Clone `target` for its substrings that end with a shorter match; return the clone."""
    clone = _add_state(graph, graph.lengths[state] + 1, graph.ends[target])
    graph.links[clone] = graph.links[target]
    edge = graph.first_edges[target]
    while edge >= 0:
        slot = _slot_of(graph, clone, graph.labels[edge])
        _add_edge(graph, slot, clone, graph.labels[edge], graph.targets[edge])
        edge = graph.next_edges[edge]
    while state >= 0:
        edge = graph.slots[_slot_of(graph, state, token)]
        if edge < 0 or graph.targets[edge] != target:
            break
        graph.targets[edge] = clone
        state = graph.links[state]
    graph.links[target] = clone
    return clone


@kernel()
def _extend(graph: Graph, last: int, token: int, position: int) -> int:
    """Append a token to the document; return the state of the whole document so far."""
    edge = graph.slots[_slot_of(graph, last, token)]
    if edge >= 0:  # this text occurred in an earlier document
        target = graph.targets[edge]
        if graph.lengths[target] == graph.lengths[last] + 1:
            return target
        return _split(graph, last, token, target)
    current = _add_state(graph, graph.lengths[last] + 1, position)
    state = last
    while state >= 0:
        slot = _slot_of(graph, state, token)
        if graph.slots[slot] >= 0:
            break
        _add_edge(graph, slot, state, token, current)
        state = graph.links[state]
    if state < 0:
        return current
    target = graph.targets[graph.slots[slot]]
    if graph.lengths[target] != graph.lengths[state] + 1:
        target = _split(graph, state, token, target)
    graph.links[current] = target
    return current


@kernel()
def build_automaton(graph: Graph, tokens: _Ints) -> None:
    """Fill an automaton with documents.

    Args:
        graph: has room for 2n states, 3n edges and 6n slots; all slots are -1.
        tokens: int32[n], documents with a separator after each.
    """
    graph.counts[:] = 0
    root = _add_state(graph, 0, 0x7FFFFFFF)
    graph.links[root] = -1
    last = root
    for position in range(len(tokens)):
        if tokens[position] == SEPARATOR:
            last = root
        else:
            last = _extend(graph, last, tokens[position], position)
