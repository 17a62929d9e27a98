"""Whether the server answers a thread: counted, logged once, and how long to wait for it."""

import logging
from threading import Event
from typing import Final

from retriever.warmth.counts import WarmthCounts

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
        self, doing: str, max_backoff_s: float, counts: WarmthCounts, stopped: Event
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
