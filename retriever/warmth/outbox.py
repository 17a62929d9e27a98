"""What waits to be published: bounded, and never waited for."""

from collections import deque
from itertools import count, islice
from threading import Condition
from typing import Final, NamedTuple

from retriever.generations import Output
from retriever.scopes import Scope
from retriever.warmth.counts import WarmthCounts
from retriever.warmth.deletions import Deletions
from retriever.warmth.options import MAX_RECORD_TOKENS
from retriever.warmth.position import Position
from retriever.warmth.records import Record

_RECORD_TOKENS: Final = 64  # what a record takes beside its tokens, as tokens of 4 bytes


class Batch(NamedTuple):
    """What is to be published next: deletions first, for no output that waits is older."""

    deletions: dict[Scope, float]
    outputs: list[Record]


class Outbox:
    """Outputs and deletions that wait. Safe to call from any thread; takes microseconds.

    Args:
        position: who publishes; keeps the deletions that wait.
        deletions: what may not be published any more.
        max_tokens: outputs that wait, in tokens; beyond it the oldest are dropped.
        counts: where that is counted.
    """

    def __init__(
        self, position: Position, deletions: Deletions, max_tokens: int, counts: WarmthCounts
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
        """Let an output be published."""
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
        """Let a deletion be published, and nothing that waits of what it deletes."""
        with self._changed:
            self._position.unsent[scope] = time_s
            self._remove(scope)
            self._changed.notify()

    def withdraw(self, scope: Scope) -> None:
        """Publish nothing of a scope that waits: another drafter was told to delete it."""
        with self._changed:
            self._remove(scope)

    def next_batch(self, max_outputs: int, wait_s: float) -> Batch:
        """Return what waits; it goes on waiting until it was sent. Empty after `wait_s`."""
        with self._changed:
            if not self._outputs and not self._position.unsent:
                self._changed.wait(wait_s)
            return Batch(dict(self._position.unsent), list(islice(self._outputs, max_outputs)))

    def sent(self, batch: Batch) -> None:
        """Let what was published wait no longer."""
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
        """Whether nothing waits."""
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
