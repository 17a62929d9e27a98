"""Stores of tokens, with hash chains that find earlier occurrences of the last tokens."""

import math
import mmap
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from ctypes import addressof, c_char
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path
from struct import Struct
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from retriever.drafter import NO_TOKENS, TokenIds
from retriever.kernels.cursors import EDIT_SIZE, MOST_EDITS, TRAIL_SIZE
from retriever.kernels.entries import (
    append_tokens,
    begin_filled_store,
    begin_store,
    extend_sequence,
    suppose_tokens,
    withdraw_tokens,
)
from retriever.kernels.layout import CACHE_LINE, INT32, INT64, STORE_LAYOUT, Chains, Cursor, Orders
from retriever.limits import MAPPED_BYTES
from retriever.tree import Source

MIN_CAPACITY: Final = 1024
"""Size of the smallest ring, in tokens; a smaller ring would have to grow immediately."""

_MIN_LAST: Final = 4096
"""Fewest entries in the table of a sequence's last tokens: 16 KiB."""


_NUMBER: Final = Struct("=q")
_STATE: Final = Struct("=3q")

_ADVISED_BYTES: Final = 1 << 22  # huge pages are requested from this size on


@dataclass(frozen=True, slots=True, eq=False)
class ChainLimits:
    """The n-gram orders that a store indexes, and the most rows of each order in a draft.

    Compared by identity, because it is the key of cached plans.
    """

    orders: tuple[int, ...]
    max_rows: tuple[int, ...]


CONTEXT_LIMITS: Final = ChainLimits(orders=(8, 4, 2, 1), max_rows=(16, 16, 32, 64))
GENERATIONS_LIMITS: Final = ChainLimits(orders=(8, 4), max_rows=(32, 64))
"""Used with a corpus, because its phrase tables cover shorter matches better and faster."""

GENERATIONS_ALONE: Final = ChainLimits(orders=(8, 4, 2, 1), max_rows=(32, 64, 32, 64))
"""Used without a corpus. On chats, short orders add 15% more tokens per step, for 6 microseconds
per draft."""


def ring_capacity(num_tokens: int) -> int:
    """Return the capacity of the smallest ring that holds `num_tokens`: a power of two."""
    return 1 << (max(num_tokens, MIN_CAPACITY) - 1).bit_length()


def store_bytes(capacity: int, limits: ChainLimits, source: Source) -> int:
    """Return the memory of a store's tokens, in bytes; arguments as for `ChainStore`."""
    return _plan_of(ring_capacity(capacity), limits, source).token_bytes


@cache
def orders_of(limits: ChainLimits) -> Orders:
    """Return the orders as arrays, which stores share and never write to."""
    return Orders(np.array(limits.orders, np.int64), np.array(limits.max_rows, np.int64))


def _untouched(first: int, last: int, block: tuple[int, int], huge: int) -> int:
    """Return how many bytes of never written zeros are not resident in memory.

    Args:
        first: address of the zeros.
        last: address after the zeros.
        block: start and end address of the mapped memory that contains them.
        huge: size of huge pages, in bytes; 1 without huge pages.
    """
    # Huge pages are aligned to their size; the memory around them has small pages.
    low, high = -(-block[0] // huge) * huge, block[1] // huge * huge
    if low >= high:
        return last - first
    before, after = min(last, low) - first, last - max(first, high)
    within = min(last, high) // huge * huge + max(first, low) // -huge * huge
    return max(0, before) + max(0, within) + max(0, after)


@cache
def _huge_page() -> int:
    """Return the size of a huge page in bytes, 1 without huge pages."""
    folder = Path("/sys/kernel/mm/transparent_hugepage")
    with suppress(OSError, ValueError):
        if "[never]" not in (folder / "enabled").read_text():
            return int((folder / "hpage_pmd_size").read_text())
    return 1


@dataclass(frozen=True, slots=True, eq=False)
class _Plan:
    """The layout of the memory block of a store of a given size.

    Attributes:
        num_bytes: size of the block.
        token_bytes: size of the part that holds and finds tokens, which is most of the block.
        record: int64[n], the packed store at the start of the block, as if the block had address 0.
        is_inside: int64[n], 1 for each word that is an address within the block.
        places: offset and shape of each array.
    """

    num_bytes: int
    token_bytes: int
    record: NDArray[np.int64]
    is_inside: NDArray[np.int64]
    places: dict[str, tuple[int, tuple[int, ...]]]


@cache
def _plan_of(size: int, limits: ChainLimits, source: Source) -> _Plan:
    """Return the plan of a store whose ring holds `size` tokens."""
    num_orders, is_sequence = len(limits.orders), source == Source.CONTEXT
    shapes: dict[str, tuple[int, ...]] = {
        "state": (3,),
        "cursor": (2,),
        "trail": (TRAIL_SIZE,),
        "edits": (MOST_EDITS if is_sequence else 0, EDIT_SIZE),
        "tokens": (size,),
        "heads": (num_orders, size // 2),
        "links": (num_orders, size),
        "last": (max(size, _MIN_LAST) if is_sequence else 1,),
    }
    places, end, token_bytes = {}, STORE_LAYOUT.itemsize, 0
    for name, shape in shapes.items():
        if name == "tokens":
            end = -(-end // CACHE_LINE) * CACHE_LINE
        places[name] = end, shape
        num_bytes = math.prod(shape) * _type_of(name).itemsize
        token_bytes += num_bytes * (name in _OF_TOKENS or name == "state")
        end += num_bytes
    outside = orders_of(limits)._asdict()
    record, is_inside = np.zeros((2, STORE_LAYOUT.itemsize // 8), np.int64)
    fields: Any = STORE_LAYOUT.fields
    for name, (_, begin, *_) in fields.items():
        word = begin // 8
        place, shape = places.get(name) or (outside[name].ctypes.data, outside[name].shape)
        record[word : word + 1 + len(shape)] = place, *shape
        is_inside[word] = name in places
    return _Plan(end, token_bytes, record, is_inside, places)


_OF_TOKENS: Final = frozenset({"tokens", "heads", "links", "last"})


def _type_of(name: str) -> np.dtype[Any]:
    """Return the type of an array's elements."""
    return INT32 if name in _OF_TOKENS else INT64


def _zeros(num_bytes: int) -> bytearray | mmap.mmap:
    """Return zeros; large blocks are mapped, so that they return to the system when freed.

    Allocators hold on to freed memory, which makes receiving messages faster. But the memory of an
    ended sequence is far larger, and may never be needed again.

    Raises:
        MemoryError: the system has no memory left.
    """
    if num_bytes < MAPPED_BYTES or os.name != "posix":
        return bytearray(num_bytes)
    try:
        memory = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except OSError as error:
        raise MemoryError from error
    if num_bytes >= _ADVISED_BYTES and hasattr(mmap, "MADV_HUGEPAGE"):
        with suppress(OSError):  # a kernel without huge pages
            memory.madvise(mmap.MADV_HUGEPAGE)
    return memory


class ChainStore:
    """Tokens in a ring, with hash chains over their n-grams; new tokens overwrite the oldest.

    Each token of capacity takes 4 bytes, and 6 more for every order of n-grams. A store is one
    block of memory, which starts with its record for kernels.

    Args:
        capacity: most tokens to hold; rounded up to a power of two.
        limits: the n-grams to index.
        source: marks rows of this store.
        tokens: int32[n], the initial tokens.
        start: position of the first token.

    Attributes:
        address: address of the record, which has `layout.STORE_LAYOUT`.
        num_bytes: memory of the tokens, in bytes.
        capacity: most tokens that the ring holds.
    """

    def __init__(
        self,
        capacity: int,
        limits: ChainLimits,
        source: Source,
        tokens: TokenIds = NO_TOKENS,
        *,
        start: int = 0,
    ) -> None:
        self.capacity = size = ring_capacity(capacity)
        self._limits = limits
        self._plan = plan = _plan_of(size, limits, source)
        self.num_bytes = plan.token_bytes
        self._memory = memory = _zeros(plan.num_bytes + CACHE_LINE)
        address = addressof(c_char.from_buffer(memory))
        self._begin = begin = -address % CACHE_LINE
        self.address = address + begin
        self._end_at = begin + plan.places["state"][0]
        if len(tokens):
            begin_filled_store(self.address, plan.record, plan.is_inside, start, tokens)
        else:
            begin_store(self.address, plan.record, plan.is_inside, start)
        self._start = start

    def __len__(self) -> int:
        """Position after the newest token.

        For a store that starts at 0, this is the number of tokens appended so far, including
        separators and overwritten tokens.
        """
        end: int = _NUMBER.unpack_from(self._memory, self._end_at)[0]
        return end

    def _array(self, name: str) -> NDArray[Any]:
        """Return a view of an array."""
        place, shape = self._plan.places[name]
        return np.ndarray(shape, _type_of(name), self._memory, self._begin + place)

    @property
    def orders(self) -> Orders:
        """The indexed n-grams."""
        return orders_of(self._limits)

    @cached_property
    def packed(self) -> NDArray[Any]:
        """The record for kernels: a view."""
        return np.ndarray(1, STORE_LAYOUT, self._memory, self._begin)

    @cached_property
    def chains(self) -> Chains:
        """The arrays of the tokens: views."""
        return Chains(*map(self._array, Chains._fields))

    @cached_property
    def cursor(self) -> Cursor:
        """The place from which the sequence is copied; it moves as the sequence grows. Views."""
        return Cursor(*map(self._array, Cursor._fields))

    @cached_property
    def tokens(self) -> TokenIds:
        """int32[capacity], the ring: a view."""
        return self._array("tokens")

    @property
    def touched_bytes(self) -> int:
        """Resident memory of the store, in bytes, without unused room for later tokens."""
        if isinstance(self._memory, bytearray):
            return self.num_bytes  # this memory was used before
        used = min(self.capacity, len(self) - self._start)
        huge = _huge_page() if self._plan.num_bytes >= _ADVISED_BYTES else 1
        block = self.address, self.address + self._plan.num_bytes
        untouched = 0
        for row in (self.chains.tokens, *self.chains.links):
            begin: int = row.ctypes.data
            zeros = begin + used * row.itemsize, begin + row.nbytes
            untouched += _untouched(*zeros, block, huge)
        return self.num_bytes - untouched

    def has_room(self, num_tokens: int) -> bool:
        """Return whether `num_tokens` more can be appended without overwriting tokens."""
        return len(self) + num_tokens <= self.capacity

    @property
    def oldest(self) -> int:
        """Position of the oldest readable token."""
        end, _, first = _STATE.unpack_from(self._memory, self._end_at)
        oldest: int = max(first, end - self.capacity)
        return oldest

    def append(self, tokens: TokenIds) -> None:
        """Append tokens, int32[n], to the current document."""
        append_tokens(self.address, tokens)

    def extend(self, tokens: TokenIds) -> None:
        """Append tokens, int32[n], to a sequence, and move its cursor."""
        extend_sequence(self.address, tokens)

    def follow(self, other: "ChainStore") -> None:
        """Take over the cursor of another store that has the same tokens."""
        for array, known in zip(self.cursor, other.cursor, strict=True):
            array[:] = known

    @contextmanager
    def supposing(self, tokens: TokenIds) -> Iterator[None]:
        """Append tokens, int32[n], for the block only; the caller has checked for room."""
        before = np.empty(len(tokens), np.int64)
        cursor = [array.copy() for array in self.cursor]
        suppose_tokens(self.address, tokens, before)
        try:
            yield
        finally:
            withdraw_tokens(self.address, tokens, before)
            for array, kept in zip(self.cursor, cursor, strict=True):
                array[:] = kept

    def forget_before(self, position: int) -> None:
        """Make tokens before `position` unreadable."""
        self.chains.state[2] = max(int(self.chains.state[2]), position)

    def clear(self) -> None:
        """Overwrite the tokens, so that an ended sequence leaves nothing in memory."""
        self.tokens[:] = 0

    def live(self) -> TokenIds:
        """Return a copy of the tokens from `oldest` on, int32[n]."""
        first, mask = self.oldest, self.capacity - 1
        return np.take(self.tokens, np.arange(first, len(self)) & mask)

    def last(self, num_tokens: int) -> TokenIds:
        """Return a view of the last tokens; only for a ring that has not wrapped."""
        end = len(self)
        first = max(0, end - num_tokens)
        begin = self._begin + self._plan.places["tokens"][0] + INT32.itemsize * first
        return np.ndarray(end - first, INT32, self._memory, begin)
