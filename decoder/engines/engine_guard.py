"""Keeps foredraft's errors from reaching the engine that calls it."""

import logging
from collections.abc import Callable
from contextlib import suppress
from types import TracebackType

from decoder.errors import UnsupportedEngineError


class EngineGuard:
    """Guards all code that an engine calls: errors cost drafts but never reach the engine.

        with guard:
            return sequences.step(rows)
        return nothing

    An error ends the block, and the code after it continues without drafts. Blocks may be nested.

    Args:
        engine: the engine's name in log messages.
        log: logger of the adapter.
        abandon: function that drops all sequences, because their state is unknown after an error;
            errors in it are ignored.
        level: log level of the first error. From `ERROR` on, the traceback is logged too, unless
            the engine's version is the cause.

    Attributes:
        num_failures: number of errors so far.
    """

    def __init__(
        self,
        engine: str,
        log: logging.Logger,
        abandon: Callable[[], None],
        level: int = logging.WARNING,
    ) -> None:
        self.num_failures = 0
        self._engine = engine
        self._log = log
        self._abandon = abandon
        self._level = level

    def __enter__(self) -> None: ...

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> bool:
        if not isinstance(error, Exception):
            return False
        self.count(error)
        with suppress(Exception):
            self._abandon()
        return True

    def count(self, error: Exception) -> None:
        """Count an error that was already handled; log the first error."""
        self.num_failures += 1
        if self.num_failures == 1:
            has_trace = self._level >= logging.ERROR and not isinstance(
                error, UnsupportedEngineError
            )
            self._log.log(
                self._level,
                "%s goes on without drafts for now: %s",
                self._engine,
                error,
                exc_info=error if has_trace else None,
            )
