"""The database of a sequence itself: its prompt, and its output so far."""

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
"""Most tokens that are committed to a sequence at once; this takes a millisecond."""

SEQUENCE_BYTES: Final = 5 << 10
"""Memory of a session without its tokens: some forty objects. We measured 4.3 KB over 1,900
sessions."""


def context_bytes(num_tokens: int) -> int:
    """Return the memory of a sequence that starts with or grows to `num_tokens`, in bytes."""
    return store_bytes(2 * num_tokens, CONTEXT_LIMITS, Source.CONTEXT) + SEQUENCE_BYTES


class Context:
    """The sequence itself, in a growing store.

    Attributes:
        step: the sequence's requests to the kernel; the record is reused for each step.
        address: address of its store, packed for kernels; it changes when the store grows.
    """

    def __init__(self, prompt: TokenIds, charge: Charge | None = None) -> None:
        """Start with some tokens, int32[n]."""
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
        """Append committed tokens, int32[n]."""
        if not self._store.has_room(len(tokens)):
            self._grow(len(self) + len(tokens))
        self._store.extend(tokens)

    def ensure_room(self, num_tokens: int) -> None:
        """Grow now if `num_tokens` more do not fit.

        Raises:
            LimitExceededError: there is no room for them.
        """
        if not self._store.has_room(num_tokens):
            self.make_room(num_tokens)
            self._grow(len(self) + num_tokens)

    def _grow(self, size: int) -> None:
        """Move to a store with room for twice `size` tokens."""
        grown = ChainStore(2 * size, CONTEXT_LIMITS, Source.CONTEXT)
        grown.append(self.last(len(self)))
        grown.follow(self._store)
        self._take(grown)
        self.settle()

    def is_long(self, num_tokens: int) -> bool:
        """Return whether committing `num_tokens` more would block other work for too long."""
        size = len(self._store) + num_tokens
        return size > LONG_COMMIT and (num_tokens > LONG_COMMIT or size > self._store.capacity)

    def make_room(self, num_tokens: int) -> None:
        """Charge the memory for more tokens before they are committed, if they do not fit.

        Called with the drafter's lock held.

        Raises:
            LimitExceededError: there is no room for them.
        """
        if not self._store.has_room(num_tokens) and self._charge is not None:
            size = len(self) + num_tokens
            needed = self._store.num_bytes + context_bytes(size)  # both exist during the copy
            self._charge.add(max(0, needed - self._charge.num_bytes))

    def settle(self) -> None:
        """Return charged memory that is not needed."""
        if self._charge is not None:
            self._charge.settle(self._store.num_bytes + SEQUENCE_BYTES)

    def clear(self) -> None:
        """Overwrite the tokens, so that an ended sequence leaves nothing in memory."""
        self._store.clear()

    def last(self, num_tokens: int) -> TokenIds:
        """Return the last tokens, at most `num_tokens`."""
        return self._store.last(num_tokens)

    def has_room(self, num_tokens: int) -> bool:
        """Return whether `num_tokens` more tokens can be appended tentatively."""
        return self._store.has_room(num_tokens)

    def supposing(self, tokens: TokenIds) -> AbstractContextManager[None]:
        """Append tokens, int32[n], for the block only; the caller has checked for room."""
        return self._store.supposing(tokens)

    @property
    def num_bytes(self) -> int:
        """Memory of the store, in bytes."""
        return self._store.num_bytes

    @property
    def touched_bytes(self) -> int:
        """Resident memory of the sequence, in bytes."""
        return self._store.touched_bytes

    @property
    def chains(self) -> Chains:
        """The arrays that kernels read."""
        return self._store.chains

    @property
    def cursor(self) -> Cursor:
        """The place from which the sequence is copied, and its edits, in the form of kernels."""
        return self._store.cursor
