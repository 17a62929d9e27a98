"""The threads of the publisher and the consumer, with retries."""

import logging
from collections.abc import Callable
from threading import Event, Thread
from typing import Final

from retriever.backoff import Backoff
from retriever.client.credentials import without_credentials
from retriever.errors import LimitExceededError, StateError
from retriever.plugins.replication.consumer import Consumer, RecordLearner
from retriever.plugins.replication.options import ReplicationOptions
from retriever.plugins.replication.publisher import Outbox, Publisher
from retriever.plugins.replication.redis_streams import REFUSALS, Streams
from retriever.plugins.replication.replication_state import Position, ReplicationCounts

_JOIN_S: Final = 2.0  # longest wait at shutdown for a call whose connection was closed

_logger = logging.getLogger(__name__)


class Attempts:
    """Outcomes of a thread's calls to the server: counts, log messages and back-off.

    Args:
        doing: what the thread does, for the log.
        max_backoff_s: longest pause before the next attempt, in seconds.
        counts: counts to update.
        stopped: set to stop retries.
    """

    def __init__(
        self, doing: str, max_backoff_s: float, counts: ReplicationCounts, stopped: Event
    ) -> None:
        self._doing = doing
        self._backoff = Backoff(last_s=max_backoff_s)
        self._counts = counts
        self._stopped = stopped

    def worked(self) -> None:
        """Record that the server answered."""
        self._counts.connected = True
        if self._backoff.num_failures:
            self._backoff.succeed()
            _logger.info("outputs are %s again", self._doing)

    def failed(self, error: Exception) -> None:
        """Record a failure and back off, for longer after consecutive failures."""
        if self._stopped.is_set():
            return
        self._counts.failures += 1
        self._counts.connected = False
        if not self._backoff.num_failures:
            _logger.warning("outputs are not %s: %s; drafting continues", self._doing, error)
        self._stopped.wait(self._backoff.fail())


class Threads:
    """A publisher and a consumer, each in its own thread, until stopped.

    Args:
        options: options of replication.
        fingerprint: fingerprint of the vocabulary.
        outbox: queue to publish.
        learner: receives records.
        position: position in the streams.
        counts: counts to update.
    """

    def __init__(  # noqa: PLR0913, PLR0917  (what the threads are made of)
        self,
        options: ReplicationOptions,
        fingerprint: str,
        outbox: Outbox,
        learner: RecordLearner,
        position: Position,
        counts: ReplicationCounts,
    ) -> None:
        self._stopped = Event()
        self._streams = Streams(options, fingerprint)
        self._outbox = outbox
        publisher = Publisher(self._streams, outbox, position, counts)
        consumer = Consumer(self._streams, learner, position, counts, self._stopped)
        server, longest = without_credentials(options.url), options.max_backoff_s
        publishing = Attempts(f"published to {server}", longest, counts, self._stopped)
        learning = Attempts(f"learned from {server}", longest, counts, self._stopped)
        self._threads = [
            self._begin("foredraft-publish", publisher.turn, publishing),
            self._begin("foredraft-learn", consumer.turn, learning),
        ]

    def stop(self) -> None:
        """Stop both threads, even during a wait."""
        self._stopped.set()
        self._outbox.wake()
        self._streams.close()
        for thread in self._threads:
            thread.join(_JOIN_S)

    def _begin(self, name: str, turn: Callable[[], bool], attempts: Attempts) -> Thread:
        thread = Thread(target=self._run, args=(turn, attempts), name=name, daemon=True)
        thread.start()
        return thread

    def _run(self, turn: Callable[[], bool], attempts: Attempts) -> None:
        while not self._stopped.is_set():
            try:
                if turn():
                    attempts.worked()
            except (*REFUSALS, StateError, LimitExceededError) as error:
                attempts.failed(error)
            except Exception as error:
                if not self._stopped.is_set():  # when stopping, closed connections raise here
                    _logger.exception("outputs are not shared for a while")
                attempts.failed(error)
