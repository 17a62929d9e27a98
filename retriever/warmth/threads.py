"""The threads that publish and learn, whatever becomes of the server."""

import logging
from collections.abc import Callable
from threading import Event, Thread
from typing import Final

from retriever.errors import LimitExceededError, StateError
from retriever.warmth.consumer import Consumer
from retriever.warmth.counts import WarmthCounts
from retriever.warmth.learning import Learner
from retriever.warmth.link import Link
from retriever.warmth.options import WarmthOptions, without_credentials
from retriever.warmth.outbox import Outbox
from retriever.warmth.position import Position
from retriever.warmth.publisher import Publisher
from retriever.warmth.streams import REFUSALS, Streams, check_url

__all__ = ["Threads", "check_url"]

_JOIN_S: Final = 2.0

_logger = logging.getLogger(__name__)


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
        options: WarmthOptions,
        fingerprint: str,
        outbox: Outbox,
        learner: Learner,
        position: Position,
        counts: WarmthCounts,
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
