"""Lanes: pieces of all tenants in turn, refusals, and work that nobody waits for any more."""

import asyncio
import sys
import threading
import time
from collections.abc import Callable, Generator

import pytest

from retriever.errors import LimitExceededError, StateError
from retriever.service.lanes import SWITCH_S, Lane
from retriever.sessions.draft_counts import TenantUses


def lane(max_waiting: int = 100, num_threads: int = 1) -> Lane:
    return Lane("test", num_threads, max_waiting, TenantUses())


def pieces(name: str, number: int, order: list[str]) -> Generator[None, None, str]:
    for _ in range(number):
        order.append(name)
        time.sleep(0.001)
        yield
    return name


async def held(of: Lane, gate: threading.Event) -> "asyncio.Task[bool]":
    """Keep the lane's thread busy until the gate opens."""
    began = threading.Event()

    def wait() -> bool:
        began.set()
        return gate.wait(10)

    task = asyncio.create_task(of.run("gate", wait))
    await asyncio.to_thread(began.wait, 10)
    return task


def test_pieces_of_tenants_alternate_however_long_their_work_is() -> None:
    order: list[str] = []

    async def run() -> list[str]:
        ours, gate = lane(), threading.Event()
        first = await held(ours, gate)
        work = [asyncio.create_task(ours.work("a", pieces("a", 40, order))) for _ in range(3)]
        work.append(asyncio.create_task(ours.work("b", pieces("b", 4, order))))
        await asyncio.sleep(0)
        gate.set()
        await first
        return await asyncio.gather(*work)

    assert asyncio.run(run()) == ["a", "a", "a", "b"]
    assert len(order) == 124
    assert [place for place, name in enumerate(order) if name == "b"][-1] <= 9


def test_a_tenants_waits_are_bounded_and_the_refusal_tells_how_long_to_wait() -> None:
    async def run() -> LimitExceededError:
        ours, gate = lane(max_waiting=3), threading.Event()
        first = await held(ours, gate)
        waiting = [asyncio.create_task(ours.run("a", int)) for _ in range(3)]
        await asyncio.sleep(0)
        with pytest.raises(LimitExceededError, match="max_tenant_waiting") as raised:
            await ours.run("a", int)
        other = asyncio.create_task(ours.run("b", int))  # is not refused
        gate.set()
        await asyncio.gather(first, other, *waiting)
        assert await ours.run("a", int) == 0
        return raised.value

    error = asyncio.run(run())
    assert error.limit == "max_tenant_waiting"
    assert error.retry_after_s is not None
    assert error.retry_after_s > 0


def test_cancelled_work_is_not_begun_and_stops_after_a_piece() -> None:
    order: list[str] = []
    ended: list[str] = []

    def watched(name: str) -> Generator[None, None, str]:
        try:
            return (yield from pieces(name, 500, order))
        finally:
            ended.append(name)

    async def run() -> None:
        ours, gate = lane(), threading.Event()
        first = await held(ours, gate)
        waiting = asyncio.create_task(ours.work("a", watched("waiting")))
        await asyncio.sleep(0)
        waiting.cancel()
        await asyncio.sleep(0)  # until it is told: the thread goes on at once
        gate.set()
        await first
        begun = asyncio.create_task(ours.work("a", watched("begun")))
        while not order:  # noqa: ASYNC110  (others run until then)
            await asyncio.sleep(0.001)
        begun.cancel()
        await asyncio.gather(waiting, begun, return_exceptions=True)
        assert await asyncio.wait_for(ours.run("a", int), 10) == 0
        async with asyncio.timeout(10):
            while ours.num_tenants:  # noqa: ASYNC110  (its thread leaves after it has answered)
                await asyncio.sleep(0.001)

    asyncio.run(run())
    assert set(order) == {"begun"}
    assert len(order) < 100
    assert ended == ["begun"]


def test_errors_come_where_the_work_is_waited_for() -> None:
    def fail() -> None:
        raise StateError("the disk refuses")

    async def run() -> None:
        ours = lane()
        with pytest.raises(StateError, match="the disk refuses"):
            await ours.run("a", fail)
        assert await ours.run("a", int) == 0

    asyncio.run(run())


@pytest.mark.parametrize("num_threads", [1, 3])
def test_all_work_is_done_once_under_cancellations(num_threads: int) -> None:
    done: list[int] = []

    def work(number: int) -> Callable[[], int]:
        def run() -> int:
            done.append(number)
            return number

        return run

    async def run() -> None:
        ours = lane(1000, num_threads)
        tasks = [
            asyncio.create_task(ours.run(f"t{number % 7}", work(number))) for number in range(500)
        ]
        for number, task in enumerate(tasks):
            if number % 50 == 0:
                await asyncio.sleep(0)
            if number % 3 == 0:
                task.cancel()
        results = await asyncio.wait_for(asyncio.gather(*tasks, return_exceptions=True), 30)
        kept = [result for result in results if isinstance(result, int)]
        assert set(kept) >= {number for number in range(500) if number % 3}
        assert len(done) == len(set(done))
        while ours.num_tenants:  # noqa: ASYNC110  (others run until then)
            await asyncio.sleep(0.001)

    asyncio.run(run())


def test_threads_switch_quickly_only_while_a_lane_works() -> None:
    before_s = sys.getswitchinterval()

    async def run() -> float:
        return await lane().run("a", sys.getswitchinterval)

    assert asyncio.run(run()) <= SWITCH_S < before_s
    assert sys.getswitchinterval() == before_s


def test_lanes_whose_work_overlaps_leave_the_switch_interval_as_it_was() -> None:
    before_s = sys.getswitchinterval()

    async def run() -> None:
        first, second = threading.Event(), threading.Event()
        earlier, later = await held(lane(), first), await held(lane(), second)
        first.set()
        await earlier
        assert sys.getswitchinterval() <= SWITCH_S
        second.set()
        await later

    asyncio.run(run())
    assert sys.getswitchinterval() == before_s
