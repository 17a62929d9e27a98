"""The bounded queue of outputs and deletions, and the publisher that sends them to the streams."""

from collections import deque
from collections.abc import Mapping
from itertools import count, islice
from threading import Condition
from typing import TYPE_CHECKING, Final, NamedTuple

import numpy as np

from retriever.plugins.replication.options import MAX_RECORD_TOKENS
from retriever.plugins.replication.replicated_records import (
    Record,
    UnreadableRecordError,
    decode,
    encode,
)
from retriever.plugins.replication.replication_state import Deletions, Position, ReplicationCounts
from retriever.predict.generations import Output, Scope

if TYPE_CHECKING:
    from retriever.plugins.replication.redis_streams import Streams

_RECORD_TOKENS: Final = 64  # overhead of a record, in tokens of 4 bytes
_MAX_OUTPUTS: Final = 16  # per batch: encoding blocks other threads for half a millisecond
_WAIT_S: Final = 0.5  # how often an idle publisher checks whether to stop
_NO_TOKENS: Final = np.empty(0, np.int32)


class Batch(NamedTuple):
    """The next records to publish: deletions first, because no queued output is older."""

    deletions: dict[Scope, float]
    outputs: list[Record]


class Outbox:
    """The queue of outputs and deletions. Thread-safe; calls take microseconds.

    Args:
        position: identity of the replica; stores unsent deletions.
        deletions: deletions of outputs that must not be published.
        max_tokens: most tokens of queued outputs; beyond it, the oldest are dropped.
        counts: counts to update.
    """

    def __init__(
        self, position: Position, deletions: Deletions, max_tokens: int, counts: ReplicationCounts
    ) -> None:
        self._position = position
        self._deletions = deletions
        self._max_tokens = max_tokens
        self._counts = counts
        self._numbers = count(position.first_number)
        self._outputs: deque[Record] = deque()
        self._num_tokens = 0
        self._changed = Condition()
        self._count()

    def offer(self, tenant: str, output: Output) -> None:
        """Queue an output."""
        tokens, time_s, origin = output.tokens, output.time_s, output.origin
        parts = [
            tokens[start : start + MAX_RECORD_TOKENS].copy()
            for start in range(0, len(tokens), MAX_RECORD_TOKENS)
        ]
        with self._changed:
            if self._deletions.cover(Scope(tenant, origin), time_s):
                return
            for part in parts:
                number = next(self._numbers)
                record = Record(self._position.replica, number, tenant, time_s, part, origin)
                self._outputs.append(record)
                self._num_tokens += _size(record)
            while self._num_tokens > self._max_tokens and self._outputs:
                self._num_tokens -= _size(self._outputs.popleft())
                self._counts.dropped += 1
            self._count()
            self._changed.notify()

    def delete(self, scope: Scope, time_s: float) -> None:
        """Queue a deletion, and drop queued outputs that it covers."""
        with self._changed:
            self._position.unsent[scope] = time_s
            self._remove(scope)
            self._changed.notify()

    def withdraw(self, scope: Scope) -> None:
        """Drop queued outputs of a scope that another drafter has deleted."""
        with self._changed:
            self._remove(scope)

    def next_batch(self, max_outputs: int, wait_s: float) -> Batch:
        """Return the next batch, which stays queued until `sent`; empty after `wait_s`."""
        with self._changed:
            if not self._outputs and not self._position.unsent:
                self._changed.wait(wait_s)
            return Batch(dict(self._position.unsent), list(islice(self._outputs, max_outputs)))

    def sent(self, batch: Batch) -> None:
        """Remove a published batch from the queue."""
        last = batch.outputs[-1].number if batch.outputs else -1
        with self._changed:
            for scope, time_s in batch.deletions.items():
                if self._position.unsent.get(scope) == time_s:
                    del self._position.unsent[scope]
            while self._outputs and self._outputs[0].number <= last:
                self._num_tokens -= _size(self._outputs.popleft())
            self._count()

    def wake(self) -> None:
        """End the wait of `next_batch`."""
        with self._changed:
            self._changed.notify_all()

    def is_empty(self) -> bool:
        """Whether the queue is empty."""
        return not self._outputs and not self._position.unsent

    def _remove(self, scope: Scope) -> None:
        self._outputs = deque(each for each in self._outputs if not scope.covers(each.scope))
        self._num_tokens = sum(map(_size, self._outputs))
        self._count()

    def _count(self) -> None:
        self._counts.queued = len(self._outputs)
        self._counts.unsent_deletions = len(self._position.unsent)


def _size(record: Record) -> int:
    """Memory of a record, in tokens."""
    return _RECORD_TOKENS + len(record.tokens)


class Publisher:
    """Moves records from the outbox to the streams.

    Args:
        streams: streams to append to.
        outbox: queue to read from.
        position: identity of the replica.
        counts: counts to update.
    """

    def __init__(
        self, streams: "Streams", outbox: Outbox, position: Position, counts: ReplicationCounts
    ) -> None:
        self._streams = streams
        self._outbox = outbox
        self._position = position
        self._counts = counts

    def turn(self) -> bool:
        """Publish a batch, or wait for one; return whether the server was used.

        Raises:
            redis.RedisError, OSError: the server refuses, or is down; the batch stays queued.
        """
        batch = self._outbox.next_batch(_MAX_OUTPUTS, _WAIT_S)
        if batch.deletions:
            self._delete(batch.deletions)
        if batch.outputs:
            encoded = [encode(record, self._streams.outputs) for record in batch.outputs]
            self._streams.append_outputs(encoded)
            self._counts.published += len(encoded)
        self._outbox.sent(batch)
        return batch != Batch({}, [])

    def _delete(self, times_s: Mapping[Scope, float]) -> None:
        """Publish deletions, then remove the outputs that they cover from the stream."""
        deletions = Deletions()
        for (tenant, origin), time_s in times_s.items():
            deletions.add(Scope(tenant, origin), time_s)
            record = Record(self._position.replica, 0, tenant, time_s, _NO_TOKENS, origin)
            self._streams.append_deletion(encode(record, self._streams.deletions))
        found = [
            entry.entry_id
            for page in self._streams.forwards(self._streams.outputs)
            for entry in page
            if entry.data is not None and self._is_deleted(entry.data, deletions)
        ]
        self._streams.remove_outputs(found)

    def _is_deleted(self, data: bytes, deletions: Deletions) -> bool:
        try:
            record = decode(data, self._streams.outputs)
        except UnreadableRecordError:
            return False
        return deletions.cover(record.scope, record.time_s)
