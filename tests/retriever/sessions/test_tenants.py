"""No tenant ever drafts from another's outputs, in memory or out of it."""

import gc
from dataclasses import replace
from pathlib import Path

import pytest

from retriever.drafter import DraftRequest, SequenceOptions
from retriever.errors import InvalidRequestError
from retriever.limits import Limits
from retriever.log.options import LogOptions
from retriever.sessions.embedded import EmbeddedDrafter
from retriever.sessions.service_face import ServiceFace
from tests.retriever.log.state_folders import drafter_on, keep, kept, knows, log_on, output
from tests.retriever.token_ids import ids

SMALL = Limits(generations_tokens=1024)


@pytest.mark.parametrize("state", [None, "state"])
def test_no_tenant_drafts_from_another(tmp_path: Path, state: str | None) -> None:
    """Names that are prefixes of one another, or hold zeros, are names of their own."""
    tenants = ["", "a", "aa", "a:", ":a", "\u00e4" * 128]
    path = tmp_path / state if state else None
    with drafter_on(path) as drafter:
        for number, tenant in enumerate(tenants):
            drafter.open(tenant or "s", ids(9), SequenceOptions(tenant=tenant))
            drafter.close(tenant or "s", output(number))
        assert_separate(drafter, tenants)
    if path is not None:
        with drafter_on(path) as drafter:
            assert_separate(drafter, tenants)


def assert_separate(drafter: EmbeddedDrafter, tenants: list[str]) -> None:
    for asking in tenants:
        for number, planted in enumerate(tenants):
            assert knows(drafter, number, asking) == (asking == planted)
            drafter.open("asks", output(number)[:8], SequenceOptions(tenant=asking))
            tree = drafter.draft([DraftRequest("asks", ids(), 8, 8)])[0]
            drafter.close("asks")
            assert (len(tree) > 0) == (asking == planted)


def test_tenants_beyond_the_limit_leave_memory_and_come_back_from_the_log(tmp_path: Path) -> None:
    limits = replace(SMALL, max_tenants=2)
    with drafter_on(tmp_path, limits) as drafter:
        for number in range(5):
            drafter.remember(output(number), tenant=str(number))
            drafter.remember(output(number + 10), tenant=str(number))
        gc.collect()
        assert [tenant for tenant in "01234" if ServiceFace(drafter.state).is_loaded(tenant)] == [
            "3",
            "4",
        ]
        for number in range(5):
            assert knows(drafter, number, str(number))
            drafter.remember(output(number + 20), tenant=str(number))
    with log_on(tmp_path, LogOptions(1024)) as log:
        expected = [output(3 + more).tolist() for more in (0, 10, 20)]
        assert kept(log, "3") == expected


def test_without_a_log_a_tenant_that_left_memory_is_forgotten() -> None:
    with drafter_on(None, replace(SMALL, max_tenants=2)) as drafter:
        for number in range(3):
            drafter.remember(output(number), tenant=str(number))
        assert not knows(drafter, 0, "0")
        assert knows(drafter, 2, "2")


def test_a_session_whose_tenant_left_memory_is_still_of_its_pool(tmp_path: Path) -> None:
    with drafter_on(tmp_path, replace(SMALL, max_tenants=1)) as drafter:
        drafter.open("s", ids(9), SequenceOptions(tenant="a"))
        drafter.remember(output(1), tenant="b")
        drafter.close("s", output(2))
        assert knows(drafter, 2, "a")
        assert not knows(drafter, 2, "b")
    with drafter_on(tmp_path) as drafter:
        assert knows(drafter, 2, "a")


@pytest.mark.parametrize("in_memory", [True, False])
def test_a_deleted_tenant_is_gone_and_the_others_are_not(tmp_path: Path, in_memory: bool) -> None:  # noqa: FBT001
    with drafter_on(tmp_path, replace(SMALL, max_tenants=2)) as drafter:
        for tenant in ("gone", "other") if not in_memory else ("other", "gone"):
            drafter.remember(output(1), tenant=tenant)
        if in_memory:
            drafter.open("s", output(2), SequenceOptions(tenant="gone"))
            drafter.delete("gone")
            drafter.close("s", output(3))
        else:
            drafter.remember(output(1), tenant="third")
            drafter.delete("gone")
        for number in (1, 2, 3):
            assert not knows(drafter, number, "gone")
        assert knows(drafter, 1, "other")
        drafter.remember(output(4), tenant="gone")
    with drafter_on(tmp_path) as drafter:
        assert [number for number in range(5) if knows(drafter, number, "gone")] == [4]
        assert knows(drafter, 1, "other")


def test_nothing_of_a_deleted_tenant_stays_in_the_files(tmp_path: Path) -> None:
    planted = [output(number, 20).astype("<u2").tobytes() for number in range(100)]
    with drafter_on(tmp_path) as drafter:
        for number in range(100):
            tenant = "gone" if number % 2 else "other"
            drafter.remember(output(number), tenant=tenant)
        data = tmp_path / "generations.mdb"
        assert all(data.read_bytes().count(tokens) for tokens in planted)
        drafter.delete("gone")
        content = data.read_bytes()
        assert data.stat().st_mode & 0o777 == 0o600
        found = [number for number in range(100) if planted[number] in content]
        assert found == list(range(0, 100, 2))
        drafter.remember(output(200), tenant="other")
        assert drafter.stats().log_failures == 0
    with log_on(tmp_path) as log:
        assert kept(log, "other") == [output(n).tolist() for n in [*range(0, 100, 2), 200]]
        assert kept(log, "gone") == []


def test_a_tenant_can_be_deleted_where_the_log_is_full(tmp_path: Path) -> None:
    with log_on(tmp_path, LogOptions(max_bytes=1 << 18)) as log:
        while log.failures == 0:
            keep(log, output(1, 1000), "gone")
        log.delete("gone")
        assert kept(log, "gone") == []
        keep(log, output(1, 1000), "other")
        assert (log.failures, kept(log, "other")) == (1, [output(1, 1000).tolist()])


def test_a_tenant_can_be_deleted_without_a_log() -> None:
    with drafter_on(None) as drafter:
        drafter.remember(output(1), tenant="a")
        drafter.delete("a")
        drafter.delete("nobody")
        assert not knows(drafter, 1, "a")


@pytest.mark.parametrize("tenant", ["x" * 257, "\ud800"])
def test_names_of_tenants_are_checked(tenant: str) -> None:
    with drafter_on(None) as drafter, pytest.raises(InvalidRequestError, match="name"):
        drafter.open("s", ids(1), SequenceOptions(tenant=tenant))
