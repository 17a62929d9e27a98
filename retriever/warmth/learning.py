"""Remembering what other drafters have generated, a little at a time, beside the drafting."""

from collections.abc import Callable, Mapping
from threading import Lock
from typing import Final

from retriever.clock import steady_time
from retriever.generations import Output
from retriever.limits import Limits
from retriever.pools import Pools
from retriever.scopes import Scope
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
        forget: forgets what is of a scope, in memory and on disk.
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
        forget: Callable[[Scope], None],
        counts: WarmthCounts,
        clock: Callable[[], float] = steady_time,
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
        self._undeleted: set[Scope] = set()  # where the disk refused

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
        if self._deletions.cover(record.scope, record.time_s):
            return "deleted"
        if self._clock() - record.time_s > self._limits.generations_age_s:
            return "expired"
        if self.vocabulary_size is not None and int(record.tokens.max()) >= self.vocabulary_size:
            return "vocabulary"
        return None

    def learn(self, record: Record) -> None:
        """Take a record, to be remembered soon; with `flush` at the latest."""
        # A clock that is ahead of ours must not keep an output longer than ours would.
        output = Output(record.tokens, min(record.time_s, self._clock()), record.origin)
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

    def delete(self, scope: Scope, time_s: float) -> bool:
        """Forget what is of a scope, as another drafter was told to; tell whether it was tried.

        Of a tenant it is not where there is nothing so old.

        Raises:
            StateError: the disk refuses; what is in memory is forgotten all the same.
            LimitExceededError: the tenant's data is being deleted: try again soon.
        """
        time_s = min(time_s, self._clock())
        if self._deletions.cover(scope, time_s) and scope not in self._undeleted:
            return False
        self._undeleted.add(scope)
        self._deletions.add(scope, time_s)
        is_there = bool(scope.origin) or self._pools.may_hold(scope.tenant, time_s)
        if is_there:
            self._forget(scope)
        self._undeleted.remove(scope)
        return is_there

    def note_deletion(self, scope: Scope, time_s: float) -> None:
        """Learn nothing of a scope that is of this time or older."""
        self._deletions.add(scope, min(time_s, self._clock()))

    def keep_position(self) -> None:
        """Let the log keep how far was read."""
        self._pools.put_note(self._position.to_bytes())
