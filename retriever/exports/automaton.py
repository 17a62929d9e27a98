"""The suffix automaton of documents, as arrays that do not change any more."""

from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from retriever.drafter import TokenIds
from retriever.kernels.automata import Graph, build_automaton

BYTES_PER_TOKEN: Final = 160
"""Memory that building takes at most, in bytes."""

_Ints = NDArray[np.int32]


@dataclass(frozen=True, slots=True, eq=False)
class FrozenAutomaton:
    """A suffix automaton; state 0 is the root.

    Attributes:
        links: int32[s], -1 at the root.
        lengths: int32[s], tokens of each state's longest substring.
        ends: int32[s], position of the last token of its first occurrence; 2^31 - 1 at the root.
        offsets: int32[s + 1], where the edges of each state begin.
        labels: int32[e], the edges' tokens, rising within a state.
        targets: int32[e], the states that they lead to.
    """

    links: _Ints
    lengths: _Ints
    ends: _Ints
    offsets: _Ints
    labels: _Ints
    targets: _Ints

    @classmethod
    def of(cls, tokens: TokenIds) -> "FrozenAutomaton":
        """Build the automaton of int32[n], documents with a separator, -1, behind each."""
        graph = _room_for(len(tokens))
        build_automaton(graph, tokens)
        num_states, num_edges = graph.counts.tolist()
        origins, labels = graph.origins[:num_edges], graph.labels[:num_edges]
        order = np.lexsort((labels, origins))
        offsets = np.zeros(num_states + 1, np.int32)
        np.cumsum(np.bincount(origins, minlength=num_states), out=offsets[1:])
        return cls(
            graph.links[:num_states],
            graph.lengths[:num_states],
            graph.ends[:num_states],
            offsets,
            labels[order],
            graph.targets[:num_edges][order],
        )


def _room_for(num_tokens: int) -> Graph:
    """Return an empty graph; what stays unused of it takes no memory."""
    num_states, num_edges = 2 * num_tokens + 1, 3 * num_tokens + 1
    num_slots = 1 << max(4, (2 * num_edges - 1).bit_length())
    links, lengths, ends, first_edges = (np.empty(num_states, np.int32) for _ in range(4))
    origins, labels, targets, next_edges = (np.empty(num_edges, np.int32) for _ in range(4))
    return Graph(
        links,
        lengths,
        ends,
        first_edges,
        origins,
        labels,
        targets,
        next_edges,
        slots=np.full(num_slots, -1, np.int32),
        counts=np.zeros(2, np.int64),
    )
