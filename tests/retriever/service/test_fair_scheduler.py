"""Turns by tenant and then by stream, on a clock that moves by the work alone."""

import asyncio
from collections import Counter, defaultdict

import pytest
from hypothesis import given, settings, strategies as st

from retriever.service.fair_scheduler import SLICE_S, FairScheduler

PIECE_S = SLICE_S / 5 * 1.001  # above roundings: five of them are a slice
WHOLE_S = SLICE_S * 1.001
ROUNDS = 40


class Clock:
    """Moves as tenants work, and notes who did."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self.worked_s: defaultdict[str, float] = defaultdict(float)

    def __call__(self) -> float:
        return self.now_s

    def since(self, before: dict[str, float]) -> dict[str, float]:
        """Return the work of each tenant since a copy of it was made."""
        return {name: worked_s - before.get(name, 0) for name, worked_s in self.worked_s.items()}

    def work(self, tenant: str, seconds: float) -> None:
        self.now_s += seconds
        self.worked_s[tenant] += seconds


async def stream(
    fair: FairScheduler,
    clock: Clock,
    tenant: str,
    steps: list[int],
    waits: list[tuple[str, dict[str, float]]],
) -> None:
    """Ask for turns without a pause, each for some pieces; note what others did meanwhile."""
    with fair.slot(tenant, is_stream=True) as slot:
        for pieces in steps:
            before = clock.worked_s.copy()
            await slot.take()
            waits.append((tenant, clock.since(before)))
            for _ in range(pieces):
                clock.work(tenant, PIECE_S)
                before = clock.worked_s.copy()
                await slot.give_way()
                waits.append((tenant, clock.since(before)))
            slot.leave()
            await asyncio.sleep(0)


@given(
    st.lists(
        st.lists(st.integers(1, 12), min_size=1, max_size=8),
        min_size=2,
        max_size=5,
    )
)
@settings(deadline=None)
def test_a_tenant_waits_for_a_slice_of_each_other_in_a_round(
    work: list[list[int]],
) -> None:
    clock, waits = Clock(), list[tuple[str, dict[str, float]]]()
    fair = FairScheduler(clock=clock)

    async def run() -> None:
        # One stream of each tenant, so that none of its own come before it.
        await asyncio.gather(
            *(stream(fair, clock, f"t{at}", steps, waits) for at, steps in enumerate(work))
        )

    asyncio.run(run())
    for tenant, others in waits:
        for other, seconds in others.items():
            if other != tenant:
                # What a tenant had begun when it was alone, the rest of the round that the wait
                # begins in, and the next.
                assert seconds <= 3 * SLICE_S
    for at, steps in enumerate(work):
        assert clock.worked_s[f"t{at}"] == pytest.approx(PIECE_S * sum(steps))


@pytest.mark.parametrize("num_streams", [1, 16])
def test_shares_are_equal_whatever_the_number_of_streams(num_streams: int) -> None:
    clock = Clock()
    fair = FairScheduler(clock=clock)
    shares: list[float] = []

    async def endless(tenant: str) -> None:
        with fair.slot(tenant, is_stream=True) as slot:
            await asyncio.sleep(0)  # until all are there: one alone is not held back
            await slot.take()
            while True:
                clock.work(tenant, PIECE_S)
                await slot.give_way()

    async def run() -> None:
        tasks = [asyncio.create_task(endless("many")) for _ in range(num_streams)]
        tasks.append(asyncio.create_task(endless("one")))
        while clock.now_s < 200 * SLICE_S:  # noqa: ASYNC110  (others run until then)
            await asyncio.sleep(0)
        shares.append(clock.worked_s["one"] / clock.worked_s["many"])
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    asyncio.run(run())
    assert shares[0] == pytest.approx(1.0, rel=0.1)


def test_streams_of_a_tenant_take_turns_and_its_calls_count_as_one() -> None:
    clock = Clock()
    fair = FairScheduler(clock=clock)
    order: list[str] = []

    async def endless(name: str, *, is_call: bool) -> None:
        with fair.slot("a", is_stream=not is_call) as slot:
            await slot.take()
            while True:
                order.append(name)
                clock.work("a", WHOLE_S)
                await slot.give_way()

    async def run() -> None:
        kinds = {"s1": False, "s2": False, "c1": True, "c2": True, "c3": True}
        tasks = [
            asyncio.create_task(endless(name, is_call=is_call)) for name, is_call in kinds.items()
        ]
        while len(order) < 5 + 60:  # noqa: ASYNC110  (others run until then)
            await asyncio.sleep(0)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    asyncio.run(run())
    counts = Counter(name[0] for name in order[5:65])
    assert counts == {"s": 40, "c": 20}
    assert Counter(order[5:65])["s1"] == 20


def test_a_tenant_alone_waits_for_nothing() -> None:
    clock = Clock()
    fair = FairScheduler(clock=clock)

    async def run() -> int:
        others = 0

        def count() -> None:
            nonlocal others
            others += 1
            asyncio.get_running_loop().call_soon(count)

        count()
        with fair.slot("a", is_stream=True) as slot:
            for _ in range(ROUNDS):
                await slot.take()
                clock.work("a", WHOLE_S)
                slot.leave()
        return others

    assert asyncio.run(run()) == 1  # no iteration of the loop went by


def test_debt_of_a_piece_that_could_not_be_cut_is_sat_out() -> None:
    clock = Clock()
    fair = FairScheduler(clock=clock)
    times: list[float] = []

    async def long() -> None:
        with fair.slot("long", is_stream=True) as slot:
            await asyncio.sleep(0)
            for _ in range(2):
                await slot.take()
                clock.work("long", 10 * WHOLE_S)
                slot.leave()
            times.append(clock.now_s)

    async def short() -> None:
        with fair.slot("short", is_stream=True) as slot:
            for _ in range(30):
                await slot.take()
                clock.work("short", WHOLE_S)
                slot.leave()
                await asyncio.sleep(0)
                if not times:
                    early.append(1)

    early: list[int] = []

    async def run() -> None:
        await asyncio.gather(long(), short())

    asyncio.run(run())
    assert 7 <= len(early) <= 12


def test_cancelled_waiters_leave_and_cost_nobody_a_turn() -> None:
    clock = Clock()
    fair = FairScheduler(clock=clock)
    order: list[int] = []

    async def wait(number: int) -> None:
        with fair.slot("a", is_stream=True) as slot:
            await slot.take()
            order.append(number)
            clock.work("a", WHOLE_S)
            slot.leave()

    async def run() -> None:
        with (
            fair.slot("b", is_stream=True),
            fair.slot("a", is_stream=True) as slot,
        ):
            await slot.take()
            clock.work("a", WHOLE_S)
            slot.leave()
            tasks = [asyncio.create_task(wait(number)) for number in range(20)]
            await asyncio.sleep(0)
            for number, task in enumerate(tasks):
                if number % 2:
                    task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            for _ in range(5):
                await asyncio.sleep(0)

    asyncio.run(run())
    assert order == list(range(0, 20, 2))


def test_nothing_is_kept_of_tenants_that_left() -> None:
    clock = Clock()
    fair = FairScheduler(clock=clock)

    async def run() -> None:
        with fair.slot("stays", is_stream=True):
            for at in range(100):
                with fair.slot(f"t{at}", is_stream=False) as slot:
                    await slot.take()
                    clock.work(f"t{at}", SLICE_S * (at % 3))
                    slot.leave()
            for _ in range(5):
                await asyncio.sleep(0)
            assert fair.num_tenants == 1

    asyncio.run(run())


def test_what_messages_cost_outside_of_turns_is_counted() -> None:
    """A tenant whose messages need little work, but as much again to be received, has half."""
    clock = Clock()
    fair = FairScheduler(clock=clock)

    async def endless(tenant: str, beyond_s: float) -> None:
        with fair.slot(tenant, is_stream=True) as slot:
            await asyncio.sleep(0)  # until all are there
            while True:
                await slot.take(PIECE_S, beyond_s)
                clock.work(tenant, PIECE_S)
                slot.leave()
                await asyncio.sleep(0)

    async def run() -> None:
        tasks = [asyncio.create_task(endless("dear", PIECE_S)) for _ in range(8)]
        tasks += [asyncio.create_task(endless("cheap", 0.0)) for _ in range(8)]
        for _ in range(20 * ROUNDS):
            await asyncio.sleep(0)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    asyncio.run(run())
    assert clock.worked_s["cheap"] / clock.worked_s["dear"] == pytest.approx(2.0, rel=0.1)
    assert fair.uses.of("dear").seconds == pytest.approx(fair.uses.of("cheap").seconds, rel=0.1)
