"""Keeps our errors from reaching an engine that calls us."""

import logging
from collections.abc import Callable
from contextlib import suppress
from types import TracebackType

from decoder.errors import UnsupportedEngineError


class EngineGuard:
    """Guards everything that an engine calls: an error costs drafts but never reaches the engine.

        with guard:
            return sequences.step(rows)
        return nothing

    An error ends the block, and the code after it continues without drafts. Blocks may be nested.

    Args:
        engine: name of the engine in the log.
        log: logger of the adapter.
        abandon: drops all sequences, because their state is unknown after an error; its own errors
            are ignored.
        level: log level of the first error. From `ERROR` on the traceback is also logged, unless
            the engine's version is the cause.

    Attributes:
        num_failures: errors so far.
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
        """Count an error that is already handled; log the first one."""
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
