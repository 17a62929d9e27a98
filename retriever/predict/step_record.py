"""What a sequence asks of the kernel that drafts, kept from one step to the next."""

from ctypes import addressof, c_char
from struct import Struct
from typing import Any, Final

import numpy as np

from retriever.drafter import TokenIds
from retriever.kernels.layout import INT32, MAX_MATCH, STEP
from retriever.tree import NODE_BYTES, BlockTree, DraftTree


def _place(name: str) -> int:
    """Return where a field of `STEP` begins."""
    fields: Any = STEP.fields
    return int(fields[name][1])


def _fields(first: str, last: str) -> Struct:
    """Return how fields of `STEP` lie, from one to another."""
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
"""Tokens that are copied into the record; more stay where they are."""

_TOKENS_AT: Final = STEP.itemsize
TREE_AT: Final = STEP.itemsize + 4 * MOST_TOKENS


def _new() -> bytes:
    """Return a record that asks for nothing, with room for a small tree."""
    memory = bytearray(TREE_AT + NODE_BYTES * _FEWEST_NODES)
    _NUMBER.pack_into(memory, _LONGEST, MAX_MATCH)
    _NUMBER.pack_into(memory, _TREE_SIZE, -1)
    return bytes(memory)


_NEW: Final = _new()


class StepRecord:
    """A record of `STEP`, with room for the tokens of a step and for the last tree.

    Attributes:
        address: of the record.
        memory: that it lies in, with what follows.
        tokens: int32[MOST_TOKENS], room for those of a step: a view.
        tokens_at: its address.
        alone: int64[1], that address, for a call of this sequence alone.
        most_nodes: of a tree that there is room for; more are made room for when they are asked.
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
        """Be of the sequence whose packed store is at an address."""
        _NUMBER.pack_into(self.memory, _SEQUENCE, sequence)

    def join(self, lane: int) -> None:
        """Be of the packed lane at an address."""
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
        """Ask anew; see `STEP` for all of it.

        Raises:
            struct.error: a number is none, or is beyond 64 bits.
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
        """Ask for other stages of the same; return those that were asked for before."""
        before: int = _NUMBER.unpack_from(self.memory, ASKED_AT)[0]
        _AGAIN.pack_into(self.memory, ASKED_AT, stages, row)
        return before

    def learn_at(self, rate: float) -> None:
        """Have what followed be learned from, at a rate."""
        _REAL.pack_into(self.memory, _RATE, rate)

    def forget_match(self) -> None:
        """Let a match in the corpus be of any length."""
        _NUMBER.pack_into(self.memory, _LONGEST, MAX_MATCH)

    def answer(self) -> tuple[int, int, int, int]:
        """Return why it was refused, the nodes, the rows, and the nodes that were learned from."""
        return ANSWER.unpack_from(self.memory, ANSWER_AT)

    def drafted(self, budget: int) -> DraftTree:
        """Return a copy of the tree that was just answered."""
        return self.tree(ANSWER.unpack_from(self.memory, ANSWER_AT)[1], budget)

    def tree(self, size: int, budget: int) -> DraftTree:
        """Return a copy of the last tree."""
        return BlockTree(self.memory[TREE_AT : TREE_AT + NODE_BYTES * budget], size)

    def clear(self) -> None:
        """Overwrite the tokens and the tree: an ended sequence leaves nothing in memory."""
        self.memory[_TOKENS_AT:] = bytes(len(self.memory) - _TOKENS_AT)
        self._held = None

    def _grow(self, most_nodes: int) -> None:
        """Have room for a larger tree; what was asked, and the last tree, stay."""
        before, held, inside = self.memory, self._held, self.tokens_at
        room = bytes(NODE_BYTES * (most_nodes - self.most_nodes))
        self._hold(most_nodes, bytearray().join((before, room)))
        self._held = held
        if _NUMBER.unpack_from(before, _TOKENS) == (inside,):
            _NUMBER.pack_into(self.memory, _TOKENS, self.tokens_at)
