"""Lanes: threads for long work, of one kind each, so that no kind waits for another.

Work comes in pieces of about a millisecond. A lane's threads take pieces of all tenants in turn,
and of a tenant's work in turn, so that a long prompt costs a short one a piece, not its whole time.
What was cancelled is not begun, and stops after the piece that is under way.
"""

import asyncio
import math
import os
import sys
import threading
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Generator, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from typing import Any, Final, TypeVar

from retriever.errors import LimitExceededError
from retriever.limits import Limits
from retriever.sessions.draft_counts import TenantUses

_MOST_BEGUN: Final = 2
"""Work of one tenant that is begun and not done: bounds the memory of half-read prompts."""

_PAUSE_S: Final = 1e-4
"""Between two pieces, in seconds: Python's locks are not fair, and one that a piece holds would be
taken again before a thread that waits for it has woken up."""

_LEAST_WAIT_S: Final = 0.05  # what a refusal tells to wait: below it, retries would be a load
_WEIGHT_OF_LAST: Final = 0.1  # of the last work in the mean of durations

SWITCH_S: Final = 0.0005
"""How long a thread may hold the interpreter against others while lanes work, in seconds.

The loop gives the interpreter up in every kernel, and waits so long for it if a lane has taken it:
5 ms by Python's default. Without work in lanes it stays as it is: gRPC's own threads would wake up
more often, too.
"""

_NICENESS: Final = 4  # more, and a thread that holds the interpreter is kept waiting with it

_Result = TypeVar("_Result")


def _yield_processors() -> None:
    """Have this thread take processors after threads of usual priority; see setpriority(2)."""
    if sys.platform == "linux":
        with suppress(OSError):
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _NICENESS)


class _Work:
    """Work in a lane.

    Attributes:
        tenant: whose it is.
        pieces: yields after each piece.
        answer: resolved on the loop.
        is_cancelled: whether nobody waits for it any more.
        seconds: that its pieces took.
    """

    __slots__ = ("answer", "is_cancelled", "pieces", "seconds", "tenant")

    def __init__(
        self, tenant: str, pieces: Generator[None, None, Any], answer: "asyncio.Future[Any]"
    ) -> None:
        self.tenant = tenant
        self.pieces = pieces
        self.answer = answer
        self.is_cancelled = False
        self.seconds = 0.0


class _Queue:
    """The work of one tenant: some of it begun, the rest in the order in which it came."""

    __slots__ = ("begun", "fresh", "num_begun")

    def __init__(self) -> None:
        self.begun: deque[_Work] = deque()
        self.fresh: deque[_Work] = deque()
        self.num_begun = 0

    def next(self) -> _Work | None:
        """Remove and return the next work; None if threads are at all that may be begun."""
        if self.fresh and self.num_begun < _MOST_BEGUN:
            self.num_begun += 1
            return self.fresh.popleft()
        return self.begun.popleft() if self.begun else None


class _SwitchInterval:
    """Python's switch interval, short while there is work that may hold the interpreter."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._num_working = 0
        self._before_s = sys.getswitchinterval()

    @contextmanager
    def short(self) -> Iterator[None]:
        """Keep it short during the block."""
        with self._lock:
            if not self._num_working:
                self._before_s = sys.getswitchinterval()
                sys.setswitchinterval(min(SWITCH_S, self._before_s))
            self._num_working += 1
        try:
            yield
        finally:
            with self._lock:
                self._num_working -= 1
                if not self._num_working:
                    sys.setswitchinterval(self._before_s)


_SWITCH_INTERVAL: Final = _SwitchInterval()
"""Of the process: services whose work overlaps must not take each other's for what was before."""


class Lane:
    """Threads for one kind of work; used from one event loop.

    Args:
        name: of its threads.
        num_threads: how many pieces are worked on at once.
        max_waiting: work of one tenant that may be in the lane at once.
        uses: gets the time that tenants take.
        computes: whether its work takes processors, and not disks: threads that do yield them to
            the event loop, where the system keeps a priority for each thread (Linux).
    """

    def __init__(
        self,
        name: str,
        num_threads: int,
        max_waiting: int,
        uses: TenantUses,
        *,
        computes: bool = False,
    ) -> None:
        begin = _yield_processors if computes else None
        self._threads = ThreadPoolExecutor(num_threads, f"foredraft-{name}", initializer=begin)
        self._num_threads = num_threads
        self._max_waiting = max_waiting
        self._uses = uses
        self._lock = threading.Lock()
        self._tenants: OrderedDict[str, _Queue] = OrderedDict()  # those whose turn comes first
        self._num_of: dict[str, int] = {}
        self._mean_s = 0.0
        self._is_closed = False

    @property
    def num_tenants(self) -> int:
        """Tenants with work that is not done."""
        return len(self._tenants)

    async def run(self, tenant: str, function: Callable[..., _Result], *arguments: Any) -> _Result:
        """Run a function that cannot be cut, in the turn of a tenant.

        Raises:
            LimitExceededError: too much of the tenant's work waits; the error says how long to.
        """
        return await self.work(tenant, _in_one_piece(function, *arguments))

    async def work(self, tenant: str, pieces: Generator[None, None, _Result]) -> _Result:
        """Do work in pieces, in turn with others'; return what the generator returns.

        If the caller is cancelled, work that has not begun is dropped, and other work is closed
        after its current piece.

        Raises:
            LimitExceededError: too much of the tenant's work waits; the error says how long to.
        """
        self._admit(tenant)
        work = _Work(tenant, pieces, asyncio.get_running_loop().create_future())
        with _SWITCH_INTERVAL.short():
            with self._lock:
                self._tenants.setdefault(tenant, _Queue()).fresh.append(work)
            self._threads.submit(self._take_pieces)
            try:
                result: _Result = await work.answer
            except asyncio.CancelledError:
                work.is_cancelled = True
                self._withdraw(work)
                raise
            finally:
                self._let_go(work)
                del work  # its answer holds the error, whose traceback holds this frame
            return result

    def close(self) -> None:
        """End the threads after the pieces that are under way."""
        self._is_closed = True
        self._threads.shutdown(wait=False, cancel_futures=True)

    def _admit(self, tenant: str) -> None:
        ahead = self._num_of.get(tenant, 0)
        if ahead >= self._max_waiting:
            wait_s = max(_LEAST_WAIT_S, self._mean_s * ahead / self._num_threads)
            self._uses.of(tenant).refused += 1
            raise LimitExceededError(
                f"{ahead} long calls of the tenant wait, which is the limit: try again in "
                f"{math.ceil(wait_s)} s (max_tenant_waiting)",
                limit="max_tenant_waiting",
                retry_after_s=wait_s,
            )
        self._num_of[tenant] = ahead + 1

    def _let_go(self, work: _Work) -> None:
        left = self._num_of[work.tenant] - 1
        if left:
            self._num_of[work.tenant] = left
        else:
            del self._num_of[work.tenant]
        self._uses.of(work.tenant).seconds += work.seconds
        if not work.is_cancelled:
            self._mean_s += _WEIGHT_OF_LAST * (work.seconds - self._mean_s)

    def _withdraw(self, work: _Work) -> None:
        """Drop work that has not begun; what has is closed by the thread that takes it next."""
        with self._lock:
            queue = self._tenants.get(work.tenant)
            if queue is not None and work in queue.fresh:
                queue.fresh.remove(work)
                if not queue.fresh and not queue.num_begun:
                    del self._tenants[work.tenant]

    # Called in the lane's threads: there is one such call for all work that came, at least.

    def _take_pieces(self) -> None:
        while not self._is_closed and (work := self._next()) is not None:
            self._take_piece(work)
            del work  # its answer holds what it came to, which may be much

    def _take_piece(self, work: _Work) -> None:
        if work.is_cancelled:
            self._end(work, None, None)
            return
        began_s = time.monotonic()
        try:
            next(work.pieces)
        except StopIteration as done:
            work.seconds += time.monotonic() - began_s
            self._end(work, done.value, None)
        except BaseException as error:  # noqa: BLE001  (raised again where it is waited for)
            work.seconds += time.monotonic() - began_s
            self._end(work, None, error)
            del work
        else:
            work.seconds += time.monotonic() - began_s
            with self._lock:
                self._queue_of(work.tenant).begun.append(work)
            time.sleep(_PAUSE_S)

    def _next(self) -> _Work | None:
        """Remove and return the work whose turn it is, and put its tenant behind the others."""
        with self._lock:
            for tenant, queue in list(self._tenants.items()):
                work = queue.next()
                if work is not None:
                    self._tenants.move_to_end(tenant)
                    return work
        return None

    def _queue_of(self, tenant: str) -> _Queue:
        return self._tenants.setdefault(tenant, _Queue())

    def _end(self, work: _Work, result: object, error: BaseException | None) -> None:
        work.pieces.close()
        with self._lock:
            queue = self._queue_of(work.tenant)
            queue.num_begun -= 1
            if not queue.fresh and not queue.num_begun:
                del self._tenants[work.tenant]
        work.answer.get_loop().call_soon_threadsafe(_resolve, work.answer, result, error)


class Lanes:
    """The lanes of a service.

    Reading takes all cores but one, at most four: kernels without the interpreter's lock.
    Explaining is Python, and more threads would only take the interpreter from drafts. Disks and
    loading get two: one tenant's slow one leaves a thread to others.

    Attributes:
        reading: long contexts, prompts, commits and outputs.
        explaining: where drafts come from.
        disk: outputs to be written, and deletions.
        loading: outputs of tenants that are not in memory.
    """

    def __init__(self, limits: Limits, uses: TenantUses) -> None:
        num_reading = min(4, max(1, (os.cpu_count() or 1) - 1))
        most = limits.max_tenant_waiting
        self.reading = Lane("reading", num_reading, most, uses, computes=True)
        self.explaining = Lane("explaining", 1, most, uses, computes=True)
        self.disk = Lane("disk", 2, most, uses)
        self.loading = Lane("loading", 2, most, uses)

    def close(self) -> None:
        """End the threads after the pieces that are under way."""
        for lane in (self.reading, self.explaining, self.disk, self.loading):
            lane.close()


def _in_one_piece(
    function: Callable[..., _Result], *arguments: Any
) -> Generator[None, None, _Result]:
    return function(*arguments)
    yield  # a generator without pieces


def _resolve(answer: "asyncio.Future[Any]", result: object, error: BaseException | None) -> None:
    """Pass on what work came to, on its loop, if somebody still waits for it."""
    if answer.done():
        return
    if error is not None:
        answer.set_exception(error)
    else:
        answer.set_result(result)
