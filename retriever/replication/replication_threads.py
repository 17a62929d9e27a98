"""The threads that publish and learn, whatever becomes of the server."""

import logging
from collections.abc import Callable
from threading import Event, Thread
from typing import Final

from retriever.errors import LimitExceededError, StateError
from retriever.replication.consumer import Consumer, Learner
from retriever.replication.options import ReplicationOptions, without_credentials
from retriever.replication.publisher import Outbox, Publisher
from retriever.replication.redis_streams import REFUSALS, Streams
from retriever.replication.replicated_records import Position, ReplicationCounts

_FIRST_BACKOFF_S: Final = 0.1

_logger = logging.getLogger(__name__)


class Link:
    """What a thread knows of the server.

    Args:
        doing: what cannot be done without it, for the log.
        max_backoff_s: longest wait before the next try, in seconds.
        counts: where failures are counted.
        stopped: set once nothing is to be tried any more.
    """

    def __init__(
        self, doing: str, max_backoff_s: float, counts: ReplicationCounts, stopped: Event
    ) -> None:
        self._doing = doing
        self._max_backoff_s = max_backoff_s
        self._counts = counts
        self._stopped = stopped
        self._num_failures = 0

    def worked(self) -> None:
        """Note that the server answered."""
        self._counts.connected = True
        if self._num_failures:
            self._num_failures = 0
            _logger.info("outputs are %s again", self._doing)

    def failed(self, error: Exception) -> None:
        """Note that it did not, and wait; longer with each failure that follows another."""
        if self._stopped.is_set():
            return
        self._counts.failures += 1
        self._counts.connected = False
        if not self._num_failures:
            _logger.warning("outputs are not %s: %s; drafting goes on", self._doing, error)
        backoff_s = _FIRST_BACKOFF_S * 2 ** min(self._num_failures, 30)
        self._num_failures += 1
        self._stopped.wait(min(backoff_s, self._max_backoff_s))


_JOIN_S: Final = 2.0


class Threads:
    """A publisher and a consumer, each in a thread of its own, until they are stopped.

    Args:
        options: where, and within what bounds.
        fingerprint: of the vocabulary that outputs are shared of.
        outbox: what is published.
        learner: what learns.
        position: how far it has.
        counts: where all that is counted.
    """

    def __init__(  # noqa: PLR0913, PLR0917  (what the threads are made of)
        self,
        options: ReplicationOptions,
        fingerprint: str,
        outbox: Outbox,
        learner: Learner,
        position: Position,
        counts: ReplicationCounts,
    ) -> None:
        self._stopped = Event()
        self._streams = Streams(options, fingerprint)
        self._outbox = outbox
        publisher = Publisher(self._streams, outbox, position, counts)
        consumer = Consumer(self._streams, learner, position, counts, self._stopped)
        server, longest = without_credentials(options.url), options.max_backoff_s
        publishing = Link(f"published to {server}", longest, counts, self._stopped)
        learning = Link(f"learned from {server}", longest, counts, self._stopped)
        self._threads = [
            self._begin("foredraft-publish", publisher.turn, publishing),
            self._begin("foredraft-learn", consumer.turn, learning),
        ]

    def stop(self) -> None:
        """End both, whatever they wait for."""
        self._stopped.set()
        self._outbox.wake()
        self._streams.close()
        for thread in self._threads:
            thread.join(_JOIN_S)

    def _begin(self, name: str, turn: Callable[[], bool], link: Link) -> Thread:
        thread = Thread(target=self._run, args=(turn, link), name=name, daemon=True)
        thread.start()
        return thread

    def _run(self, turn: Callable[[], bool], link: Link) -> None:
        while not self._stopped.is_set():
            try:
                if turn():
                    link.worked()
            except (*REFUSALS, StateError, LimitExceededError) as error:
                link.failed(error)
            except Exception as error:
                if not self._stopped.is_set():  # connections end while they are used, then
                    _logger.exception("outputs are not shared for a while")
                link.failed(error)
