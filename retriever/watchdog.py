"""A deadline for calls that take none: a read from a stream has no timeout of its own."""

import time
from collections.abc import Callable
from threading import Condition, Thread
from typing import Self


class Watchdog:
    """Calls `on_timeout` once a guarded block has run for longer than `timeout_s` seconds.

    Entering and leaving the block costs about a microsecond: one sleeping thread looks at the
    clock instead of a timer being made each time. It may bark up to a quarter of the timeout late.
    """

    def __init__(self, timeout_s: float, on_timeout: Callable[[], object]) -> None:
        self._timeout_s = timeout_s
        self._on_timeout = on_timeout
        self._entered_at: float | None = None
        self._stopped = False
        self._changed = Condition()
        self._thread = Thread(target=self._watch, name="foredraft-watchdog", daemon=True)
        self._thread.start()

    def __enter__(self) -> Self:
        self._entered_at = time.monotonic()
        return self

    def __exit__(self, *_: object) -> None:
        self._entered_at = None

    def stop(self) -> None:
        """End the thread."""
        with self._changed:
            self._stopped = True
            self._changed.notify()

    def _watch(self) -> None:
        with self._changed:
            while not self._stopped:
                self._changed.wait(self._timeout_s / 4)
                entered_at = self._entered_at
                if entered_at is not None and time.monotonic() - entered_at > self._timeout_s:
                    self._entered_at = None
                    self._on_timeout()
