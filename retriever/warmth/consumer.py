"""The thread that learns what the other drafters have generated."""

import time
from collections import Counter
from collections.abc import Iterator, Sequence
from threading import Event
from typing import Final

from retriever.warmth.counts import WarmthCounts
from retriever.warmth.deletions import Surplus
from retriever.warmth.learning import Learner
from retriever.warmth.position import BEGINNING, Position
from retriever.warmth.records import Record, UnreadableRecordError, decode
from retriever.warmth.streams import PAGE, StreamEntry, Streams

_BLOCK_MS: Final = 250
_GATHER_S: Final = 0.01  # what comes within it is learned at once


class Consumer:
    """Reads the streams from where it was, and lets the learner learn.

    Args:
        streams: where from.
        learner: where to.
        position: how far it has read; changed here alone.
        counts: where that is counted.
        stopped: set once it is to end.
    """

    def __init__(
        self,
        streams: Streams,
        learner: Learner,
        position: Position,
        counts: WarmthCounts,
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
        """Learn what has come, or wait for it.

        Raises:
            redis.RedisError, OSError: the server refuses, or is away.
            StateError: the disk refuses to delete.
            LimitExceededError: what is to be deleted is being deleted.
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
            # At most half of the time, so that drafts are hardly held up while it catches up.
            gather_s = _GATHER_S if len(outputs) < PAGE else 0.0
            self._stopped.wait(max(gather_s, time.thread_time() - started))

    def _find_place(self) -> None:
        """Go on where reading ended; but the server may have begun anew, or this is a first life.

        Deletions are read from their beginning, for whoever was away may still publish what is
        older than they are.
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
        """Return the id that as much comes after as the rings of all tenants hold.

        None where there was no time to find it.
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
            time.sleep(0)  # others may draft
        self._learner.expect(held)
        return begin

    def _delete(self, entries: Sequence[StreamEntry]) -> None:
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

    def _learn(self, entries: Sequence[StreamEntry]) -> None:
        deleted: list[str] = []
        for record in self._new_records(entries, deleted):
            self._learner.learn(record)
        self._learner.flush()
        self._streams.remove_outputs(deleted)

    def _new_records(self, entries: Sequence[StreamEntry], deleted: list[str]) -> Iterator[Record]:
        """Give what may be learned, having moved the position past it; note what was deleted."""
        for entry in entries:
            if self._stopped.is_set():
                return
            time.sleep(0)  # others may draft
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

    def _decode(self, entry: StreamEntry, stream: bytes) -> Record | str:
        """Return an entry's record, or why it has none."""
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
