"""Generations in memory, to find what followed the last tokens; and what is deleted of them."""

import math
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from hashlib import sha256
from typing import Final, NamedTuple, Self

import numpy as np
from numpy.typing import NDArray

from retriever.drafter import TokenIds
from retriever.kernels.chains import SEPARATOR
from retriever.kernels.live_table import WAYS, count_tokens
from retriever.predict.question import Question
from retriever.predict.stores import GENERATIONS_LIMITS, ChainLimits, ChainStore, ring_capacity
from retriever.tree import Source

# Where there is one, a clock that goes on while the machine is suspended.
_RISING: Final = getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC)
_BEGAN_S: Final = time.time() - time.clock_gettime(_RISING)


def steady_time() -> float:
    """Return seconds since 1970, by the machine's clock as it stood when this process began.

    Should that clock be set, by an hour or by days, nothing here is younger or older than before.
    """
    return _BEGAN_S + time.clock_gettime(_RISING)


class Scope(NamedTuple):
    """What is deleted, or what an output is deleted with.

    Attributes:
        tenant: its name.
        origin: of outputs, see `session_origin`; empty for all that the tenant has.
    """

    tenant: str
    origin: bytes = b""

    def covers(self, other: Self) -> bool:
        """Tell whether to delete this deletes that."""
        return self.tenant == other.tenant and self.origin in {b"", other.origin}


def session_origin(name: str) -> bytes:
    """Return what tells a session's outputs from others, and does not tell its name."""
    return sha256(name.encode()).digest()[:16] if name else b""


_MARGIN: Final = 8
"""Tokens that are no longer counted before they are overwritten: the contexts of those after."""

_AT_ONCE: Final = 1 << 12
"""Tokens that are taken in at once while others wait."""

_END: Final = np.array([SEPARATOR], np.int32)


@dataclass(frozen=True, slots=True)
class Output:
    """What a model wrote.

    Attributes:
        tokens: int32[n], token ids.
        time_s: when it ended, in seconds since 1970.
        origin: what it is deleted by, 16 bytes; none where nobody will ask for it.
    """

    tokens: TokenIds
    time_s: float
    origin: bytes = b""


class _End(NamedTuple):
    """Where an output in the ring ends, its end included, and what else is known of it."""

    time_s: float
    position: int
    origin: bytes


class Generations:
    """generations, the newest `capacity` tokens of them, none older than `max_age_s`.

    The ring grows with what it holds, by doubling. An output takes one place more than it has
    tokens. Callers hold a lock.

    Args:
        capacity: most tokens to hold; rounded up to a power of two. Each takes 24 bytes, and 6 more
            for each order of n-grams beyond two.
        max_age_s: outputs older than this are not read, in seconds.
        clock: seconds since 1970.
        limits: the n-grams by which outputs are found.
    """

    def __init__(
        self,
        capacity: int,
        max_age_s: float = math.inf,
        clock: Callable[[], float] = steady_time,
        limits: ChainLimits = GENERATIONS_LIMITS,
    ) -> None:
        self._limits = limits
        self._capacity = ring_capacity(capacity)
        self._max_age_s = max_age_s
        self._clock = clock
        self._store = ChainStore(0, self._limits, Source.GENERATIONS)
        self.live = live_table(self._store.capacity)
        self._counted_from = 0
        self._ends: deque[_End] = deque()
        self._expires_at_s = math.inf

    @property
    def num_bytes(self) -> int:
        """Memory of the store, in bytes."""
        return self._store.num_bytes + self.live.nbytes

    @property
    def num_tokens(self) -> int:
        """Tokens that are held, with one for each output's end."""
        self._expire()
        return len(self._store) - self._store.oldest

    def add(self, output: TokenIds, time_s: float | None = None) -> None:
        """Remember int32[n], the output of one sequence.

        Args:
            output: token ids.
            time_s: when it ended; now if not given. What was added before an older output is read
                no longer than that is.
        """
        if len(output):
            self.extend([Output(output, self._clock() if time_s is None else time_s)])

    def extend(self, outputs: Sequence[Output]) -> None:
        """Remember several outputs, oldest first."""
        self._expire()
        documents = [part for output in outputs for part in (output.tokens, _END)]
        if not documents:
            return
        tokens = np.concatenate(documents).astype(np.int32, copy=False)
        self._make_room(len(tokens))
        self._note_ends(outputs)
        self._append(tokens)
        self._drop_ends()
        self._expire()

    def outputs(self) -> list[Output]:
        """Return what is held, oldest first; of the oldest the end, where its beginning is gone."""
        self._expire()
        held, begin = self._store.live(), self._store.oldest
        found: list[Output] = []
        for end in self._ends:
            tokens = held[begin - self._store.oldest : end.position - 1 - self._store.oldest]
            found.append(Output(tokens.copy(), end.time_s, end.origin))
            begin = end.position
        return found

    def removing(self, origin: bytes) -> Iterator[None]:
        """Forget the outputs of an origin with the first step, and take the others in again.

        A step takes a millisecond or two, and between steps others may use this: they find what
        was taken in by then.
        """
        if all(end.origin != origin for end in self._ends):
            return
        kept = [output for output in self.outputs() if output.origin != origin]
        self.clear()
        self.reserve(sum(len(output.tokens) + 1 for output in kept))
        yield
        begin, size = 0, 0
        for end, output in enumerate(kept, 1):
            size += len(output.tokens) + 1
            if size >= _AT_ONCE or end == len(kept):
                self.extend(kept[begin:end])
                begin, size = end, 0
                yield

    def reserve(self, num_tokens: int) -> None:
        """Make room now for this many more tokens, one more for each output, or the most."""
        self._make_room(num_tokens)

    def clear(self) -> None:
        """Forget everything, and overwrite it."""
        self._store.chains.tokens[:] = 0
        self.live[:] = 0
        self._store = ChainStore(0, self._limits, Source.GENERATIONS)
        self.live = live_table(self._store.capacity)
        self._counted_from = 0
        self._ends.clear()
        self._expires_at_s = math.inf

    def commit(self, tokens: TokenIds) -> None:
        """Do nothing: a sequence is no generation before it ends; see `add`."""

    def collect(self, question: Question, row: int) -> int:
        """Write rows of evidence from `row` on; return the first free row."""
        if self._expires_at_s < math.inf and self._expires_at_s < self._clock():
            self._expire()
        return self._store.collect(question, row)

    def _make_room(self, num_tokens: int) -> None:
        """Move to a larger ring where the tokens would overwrite what may stay.

        It then has at least twice the size, so that a token is linked again about once.
        """
        store = self._store
        held = len(store) - store.oldest
        if store.capacity == self._capacity or held + num_tokens <= store.capacity:
            return
        size = min(self._capacity, ring_capacity(held + num_tokens))
        self._store = ChainStore(size, self._limits, Source.GENERATIONS, start=store.oldest)
        self._store.chains.tokens[(store.oldest - 1) & (size - 1)] = (
            SEPARATOR  # nothing precedes the first token
        )
        self.live = live_table(size)
        self._counted_from = store.oldest
        self._append(store.live())

    def _append(self, tokens: TokenIds) -> None:
        """Append int32[n], having taken back what they overwrite."""
        store = self._store
        for part in np.array_split(tokens, max(1, -(-len(tokens) // (store.capacity // 2)))):
            self._take_back(len(store) + len(part) - store.capacity + _MARGIN)
            begin = len(store)
            store.append(part)
            count_tokens(self.live, store.chains.tokens, begin, len(store), 1)

    def _take_back(self, position: int) -> None:
        """No longer count what stands before `position`."""
        end = min(position, len(self._store))
        if end > self._counted_from:
            count_tokens(self.live, self._store.chains.tokens, self._counted_from, end, -1)
            self._counted_from = end

    def _note_ends(self, outputs: Sequence[Output]) -> None:
        end = len(self._store)
        for output in outputs:
            end += len(output.tokens) + 1
            self._ends.append(_End(output.time_s, end, output.origin))
            self._end_no_later(output.time_s)
        self._expires_at_s = self._ends[0].time_s + self._max_age_s

    def _drop_ends(self) -> None:
        """Know no longer of outputs that were overwritten."""
        while self._ends and self._ends[0].position <= self._store.oldest:
            self._ends.popleft()

    def _end_no_later(self, time_s: float) -> None:
        """Let what stands before an output that came late expire with it, if not sooner."""
        place = len(self._ends) - 2
        while place >= 0 and self._ends[place].time_s > time_s:
            self._ends[place] = self._ends[place]._replace(time_s=time_s)
            place -= 1

    def _expire(self) -> None:
        """Stop reading what is too old."""
        if self._expires_at_s == math.inf:
            return
        now, oldest = self._clock(), self._store.oldest
        while self._ends and (
            self._ends[0].time_s + self._max_age_s < now or self._ends[0].position <= oldest
        ):
            end = self._ends.popleft().position
            self._take_back(end)
            self._store.forget_before(end)
        self._expires_at_s = self._ends[0].time_s + self._max_age_s if self._ends else math.inf


def live_table(capacity: int) -> NDArray[np.int64]:
    """Return int64[sets, WAYS], an empty table with an entry for each token of a ring."""
    return np.zeros((max(1, capacity // WAYS), WAYS), np.int64)
