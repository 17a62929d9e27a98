"""Stores of tokens with hash chains that find earlier occurrences of the last tokens."""

import math
import mmap
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Final

import numpy as np
from numpy.typing import NDArray

from retriever.drafter import TokenIds
from retriever.kernels.cursors import new_cursor
from retriever.kernels.entries import (
    append_tokens,
    extend_sequence,
    suppose_tokens,
    withdraw_tokens,
)
from retriever.kernels.layout import Chains, Cursor, Orders, pack
from retriever.limits import MAPPED_BYTES
from retriever.tree import Source

_READ_AT_ONCE: Final = 1 << 16
"""Tokens that a new store is made of in one piece: 5 ms without the interpreter. Each piece ends
by asking for that, and a thread that is suspended while it has it stops all others."""

MIN_CAPACITY: Final = 1024
"""Tokens in the smallest ring: smaller ones would grow at once."""

_MIN_LAST: Final = 4096
"""Least entries in the table of a sequence's last tokens: 16 KiB."""


_ADVISED_BYTES: Final = 1 << 22  # huge pages are asked for from this size on


@dataclass(frozen=True, slots=True)
class ChainLimits:
    """The n-gram orders that a store indexes, and the most rows of each in a draft."""

    orders: tuple[int, ...]
    max_rows: tuple[int, ...]


CONTEXT_LIMITS: Final = ChainLimits(orders=(8, 4, 2, 1), max_rows=(16, 16, 32, 64))
GENERATIONS_LIMITS: Final = ChainLimits(orders=(8, 4), max_rows=(32, 64))
"""With a corpus, whose phrase tables cover shorter matches better and faster."""

GENERATIONS_ALONE: Final = ChainLimits(orders=(8, 4, 2, 1), max_rows=(32, 64, 32, 64))
"""Without a corpus: on chats 15% more tokens a step, for 6 microseconds a draft."""


def ring_capacity(num_tokens: int) -> int:
    """Return the tokens of the smallest ring that holds `num_tokens`: a power of two."""
    return 1 << (max(num_tokens, MIN_CAPACITY) - 1).bit_length()


def store_bytes(capacity: int, limits: ChainLimits, source: Source) -> int:
    """Return the memory of a store's arrays, in bytes; arguments as for `ChainStore`."""
    size, num_orders = ring_capacity(capacity), len(limits.orders)
    last = max(size, _MIN_LAST) if source == Source.CONTEXT else 1
    return 4 * (size + num_orders * (size // 2) + num_orders * size + last) + 3 * 8


@cache
def orders_of(limits: ChainLimits) -> Orders:
    """Return the orders as arrays, which stores share and none writes to."""
    return Orders(np.array(limits.orders, np.int64), np.array(limits.max_rows, np.int64))


def _touched(array: NDArray[np.int32], used: int) -> int:
    """Return how much of zeros takes pages once the first elements of each row are written."""
    if array.nbytes < MAPPED_BYTES:
        return array.nbytes  # of memory that was used before
    huge = _huge_page() if array.nbytes >= _ADVISED_BYTES else 1
    begin: int = array.ctypes.data
    # Huge pages lie at multiples of their size; around them are small ones.
    low, high = -(-begin // huge) * huge, (begin + array.nbytes) // huge * huge
    row_bytes, touched, seen = array.strides[0] if array.ndim > 1 else 0, 0, low
    for row in range(array.size // array.shape[-1]):
        first = begin + row * row_bytes
        last = first + used * array.itemsize
        touched += max(0, min(last, low) - first) + max(0, last - max(first, high))
        pages_from = max(seen, max(first, low) // huge * huge)
        seen = max(seen, -(-min(last, high) // huge) * huge)
        touched += max(0, seen - pages_from)
    return touched


@cache
def _huge_page() -> int:
    """Return the bytes of a huge page; 1 where there is none."""
    folder = Path("/sys/kernel/mm/transparent_hugepage")
    with suppress(OSError, ValueError):
        if "[never]" not in (folder / "enabled").read_text():
            return int((folder / "hpage_pmd_size").read_text())
    return 1


def _mapped(shape: tuple[int, ...], fill: int = 0) -> NDArray[np.int32]:
    """Return int32 of a shape and value; a large array goes back to the system when it is freed.

    Allocators keep what they were given back, and messages are faster to receive for it: but
    memory of an ended sequence is far more, and may never be asked for again.

    Raises:
        MemoryError: the system has no memory left.
    """
    num_bytes = 4 * math.prod(shape)
    if num_bytes < MAPPED_BYTES or os.name != "posix":
        return np.full(shape, fill, np.int32) if fill else np.zeros(shape, np.int32)
    try:
        memory = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except OSError as error:
        raise MemoryError from error
    if num_bytes >= _ADVISED_BYTES and hasattr(mmap, "MADV_HUGEPAGE"):
        with suppress(OSError):  # a kernel without them
            memory.madvise(mmap.MADV_HUGEPAGE)
    array = np.frombuffer(memory, np.int32).reshape(shape)
    if fill:
        array[:] = fill
    return array


class ChainStore:
    """Tokens in a ring with hash chains over their n-grams; the oldest are overwritten.

    Each token of capacity takes 4 bytes, and 6 more for every order of n-grams.

    Args:
        capacity: most tokens to hold; rounded up to a power of two.
        limits: the n-grams to index.
        source: marks rows of this store.
        start: position of the first token that will be appended.
        cursor: of the sequence in the store; a new one if not given.

    Attributes:
        chains: the arrays.
        cursor: where the sequence is being copied from; moves as it grows.
        orders: the indexed n-grams.
        packed: these arrays and the indexed orders, packed for kernels: one record of
            `layout.STORE_LAYOUT`.
        address: of that.
        num_bytes: their memory, in bytes.
        capacity: tokens that the ring holds.
        end: position after the newest token; whoever has a kernel append others moves it.
    """

    def __init__(
        self,
        capacity: int,
        limits: ChainLimits,
        source: Source,
        *,
        start: int = 0,
        cursor: Cursor | None = None,
    ) -> None:
        size = ring_capacity(capacity)
        self.orders = orders_of(limits)
        self.cursor = new_cursor(is_sequence=source == Source.CONTEXT) if cursor is None else cursor
        self._source = int(source)
        self.chains = Chains(
            _mapped((size,)),
            _mapped((len(limits.orders), size // 2), -1),
            _mapped((len(limits.orders), size)),
            np.array([start, start, start], np.int64),
            _mapped((max(size, _MIN_LAST) if source == Source.CONTEXT else 1,), -1),
        )
        self.packed = pack(self.chains, self.orders, self.cursor)
        self.address: int = self.packed.ctypes.data
        self.num_bytes = sum(array.nbytes for array in self.chains)
        self.capacity = size
        self._start = self.end = start

    def __len__(self) -> int:
        """Position after the newest token: of a store from 0, the tokens appended so far.

        Overwritten tokens and separators count.
        """
        return self.end

    @property
    def touched_bytes(self) -> int:
        """Memory of the store that takes pages, in bytes: not all of the room for later tokens."""
        used = min(self.capacity, self.end - self._start)
        growing = (self.chains.tokens, self.chains.links)
        return self.num_bytes - sum(array.nbytes - _touched(array, used) for array in growing)

    def has_room(self, num_tokens: int) -> bool:
        """Return whether so many more tokens can be appended without overwriting any."""
        return self.end + num_tokens <= self.capacity

    @property
    def oldest(self) -> int:
        """Position of the oldest readable token."""
        return max(int(self.chains.state[2]), len(self) - self.capacity)

    def append(self, tokens: TokenIds) -> None:
        """Append int32[n] to the current document."""
        append_tokens(self.packed, tokens)
        self.end += len(tokens)

    def extend(self, tokens: TokenIds) -> None:
        """Append int32[n] to a sequence, and move its cursor."""
        extend_sequence(self.packed, tokens)
        self.end += len(tokens)

    @contextmanager
    def supposing(self, tokens: TokenIds) -> Iterator[None]:
        """Have a sequence end with int32[n] during the block; there is room for them."""
        before = np.empty(len(tokens), np.int64)
        cursor = [array.copy() for array in self.cursor]
        suppose_tokens(self.packed, tokens, before)
        self.end += len(tokens)
        try:
            yield
        finally:
            withdraw_tokens(self.packed, tokens, before)
            for array, kept in zip(self.cursor, cursor, strict=True):
                array[:] = kept
            self.end -= len(tokens)

    def forget_before(self, position: int) -> None:
        """Make tokens before `position` unreadable."""
        self.chains.state[2] = max(int(self.chains.state[2]), position)

    def live(self) -> TokenIds:
        """Return int32[n], a copy of the tokens from `oldest` on."""
        first, mask = self.oldest, self.capacity - 1
        return np.take(self.chains.tokens, np.arange(first, len(self)) & mask)

    def last(self, num_tokens: int) -> TokenIds:
        """Return a view of the last tokens; only for a ring that has not wrapped."""
        end = len(self)
        return self.chains.tokens[max(0, end - num_tokens) : end]


def appending(store: ChainStore, tokens: TokenIds) -> Iterator[None]:
    """Append int32[n] to a store; yield between pieces of work."""
    for begin in range(0, len(tokens), _READ_AT_ONCE):
        if begin:
            yield
        store.append(tokens[begin : begin + _READ_AT_ONCE])
