"""Ctrl-C: at once where nothing is lost by it, else between two passes of the model."""

import signal
from collections.abc import Iterator
from contextlib import contextmanager


class Interruption:
    """Turns the first Ctrl-C during a step into a request to stop behind it.

    So what is shown, what is counted and what the drafter is told agree. A second one raises
    KeyboardInterrupt wherever it comes.

    Attributes:
        is_requested: whether to stop.
        is_deferred: whether Ctrl-C is a request now, and no exception.
    """

    def __init__(self) -> None:
        self.is_requested = False
        self.is_deferred = False

    @contextmanager
    def handled(self) -> Iterator[None]:
        """Answer Ctrl-C for the block's time; in the main thread only."""
        previous = signal.signal(signal.SIGINT, self._handle)
        try:
            yield
        finally:
            signal.signal(signal.SIGINT, previous)

    @contextmanager
    def between_steps(self) -> Iterator[None]:
        """End the deferring with the block."""
        try:
            yield
        finally:
            self.is_deferred = False

    def _handle(self, *_: object) -> None:
        if not self.is_deferred or self.is_requested:
            raise KeyboardInterrupt
        self.is_requested = True
