"""Outputs of running sequences, from which other sequences draft before the outputs end.

A sequence of a group writes its output into a *lane*. Other sequences of its group find that output
in their next step. If the output is to be remembered, the tenant's other sequences find each block
of it once the block is full. When the sequence ends, its lane is removed; a remembered output then
becomes a generation.
"""

from hashlib import blake2b
from itertools import count
from typing import Final, Protocol

import numpy as np
from numpy.typing import NDArray

from retriever.drafter import DEFAULT, SequenceOptions, TokenIds
from retriever.errors import LimitExceededError
from retriever.kernels.chains import IS_SHARED, OLDEST, SEPARATOR
from retriever.kernels.entries import append_to_lane, move_lanes, withdraw_lane
from retriever.kernels.layout import BLOCK, LANE_BLOCK, Lane, Lanes, aligned_zeros, pack
from retriever.predict.ledger import Charge
from retriever.predict.stores import ChainLimits, orders_of

RUNNING_LIMITS: Final = ChainLimits(orders=(8, 4, 2, 1), max_rows=(8, 16, 16, 16))
"""Sequences of a group have the same topic, so even a match of one or two tokens is strong
evidence: without orders 1 and 2, lanes gain half as much."""

MOST_TOKENS: Final = 1 << 18
"""Most tokens of a tenant's running outputs; the newest are stored. They take 15 MB."""

FEWEST_TOKENS: Final = 1 << 12
"""Size of a new ring, in tokens."""

_TAIL: Final = 8  # prompt tokens at the start of a lane: the longest n-gram
_AT_ONCE: Final = 1 << 12  # most tokens copied at once; of longer commits, the last


class _Sequence(Protocol):
    """The sequence whose output is copied into a lane."""

    @property
    def address(self) -> int:
        """Address of its store, packed for kernels."""

    def __len__(self) -> int: ...


def running_bytes(num_tokens: int) -> int:
    """Return the memory of a ring of running outputs, in bytes."""
    num_orders = len(RUNNING_LIMITS.orders)
    words = 1 + 2 * num_orders + num_orders  # a token, its links, and half as many heads as links
    return 4 * words * num_tokens + BLOCK.itemsize * (num_tokens // LANE_BLOCK)


def _ring(num_tokens: int) -> Lanes:
    """Return an empty ring."""
    num_rows = 2 * len(RUNNING_LIMITS.orders)
    blocks = aligned_zeros((num_tokens // LANE_BLOCK,), BLOCK)
    blocks["lane"] = -1
    return Lanes(
        np.full(num_tokens, SEPARATOR, np.int32),
        np.full((num_rows, num_tokens // 2), -1, np.int32),
        np.zeros((num_rows, num_tokens), np.int32),
        blocks,
        np.zeros(3, np.int64),
    )


_ORDERS: Final = orders_of(RUNNING_LIMITS)


class RunningOutputs:
    """The newest tokens of a tenant's running outputs. Not thread-safe: callers hold a lock.

    The ring doubles once lanes fill half of it, up to `most_tokens`. If memory has no room for a
    larger ring, it does not grow, and the oldest blocks are overwritten.

    Args:
        charge: charge for the memory; None to grow freely.
        most_tokens: most tokens of the ring, a power of two.

    Attributes:
        packed: the ring, packed for kernels; replaced when it grows.
    """

    def __init__(self, charge: Charge | None = None, most_tokens: int = MOST_TOKENS) -> None:
        self._charge = charge
        self._most_tokens = most_tokens
        self._numbers = count()
        self._num_lanes = 0
        self._take(_ring(min(FEWEST_TOKENS, most_tokens)))

    def _take(self, lanes: Lanes) -> None:
        self._lanes = lanes
        self.packed = pack(lanes, _ORDERS)
        if self._charge is not None:
            self._charge.settle(self.num_bytes)

    @property
    def num_bytes(self) -> int:
        """Memory of the ring, in bytes."""
        return running_bytes(len(self._lanes.tokens))

    @property
    def tokens(self) -> TokenIds:
        """int32[n], the whole ring, with `SEPARATOR` where it is empty. Read-only."""
        tokens = self._lanes.tokens.view()
        tokens.flags.writeable = False
        return tokens

    @property
    def num_tokens(self) -> int:
        """Number of tokens in the blocks of all lanes; a block counts as full."""
        return LANE_BLOCK * int(self._lanes.state[2])

    @property
    def num_lanes(self) -> int:
        """Number of lanes that have joined and not left."""
        return self._num_lanes

    def join(self) -> int:
        """Return the number of a new lane."""
        self._num_lanes += 1
        return next(self._numbers)

    def note(self, lane: int, sequence: int, first: int, end: int, linked_from: int) -> None:
        """Append tokens of a sequence to its lane; see `kernels.entries.append_to_lane`."""
        num_blocks = len(self._lanes.blocks)
        needed = (end - first) // LANE_BLOCK + 1
        if 2 * (int(self._lanes.state[2]) + needed) > num_blocks:
            self._grow()
        append_to_lane(self.packed, lane, sequence, first, end, linked_from)

    def withdraw(self, lane: int) -> None:
        """Overwrite a lane's tokens."""
        withdraw_lane(self.packed, lane)

    def leave(self, lane: int) -> None:
        """End a lane and overwrite its tokens."""
        self.withdraw(lane)
        self._num_lanes -= 1

    def clear(self) -> None:
        """Delete and overwrite everything; lanes start over with their next tokens."""
        lanes = self._lanes
        lanes.tokens[:] = SEPARATOR
        lanes.heads[:] = -1
        lanes.blocks["lane"] = -1
        lanes.state[1], lanes.state[2] = lanes.state[0], 0

    def _grow(self) -> None:
        size = 2 * len(self._lanes.tokens)
        if size > self._most_tokens:
            return
        try:
            if self._charge is not None:
                self._charge.add(running_bytes(size))  # both exist during the move
        except LimitExceededError:
            return
        grown = _ring(size)
        move_lanes(self.packed, pack(grown, _ORDERS))
        self._take(grown)


NOTHING_RUNS: Final = pack(_ring(LANE_BLOCK), _ORDERS)[:0]
"""A record without running outputs, packed for kernels."""


def group_number(group: str) -> int:
    """Return the number of a group: a hash of its name, 0 for no group."""
    if not group:
        return 0
    return 1 + (int.from_bytes(blake2b(group.encode(), digest_size=8).digest()) >> 2)


class RunningOutput:
    """The lane of one sequence: others draft from its output, and it drafts from theirs.

    Args:
        outputs: running outputs of its tenant; None for a sequence without a group, which only
            reads.
        fields: fields of its lane, see `lane_fields`.
        sequence: the sequence that writes the lane; None if it only reads.
        prompt_length: length of the sequence's prompt.

    Attributes:
        address: address of the lane, packed for kernels.
        oldest_version: oldest model version whose evidence counts.
    """

    def __init__(
        self,
        outputs: RunningOutputs | None,
        fields: NDArray[np.int64],
        sequence: _Sequence | None = None,
        prompt_length: int = 0,
    ) -> None:
        self._outputs = outputs
        self._fields = fields
        self._sequence = sequence
        self._packed = pack(Lane(fields))
        self.address: int = self._packed.ctypes.data
        self.oldest_version = int(fields[OLDEST])
        self._linked_from = max(0, prompt_length - 1)  # the output follows the prompt's last token
        self._noted = max(0, prompt_length - _TAIL)

    @property
    def is_written(self) -> bool:
        """Whether the sequence writes a lane, instead of only reading other lanes."""
        return self._outputs is not None

    def commit(self, tokens: TokenIds) -> None:  # noqa: ARG002  (the sequence has them)
        """Copy appended tokens into the lane; called with the drafter's lock held."""
        outputs, sequence = self._outputs, self._sequence
        if outputs is None or sequence is None:
            return
        end = len(sequence)
        if end - self._noted > _AT_ONCE:  # skipped tokens would leave a gap, so start over
            outputs.withdraw(self.address)
            self._noted = self._linked_from = end - _AT_ONCE
        outputs.note(self.address, sequence.address, self._noted, end, self._linked_from)
        self._noted = end

    def restrict(self) -> None:
        """Let only the group see the lane from now on, and only its later tokens."""
        self._fields[IS_SHARED] = 0
        if self._sequence is not None:
            self._noted = self._linked_from = len(self._sequence)

    def leave(self) -> None:
        """End the lane and overwrite its tokens."""
        if self._outputs is not None:
            self._outputs.leave(self.address)
            self._outputs = self._sequence = None


def lane_fields(
    kin: SequenceOptions, number: int = -1, *, is_shared: bool = False
) -> NDArray[np.int64]:
    """Return int64[6], the fields of a lane; see `kernels.chains`."""
    version = -1 if kin.policy_version is None else kin.policy_version
    group = group_number(kin.group) if number >= 0 else 0
    return np.array([number, group, -1, is_shared, version, kin.oldest_version], np.int64)


READER: Final = RunningOutput(None, lane_fields(DEFAULT))
"""The lane of a sequence without a group and model version."""
