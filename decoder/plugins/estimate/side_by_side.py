"""Parallel replays: one runs in this process, and each other replay in its own process."""

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
"""Most helper processes: each loads the drafting code, a few hundred megabytes."""

_WORTH_TOKENS: Final = 5000
"""With fewer tokens in a log, a replay ends before another process has started."""


Seen = Callable[[ProjectedOutcome, int], None]
"""Called with an outcome so far, and with the number of records since the last call."""


def outcomes_of(log: TokenLog, replays: Sequence[Replay], seen: Seen) -> list[ProjectedOutcome]:
    """Return the outcome of each replay, in order.

    This process takes replays from the front, and the helper processes take them from the end, so
    the first figure comes soon. This process also runs the rules that cannot be pickled, and all
    replays if no helper process starts.

    Args:
        log: the records; helper processes read them from the same file.
        replays: the replays; each starts with no outputs.
        seen: called with the progress.

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
    """Helper processes, one for each further processor; each runs one replay at a time."""

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
                continue  # a user's own rule that only this process can run
        context = get_context("spawn")
        theirs, self._ours = context.Pipe(duplex=False)
        self._pool = ProcessPoolExecutor(self._most, context, _prepare, (theirs,))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self._pool is not None:
            self._ours.close()  # ends the processes at once
            self._pool.shutdown(cancel_futures=True)

    def take(self, waiting: "deque[int]") -> None:
        """Start waiting replays while a process is free; the last replay comes first."""
        for number in [n for n in reversed(waiting) if n in self._given]:
            if self._pool is None or len(self.running) >= self._most or len(waiting) < 2:  # noqa: PLR2004
                return
            waiting.remove(number)
            # Ctrl-C must not reach the helper processes: they end with this process.
            mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
            try:
                self.running[self._pool.submit(_helped, self._given[number])] = number
            finally:
                signal.pthread_sigmask(signal.SIG_SETMASK, mask)

    def done(self, *, is_awaited: bool) -> list[tuple[int, ProjectedOutcome | None]]:
        """Return the finished replays with their outcomes.

        The outcome is None if no helper process can run the replay.

        Args:
            is_awaited: whether to wait until at least one replay has finished.
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
    """End this process when the process that started it has ended or needs it no more."""
    threading.Thread(target=_end_with, args=(lifeline,), daemon=True).start()


def _end_with(lifeline: Connection) -> None:
    lifeline.poll(None)
    os._exit(1)


def _helped(given: bytes) -> ProjectedOutcome:
    log, replay = pickle.loads(given)  # noqa: S301  (from the process that started this one)
    return replayed(log, replay)
