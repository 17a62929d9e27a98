"""FairScheduler on the event loop: work is given out in slices, by tenant and then by stream.

This is deficit round robin (Shreedhar and Varghese, 1995) with an iteration of the event loop as a
round. In each, a tenant may work for one slice. What work takes beyond that is a debt, for which
the tenant sits out later rounds. So a tenant that waits has its turn in the next round, and waits
for at most one slice of every other tenant in it, what is left of theirs in the round before, and
one piece of work that cannot be cut. Within a tenant, its streams take turns, and all its calls
outside of streams count as one stream.

A tenant that works alone is not held back: only a stream whose slice is over waits for the next
iteration, so that messages of others are read in between.
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
        expected_s: of the work; taken off the tenant's slice in advance.
    """

    granted: "asyncio.Future[None]"
    expected_s: float


class _Tenant:
    """A tenant with work, or with streams that may bring some.

    Attributes:
        left_s: of its slice of a round; below 0 for a debt.
        num_slots: streams and calls under way.
        waiting: waits by stream, in the order of turns.
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
    """Gives out turns to the streams and calls of all tenants. For one event loop.

    Args:
        uses: gets the time that tenants work.
        clock: seconds, rising.
    """

    def __init__(
        self, uses: TenantUses | None = None, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.uses = uses or TenantUses()
        self.clock = clock
        self._tenants: dict[str, _Tenant] = {}
        self._owing: dict[str, _Tenant] = {}  # those whose slice is not whole, or who wait
        self._is_due = False
        self._num_granted = 0  # turns that were given and have not begun

    @property
    def num_tenants(self) -> int:
        """Tenants with streams, calls or debts."""
        return len(self._tenants)

    @contextmanager
    def slot(self, name: str, *, is_stream: bool) -> Iterator["Slot"]:
        """Let a stream of a tenant take part during the block, or a call outside of streams."""
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
                    self._come_round()  # it is gone with its debt paid
                else:
                    del self._tenants[name]

    def may_go(self, tenant: _Tenant) -> bool:
        """Return whether a tenant may work now: it is alone, or has not had its slice."""
        return tenant.left_s > 0 or len(self._tenants) == 1

    async def wait(self, name: str, tenant: _Tenant, key: Hashable, expected_s: float) -> float:
        """Wait for a turn of a stream; return what was taken off the tenant's slice for it."""
        if len(self._tenants) == 1 and not tenant.waiting and not self._num_granted:
            # Nobody to choose from: one iteration, where a round takes two.
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
            if not waiting.granted.cancelled():  # else a round drops it
                tenant.left_s += expected_s
            raise
        finally:
            self._num_granted -= not waiting.granted.cancelled()
        return expected_s

    def worked(self, name: str, tenant: _Tenant, seconds: float, expected_s: float) -> None:
        """Count the work of a turn, of which some was taken off in advance."""
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
        """Begin a round with the next iteration of the loop."""
        if not self._is_due:
            self._is_due = True
            asyncio.get_running_loop().call_soon(self._round)

    def _round(self) -> None:
        """Give each tenant its slice, and turns to those who wait."""
        self._is_due = False
        if self._num_granted:  # some of the last round's turns have not begun
            self._come_round()
            return
        is_alone = len(self._tenants) == 1
        for name, tenant in list(self._owing.items()):
            tenant.left_s = SLICE_S if is_alone else min(SLICE_S, tenant.left_s + SLICE_S)
            while tenant.waiting and tenant.left_s > 0:
                waiting = tenant.next()
                if not waiting.granted.done():  # else it was cancelled
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
    """A stream's, or a call's, place in the scheduler.

    Args:
        fair: the scheduler, shared with all others.
        name: of the tenant.
        tenant: its state.
        key: of the stream among the tenant's.
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
        """Wait for a turn, which begins now; `leave` ends it.

        A tenant that is alone, or has some of its slice left, waits for nothing.

        Args:
            expected_s: of the work, in seconds; what goes beyond a slice is cut by `give_way`.
            beyond_s: that the event loop works for it outside of its turn; counted with that.
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
        """End the turn: before waiting for anything but a turn."""
        if self._began_s is None:
            return
        seconds = self._fair.clock() - self._began_s + self._beyond_s
        self._beyond_s = 0.0
        expected_s, self._expected_s, self._began_s = self._expected_s, 0.0, None
        self._fair.worked(self._name, self._tenant, seconds, expected_s)

    async def _wait(self, expected_s: float) -> None:
        self._expected_s = await self._fair.wait(self._name, self._tenant, self._key, expected_s)
