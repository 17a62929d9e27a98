"""Worker pools: tenants in turn, refusals, and work that nobody waits for any more."""

import asyncio
import threading
from collections.abc import Callable
from functools import partial

import pytest

from retriever.errors import LimitExceededError, StateError
from retriever.service.worker_pools import WorkerPool
from retriever.sessions.draft_counts import TenantUses


def pool(max_waiting: int = 100, num_threads: int = 1) -> WorkerPool:
    return WorkerPool("test", num_threads, lambda: max_waiting, TenantUses())


async def held(of: WorkerPool, gate: threading.Event) -> "asyncio.Task[bool]":
    """Keep the pool's thread busy until the gate opens."""
    began = threading.Event()

    def wait() -> bool:
        began.set()
        return gate.wait(10)

    task = asyncio.create_task(of.run("gate", wait))
    await asyncio.to_thread(began.wait, 10)
    return task


def test_a_tenant_waits_for_one_piece_of_work_of_each_other_however_much_they_ask_for() -> None:
    order: list[str] = []

    async def run() -> None:
        ours, gate = pool(), threading.Event()
        first = await held(ours, gate)
        names = [*"a" * 40, *"c" * 40, *"b" * 4]
        work = [asyncio.create_task(ours.run(name, partial(order.append, name))) for name in names]
        await asyncio.sleep(0)
        gate.set()
        await asyncio.gather(first, *work)

    asyncio.run(run())
    assert order[:12] == [*"acb" * 4]
    assert order[12:] == [*"ac" * 36]


def test_a_tenant_takes_one_thread_and_leaves_others_to_others() -> None:
    async def run() -> None:
        ours, gate = pool(num_threads=2), threading.Event()
        first = await held(ours, gate)
        second = asyncio.create_task(ours.run("gate", int))
        assert await asyncio.wait_for(ours.run("other", int), 10) == 0
        assert not second.done()
        gate.set()
        await asyncio.gather(first, second)

    asyncio.run(run())


def test_what_cannot_be_refused_waits_beyond_the_bound() -> None:
    async def run() -> None:
        ours, gate = pool(max_waiting=1), threading.Event()
        first = await held(ours, gate)
        waiting = [asyncio.create_task(ours.run("a", int, can_refuse=False)) for _ in range(3)]
        await asyncio.sleep(0)
        with pytest.raises(LimitExceededError):
            await ours.run("a", int)
        gate.set()
        assert await asyncio.gather(*waiting) == [0, 0, 0]
        await first

    asyncio.run(run())


def test_a_tenants_waits_are_bounded_and_the_refusal_tells_how_long_to_wait() -> None:
    async def run() -> LimitExceededError:
        ours, gate = pool(max_waiting=3), threading.Event()
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


def test_cancelled_work_is_not_begun_and_what_has_begun_keeps_its_place() -> None:
    done: list[str] = []

    async def run() -> None:
        ours, gate = pool(), threading.Event()
        first = await held(ours, gate)
        waiting = asyncio.create_task(ours.run("gate", partial(done.append, "waiting")))
        other = asyncio.create_task(ours.run("other", partial(done.append, "other")))
        await asyncio.sleep(0)
        for each in (first, waiting, other):
            each.cancel()
        await asyncio.gather(first, waiting, other, return_exceptions=True)
        last = asyncio.create_task(ours.run("gate", partial(done.append, "last")))
        await asyncio.sleep(0.01)
        assert done == []
        gate.set()
        await asyncio.wait_for(last, 10)
        async with asyncio.timeout(10):
            while ours.num_tenants:  # noqa: ASYNC110  (others run until then)
                await asyncio.sleep(0.001)

    asyncio.run(run())
    assert done == ["last"]


def test_errors_come_where_the_work_is_waited_for() -> None:
    def fail() -> None:
        raise StateError("the disk refuses")

    async def run() -> None:
        ours = pool()
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
        ours = pool(1000, num_threads)
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
