"""Replication as a drafter uses it: publishing outputs and deletions, start and shutdown."""

import time
from collections import deque
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any, Final

from indexer.reader import Vocabulary
from retriever.errors import ReplicationError
from retriever.plugins.replication.consumer import RecordLearner
from retriever.plugins.replication.options import ReplicationOptions
from retriever.plugins.replication.publisher import Outbox
from retriever.plugins.replication.replication_state import Deletions, Position, ReplicationCounts
from retriever.predict.generations import Scope, steady_time
from retriever.predict.pool import Entry
from retriever.sessions.drafter_plugins import DrafterPlugin
from retriever.sessions.drafter_state import DrafterState

if TYPE_CHECKING:
    from retriever.plugins.replication.replication_threads import Threads

_FLUSH_S: Final = 1.0  # 10 ms suffice if the server answers; bounds the delay of a shutdown


class Replication(DrafterPlugin):
    """Replicates outputs through a Redis server, once the vocabulary is known.

    Args:
        options: checked options.
        state: state of the drafter.

    Attributes:
        counts: counts of replicated outputs.
    """

    name = "replication"

    def __init__(self, options: ReplicationOptions, state: DrafterState) -> None:
        self.counts: ReplicationCounts = ReplicationCounts()
        self._options = options
        self._pools = state.pools
        self._deletions = Deletions()
        self._position = Position.resume(state.pools.note())
        self._outbox = Outbox(
            self._position, self._deletions, options.max_queued_tokens, self.counts
        )
        self._learner = RecordLearner(
            state.pools,
            state.lock,
            limits=state.limits,
            deletions=self._deletions,
            position=self._position,
            forget=lambda scope: state.forget(scope, self._outbox.withdraw),
            counts=self.counts,
        )
        self._held: deque[Entry] = deque()
        self._running: Threads | None = None

    def on_vocabulary(self, fingerprint: str, vocabulary: Vocabulary | None) -> None:
        """Start to replicate outputs of this vocabulary."""
        self.settle()
        if vocabulary is not None:
            self._learner.vocabulary_size = vocabulary.size
        with _needing_redis():
            from retriever.plugins.replication.replication_threads import Threads  # noqa: PLC0415  (an extra)
        self._running = Threads(
            self._options, fingerprint, self._outbox, self._learner, self._position, self.counts
        )

    def on_remembered(self, entry: Entry) -> None:
        """Queue a remembered output; it is published once it is stored. Takes a microsecond."""
        self._held.append(entry)

    @contextmanager
    def storing(self) -> Iterator[None]:
        """Publish the outputs that are held now after the block, because the block stores them."""
        held: list[Entry] = []
        with suppress(IndexError):
            while True:
                held.append(self._held.popleft())
        yield
        for entry in held:
            self._outbox.offer(entry.tenant, entry.output)

    def on_deleting(self, scope: Scope) -> None:
        """Publish a deletion."""
        now = steady_time()
        self._deletions.add(scope, now)
        self._outbox.delete(scope, now)

    def settle(self) -> None:
        """Store the position in the log for the next process."""
        self._pools.put_note(self._position.to_bytes())

    def metrics(self) -> Iterable[Any]:
        """Return the metrics of replication."""
        from retriever.plugins.replication.replication_metrics import metrics_of  # noqa: PLC0415  (an extra)

        return metrics_of(self.counts)

    def shut_down(self) -> None:
        """Stop the threads; publish queued records for at most a second."""
        if self._running is None:
            return
        end = time.monotonic() + _FLUSH_S
        while self.counts.connected and not self._outbox.is_empty() and time.monotonic() < end:
            time.sleep(0.005)
        self._running.stop()
        self._running = None
        self.settle()


def check(options: ReplicationOptions) -> None:
    """Refuse invalid options.

    Raises:
        ReplicationError: the library redis is missing, or the URL is invalid.
    """
    with _needing_redis():
        from retriever.plugins.replication.redis_streams import check_url  # noqa: PLC0415  (an extra)
    check_url(options)


@contextmanager
def _needing_redis() -> Iterator[None]:
    try:
        yield
    except ModuleNotFoundError as error:
        raise ReplicationError(
            f"the library {error.name}, which shares outputs, is missing: "
            "run `pip install 'foredraft[redis]'`"
        ) from error
