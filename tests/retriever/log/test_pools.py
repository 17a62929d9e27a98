"""No tenant waits for another tenant's disk, and no output is lost or doubled meanwhile."""

from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait as wait_for
from pathlib import Path
from threading import Event, Lock
from typing import Any

import numpy as np
import pytest

from retriever.errors import LimitExceededError
from retriever.limits import Limits
from retriever.log.generations_log import GenerationsLog
from retriever.log.log_store import Remembered
from retriever.log.pools import Pools
from retriever.predict.generations import Output, Scope
from retriever.predict.pool import Entry, Pool
from tests.retriever.log.state_folders import output

SLOW = "slow"
WAIT_S = 30.0
SOON_S = 0.3
"""Long enough for a thread that does not wait to be done."""


class SlowLog(GenerationsLog):
    """A log that waits for `may_go_on` before it answers for the slow tenant."""

    def __init__(self, directory: Path) -> None:
        super().__init__(directory)
        self.began, self.may_go_on = Event(), Event()
        self.num_loads, self.fails = 0, False

    def load(self, tenant: str) -> Remembered:
        found = super().load(tenant)  # what comes later is not in it
        if tenant == SLOW:
            self.num_loads += 1
            self.began.set()
            assert self.may_go_on.wait(WAIT_S)
            if self.fails:
                raise MemoryError
        return found


@pytest.fixture
def log(tmp_path: Path) -> Iterator[SlowLog]:
    log = SlowLog(tmp_path)
    log.append(Entry(SLOW, Output(output(1), 0.0)))
    log.commit()
    yield log
    log.may_go_on.set()
    log.close()


@pytest.fixture
def threads(log: SlowLog) -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(4) as threads:
        yield threads
        log.may_go_on.set()


def loading(pools: Pools, log: SlowLog, threads: ThreadPoolExecutor) -> Future[Pool]:
    """A load of the slow tenant that has begun."""
    future = threads.submit(pools.get, SLOW)
    assert log.began.wait(WAIT_S)
    return future


def outputs_of(pool: Pool) -> list[list[int]]:
    return [each.tokens.tolist() for each in pool.generations.outputs()]


def test_no_tenant_waits_for_another_tenants_load(
    log: SlowLog, threads: ThreadPoolExecutor
) -> None:
    pools = Pools(Limits(), log)
    loaded = loading(pools, log, threads)
    other = threads.submit(pools.get, "other")
    assert other.result(WAIT_S / 10).tenant == "other"
    assert not loaded.done()
    log.may_go_on.set()
    assert outputs_of(loaded.result(WAIT_S)) == [output(1).tolist()]


def test_a_tenants_calls_share_one_load(log: SlowLog, threads: ThreadPoolExecutor) -> None:
    pools = Pools(Limits(), log)
    futures = [loading(pools, log, threads), *(threads.submit(pools.get, SLOW) for _ in range(3))]
    assert not wait_for(futures, SOON_S).done
    log.may_go_on.set()
    assert len({id(future.result(WAIT_S)) for future in futures}) == 1
    assert log.num_loads == 1


def test_a_load_that_fails_is_tried_by_the_next_call(
    log: SlowLog, threads: ThreadPoolExecutor
) -> None:
    pools = Pools(Limits(), log)
    log.fails = True
    first = loading(pools, log, threads)
    log.may_go_on.set()
    with pytest.raises(MemoryError):
        first.result(WAIT_S)
    log.fails = False
    assert outputs_of(pools.get(SLOW)) == [output(1).tolist()]


def test_outputs_learned_during_a_load_are_there_once(
    log: SlowLog, threads: ThreadPoolExecutor
) -> None:
    pools, lock = Pools(Limits(), log), Lock()
    loaded = loading(pools, log, threads)
    learned = [(SLOW, Output(output(2), 1.0)), ("other", Output(output(3), 1.0))]
    learning = threads.submit(pools.learn, learned, b"", lock, lambda _scope, _time_s: False)
    reserving = threads.submit(pools.reserve, SLOW, 100, lock)
    both: list[Future[Any]] = [learning, reserving]
    assert not wait_for(both, SOON_S).done
    with lock:  # others draft meanwhile
        log.may_go_on.set()
    pool = loaded.result(WAIT_S)
    assert len(learning.result(WAIT_S)) == len(learned)
    reserving.result(WAIT_S)
    pools.commit()
    expected = [output(1).tolist(), output(2).tolist()]
    assert outputs_of(pool) == expected
    assert [each.tokens.tolist() for each in log.load(SLOW).outputs] == expected


def test_what_is_deleted_during_a_load_is_gone(log: SlowLog, threads: ThreadPoolExecutor) -> None:
    pools = Pools(Limits(), log)
    loaded = loading(pools, log, threads)

    def delete() -> None:
        with pools.deletion(SLOW) as pool:
            assert pool is not None
            pool.clear()
            pools.evict(SLOW)
            pools.delete_logged(Scope(SLOW))

    deleting = threads.submit(delete)
    assert not wait_for([deleting], SOON_S).done
    with pytest.raises(LimitExceededError, match="being deleted"):
        pools.get(SLOW)
    log.may_go_on.set()
    deleting.result(WAIT_S)
    assert outputs_of(loaded.result(WAIT_S)) == []
    assert outputs_of(pools.get(SLOW)) == []
    assert log.load(SLOW).outputs == []


def test_an_end_waits_for_a_load(log: SlowLog, threads: ThreadPoolExecutor) -> None:
    pools = Pools(Limits(), log)
    loaded = loading(pools, log, threads)
    ending = threads.submit(pools.close)
    assert not wait_for([ending], SOON_S).done
    log.may_go_on.set()
    ending.result(WAIT_S)
    assert outputs_of(loaded.result(WAIT_S)) == [output(1).tolist()]
    assert log.failures == 0


def test_weights_of_an_evicted_tenant_are_written_later_and_read_again(tmp_path: Path) -> None:
    log = GenerationsLog(tmp_path)
    pools = Pools(Limits(max_tenants=1), log)
    pool = pools.get("first")
    pool.weights["bias"] += 1.0
    pool.learned += 1
    learned = pool.weights.copy()
    del pool
    pools.get("second")
    assert "first" not in pools
    assert np.array_equal(pools.get("first").weights, learned)
    pools.close()


def test_weights_of_an_evicted_tenant_do_not_outlive_its_deletion(tmp_path: Path) -> None:
    log = GenerationsLog(tmp_path)
    pools = Pools(Limits(), log)
    pools.get("gone").learned += 1
    assert pools.evict("gone")
    with pools.deletion("gone") as pool:
        assert pool is None
        pools.delete_logged(Scope("gone"))
    assert log.load("gone").statistics is None
    pools.close()


def test_a_log_is_read_in_parts(tmp_path: Path) -> None:
    """Commits of others go on between two parts."""
    log = GenerationsLog(tmp_path)
    expected = [np.full(1 << 15, (1 << 20) + number, np.int32) for number in range(30)]
    for each in expected:  # 128 KiB each
        log.append(Entry("", Output(each, 0.0)))
    log.commit()
    found = log.load("").outputs
    log.close()
    assert [each.tokens.tolist() for each in found] == [each.tolist() for each in expected]
