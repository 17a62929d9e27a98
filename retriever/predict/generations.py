"""The database of generations: a ring of outputs in memory, with expiry and deletion."""

import math
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from hashlib import sha256
from typing import Final, NamedTuple, Self
from weakref import ref

import numpy as np
from numpy.typing import NDArray

from retriever.drafter import TokenIds
from retriever.errors import LimitExceededError
from retriever.kernels.chains import SEPARATOR
from retriever.kernels.entries import add_tokens
from retriever.kernels.layout import aligned_zeros
from retriever.kernels.live_table import WAYS, count_tokens
from retriever.predict.ledger import Charge
from retriever.predict.stores import (
    GENERATIONS_LIMITS,
    MIN_CAPACITY,
    ChainLimits,
    ChainStore,
    ring_capacity,
    store_bytes,
)
from retriever.tree import Source

# Where available, a clock that runs while the machine is suspended.
_RISING: Final = getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC)
_BEGAN_S: Final = time.time() - time.clock_gettime(_RISING)


def steady_time() -> float:
    """Return seconds since 1970, based on the system clock at the start of this process.

    If the system clock is set later, the age of outputs does not change.
    """
    return _BEGAN_S + time.clock_gettime(_RISING)


class Scope(NamedTuple):
    """The unit of deletion: a tenant, or one origin of a tenant.

    Attributes:
        tenant: name of the tenant.
        origin: origin of the outputs, see `session_origin`; empty for all outputs of the tenant.
    """

    tenant: str
    origin: bytes = b""

    def covers(self, other: Self) -> bool:
        """Return whether deleting this scope also deletes the other scope."""
        return self.tenant == other.tenant and self.origin in {b"", other.origin}


def session_origin(name: str) -> bytes:
    """Return a hash of a session's name, which marks its outputs without revealing the name."""
    return sha256(name.encode()).digest()[:16] if name else b""


_MARGIN: Final = 8
"""Tokens are subtracted from the counts this many tokens before they are overwritten, because the
tokens before them, their context, must still exist."""

_AT_ONCE: Final = 1 << 12
"""Most tokens added in one piece while others wait; this takes a millisecond or two."""

_END_BYTES: Final = 200  # size of the entry for an output's end: four small objects

POOL_BYTES: Final = 8 << 10
"""Memory of a tenant's pool without its outputs: weights and some forty objects. We measured 7.5 KB
over 1,000 pools."""

_END: Final = np.array([SEPARATOR], np.int32)


class Output(NamedTuple):
    """One generation: the output of a model for one sequence.

    Attributes:
        tokens: int32[n], token ids.
        time_s: when it ended, in seconds since 1970.
        origin: key for deletion, 16 bytes; empty if it cannot be deleted by session.
        version: version of the model that wrote it; 0 if unknown.
    """

    tokens: TokenIds
    time_s: float
    origin: bytes = b""
    version: int = 0


_NOWHERE: Final = 1 << 62
_FEWEST_VERSIONS: Final = 16
_NO_VERSIONS: Final = np.empty((0, 2), np.int64)

NO_OUTPUT: Final = Output(np.empty(0, np.int32), 0.0)


class _End(NamedTuple):
    """The position in the ring after an output's separator, and the output's attributes."""

    time_s: float
    position: int
    origin: bytes
    version: int


class Generations:
    """The newest `capacity` tokens of generations that are not older than `max_age_s`.

    The ring doubles as it fills. An output takes one slot more than it has tokens. Not thread-safe:
    callers hold a lock.

    Args:
        capacity: most tokens to hold; rounded up to a power of two. Each takes 24 bytes, and 6 more
            for each order of n-grams beyond two.
        max_age_s: outputs older than this are not read, in seconds.
        clock: returns seconds since 1970.
        limits: the n-grams that index the outputs.
        charge: charge for the memory; the ring does not grow if there is no room for that. None to
            grow freely.

    Attributes:
        live: int64[sets, WAYS], counts of successors.
        versions: int64[n, 2], the model versions that wrote the outputs; see `chains.fade_rows`.
        expires_at_s: when the oldest output expires, by the clock.
        arrays: the arrays that drafts read: the packed store, `live` and `versions`. It is a new
            tuple whenever one of them is replaced.
    """

    def __init__(
        self,
        capacity: int,
        max_age_s: float = math.inf,
        clock: Callable[[], float] = steady_time,
        limits: ChainLimits = GENERATIONS_LIMITS,
        charge: Charge | None = None,
    ) -> None:
        self._charge = charge
        self._limits = limits
        self._capacity = ring_capacity(capacity)
        self._max_age_s = max_age_s
        self._clock = clock
        self.versions, self._version = _NO_VERSIONS, 0
        self._take_empty()
        self._counted_from = 0
        self._ends: deque[_End] = deque()
        self.expires_at_s = math.inf
        self._coming: deque[Output] = deque()
        self._adder: ref[Iterator[None]] | None = None
        self._epoch = 0
        self._settle()

    @property
    def num_bytes(self) -> int:
        """Memory of the outputs, in bytes."""
        return self._store.num_bytes + self.live.nbytes + _END_BYTES * len(self._ends)

    @property
    def touched_bytes(self) -> int:
        """Resident memory of the outputs, in bytes."""
        return self.num_bytes - self._store.num_bytes + self._store.touched_bytes

    @property
    def num_tokens(self) -> int:
        """Tokens in the ring, including one separator for each output."""
        self._expire()
        return len(self._store) - self._store.oldest

    def add(self, output: TokenIds, time_s: float | None = None) -> None:
        """Remember the output of one sequence, int32[n].

        Args:
            output: token ids.
            time_s: when it ended; now if not given. Outputs that were added before an older one
                expire with it.
        """
        if len(output):
            self.extend([Output(output, self._clock() if time_s is None else time_s)])

    def extend(self, outputs: Sequence[Output]) -> None:
        """Remember several outputs, oldest first, after outputs that are still added in pieces."""
        if self._is_adding:
            self._coming.extend(outputs)
            return
        if self._coming:  # the iterator that should have added them was dropped
            outputs = [*self._coming, *outputs]
            self._coming.clear()
        self._expire()
        documents = [part for output in outputs for part in (output.tokens, _END)]
        if not documents:
            return
        tokens = np.concatenate(documents, dtype=np.int32, casting="same_kind")
        if self._is_too_small(len(tokens)):
            self._make_room(len(tokens))
        self._note_versions(outputs)
        self._note_ends(outputs)
        self._append(tokens)
        self._drop_ends()
        self._expire()
        self._settle()

    def adding(self, output: Output) -> Iterator[None]:
        """Remember an output; if it is long, the returned iterator adds it in pieces.

        A piece takes a millisecond. The output is queued immediately, so a deletion before the
        first piece also deletes it. Others may use this object between pieces, and find the pieces
        added so far. Outputs that arrive meanwhile follow it. If everything is deleted meanwhile,
        nothing of the output remains.
        """
        if self._is_quick(len(output.tokens) + 1):
            self.extend([output])
            return iter(())
        self._coming.append(output)
        if self._is_adding:
            return iter(())  # the running iterator adds this output, too
        pieces = self._adding_all(self._epoch)
        self._adder = ref(pieces)
        return pieces

    @property
    def _is_adding(self) -> bool:
        """Whether an iterator is adding outputs in pieces."""
        return self._adder is not None and self._adder() is not None

    def _adding_all(self, epoch: int) -> Iterator[None]:
        """Add the queued outputs until there are no more or everything is deleted."""
        try:
            while self._coming and epoch == self._epoch:
                yield from self._adding(self._coming[0], epoch)
                if epoch == self._epoch:
                    self._coming.popleft()
        finally:
            if epoch == self._epoch:
                self._adder = None

    def _is_quick(self, num_tokens: int) -> bool:
        """Return whether adding `num_tokens` is short enough for a single piece."""
        moved = self._num_held if self._is_too_small(num_tokens) else 0
        return num_tokens + moved <= 2 * _AT_ONCE

    @property
    def _num_held(self) -> int:
        """Number of tokens that can be read, including separators."""
        return len(self._store) - self._store.oldest

    def _is_too_small(self, num_tokens: int) -> bool:
        """Return whether the ring must grow before it takes `num_tokens` more."""
        capacity = self._store.capacity
        return capacity < self._capacity and self._num_held + num_tokens > capacity

    def _adding(self, output: Output, epoch: int) -> Iterator[None]:
        """Append an output in pieces, and record its end."""
        self._expire()
        yield from self._making_room(len(output.tokens) + 1, epoch)
        for begin in range(0, len(output.tokens), _AT_ONCE):
            if epoch != self._epoch:
                return
            if not begin:
                self._note_version(output.version, len(self._store))
            self._append(output.tokens[begin : begin + _AT_ONCE])
            yield
        if epoch == self._epoch:
            self._append(_END)
            self._note_end(output, len(self._store))
            self._drop_ends()
            self._expire()
            self._settle()

    def outputs(self) -> list[Output]:
        """Return all outputs, oldest first; the oldest may have lost its beginning."""
        self._expire()
        self._drop_ends()
        held, begin = self._store.live(), self._store.oldest
        found: list[Output] = []
        for end in self._ends:
            tokens = held[begin - self._store.oldest : end.position - 1 - self._store.oldest]
            found.append(Output(tokens.copy(), end.time_s, end.origin, end.version))
            begin = end.position
        return found

    def removing(self, origin: bytes) -> Iterator[None]:
        """Delete the outputs of an origin in the first step, then add the other outputs again.

        A step takes a millisecond or two. Others may use this object between steps, and find the
        outputs added so far.
        """
        coming = list(self._coming)  # the first may already be in the ring in part
        origins = [each.origin for each in self._ends] + [each.origin for each in coming]
        if origin not in origins:
            return
        kept = [output for output in (*self.outputs(), *coming) if output.origin != origin]
        self.clear()
        self.reserve(sum(len(output.tokens) + 1 for output in kept))
        yield
        begin, size = 0, 0
        for end, output in enumerate(kept, 1):
            size += len(output.tokens) + 1
            if size >= 2 * _AT_ONCE:
                self.extend(kept[begin : end - 1])
                yield from self.adding(output)
                begin, size = end, 0
            elif size >= _AT_ONCE or end == len(kept):
                self.extend(kept[begin:end])
                begin, size = end, 0
                yield

    def reserve(self, num_tokens: int) -> None:
        """Grow now for this many more tokens (one more for each output), up to the capacity."""
        self._make_room(num_tokens)

    def clear(self) -> None:
        """Delete and overwrite everything."""
        self._store.clear()
        self.live[:] = 0
        self.versions, self._version = _NO_VERSIONS, 0
        self._take_empty()
        self._counted_from = 0
        self._ends.clear()
        self.expires_at_s = math.inf
        self._coming.clear()
        self._adder = None
        self._epoch += 1
        self._settle()

    def shrink(self) -> bool:
        """Keep only the newest outputs, in a ring half as large; return False for a small ring.

        Takes 20 ms for a million tokens.
        """
        size = self._store.capacity // 2
        if size < MIN_CAPACITY:
            return False
        coming = list(self._coming)  # the first may already be in the ring in part
        kept: deque[Output] = deque()
        num_tokens = 0
        newest_first = [*self.outputs(), *coming][::-1]
        if newest_first:  # if it is too long, only its end stays
            newest = newest_first[0]
            newest_first[0] = newest._replace(tokens=newest.tokens[1 - size :])
        for output in newest_first:
            num_tokens += len(output.tokens) + 1
            if num_tokens > size:
                break
            kept.appendleft(output)
        self.clear()
        self.extend(kept)
        return True

    def _take_empty(self) -> None:
        store = ChainStore(0, self._limits, Source.GENERATIONS)
        self._take(store, live_table(store.capacity))

    def _take(self, store: ChainStore, live: NDArray[np.int64]) -> None:
        """Use a store and its live table from now on."""
        self._store, self.live = store, live
        self.arrays = store.packed, live, self.versions

    def _settle(self) -> None:
        if self._charge is not None:
            self._charge.settle(self.num_bytes + POOL_BYTES)

    def leave_out_expired(self) -> None:
        """Make expired outputs unreadable."""
        if self.expires_at_s < math.inf and self.expires_at_s < self._clock():
            self._expire()

    def _make_room(self, num_tokens: int) -> None:
        """Move to a larger ring if the tokens would overwrite outputs within the capacity.

        The size at least doubles, so each token is linked again about once on average.
        """
        for _ in self._making_room(num_tokens, self._epoch):
            pass

    def _making_room(self, num_tokens: int, epoch: int) -> Iterator[None]:
        """Do what `_make_room` does, in pieces; drafts read the smaller ring until all is moved."""
        store = self._store
        if not self._is_too_small(num_tokens):
            return
        wanted = ring_capacity(self._num_held + num_tokens)
        size = self._affordable(min(self._capacity, wanted))
        if size <= store.capacity or self._store is not store:
            self._settle()
            return  # no room, or the ring was shrunk to make room: the oldest is overwritten
        grown = ChainStore(size, self._limits, Source.GENERATIONS, start=store.oldest)
        grown.tokens[(store.oldest - 1) & (size - 1)] = (
            SEPARATOR  # nothing precedes the first token
        )
        live, first, tokens = live_table(size), store.oldest, store.live()
        for begin in range(0, len(tokens), _AT_ONCE):
            if begin:
                yield
            if epoch != self._epoch:
                return
            part = tokens[begin : begin + _AT_ONCE]
            add_tokens(grown.address, live, part, first, 0)
        oldest = store.oldest  # some outputs may have expired meanwhile
        self._take(grown, live)
        self._counted_from = first
        if oldest > first:
            self._take_back(oldest)
            grown.forget_before(oldest)
        self._settle()

    def _affordable(self, size: int) -> int:
        """Charge the memory of a ring of this size, or of the largest one that fits."""
        while self._charge is not None and size > self._store.capacity:
            try:
                self._charge.add(generations_bytes(size, self._limits))
            except LimitExceededError:
                size //= 2
            else:
                break
        return size

    def _append(self, tokens: TokenIds) -> None:
        """Append tokens, int32[n]; the tokens that they overwrite are first subtracted."""
        store = self._store
        self._counted_from = add_tokens(
            store.address, self.live, tokens, self._counted_from, _MARGIN
        )

    def _take_back(self, position: int) -> None:
        """Subtract the tokens before `position` from the counts."""
        end = min(position, len(self._store))
        if end > self._counted_from:
            count_tokens(self.live, self._store.tokens, self._counted_from, end, -1)
            self._counted_from = end

    def has_older(self, version: int) -> bool:
        """Return whether an output of an older version is in memory."""
        oldest = self._store.oldest
        if len(self._store) == oldest:
            return False
        noted = self.versions[: int(np.searchsorted(self.versions[:, 0], _NOWHERE))]
        first = int(np.searchsorted(noted[:, 0], oldest, "right")) - 1
        earliest = int(noted[first, 1]) if first >= 0 else 0
        return min(earliest, int(noted[first + 1 :, 1].min(initial=earliest))) < version

    def _note_versions(self, outputs: Sequence[Output]) -> None:
        begin = len(self._store)
        for output in outputs:
            self._note_version(output.version, begin)
            begin += len(output.tokens) + 1

    def _note_version(self, version: int, begin: int) -> None:
        """Record which version wrote the tokens from a position on."""
        if version == self._version:
            return
        self._version = version
        noted = self.versions
        size = int(np.searchsorted(noted[:, 0], _NOWHERE))
        if size == len(noted):
            oldest = self._store.oldest  # drop entries of overwritten positions
            kept = noted[max(0, int(np.searchsorted(noted[:, 0], oldest, "right")) - 1) :]
            size = len(kept)
            self.versions = np.full((max(_FEWEST_VERSIONS, 2 * size), 2), _NOWHERE, np.int64)
            self.versions[:size] = kept
            self._take(self._store, self.live)
        self.versions[size] = begin, version

    def _note_ends(self, outputs: Sequence[Output]) -> None:
        end = len(self._store)
        for output in outputs:
            end += len(output.tokens) + 1
            self._note_end(output, end)

    def _note_end(self, output: Output, end: int) -> None:
        self._ends.append(_End(output.time_s, end, output.origin, output.version))
        self._end_no_later(output.time_s)
        self.expires_at_s = self._ends[0].time_s + self._max_age_s

    def _drop_ends(self) -> None:
        """Drop the ends of overwritten outputs."""
        while self._ends and self._ends[0].position <= self._store.oldest:
            self._ends.popleft()

    def _end_no_later(self, time_s: float) -> None:
        """Make each output expire no later than the outputs added after it."""
        place = len(self._ends) - 2
        while place >= 0 and self._ends[place].time_s > time_s:
            self._ends[place] = self._ends[place]._replace(time_s=time_s)
            place -= 1

    def _expire(self) -> None:
        """Stop reading expired outputs."""
        if self.expires_at_s == math.inf:
            return
        now, oldest = self._clock(), self._store.oldest
        while self._ends and (
            self._ends[0].time_s + self._max_age_s < now or self._ends[0].position <= oldest
        ):
            end = self._ends.popleft().position
            self._take_back(end)
            self._store.forget_before(end)
        self.expires_at_s = self._ends[0].time_s + self._max_age_s if self._ends else math.inf


def generations_bytes(capacity: int, limits: ChainLimits) -> int:
    """Return the memory of a ring of generations with its live table, in bytes."""
    num_entries = max(1, ring_capacity(capacity) // WAYS) * WAYS
    return store_bytes(capacity, limits, Source.GENERATIONS) + 8 * num_entries


def live_table(capacity: int) -> NDArray[np.int64]:
    """Return an empty table, int64[sets, WAYS], with an entry for each token of a ring."""
    return aligned_zeros((max(1, capacity // WAYS), WAYS), np.int64)
