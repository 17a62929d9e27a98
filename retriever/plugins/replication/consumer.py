"""Reads the replication streams and adds other drafters' outputs to the pools in small steps."""

import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from threading import Event, Lock
from typing import TYPE_CHECKING, Final

from retriever.limits import Limits
from retriever.log.pools import Pools
from retriever.plugins.replication.options import PAGE
from retriever.plugins.replication.replicated_records import Record, UnreadableRecordError, decode
from retriever.plugins.replication.replication_state import (
    BEGINNING,
    Deletions,
    Position,
    ReplicationCounts,
    Surplus,
)
from retriever.predict.generations import Output, Scope, steady_time

if TYPE_CHECKING:
    from retriever.plugins.replication.redis_streams import StreamEntry, Streams

_AT_ONCE_TOKENS: Final = 1024  # drafts wait for this long: a third of a millisecond
_BLOCK_MS: Final = 250  # bounds the time that a blocked thread takes to stop
_GATHER_S: Final = 0.01  # records that arrive within this time are learned in one step


class RecordLearner:
    """Adds records to the pools of their tenants.

    Args:
        pools: pools of this drafter.
        lock: held while drafts are made.
        limits: limits of this drafter.
        deletions: deletions of outputs that must not be learned.
        position: position in the streams; the log stores it with the learned outputs.
        forget: deletes a scope in memory and on disk.
        counts: counts to update.
        clock: returns seconds since 1970.

    Attributes:
        vocabulary_size: bound on token ids; None if unknown.
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
        counts: ReplicationCounts,
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
        self._undeleted: set[Scope] = set()  # scopes that the disk refused to delete

    @property
    def ring_tokens(self) -> int:
        """Most tokens held for each tenant."""
        return self._limits.generations_tokens

    def expect(self, num_tokens: Mapping[str, int]) -> None:
        """Reserve room in advance for this many tokens of each tenant."""
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
        """Queue a record; it is added soon, or at once by `flush`."""
        # A writer whose clock is ahead must not extend an output's lifetime.
        output = Output(record.tokens, min(record.time_s, self._clock()), record.origin)
        self._waiting.append((record.tenant, output))
        self._num_waiting += len(record.tokens) + 1
        if self._num_waiting >= _AT_ONCE_TOKENS:
            self.flush()

    def flush(self) -> None:
        """Add queued records, and store the position."""
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
        """Delete a scope on behalf of another drafter; return whether it was attempted.

        Nothing is attempted if the tenant has no outputs that are old enough.

        Raises:
            StateError: the disk refuses; the data in memory is deleted anyway.
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
        """Refuse outputs of a scope that ended at or before this time from now on."""
        self._deletions.add(scope, min(time_s, self._clock()))

    def keep_position(self) -> None:
        """Store the position in the log."""
        self._pools.put_note(self._position.to_bytes())


class Consumer:
    """Reads the streams from the last position, and passes records to the learner.

    Args:
        streams: streams to read.
        learner: receives the records.
        position: position in the streams; changed only here.
        counts: counts to update.
        stopped: set to stop.
    """

    def __init__(
        self,
        streams: "Streams",
        learner: RecordLearner,
        position: Position,
        counts: ReplicationCounts,
        stopped: Event,
    ) -> None:
        self._streams = streams
        self._learner = learner
        self._position = position
        self._counts = counts
        self._stopped = stopped
        self._is_placed = False
        self._deletions_from = BEGINNING
        self._surplus = Surplus()

    def turn(self) -> bool:
        """Learn new records, or wait for new records.

        Raises:
            redis.RedisError, OSError: the server refuses, or is down.
            StateError: the disk refuses to delete.
            LimitExceededError: the data is being deleted already.
        """
        try:
            self._read_on()
        except BaseException:
            self._is_placed = False  # the server may come back with other streams
            raise
        return True

    def _read_on(self) -> None:
        started = time.thread_time()
        if not self._is_placed:
            self._find_place()
            self._is_placed = True
        outputs, deletions = self._streams.read(
            self._position.outputs or BEGINNING, self._deletions_from, _BLOCK_MS
        )
        self._delete(deletions)
        self._learn(outputs)
        if outputs:
            # Work at most half of the time, so that catching up does not delay drafts.
            gather_s = _GATHER_S if len(outputs) < PAGE else 0.0
            self._stopped.wait(max(gather_s, time.thread_time() - started))

    def _find_place(self) -> None:
        """Find the position to read from, after a reset of the server or for a new replica.

        Deletions are read from the start, because a replica that was down may still publish older
        outputs.
        """
        position = self._position
        if self._has_begun_anew(self._streams.outputs, position.outputs):
            position.outputs = BEGINNING
        if self._has_begun_anew(self._streams.deletions, position.deletions):
            position.deletions = BEGINNING
        self._deletions_from, self._surplus = BEGINNING, Surplus()
        for page in self._streams.forwards(self._streams.deletions):
            self._delete(page)
        if position.outputs is None:
            position.outputs = self._beginning()

    def _has_begun_anew(self, stream: bytes, offset: str | None) -> bool:
        last = self._streams.last_id(stream)
        return offset is not None and (last is None or _order(last) < _order(offset))

    def _beginning(self) -> str | None:
        """Return the id after which the outputs fill all tenants' rings.

        Returns None if stopped before it is found.
        """
        begin = BEGINNING
        held: Counter[str] = Counter()
        for entry in self._streams.backwards():
            if self._stopped.is_set():
                return None
            if held and min(held.values()) >= self._learner.ring_tokens:
                begin = entry.entry_id
                break
            record = self._decode(entry, self._streams.outputs)
            if isinstance(record, Record):
                held[record.tenant] += len(record.tokens) + 1
            time.sleep(0)  # let others draft
        self._learner.expect(held)
        return begin

    def _delete(self, entries: "Sequence[StreamEntry]") -> None:
        known = _order(self._position.deletions or BEGINNING)
        surplus: list[str] = []
        for entry in entries:
            record = self._decode(entry, self._streams.deletions)
            is_new = _order(entry.entry_id) > known
            if isinstance(record, str):
                if is_new:
                    self._counts.skip(record)
            elif not is_new or record.replica == self._position.replica:
                self._learner.note_deletion(record.scope, record.time_s)
            elif self._learner.delete(record.scope, record.time_s):
                self._counts.deletions += 1
            if isinstance(record, Record):
                surplus += self._surplus.add(record.scope, entry.entry_id)
            self._deletions_from = entry.entry_id
            if is_new:
                self._position.deletions = entry.entry_id
        if entries and _order(self._deletions_from) > known:
            self._learner.keep_position()
        self._streams.remove_deletions(surplus)

    def _learn(self, entries: "Sequence[StreamEntry]") -> None:
        deleted: list[str] = []
        for record in self._new_records(entries, deleted):
            self._learner.learn(record)
        self._learner.flush()
        self._streams.remove_outputs(deleted)

    def _new_records(
        self, entries: "Sequence[StreamEntry]", deleted: list[str]
    ) -> Iterator[Record]:
        """Yield learnable records, and move the position past them; record deletions."""
        for entry in entries:
            if self._stopped.is_set():
                return
            time.sleep(0)  # let others draft
            record = self._decode(entry, self._streams.outputs)
            reason = record if isinstance(record, str) else self._reason(record)
            self._position.outputs = entry.entry_id
            if reason == "deleted":
                deleted.append(entry.entry_id)
            if reason is not None:
                self._counts.skip(reason)
            elif isinstance(record, Record):
                yield record

    def _reason(self, record: Record) -> str | None:
        """Return why a record is not learned; None if it is."""
        reason = self._learner.reason(record)
        if reason == "deleted":
            return reason
        if record.replica == self._position.replica:
            return "own"
        if not self._position.is_new(record.replica, record.number):
            return "repeated"
        return reason

    def _decode(self, entry: "StreamEntry", stream: bytes) -> Record | str:
        """Return the record of an entry, or the reason why it has no record."""
        if entry.data is None:
            return "foreign"
        try:
            record = decode(entry.data, stream)
        except UnreadableRecordError as error:
            return str(error)
        if bool(len(record.tokens)) != (stream == self._streams.outputs):
            return "damaged"
        return record


def _order(entry_id: str) -> tuple[int, ...]:
    return tuple(map(int, entry_id.split("-")))
