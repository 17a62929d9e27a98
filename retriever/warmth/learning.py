"""Remembering what other drafters have generated, a little at a time, beside the drafting."""

import time
from collections.abc import Callable, Mapping
from threading import Lock
from typing import Final

from retriever.generations import Output
from retriever.limits import Limits
from retriever.pools import Pools
from retriever.warmth.counts import WarmthCounts
from retriever.warmth.deletions import Deletions
from retriever.warmth.position import Position
from retriever.warmth.records import Record

_AT_ONCE_TOKENS: Final = 1024  # drafts wait for them: a third of a millisecond


class Learner:
    """Adds records to the pools of their tenants.

    Args:
        pools: of this drafter.
        lock: held while drafts are made.
        limits: of this drafter.
        deletions: what may not be learned.
        position: how far the streams are read, which the log keeps with what was learned.
        forget: forgets a tenant, in memory and on disk.
        counts: where that is counted.
        clock: seconds since 1970.

    Attributes:
        vocabulary_size: ids must be below it; None where it is not known.
    """

    def __init__(  # noqa: PLR0913  (what a drafter consists of)
        self,
        pools: Pools,
        lock: Lock,
        *,
        limits: Limits,
        deletions: Deletions,
        position: Position,
        forget: Callable[[str], None],
        counts: WarmthCounts,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._pools = pools
        self._lock = lock
        self._limits = limits
        self.vocabulary_size: int | None = None
        self._deletions = deletions
        self._position = position
        self._forget = forget
        self._counts = counts
        self._clock = clock
        self._waiting: list[tuple[str, Output]] = []
        self._num_waiting = 0
        self._undeleted: set[str] = set()  # where the disk refused

    @property
    def ring_tokens(self) -> int:
        """Tokens that are remembered of each tenant."""
        return self._limits.generations_tokens

    def expect(self, num_tokens: Mapping[str, int]) -> None:
        """Make room for this many tokens of each tenant at once, while there is little to move."""
        for tenant, expected in num_tokens.items():
            self._pools.reserve(tenant, expected, self._lock)

    def reason(self, record: Record) -> str | None:
        """Return why a record cannot be learned; None if it can."""
        if self._deletions.cover(record.tenant, record.time_s):
            return "deleted"
        if self._clock() - record.time_s > self._limits.generations_age_s:
            return "expired"
        if self.vocabulary_size is not None and int(record.tokens.max()) >= self.vocabulary_size:
            return "vocabulary"
        return None

    def learn(self, record: Record) -> None:
        """Take a record, to be remembered soon; with `flush` at the latest."""
        # A clock that is ahead of ours must not keep an output longer than ours would.
        output = Output(record.tokens, min(record.time_s, self._clock()))
        self._waiting.append((record.tenant, output))
        self._num_waiting += len(record.tokens) + 1
        if self._num_waiting >= _AT_ONCE_TOKENS:
            self.flush()

    def flush(self) -> None:
        """Remember what was taken, and how far was read."""
        waiting, self._waiting, self._num_waiting = self._waiting, [], 0
        if not waiting:
            return
        note = self._position.to_bytes()
        learned = self._pools.learn(waiting, note, self._lock, self._deletions.cover)
        self._pools.commit()
        for _ in range(len(waiting) - len(learned)):
            self._counts.skip("no-room")
        self._counts.learned += len(learned)
        self._counts.learned_tokens += sum(len(output.tokens) for _, output in learned)

    def delete(self, tenant: str, time_s: float) -> bool:
        """Forget a tenant, as another drafter was told to; tell whether there was anything.

        Raises:
            StateError: the disk refuses; what is in memory is forgotten all the same.
        """
        time_s = min(time_s, self._clock())
        if self._deletions.cover(tenant, time_s) and tenant not in self._undeleted:
            return False
        self._undeleted.add(tenant)
        self._deletions.add(tenant, time_s)
        is_there = self._pools.may_hold(tenant, time_s)
        if is_there:
            self._forget(tenant)
        self._undeleted.remove(tenant)
        return is_there

    def note_deletion(self, tenant: str, time_s: float) -> None:
        """Learn nothing of a tenant that is of this time or older."""
        self._deletions.add(tenant, min(time_s, self._clock()))

    def keep_position(self) -> None:
        """Let the log keep how far was read."""
        self._pools.put_note(self._position.to_bytes())
