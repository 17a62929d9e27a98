"""The thread that tells the other drafters what this one has generated."""

from collections.abc import Mapping
from typing import Final

import numpy as np

from retriever.drafter import TokenIds
from retriever.scopes import Scope
from retriever.warmth.counts import WarmthCounts
from retriever.warmth.deletions import Deletions
from retriever.warmth.outbox import Batch, Outbox
from retriever.warmth.position import Position
from retriever.warmth.records import Record, UnreadableRecordError, decode, encode
from retriever.warmth.streams import Streams

_MAX_OUTPUTS: Final = 16  # at once: to encode them holds up other threads for half a millisecond
_WAIT_S: Final = 0.5
_NO_TOKENS: Final[TokenIds] = np.empty(0, np.int32)


class Publisher:
    """Takes what waits in the outbox to the streams.

    Args:
        streams: where to.
        outbox: where from.
        position: who publishes.
        counts: where that is counted.
    """

    def __init__(
        self, streams: Streams, outbox: Outbox, position: Position, counts: WarmthCounts
    ) -> None:
        self._streams = streams
        self._outbox = outbox
        self._position = position
        self._counts = counts

    def turn(self) -> bool:
        """Publish some of what waits, or wait for it; tell whether the server was asked.

        Raises:
            redis.RedisError, OSError: it refuses, or is away; what waited still does.
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
        """Tell the others first: what they have published until they know, they remove."""
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
