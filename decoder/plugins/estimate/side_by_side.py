"""Replays beside one another: one in this process, others in processes of their own."""

import os
import pickle
import signal
import threading
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from multiprocessing import get_context
from multiprocessing.connection import Connection
from typing import Final, Self

from decoder.plugins.estimate.projection import ProjectedOutcome, Replay, replayed
from decoder.plugins.estimate.token_log import TokenLog

_MOST_PROCESSES: Final = 8
"""Each loads what drafts, some hundred megabytes."""

_WORTH_TOKENS: Final = 5000
"""Fewer are replayed before another process has started."""


Seen = Callable[[ProjectedOutcome, int], None]
"""Is told of an outcome so far, and of how many records came to it since it was last told."""


def outcomes_of(log: TokenLog, replays: Sequence[Replay], seen: Seen) -> list[ProjectedOutcome]:
    """Return the outcome of each replay, in order.

    This process begins with the first ones and others with the last, so that there is a figure
    soon. It also does what others cannot: rules that they cannot be given, and all where none
    starts.

    Args:
        log: which other processes read from the same file.
        replays: each begins with no output.
        seen: is told of progress.

    Raises:
        RetrieverError: a drafter refuses a record.
    """
    waiting = deque(range(len(replays)))
    outcomes: dict[int, ProjectedOutcome] = {}
    with _Helpers(log, replays) as helpers:
        while waiting or helpers.running:
            helpers.take(waiting)
            if waiting:
                number = waiting.popleft()
                outcomes[number] = replayed(log, replays[number], seen=lambda each: seen(each, 1))
            for number, outcome in helpers.done(is_awaited=not waiting):
                if outcome is None:
                    waiting.append(number)
                else:
                    outcomes[number] = outcome
                    seen(outcome, log.num_records)
    return [outcomes[number] for number in range(len(replays))]


class _Helpers:
    """Other processes, each with a replay at a time: one for each further processor."""

    def __init__(self, log: TokenLog, replays: Sequence[Replay]) -> None:
        self._given: dict[int, bytes] = {}
        self.running: dict[Future[ProjectedOutcome], int] = {}
        processors = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else 1
        self._most = min(processors - 1, _MOST_PROCESSES)
        self._pool: ProcessPoolExecutor | None = None
        if self._most < 1 or log.num_tokens < _WORTH_TOKENS:
            return
        for number, replay in enumerate(replays):
            try:
                self._given[number] = pickle.dumps((log, replay))
            except (AttributeError, TypeError, pickle.PicklingError):
                continue  # a rule of the user's own that only this process can have
        context = get_context("spawn")
        theirs, self._ours = context.Pipe(duplex=False)
        self._pool = ProcessPoolExecutor(self._most, context, _prepare, (theirs,))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self._pool is not None:
            self._ours.close()  # whatever they are doing, they end
            self._pool.shutdown(cancel_futures=True)

    def take(self, waiting: "deque[int]") -> None:
        """Take replays that wait, the last ones first, as long as a process is free."""
        for number in [n for n in reversed(waiting) if n in self._given]:
            if self._pool is None or len(self.running) >= self._most or len(waiting) < 2:  # noqa: PLR2004
                return
            waiting.remove(number)
            # Ctrl-C must not reach a process that this starts: it ends with this one.
            mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
            try:
                self.running[self._pool.submit(_helped, self._given[number])] = number
            finally:
                signal.pthread_sigmask(signal.SIG_SETMASK, mask)

    def done(self, *, is_awaited: bool) -> list[tuple[int, ProjectedOutcome | None]]:
        """Return the outcomes that are there, of at least one replay where they are awaited.

        None stands for a replay that no other process can do.
        """
        timeout = None if is_awaited else 0
        found: list[tuple[int, ProjectedOutcome | None]] = []
        for future in wait(self.running, timeout, FIRST_COMPLETED).done:
            number = self.running.pop(future)
            try:
                found.append((number, future.result()))
            except (BrokenProcessPool, ImportError, AttributeError, pickle.UnpicklingError):
                self._pool, self._given = None, {}
                found.append((number, None))
        return found


def _prepare(lifeline: Connection) -> None:
    """End this process when the one that started it is gone, or done."""
    threading.Thread(target=_end_with, args=(lifeline,), daemon=True).start()


def _end_with(lifeline: Connection) -> None:
    lifeline.poll(None)
    os._exit(1)


def _helped(given: bytes) -> ProjectedOutcome:
    log, replay = pickle.loads(given)  # noqa: S301  (from the process that started this one)
    return replayed(log, replay)
