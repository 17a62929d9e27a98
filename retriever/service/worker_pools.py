"""Worker pools: threads for long work, of one kind each, so that no kind waits for another.

Work is done whole, and of each tenant one at a time, in the order in which it came: however much a
tenant asks for, another's work is next. Long work takes a tenth of a second for a million tokens,
almost all of it in kernels, which need no lock of the interpreter: the system shares processors out
among the threads. What was cancelled is not begun; what has begun is done.
"""

import asyncio
import math
import os
import sys
import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Any, Final, TypeVar

from retriever.errors import LimitExceededError
from retriever.sessions.draft_counts import TenantUses

_LEAST_WAIT_S: Final = 0.05  # what a refusal tells to wait: below it, retries would be a load
_WEIGHT_OF_LAST: Final = 0.1  # of the last work in the mean of durations
_NICENESS: Final = 4  # more, and a thread that holds the interpreter is kept waiting with it

_Result = TypeVar("_Result")


def _yield_processors() -> None:
    """Have this thread take processors after threads of usual priority; see setpriority(2)."""
    if sys.platform == "linux":
        with suppress(OSError):
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _NICENESS)


class _Work:
    """What is done in a pool, and the future of what it comes to, which is resolved on the loop."""

    __slots__ = ("answer", "do")

    def __init__(self, do: Callable[[], Any], answer: "asyncio.Future[Any]") -> None:
        self.do = do
        self.answer = answer


class WorkerPool:
    """Threads for one kind of work; used from one event loop.

    Args:
        name: of its threads.
        num_threads: tenants that are worked for at once.
        max_waiting: returns how much work of one tenant may be in the pool at once.
        uses: gets the time that tenants take.
        computes: whether its work takes processors, and not disks: threads that do yield them to
            the event loop, where the system keeps a priority for each thread (Linux).
    """

    def __init__(
        self,
        name: str,
        num_threads: int,
        max_waiting: Callable[[], int],
        uses: TenantUses,
        *,
        computes: bool = False,
    ) -> None:
        begin = _yield_processors if computes else None
        self._threads = ThreadPoolExecutor(num_threads, f"foredraft-{name}", initializer=begin)
        self._max_waiting = max_waiting
        self._uses = uses
        self._tenants: dict[str, deque[_Work]] = {}  # the first of each is in the threads
        self._mean_s = 0.0

    @property
    def num_tenants(self) -> int:
        """Tenants with work that is not done."""
        return len(self._tenants)

    async def run(
        self, tenant: str, do: Callable[[], _Result], *, can_refuse: bool = True
    ) -> _Result:
        """Do something for a tenant in a thread, after what came before; return what it returns.

        Args:
            tenant: whose turn it takes.
            do: what is done.
            can_refuse: whether the caller can be told to try again.

        Raises:
            LimitExceededError: too much of the tenant's work waits; the error says how long to.
        """
        queue = self._tenants.get(tenant, ())
        if can_refuse and len(queue) >= self._max_waiting():
            raise self._refusal(tenant, len(queue))
        work = _Work(do, asyncio.get_running_loop().create_future())
        self._tenants.setdefault(tenant, deque()).append(work)
        if not queue:
            self._begin_next(tenant)
        try:
            result: _Result = await work.answer
        finally:
            del work  # its answer holds the error, whose traceback holds this frame
        return result

    def close(self) -> None:
        """End the threads after the work that is under way."""
        self._threads.shutdown(wait=False, cancel_futures=True)

    def _refusal(self, tenant: str, num_waiting: int) -> LimitExceededError:
        self._uses.of(tenant).refused += 1
        wait_s = max(_LEAST_WAIT_S, self._mean_s * num_waiting)
        return LimitExceededError(
            f"{num_waiting} long calls of the tenant wait, which is the limit: try again in "
            f"{math.ceil(wait_s)} s (max_tenant_waiting)",
            limit="max_tenant_waiting",
            retry_after_s=wait_s,
        )

    def _begin_next(self, tenant: str) -> None:
        """Pass the first work of a tenant that somebody waits for to the threads."""
        queue = self._tenants[tenant]
        while queue and queue[0].answer.done():  # cancelled
            queue.popleft()
        if queue:
            self._threads.submit(self._do, tenant, queue[0])
        else:
            del self._tenants[tenant]

    def _do(self, tenant: str, work: _Work) -> None:
        """Do some work; called in a thread of the pool."""
        result: object = None
        error: BaseException | None = None
        began_s = time.monotonic()
        try:
            if not work.answer.done():
                result = work.do()
        except BaseException as raised:  # noqa: BLE001  (raised again where it is waited for)
            error = raised
        seconds = time.monotonic() - began_s
        loop = work.answer.get_loop()
        del work  # its answer holds what it came to, which may be much
        loop.call_soon_threadsafe(self._end_first, tenant, seconds, result, error)

    def _end_first(
        self, tenant: str, seconds: float, result: object, error: BaseException | None
    ) -> None:
        """Pass on what the first work of a tenant came to, if somebody still waits; begin another.

        Called on the loop.
        """
        answer = self._tenants[tenant].popleft().answer
        self._uses.of(tenant).seconds += seconds
        self._mean_s += _WEIGHT_OF_LAST * (seconds - self._mean_s)
        self._begin_next(tenant)
        if answer.done():
            return
        if error is not None:
            answer.set_exception(error)
        else:
            answer.set_result(result)


class WorkerPools:
    """The worker pools of a service.

    Reading takes all processors but one, at most four: kernels without the interpreter's lock. It
    has two threads at least, so that a tenant's long prompt leaves one to others. Explaining is
    Python, and more threads would only take the interpreter from drafts. Disks and loading get two:
    one tenant's slow one leaves a thread to others.

    Attributes:
        reading: long contexts, prompts, commits and outputs.
        explaining: where drafts come from.
        disk: outputs to be written, and deletions.
        loading: outputs of tenants that are not in memory.
    """

    def __init__(self, most: Callable[[], int], uses: TenantUses) -> None:
        num_reading = min(4, max(2, (os.cpu_count() or 1) - 1))
        self.reading = WorkerPool("reading", num_reading, most, uses, computes=True)
        self.explaining = WorkerPool("explaining", 1, most, uses, computes=True)
        self.disk = WorkerPool("disk", 2, most, uses)
        self.loading = WorkerPool("loading", 2, most, uses)

    def close(self) -> None:
        """End the threads after the work that is under way."""
        for pool in (self.reading, self.explaining, self.disk, self.loading):
            pool.close()
