"""All that a drafter keeps is counted in bytes, stays below its ceilings, and makes room by age."""

import subprocess
import sys
import time
import timeit
from pathlib import Path

import numpy as np
import pytest

from retriever.drafter import DraftRequest, SequenceOptions
from retriever.errors import LimitExceededError
from retriever.limits import Limits
from retriever.plugins.admin.administration import Administration, SessionFilter
from retriever.predict.context import SEQUENCE_BYTES, Context, context_bytes
from retriever.predict.generations import POOL_BYTES, Generations, generations_bytes
from retriever.predict.ledger import Ledger, default_max_bytes, with_ceilings
from retriever.predict.stores import GENERATIONS_ALONE, GENERATIONS_LIMITS
from retriever.sequences import SessionKey
from retriever.sessions.embedded import EmbeddedDrafter
from retriever.sessions.service_face import ServiceFace
from tests.retriever.log.state_folders import drafter_on, knows, output

SESSION = context_bytes(10)
POOL = generations_bytes(0, GENERATIONS_ALONE) + POOL_BYTES
PROMPT = np.arange(10, dtype=np.int32)


def begin(drafter: EmbeddedDrafter, tenant: str, name: str, length: int = 10) -> None:
    prompt = np.arange(length, dtype=np.int32)
    drafter.state.begin(
        SessionKey(tenant, name), drafter.state.prepare(prompt, SequenceOptions(tenant=tenant))
    )


@pytest.mark.parametrize("num_tokens", [0, 1, 511, 512, 513, 4097, 100_000])
def test_sizes_are_told_before_the_memory_is_taken(num_tokens: int) -> None:
    context = Context(np.zeros(num_tokens, np.int32))
    assert context_bytes(num_tokens) == context.num_bytes + SEQUENCE_BYTES
    for limits in (GENERATIONS_LIMITS, GENERATIONS_ALONE):
        generations = Generations(1 << 17, limits=limits)
        generations.reserve(num_tokens)
        assert generations_bytes(num_tokens, limits) == generations.num_bytes
    assert context.touched_bytes <= context.num_bytes


def test_what_is_taken_is_what_is_there() -> None:
    """Through growth, refusals, ends and bare drafts; and nothing is left at the end."""
    drafter = EmbeddedDrafter(limits=Limits(max_bytes=1 << 26, max_tenant_bytes=1 << 25))
    for number in range(5):
        begin(drafter, "a", str(number), 10 + 300 * number)
        length = 10 + 300 * number
        for _ in range(20):
            new = np.arange(200, dtype=np.int32)
            length += len(new)
            ServiceFace(drafter.state).commit_each([DraftRequest(str(number), new, length, 0)], "a")
        drafter.draft_context(np.arange(5000, dtype=np.int32), 8, tenant="a")
        drafter.draft_context(PROMPT, 8)
        census = drafter.state.census()
        expected = census.session_bytes + census.generations_bytes
        expected += SEQUENCE_BYTES * (number + 1) + POOL_BYTES * census.tenants
        assert census.reserved_bytes == expected
    for number in range(5):
        drafter.state.end(SessionKey("a", str(number)), np.arange(3000, dtype=np.int32))
    kept = drafter.state.census()
    expected = kept.generations_bytes + POOL_BYTES * kept.tenants
    assert kept.reserved_bytes == expected
    assert Administration(drafter.state).evict("a", lose=True)[0]
    assert drafter.state.census().reserved_bytes == POOL


def test_a_step_that_is_refused_changes_nothing_and_is_taken_once_there_is_room() -> None:
    limits = Limits(max_bytes=1 << 26, max_tenant_bytes=POOL + 4 * SESSION)
    drafter = EmbeddedDrafter(limits=limits)
    drafter.open("a", PROMPT)
    drafter.open("b", PROMPT)
    growing = DraftRequest("a", np.zeros(1020, np.int32), 1030, 4)
    for _ in range(3):
        with pytest.raises(LimitExceededError, match="max_tenant_bytes"):
            drafter.draft([growing])
    drafter.close("b")
    assert len(drafter.draft([growing])) == 1


def age(drafter: EmbeddedDrafter, tenant: str) -> None:
    """Let a tenant's last call be long ago."""
    drafter.state.pool(tenant).last_used_s -= 1000.0


def test_idle_pools_make_room_first_and_come_back_from_the_log(tmp_path: Path) -> None:
    room = 3 * POOL + 2 * SESSION + 8000
    with drafter_on(tmp_path, Limits(max_bytes=room, max_tenant_bytes=room)) as drafter:
        for number, tenant in enumerate("ab"):
            drafter.remember(output(number), tenant=tenant)
        begin(drafter, "b", "1")
        age(drafter, "")
        begin(drafter, "c", "1")
        assert [ServiceFace(drafter.state).is_loaded(tenant) for tenant in ("", *"abc")] == [
            False,
            True,
            True,
            True,
        ]
        with pytest.raises(LimitExceededError, match="max_bytes"):
            begin(drafter, "c", "2")  # it has its share, and the others have called of late
        age(drafter, "a")
        begin(drafter, "c", "2")
        assert [ServiceFace(drafter.state).is_loaded(tenant) for tenant in "abc"] == [
            False,
            True,
            True,
        ]
        assert drafter.stats().evictions["pools"] == len(("", "a"))
        for name in "12":
            drafter.state.end(SessionKey("c", name))
        assert knows(drafter, 0, "a")


def test_a_tenant_at_its_ceiling_takes_nothing_from_others() -> None:
    limits = Limits(max_bytes=1 << 26, max_tenant_bytes=2 << 20, idle_eviction_s=0.0)
    drafter = EmbeddedDrafter(limits=limits)
    drafter.remember(output(1), tenant="idle")
    begin(drafter, "victim", "s")
    for number in range(200):
        drafter.remember(np.arange(1000, dtype=np.int32), tenant="greedy")
        begin(drafter, "greedy", str(number), 1000)  # its own idle sessions make room
    assert drafter.state.census().reserved_bytes <= 3 << 20
    assert knows(drafter, 1, "idle")
    (listed,) = Administration(drafter.state).sessions(SessionFilter("victim"))
    assert [each.session_id for each in listed] == ["s"]
    assert drafter.stats().evictions["generations"] > 0
    assert drafter.stats().evictions["sessions"] > 0
    assert drafter.stats().evictions["pools"] == 0


def test_a_tenants_newest_outputs_stay() -> None:
    generations = Generations(1 << 14)
    for number in range(100):
        generations.add(output(number, 90))
    assert generations.shrink()
    kept = [each.tokens[0] // 100 for each in generations.outputs()]
    assert kept == list(range(100 - len(kept), 100))
    assert generations.num_tokens <= 1 << 13
    assert not Generations(1 << 14).shrink()


def test_outputs_beyond_the_ceiling_replace_the_oldest(tmp_path: Path) -> None:
    """Also when they are loaded: a tenant is never refused for what it has on disk."""
    with drafter_on(tmp_path) as drafter:
        for number in range(200):
            drafter.remember(output(number, 90), tenant="a")
    small = Limits(max_bytes=1 << 20, max_tenant_bytes=4 * POOL)
    with drafter_on(tmp_path, small) as drafter:
        assert knows(drafter, 199, "a")
        assert not knows(drafter, 0, "a")
        assert drafter.state.census().reserved_bytes <= 1 << 20
        drafter.remember(output(300, 90), tenant="a")
        assert knows(drafter, 300, "a")


def test_what_is_too_large_is_refused_before_it_is_read() -> None:
    drafter = EmbeddedDrafter(limits=Limits(max_bytes=1 << 22, max_tenant_bytes=1 << 22))
    began_s = time.perf_counter()
    with pytest.raises(LimitExceededError, match="send fewer tokens") as refused:
        drafter.open("s", np.zeros(1 << 20, np.int32))
    assert refused.value.retry_after_s is None
    assert time.perf_counter() - began_s < 0.05  # a million tokens take longer
    with pytest.raises(LimitExceededError):
        drafter.draft_context(np.zeros(1 << 20, np.int32), 8)
    assert drafter.state.census().session_tokens == 0


def test_charges_are_cheap_and_all_given_back() -> None:
    ledger = Ledger(1000, 600)
    one, other = ledger.take("a", 500), ledger.take("b", 500)
    with pytest.raises(LimitExceededError, match=r"\(max_bytes\)") as full:
        ledger.take("c", 1)
    assert full.value.retry_after_s == 5.0
    del other
    with pytest.raises(LimitExceededError, match=r"\(max_tenant_bytes\)"):
        one.add(101)
    one.settle(200)
    assert (ledger.total, ledger.of("a"), ledger.of("b")) == (200, 200, 0)
    context = Context(np.zeros(10, np.int32), ledger_charge := Ledger(1 << 20, 1 << 20).take("", 1))
    assert ledger_charge.num_bytes == SESSION
    taken_s = timeit.repeat(lambda: context.make_room(1), number=1000, repeat=20)
    assert min(taken_s) / 1000 < 1e-6


def test_ceilings_have_defaults() -> None:
    limits = with_ceilings(Limits())
    assert limits.max_bytes == 2 * limits.max_tenant_bytes + limits.max_bytes % 2
    assert abs(limits.max_bytes - default_max_bytes()) < 1 << 20
    assert with_ceilings(Limits(max_bytes=100, max_tenant_bytes=70)) == Limits(
        max_bytes=100, max_tenant_bytes=70
    )


UNDER_A_LIMIT = """
import resource
from retriever.limits import check_memory
from retriever.predict.ledger import default_max_bytes
from retriever.errors import LimitExceededError
resource.setrlimit(resource.RLIMIT_AS, (1 << 30, 1 << 30))
print(default_max_bytes())
try:
    check_memory(1 << 31)
except LimitExceededError as error:
    print(error.limit)
"""


def test_a_limit_of_address_space_counts() -> None:
    done = subprocess.run(
        [sys.executable, "-c", UNDER_A_LIMIT], check=True, capture_output=True, text=True
    )
    max_bytes, limit = done.stdout.split()
    assert 0 < int(max_bytes) < 1 << 29
    assert limit == "max_bytes"
