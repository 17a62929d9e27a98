"""Worker pools: threads for long work, one pool per kind, so that no kind waits for another.

Work is not interrupted. Each tenant has one piece of work running at a time, in order of arrival.
So another tenant's work is next no matter how much work one tenant has. Long work takes a tenth of
a second for a million tokens. Almost all of that is in kernels that do not hold the GIL, so the
system shares processors among the threads. Cancelled work is not started; started work is finished.
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

_LEAST_WAIT_S: Final = 0.05  # shortest retry delay in a refusal; earlier retries would be a load
_WEIGHT_OF_LAST: Final = 0.1  # weight of the latest duration in the mean
_NICENESS: Final = 4  # with more, a thread would be delayed while it holds the GIL

_Result = TypeVar("_Result")


def _yield_processors() -> None:
    """Lower the priority of this thread below that of normal threads; see setpriority(2)."""
    if sys.platform == "linux":
        with suppress(OSError):
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _NICENESS)


class _Work:
    """A piece of work in a pool, and the future of its result, which is resolved on the loop."""

    __slots__ = ("answer", "do")

    def __init__(self, do: Callable[[], Any], answer: "asyncio.Future[Any]") -> None:
        self.do = do
        self.answer = answer


class WorkerPool:
    """Threads for one kind of work; used from one event loop.

    Args:
        name: name of its threads.
        num_threads: tenants that are served concurrently.
        max_waiting: returns how many pieces of work of one tenant may be in the pool.
        uses: records the time that tenants take.
        computes: whether its work is CPU-bound, not disk-bound. Such threads yield to the event
            loop if the system has per-thread priorities (Linux).
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
        self._tenants: dict[str, deque[_Work]] = {}  # the first work of each is in a thread
        self._mean_s = 0.0

    @property
    def num_tenants(self) -> int:
        """The number of tenants with unfinished work."""
        return len(self._tenants)

    async def run(
        self, tenant: str, do: Callable[[], _Result], *, can_refuse: bool = True
    ) -> _Result:
        """Run work for a tenant in a thread, after its earlier work; return the result.

        Args:
            tenant: tenant whose turn it takes.
            do: the work.
            can_refuse: whether the caller can be told to try again.

        Raises:
            LimitExceededError: too much of the tenant's work waits; the error says when to retry.
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
            del work  # breaks a cycle: its answer holds the error, whose traceback holds this frame
        return result

    def close(self) -> None:
        """End the threads after the work in progress."""
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
        """Pass the first uncancelled work of a tenant to the threads."""
        queue = self._tenants[tenant]
        while queue and queue[0].answer.done():  # cancelled
            queue.popleft()
        if queue:
            self._threads.submit(self._do, tenant, queue[0])
        else:
            del self._tenants[tenant]

    def _do(self, tenant: str, work: _Work) -> None:
        """Do a piece of work; called in a thread of the pool."""
        result: object = None
        error: BaseException | None = None
        began_s = time.monotonic()
        try:
            if not work.answer.done():
                result = work.do()
        except BaseException as raised:  # noqa: BLE001  (raised again in the waiting caller)
            error = raised
        seconds = time.monotonic() - began_s
        loop = work.answer.get_loop()
        del work  # its answer holds the result, which may be large
        loop.call_soon_threadsafe(self._end_first, tenant, seconds, result, error)

    def _end_first(
        self, tenant: str, seconds: float, result: object, error: BaseException | None
    ) -> None:
        """Pass on the result of a tenant's first work if it is still awaited, and start the next.

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

    Reading runs kernels that do not hold the GIL, on all processors except one, at most four. It
    has at least two threads, so that one tenant's long prompt leaves a thread to others. Explaining
    is Python, and more threads would only take the GIL from drafts. Disks and loading get two
    threads each: one tenant's slow work leaves a thread to others.

    Attributes:
        reading: long contexts, prompts, commits and outputs.
        explaining: explanations of drafts.
        disk: writes of outputs, and deletions.
        loading: outputs of tenants that are not in memory.
    """

    def __init__(self, most: Callable[[], int], uses: TenantUses) -> None:
        num_reading = min(4, max(2, (os.cpu_count() or 1) - 1))
        self.reading = WorkerPool("reading", num_reading, most, uses, computes=True)
        self.explaining = WorkerPool("explaining", 1, most, uses, computes=True)
        self.disk = WorkerPool("disk", 2, most, uses)
        self.loading = WorkerPool("loading", 2, most, uses)

    def close(self) -> None:
        """End the threads after the work in progress."""
        for pool in (self.reading, self.explaining, self.disk, self.loading):
            pool.close()
