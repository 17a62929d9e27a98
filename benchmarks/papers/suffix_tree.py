"""A suffix tree that documents are added to and running sequences are appended to."""

from collections.abc import Iterable
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from benchmarks.papers.kernels.suffix_nodes import append_tokens, enter_all, insert_document
from benchmarks.papers.kernels.suffix_siblings import NODE, NONE, NUM_NODES, make_root
from retriever.drafter import TokenIds


@dataclass(slots=True)
class OpenSequence:
    """Where the last suffixes of a running sequence end in a tree.

    Attributes:
        active: int32[max_depth], nodes, the longest suffix first.
        num_active: how many there are.
    """

    active: NDArray[np.int32] = field(repr=False)
    num_active: int = 0


class SuffixTree:
    """All substrings of up to `max_depth` tokens of what was added, with their counts.

    Args:
        max_depth: longest substring, in tokens.
    """

    def __init__(self, max_depth: int) -> None:
        self.max_depth = max_depth
        self.nodes = np.zeros(256, NODE)
        self.text = np.zeros(256, np.int32)
        self.keys = np.full(1024, NONE, np.int64)
        self.children = np.zeros(1024, np.int32)
        self._state = np.zeros(3, np.int64)
        self._num_tokens = 0
        make_root(self.nodes, self._state)

    def add(self, document: TokenIds) -> None:
        """Add int32[n], a document that has ended."""
        begin, end = self._extend_text(document, 2)
        self._insert(begin, end, end)

    def add_all(self, documents: Iterable[TokenIds]) -> None:
        """Add documents, int32[n] each."""
        for document in documents:
            self.add(document)

    def begin(self, tokens: TokenIds) -> OpenSequence:
        """Begin a running sequence with int32[n]."""
        sequence = OpenSequence(np.zeros(self.max_depth, np.int32))
        finished = max(0, len(tokens) - self.max_depth)
        begin, end = self._extend_text(tokens, 2)
        self._insert(begin, begin + finished, end)
        self._append(sequence, begin + finished, end)
        return sequence

    def append(self, sequence: OpenSequence, tokens: TokenIds) -> None:
        """Append int32[n] to a running sequence."""
        self._append(sequence, *self._extend_text(tokens, 2 * self.max_depth))

    def _insert(self, begin: int, stop: int, end: int) -> None:
        insert_document(
            self.nodes,
            self._state,
            self.text,
            self.keys,
            self.children,
            begin,
            stop,
            end,
            self.max_depth,
        )

    def _append(self, sequence: OpenSequence, begin: int, end: int) -> None:
        self._reserve_nodes(2 * self.max_depth * (end - begin))
        sequence.num_active = append_tokens(
            self.nodes,
            self._state,
            self.text,
            self.keys,
            self.children,
            begin,
            end,
            sequence.active,
            sequence.num_active,
        )

    def _extend_text(self, tokens: TokenIds, nodes_per_token: int) -> tuple[int, int]:
        """Write tokens to the text and make room for their nodes; return where they stand."""
        begin, end = self._num_tokens, self._num_tokens + len(tokens)
        if end > len(self.text):
            self.text = np.concatenate([self.text, np.zeros(max(end, len(self.text)), np.int32)])
        self.text[begin:end] = tokens
        self._num_tokens = end
        self._reserve_nodes(nodes_per_token * len(tokens))
        return begin, end

    def _reserve_nodes(self, num_nodes: int) -> None:
        needed = int(self._state[NUM_NODES]) + num_nodes
        if needed > len(self.nodes):
            room = np.zeros(max(needed - len(self.nodes), len(self.nodes)), NODE)
            self.nodes = np.concatenate([self.nodes, room])
        if 4 * needed > 3 * len(self.keys):
            size = 1 << (2 * needed - 1).bit_length()
            self.keys, self.children = np.full(size, NONE, np.int64), np.zeros(size, np.int32)
            enter_all(self.nodes, self._state, self.text, self.keys, self.children)
