"""The database of a sequence itself: prompt and output so far."""

from contextlib import AbstractContextManager
from typing import Final

from retriever.drafter import TokenIds
from retriever.kernels.layout import Chains, Cursor
from retriever.predict.ledger import Charge
from retriever.predict.step_record import StepRecord
from retriever.predict.stores import (
    CONTEXT_LIMITS,
    ChainStore,
    store_bytes,
)
from retriever.tree import Source

LONG_COMMIT: Final = 1 << 14
"""Tokens that are committed to a sequence in one piece: a millisecond."""

SEQUENCE_BYTES: Final = 5 << 10
"""Memory of a session but for its tokens: some forty objects; 4.3 KB were measured over 1,900."""


def context_bytes(num_tokens: int) -> int:
    """Return the memory of a sequence that begins with, or grows to, so many tokens, in bytes."""
    return store_bytes(2 * num_tokens, CONTEXT_LIMITS, Source.CONTEXT) + SEQUENCE_BYTES


class Context:
    """The sequence itself, in a store that grows.

    Attributes:
        step: what the sequence asks of the kernel, kept from one step to the next.
        address: where its store is packed for kernels; elsewhere once the sequence has outgrown it.
    """

    def __init__(self, prompt: TokenIds, charge: Charge | None = None) -> None:
        """Begin with int32[n]."""
        self._charge = charge
        self.step = StepRecord()
        self._take(ChainStore(2 * len(prompt), CONTEXT_LIMITS, Source.CONTEXT, prompt))
        self.settle()

    def _take(self, store: ChainStore) -> None:
        self._store, self.address = store, store.address
        self.step.follow(store.address)

    def __len__(self) -> int:
        return len(self._store)

    def commit(self, tokens: TokenIds) -> None:
        """Append int32[n], committed tokens."""
        if not self._store.has_room(len(tokens)):
            self._grow(len(self) + len(tokens))
        self._store.extend(tokens)

    def ensure_room(self, num_tokens: int) -> None:
        """Grow now, if so many more tokens do not fit.

        Raises:
            LimitExceededError: there is no room for it.
        """
        if not self._store.has_room(num_tokens):
            self.make_room(num_tokens)
            self._grow(len(self) + num_tokens)

    def _grow(self, size: int) -> None:
        """Move to a store with room for twice that many tokens."""
        grown = ChainStore(2 * size, CONTEXT_LIMITS, Source.CONTEXT)
        grown.append(self.last(len(self)))
        grown.follow(self._store)
        self._take(grown)
        self.settle()

    def is_long(self, num_tokens: int) -> bool:
        """Return whether committing so many more tokens takes longer than other work may wait."""
        size = len(self._store) + num_tokens
        return size > LONG_COMMIT and (num_tokens > LONG_COMMIT or size > self._store.capacity)

    def make_room(self, num_tokens: int) -> None:
        """Take the memory for more tokens, where they do not fit, before they are committed.

        Called with the drafter's lock held.

        Raises:
            LimitExceededError: there is no room for it.
        """
        if not self._store.has_room(num_tokens) and self._charge is not None:
            size = len(self) + num_tokens
            needed = self._store.num_bytes + context_bytes(size)  # both while it is copied
            self._charge.add(max(0, needed - self._charge.num_bytes))

    def settle(self) -> None:
        """Give back memory that was taken and is not needed."""
        if self._charge is not None:
            self._charge.settle(self._store.num_bytes + SEQUENCE_BYTES)

    def clear(self) -> None:
        """Overwrite the tokens: an ended sequence leaves nothing in memory."""
        self._store.clear()

    def last(self, num_tokens: int) -> TokenIds:
        """Return the last tokens, at most `num_tokens`."""
        return self._store.last(num_tokens)

    def has_room(self, num_tokens: int) -> bool:
        """Return whether so many more tokens can be supposed."""
        return self._store.has_room(num_tokens)

    def supposing(self, tokens: TokenIds) -> AbstractContextManager[None]:
        """Have the sequence end with int32[n] during the block; there is room for them."""
        return self._store.supposing(tokens)

    @property
    def num_bytes(self) -> int:
        """Memory of the store, in bytes."""
        return self._store.num_bytes

    @property
    def touched_bytes(self) -> int:
        """Memory of the sequence that takes pages by now, in bytes."""
        return self._store.touched_bytes

    @property
    def chains(self) -> Chains:
        """The arrays that kernels read."""
        return self._store.chains

    @property
    def cursor(self) -> Cursor:
        """Where the sequence is being copied from, and its edits, as kernels keep them."""
        return self._store.cursor
