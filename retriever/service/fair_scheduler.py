"""Fair scheduling on the event loop: work is divided into slices, by tenant and then by stream.

This is deficit round robin (Shreedhar and Varghese, 1995) with an iteration of the event loop as a
round. In each round, a tenant may work for one slice. Work beyond that becomes a debt, for which
the tenant sits out later rounds. So a waiting tenant gets its turn in the next round. Until then it
waits at most for the rest of the other tenants' slices in the current round, for one slice of each
in the next, and for one indivisible piece of work. Within a tenant, streams take turns, and all
calls outside of streams count as one stream.

A tenant that works alone is not held back. Its streams only wait for the next iteration when a
slice is over, so that messages of others are read in between.
"""

import asyncio
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from typing import Final, NamedTuple

from retriever.sessions.draft_counts import TenantUses

SLICE_S: Final = 0.00025
"""Work after which a stream waits for its next turn, in seconds; a draft takes a fifth of it."""


class _Waiting(NamedTuple):
    """A wait for a turn.

    Attributes:
        granted: resolved when the turn comes.
        expected_s: expected time of the work; deducted from the tenant's slice in advance.
    """

    granted: "asyncio.Future[None]"
    expected_s: float


class _Tenant:
    """A tenant with work, or with streams that may send work.

    Attributes:
        left_s: rest of its slice of the round; below 0 for a debt.
        num_slots: open streams and calls in progress.
        waiting: waits by stream, in order of turns.
    """

    __slots__ = ("left_s", "num_slots", "waiting")

    def __init__(self) -> None:
        self.left_s = SLICE_S
        self.num_slots = 0
        self.waiting: OrderedDict[Hashable, deque[_Waiting]] = OrderedDict()

    def add(self, key: Hashable, waiting: _Waiting) -> None:
        """Append a wait of a stream."""
        self.waiting.setdefault(key, deque()).append(waiting)

    def next(self) -> _Waiting:
        """Remove and return the first wait of the stream whose turn it is."""
        key, waits = self.waiting.popitem(last=False)
        first = waits.popleft()
        if waits:
            self.waiting[key] = waits
        return first


class FairScheduler:
    """Gives turns to the streams and calls of all tenants, on one event loop.

    Args:
        uses: records the time that tenants work.
        clock: returns monotonic seconds.
    """

    def __init__(
        self, uses: TenantUses | None = None, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.uses = uses or TenantUses()
        self.clock = clock
        self._tenants: dict[str, _Tenant] = {}
        self._owing: dict[str, _Tenant] = {}  # tenants that wait or have used some of their slice
        self._is_due = False
        self._num_granted = 0  # turns granted but not started

    @property
    def num_tenants(self) -> int:
        """The number of tenants with streams, calls or debts."""
        return len(self._tenants)

    @contextmanager
    def slot(self, name: str, *, is_stream: bool) -> Iterator["Slot"]:
        """Let a stream of a tenant, or a call outside of streams, take part during the block."""
        tenant = self._tenants.get(name)
        if tenant is None:
            tenant = self._tenants[name] = _Tenant()
        tenant.num_slots += 1
        slot = Slot(self, name, tenant, object() if is_stream else None)
        try:
            yield slot
        finally:
            slot.leave()
            tenant.num_slots -= 1
            if not tenant.num_slots:
                if name in self._owing:
                    self._come_round()  # removed once its debt is paid
                else:
                    del self._tenants[name]

    def may_go(self, tenant: _Tenant) -> bool:
        """Return whether a tenant may work now: it is alone, or has some of its slice left."""
        return tenant.left_s > 0 or len(self._tenants) == 1

    async def wait(self, name: str, tenant: _Tenant, key: Hashable, expected_s: float) -> float:
        """Wait for a turn of a stream; return the time deducted from the tenant's slice for it."""
        if len(self._tenants) == 1 and not tenant.waiting and not self._num_granted:
            # No other tenant: wait for one iteration only; a round would take two.
            self._num_granted += 1
            try:
                await asyncio.sleep(0)
            finally:
                self._num_granted -= 1
            return 0.0
        waiting = _Waiting(asyncio.get_running_loop().create_future(), expected_s)
        tenant.add(key, waiting)
        self._owing[name] = tenant
        self._come_round()
        try:
            await waiting.granted
        except asyncio.CancelledError:
            if not waiting.granted.cancelled():  # else a round drops this wait
                tenant.left_s += expected_s
            raise
        finally:
            self._num_granted -= not waiting.granted.cancelled()
        return expected_s

    def worked(self, name: str, tenant: _Tenant, seconds: float, expected_s: float) -> None:
        """Account for the work of a turn, of which `expected_s` was deducted in advance."""
        self.uses.of(name).seconds += seconds
        tenant.left_s += expected_s
        if len(self._tenants) == 1:
            return
        tenant.left_s -= seconds
        if tenant.left_s < SLICE_S:
            self._owing[name] = tenant
            if tenant.left_s <= 0:
                self._come_round()

    def _come_round(self) -> None:
        """Schedule a round for the next iteration of the loop."""
        if not self._is_due:
            self._is_due = True
            asyncio.get_running_loop().call_soon(self._round)

    def _round(self) -> None:
        """Give each tenant its slice, and grant turns to those that wait."""
        self._is_due = False
        if self._num_granted:  # some turns of the last round have not started
            self._come_round()
            return
        is_alone = len(self._tenants) == 1
        for name, tenant in list(self._owing.items()):
            tenant.left_s = SLICE_S if is_alone else min(SLICE_S, tenant.left_s + SLICE_S)
            while tenant.waiting and tenant.left_s > 0:
                waiting = tenant.next()
                if not waiting.granted.done():  # otherwise it was cancelled
                    tenant.left_s -= waiting.expected_s
                    self._num_granted += 1
                    waiting.granted.set_result(None)
            if tenant.waiting or tenant.left_s < 0:
                self._come_round()
            elif tenant.left_s == SLICE_S:
                del self._owing[name]
                if not tenant.num_slots:
                    del self._tenants[name]
            elif not tenant.num_slots:
                self._come_round()


class Slot:
    """The place of a stream or a call in the scheduler.

    Args:
        fair: scheduler, shared by all slots.
        name: name of the tenant.
        tenant: state of the tenant.
        key: key of the stream within the tenant.
    """

    __slots__ = ("_began_s", "_beyond_s", "_expected_s", "_fair", "_key", "_name", "_tenant")

    def __init__(self, fair: FairScheduler, name: str, tenant: _Tenant, key: Hashable) -> None:
        self._fair = fair
        self._name = name
        self._tenant = tenant
        self._key = key
        self._began_s: float | None = None
        self._expected_s = self._beyond_s = 0.0

    async def take(self, expected_s: float = SLICE_S, beyond_s: float = 0.0) -> None:
        """Wait for a turn, which starts when this returns; `leave` ends it.

        A tenant that is alone, or has some of its slice left, does not wait.

        Args:
            expected_s: expected time of the work, in seconds; `give_way` splits work beyond a
                slice.
            beyond_s: time that the event loop works for it outside of the turn, in seconds; counted
                with the turn.
        """
        self._beyond_s = beyond_s
        if not self._fair.may_go(self._tenant):
            await self._wait(min(expected_s, SLICE_S))
        self._began_s = self._fair.clock()

    @property
    def is_over(self) -> bool:
        """Whether this turn's slice is over."""
        began_s = self._began_s
        return began_s is not None and self._fair.clock() - began_s >= SLICE_S

    async def give_way(self) -> None:
        """Wait for the next turn if this one's slice is over."""
        if not self.is_over:
            return
        self.leave()
        await self._wait(SLICE_S)
        self._began_s = self._fair.clock()

    def leave(self) -> None:
        """End the turn; required before waiting for anything other than a turn."""
        if self._began_s is None:
            return
        seconds = self._fair.clock() - self._began_s + self._beyond_s
        self._beyond_s = 0.0
        expected_s, self._expected_s, self._began_s = self._expected_s, 0.0, None
        self._fair.worked(self._name, self._tenant, seconds, expected_s)

    async def _wait(self, expected_s: float) -> None:
        self._expected_s = await self._fair.wait(self._name, self._tenant, self._key, expected_s)
