"""Runs tasks in a pool of processes that respects a memory limit and replaces dead workers."""

import os
import signal
import threading
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from contextlib import ExitStack
from dataclasses import dataclass
from multiprocessing import get_context
from multiprocessing.connection import Connection
from typing import Any, Final, Self, TypeVar

from indexer.engines import MAX_RETRIES, check_workers, forbid_threads, num_that_fit
from indexer.engines.memory import bytes_taken
from indexer.errors import IndexerError

_Task = TypeVar("_Task")
_Result = TypeVar("_Result")

_TRACKER_BYTES: Final = 16 << 20
"""Memory of the extra process that multiprocessing starts in addition to the workers."""

# Never fork: a fork would leave threads and mapped databases in an undefined state.
_CONTEXT: Final = get_context("spawn")


@dataclass(frozen=True, slots=True)
class ProcessPool:
    """Runs tasks in other processes on this machine; an `Engine`.

    As many tasks run at once as there are workers, if they fit into memory. This process's memory
    counts, too. A worker that dies is replaced, and its task runs again. However this process ends,
    the workers end with it.

    Attributes:
        workers: most concurrent processes.
        memory_bytes: memory that this process and the workers together may take. Pages of mapped
            files do not count, because the system can reclaim them.
    """

    workers: int
    memory_bytes: int

    def __post_init__(self) -> None:
        check_workers(self.workers)

    def map(
        self, function: Callable[[_Task], _Result], tasks: Sequence[_Task], memory_bytes: int
    ) -> Iterator[_Result]:
        """See `Engine.map`."""
        if not tasks:
            return
        with ExitStack() as stack:
            first = stack.enter_context(_Worker())
            interpreter = first.bytes_taken(function)
            fixed = bytes_taken() + _TRACKER_BYTES
            fitting = num_that_fit(self.memory_bytes, fixed, interpreter + memory_bytes)
            number = min(self.workers, len(tasks), fitting)
            others = [stack.enter_context(_Worker()) for _ in range(number - 1)]
            yield from _run(function, tasks, [first, *others])


class _Worker:
    """One process, started on demand. It ends with the block, whatever it is doing.

    It holds one end of a pipe, and only this process has the other end. When that end closes, the
    worker ends.
    """

    def __init__(self) -> None:
        self._executor: ProcessPoolExecutor | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def submit(self, function: Callable[..., Any], *arguments: Any) -> "Future[Any]":
        if self._executor is None:
            theirs, self._ours = _CONTEXT.Pipe(duplex=False)
            self._executor = ProcessPoolExecutor(1, _CONTEXT, _prepare, (theirs,))
        # The first task starts the process. Ctrl-C must not reach it; it ends with this process.
        mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
        try:
            return self._executor.submit(function, *arguments)
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, mask)

    def stop(self) -> None:
        """End the process immediately. The next task starts a new process."""
        if self._executor is not None:
            self._ours.close()
            self._executor.shutdown(wait=True, cancel_futures=True)
            self._executor = None

    def bytes_taken(self, function: Callable[..., Any]) -> int:
        """Return the memory of a worker after it has imported what a function needs."""
        for _ in range(MAX_RETRIES + 1):
            try:
                return int(self.submit(_introduce, function).result())
            except BrokenProcessPool:
                self.stop()
        raise IndexerError(
            "no worker process could be started: a script that builds with several processes must "
            'do so under `if __name__ == "__main__":`; --engine serial needs none'
        )


def _run(
    function: Callable[[_Task], _Result], tasks: Sequence[_Task], workers: Sequence[_Worker]
) -> Iterator[_Result]:
    """Yield results in order. Each worker has one task at a time."""
    waiting, idle = deque(range(len(tasks))), list(workers)
    running: dict[Future[_Result], tuple[int, _Worker]] = {}
    results: dict[int, _Result] = {}
    deaths: Counter[int] = Counter()
    for turn in range(len(tasks)):
        while turn not in results:
            while idle and waiting:
                number, worker = waiting.popleft(), idle.pop()
                running[worker.submit(function, tasks[number])] = number, worker
            for future in wait(running, return_when=FIRST_COMPLETED).done:
                number, worker = running.pop(future)
                idle.append(worker)
                try:
                    results[number] = future.result()
                except BrokenProcessPool as error:
                    worker.stop()
                    _count_death(deaths, number, error)
                    waiting.appendleft(number)
        yield results.pop(turn)


def _count_death(deaths: "Counter[int]", number: int, error: BaseException) -> None:
    deaths[number] += 1
    if deaths[number] > MAX_RETRIES:
        raise IndexerError(
            f"a worker process died {deaths[number]} times at the same task, as if the system had "
            "killed it for lack of memory: choose fewer --workers or less --memory than it has"
        ) from error


def _prepare(lifeline: Connection) -> None:
    """Set up a worker. Its libraries start no threads, and it ends when the lifeline closes."""
    forbid_threads()
    threading.Thread(target=_end_with, args=(lifeline,), daemon=True).start()


def _end_with(lifeline: Connection) -> None:
    lifeline.poll(None)
    os._exit(1)


def _introduce(function: Callable[..., Any]) -> int:
    """Return this process's memory. Unpickling `function` has already imported what it needs."""
    del function
    return bytes_taken()
