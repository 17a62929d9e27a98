"""Work of a tenant in a second: a burst, a debt, and how long to wait."""

import pytest

from retriever.errors import LimitExceededError
from retriever.service.allowances import Allowances, work_of_draft


def test_work_beyond_a_seconds_allowance_is_refused_with_the_time_to_wait() -> None:
    now = 0.0
    allowances = Allowances.of_work(lambda: 1000.0, lambda: now)
    for _ in range(11):  # the last one begins before the burst is used up
        allowances.take("a", 100.0)
    with pytest.raises(LimitExceededError, match="max_tenant_work") as raised:
        allowances.take("a", 1.0)
    assert raised.value.limit == "max_tenant_work"
    allowances.take("b", 1.0)
    assert raised.value.retry_after_s is not None
    now += raised.value.retry_after_s + 0.1
    allowances.take("a", 1.0)


def test_one_request_may_be_larger_than_the_allowance_and_is_paid_back() -> None:
    now = 0.0
    allowances = Allowances.of_work(lambda: 1000.0, lambda: now)
    allowances.take("a", 5000.0)
    with pytest.raises(LimitExceededError) as raised:
        allowances.take("a", 1.0)
    assert raised.value.retry_after_s == pytest.approx(4.0)
    now = 3.9
    with pytest.raises(LimitExceededError):
        allowances.take("a", 1.0)
    now = 4.01
    allowances.take("a", 1.0)


def test_over_time_a_tenant_gets_its_rate() -> None:
    now, taken = 0.0, 0.0
    allowances = Allowances.of_work(lambda: 1000.0, lambda: now)
    work = work_of_draft(32, 16)
    for _ in range(20_000):
        now += 0.001
        try:
            allowances.take("a", work)
        except LimitExceededError:
            continue
        taken += work
    assert taken == pytest.approx(21_000, rel=0.02)  # of 20 s, and the first burst


def test_a_tenant_that_deletes_without_end_is_told_when_to_come_again() -> None:
    now = [0.0]
    deleting = Allowances.of_deletions(lambda: 3, lambda: now[0])
    for _ in range(3):
        deleting.take("a")
    with pytest.raises(LimitExceededError, match=r"again in 20 s \(max_tenant_deletions\)"):
        deleting.take("a")
    deleting.take("b")
    now[0] = 20.0
    deleting.take("a")
    with pytest.raises(LimitExceededError):
        deleting.take("a")
    now[0] = 1000.0
    for _ in range(3):
        deleting.take("a")
    with pytest.raises(LimitExceededError):
        deleting.take("a")


def test_a_limit_that_changes_counts_from_the_next_request_on() -> None:
    limit = float("inf")
    allowances = Allowances.of_work(lambda: limit, lambda: 0.0)
    allowances.take("a", 1e9)
    assert not allowances.is_limited
    limit = 100.0
    allowances.take("a", 1000.0)
    assert allowances.is_limited
    with pytest.raises(LimitExceededError):
        allowances.take("a", 1.0)
    limit = 1000.0
    allowances.take("b", 1000.0)
