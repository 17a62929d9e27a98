"""Whether the server answers: counted, logged once, and how long to wait before the next try."""

import logging
from threading import Event, Lock
from typing import Final

from retriever.warmth.counts import WarmthCounts

_FIRST_BACKOFF_S: Final = 0.1

_logger = logging.getLogger(__name__)


class Link:
    """What the threads know of the server. Safe to call from any thread.

    Args:
        name: of the server, without credentials.
        max_backoff_s: longest wait before the next try, in seconds.
        counts: where failures are counted.

    Attributes:
        stopped: set once nothing is to be tried any more.
    """

    def __init__(self, name: str, max_backoff_s: float, counts: WarmthCounts) -> None:
        self.stopped = Event()
        self._name = name
        self._max_backoff_s = max_backoff_s
        self._counts = counts
        self._is_away = False
        self._lock = Lock()

    def worked(self) -> None:
        """Note that the server answered."""
        with self._lock:
            self._counts.connected = True
            if self._is_away:
                self._is_away = False
                _logger.info("outputs are shared through %s again", self._name)

    def failed(self, error: Exception, num_failures: int) -> None:
        """Note that it did not, and wait; longer with each failure that follows another."""
        if self.stopped.is_set():
            return
        with self._lock:
            self._counts.failures += 1
            self._counts.connected = False
            if not self._is_away:
                self._is_away = True
                _logger.warning(
                    "outputs are not shared through %s: %s; drafting goes on", self._name, error
                )
        self.stopped.wait(min(_FIRST_BACKOFF_S * 2 ** min(num_failures, 30), self._max_backoff_s))
