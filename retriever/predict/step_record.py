"""A sequence's requests to the kernel that drafts, in a record that is reused for each step."""

from ctypes import addressof, c_char
from struct import Struct
from typing import Any, Final

import numpy as np

from retriever.drafter import TokenIds
from retriever.kernels.layout import INT32, MAX_MATCH, STEP
from retriever.tree import NODE_BYTES, BlockTree, DraftTree


def _place(name: str) -> int:
    """Return the offset of a field of `STEP`."""
    fields: Any = STEP.fields
    return int(fields[name][1])


def _fields(first: str, last: str) -> Struct:
    """Return the layout of the fields of `STEP` from `first` to `last`."""
    names: Any = STEP.names
    within = names[names.index(first) : names.index(last) + 1]
    return Struct("=" + "".join("d" if STEP[name].kind == "f" else "q" for name in within))


ASKED, ASKED_AT = _fields("stages", "rate"), _place("stages")
ANSWER, ANSWER_AT = _fields("refusal", "learned"), _place("refusal")
_AGAIN: Final = _fields("stages", "row")
_NUMBER, _REAL = Struct("=q"), Struct("=d")
_SEQUENCE, _LANE = _place("sequence"), _place("lane")
_TOKENS, _RATE = _place("tokens"), _place("rate")
_LONGEST, _TREE, _TREE_SIZE = _place("longest"), _place("tree"), _place("tree_size")

_FEWEST_NODES: Final = 64
MOST_TOKENS: Final = 64
"""Most tokens that are copied into the record; longer arrays are referenced instead."""

_TOKENS_AT: Final = STEP.itemsize
TREE_AT: Final = STEP.itemsize + 4 * MOST_TOKENS


def _new() -> bytes:
    """Return a record without a request, with room for a small tree."""
    memory = bytearray(TREE_AT + NODE_BYTES * _FEWEST_NODES)
    _NUMBER.pack_into(memory, _LONGEST, MAX_MATCH)
    _NUMBER.pack_into(memory, _TREE_SIZE, -1)
    return bytes(memory)


_NEW: Final = _new()


class StepRecord:
    """A record of `STEP`, with room for the tokens of a step and for the last tree.

    Attributes:
        address: address of the record.
        memory: memory of the record, the tokens and the tree.
        tokens: int32[MOST_TOKENS], room for the tokens of a step: a view.
        tokens_at: address of `tokens`.
        alone: int64[1], the record's address, for a call for this sequence alone.
        most_nodes: largest tree that fits; grows with the budget of requests.
    """

    __slots__ = ("_held", "address", "alone", "memory", "most_nodes", "tokens", "tokens_at")

    def __init__(self) -> None:
        self._hold(_FEWEST_NODES, bytearray(_NEW))

    def _hold(self, most_nodes: int, memory: bytearray) -> None:
        self.most_nodes = most_nodes
        self.memory = memory
        self.address = addressof(c_char.from_buffer(memory))
        self.alone = np.array([self.address])
        self.tokens = np.frombuffer(memory, INT32, MOST_TOKENS, _TOKENS_AT)
        self.tokens_at = self.address + _TOKENS_AT
        self._held: TokenIds | None = None
        _NUMBER.pack_into(memory, _TREE, self.address + TREE_AT)

    def follow(self, sequence: int) -> None:
        """Set the address of the sequence's packed store."""
        _NUMBER.pack_into(self.memory, _SEQUENCE, sequence)

    def join(self, lane: int) -> None:
        """Set the address of the packed lane."""
        _NUMBER.pack_into(self.memory, _LANE, lane)

    def ask(  # noqa: PLR0913, PLR0917  (what is asked)
        self,
        stages: int,
        tokens: TokenIds,
        length: int,
        budget: int,
        min_probability: float,
        rate: float,
    ) -> None:
        """Write a new request; `STEP` describes the fields.

        Raises:
            struct.error: a value is not a number or exceeds 64 bits.
        """
        num_tokens = len(tokens)
        if num_tokens <= MOST_TOKENS:
            self.tokens[:num_tokens] = tokens
            place, self._held = self.tokens_at, None
        else:
            self._held = np.ascontiguousarray(tokens)
            place = self._held.ctypes.data
        ASKED.pack_into(
            self.memory, ASKED_AT, stages, 0, place, num_tokens, length, budget,
            min_probability, rate,
        )  # fmt: skip
        if budget > self.most_nodes:
            self._grow(budget)

    def ask_again(self, stages: int, row: int = 0) -> int:
        """Request other stages, with the other values as before; return the previous stages."""
        before: int = _NUMBER.unpack_from(self.memory, ASKED_AT)[0]
        _AGAIN.pack_into(self.memory, ASKED_AT, stages, row)
        return before

    def learn_at(self, rate: float) -> None:
        """Set the learning rate."""
        _REAL.pack_into(self.memory, _RATE, rate)

    def forget_match(self) -> None:
        """Allow a match of any length in the corpus again."""
        _NUMBER.pack_into(self.memory, _LONGEST, MAX_MATCH)

    def answer(self) -> tuple[int, int, int, int]:
        """Return the refusal, the tree's size, the first free row, and the nodes learned from."""
        return ANSWER.unpack_from(self.memory, ANSWER_AT)

    def drafted(self, budget: int) -> DraftTree:
        """Return a copy of the tree of the last answer."""
        return self.tree(ANSWER.unpack_from(self.memory, ANSWER_AT)[1], budget)

    def tree(self, size: int, budget: int) -> DraftTree:
        """Return a copy of the last tree."""
        return BlockTree(self.memory[TREE_AT : TREE_AT + NODE_BYTES * budget], size)

    def clear(self) -> None:
        """Overwrite the tokens and the tree, so that an ended sequence leaves nothing in memory."""
        self.memory[_TOKENS_AT:] = bytes(len(self.memory) - _TOKENS_AT)
        self._held = None

    def _grow(self, most_nodes: int) -> None:
        """Make room for a larger tree; the request and the last tree stay as they are."""
        before, held, inside = self.memory, self._held, self.tokens_at
        room = bytes(NODE_BYTES * (most_nodes - self.most_nodes))
        self._hold(most_nodes, bytearray().join((before, room)))
        self._held = held
        if _NUMBER.unpack_from(before, _TOKENS) == (inside,):
            _NUMBER.pack_into(self.memory, _TOKENS, self.tokens_at)
