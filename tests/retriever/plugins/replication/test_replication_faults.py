"""Replication where the server, the network or another drafter is not as it should be."""

import time
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import pytest

from retriever.drafter import DraftRequest, SequenceOptions
from retriever.errors import LimitExceededError, StateError, UnknownSessionError
from retriever.limits import Limits
from retriever.log.pools import Pools
from retriever.plugins.replication import replication_state
from retriever.plugins.replication.replicated_records import Record, encode
from retriever.predict.generations import Generations, Scope, session_origin
from retriever.sequences import SessionKey
from retriever.sessions.embedded import EmbeddedDrafter
from tests.patience import can_be_kept
from tests.retriever.log.state_folders import knows, output
from tests.retriever.plugins.replication.redis_server import (
    DELETIONS,
    OUTPUTS,
    RedisServer,
    counts,
    needs_redis,
    server,
    sharing,
    soon,
)
from tests.retriever.token_ids import ids

__all__ = ["server"]

OTHER = b"another drafter."
NO_TOKENS = ids()

pytestmark = needs_redis


def test_a_server_that_is_killed_costs_replication_alone(server: RedisServer) -> None:
    """It comes back with nothing: what waited is shared, and what comes after."""
    with sharing(server.url) as one, sharing(server.url) as other:
        one.remember(output(1))
        soon(lambda: knows(other, 1))
        server.kill()
        for number in (2, 3):
            one.remember(output(number))
        soon(lambda: counts(one).failures > 0 and counts(other).failures > 0)
        assert knows(other, 1)
        assert not counts(one).connected
        server.start()
        soon(lambda: knows(other, 2) and knows(other, 3))
        one.remember(output(4))
        soon(lambda: knows(other, 4))
        assert (
            counts(other).learned,
            counts(one).dropped,
        ) == (4, 0)


def test_a_server_that_lost_its_time_is_read_from_its_beginning(
    server: RedisServer, tmp_path: Path
) -> None:
    """What it gives again was learned already; ids that are lower than before are noticed."""
    with sharing(server.url, tmp_path / "state") as away, server.client() as client:
        publish(client, Record(OTHER, 1, "", time.time(), output(1)))
        soon(lambda: counts(away).learned == 1)
    with server.client() as client:
        client.flushall()
        for number in (1, 2):
            publish(client, Record(OTHER, number, "", time.time(), output(number)), f"{number}-0")
        with sharing(server.url, tmp_path / "state") as away:
            soon(lambda: counts(away).learned == 1)
            assert counts(away).skipped == {"repeated": 1}
            assert knows(away, 2)


@pytest.mark.faults
@can_be_kept
def test_a_paused_server_slows_neither_a_draft_nor_a_close(server: RedisServer) -> None:
    with sharing(server.url) as one, sharing(server.url) as other:
        one.warm()
        one.remember(output(1))
        soon(lambda: counts(other).learned == 1)
        usual = step_times(one, 1.0)
        server.pause()
        try:
            paused = step_times(one, 3.0)
        finally:
            server.go_on()
        assert counts(one).failures > 0
        # A wait for the server would take a second, its time limit.
        assert max(paused) < max(0.25, 2 * max(usual))
        assert median(paused) < 2 * median(usual)
        soon(lambda: counts(one).queued == 0 and counts(one).connected)
        soon(lambda: counts(other).learned + counts(other).skipped.get("repeated", 0) > 100)


def step_times(drafter: EmbeddedDrafter, for_s: float) -> list[float]:
    """Open, draft and close for some seconds; return how long each call took."""
    taken: list[float] = []
    end = time.monotonic() + for_s
    calls = (
        lambda: drafter.open("s", output(1)[:8]),
        lambda: drafter.draft([DraftRequest("s", NO_TOKENS, 8, 8)]),
        lambda: drafter.close("s", output(3)),
    )
    while time.monotonic() < end:
        for call in calls:
            began = time.perf_counter()
            call()
            taken.append(time.perf_counter() - began)
        time.sleep(0.002)
    return taken


def publish(client: Any, record: Record, entry_id: str = "*", key: str = OUTPUTS) -> None:
    client.xadd(key, {"r": encode(record, key.encode())}, id=entry_id)


def test_what_is_no_record_is_counted_and_skipped(server: RedisServer) -> None:
    now = time.time()
    with server.client() as client:
        client.xadd(OUTPUTS, {"x": b"foreign"})
        client.xadd(OUTPUTS, {"r": b""})
        client.xadd(OUTPUTS, {"r": b"\x02" + bytes(100)})
        client.xadd(OUTPUTS, {"r": bytes(1 << 20)})
        client.xadd(DELETIONS, {"r": b"\x01"})
        good = encode(Record(OTHER, 1, "", now, output(1)), OUTPUTS.encode())
        client.xadd(OUTPUTS, {"r": good[:-1] + b"\xff"})
        publish(client, Record(OTHER, 2, "", now, NO_TOKENS))
        publish(client, Record(OTHER, 3, "", now, ids(1, 1 << 20)))
        publish(client, Record(OTHER, 4, "", now, output(2)), key=DELETIONS)
        publish(client, Record(OTHER, 5, "", now - 100, output(5)))
        client.xadd(OUTPUTS, {"r": good})  # its number is below that of the one before
        publish(client, Record(OTHER, 6, "", now, output(6)))
        publish(client, Record(OTHER, 6, "", now, output(6)))
    with sharing(server.url, limits=Limits(generations_age_s=50)) as one:
        soon(lambda: counts(one).learned == 1)
        soon(lambda: sum(counts(one).skipped.values()) == 12)
        expected = {"foreign": 1, "damaged": 5, "newer": 1, "oversized": 1}
        expected |= {"vocabulary": 1, "expired": 1, "repeated": 2}
        assert counts(one).skipped == expected
        assert [number for number in range(7) if knows(one, number)] == [6]


def test_a_key_of_another_kind_is_a_server_that_refuses(server: RedisServer) -> None:
    with server.client() as client:
        client.set(OUTPUTS, "a string")
        with sharing(server.url) as one:
            one.remember(output(1))
            soon(lambda: counts(one).failures > 2)
            client.delete(OUTPUTS)
            soon(lambda: counts(one).published == 1)


def knows_by_now(drafter: EmbeddedDrafter, number: int, tenant: str) -> bool:
    """Whether an output is known, which cannot be told while its tenant's data is deleted."""
    try:
        return knows(drafter, number, tenant)
    except LimitExceededError:
        return False


def test_a_deleted_tenant_is_gone_everywhere(server: RedisServer, tmp_path: Path) -> None:
    """From all that listen, from one that was away, and from the server's memory."""
    planted = output(1).astype("<u2").tobytes()
    with sharing(server.url) as one:
        with sharing(server.url, tmp_path / "away") as away:
            for number in range(10):
                one.remember(output(number), tenant="gone" if number % 2 else "kept")
            soon(lambda: counts(away).learned == 10)
        with sharing(server.url, tmp_path / "other") as other, server.client() as client:
            soon(lambda: counts(other).learned == 10)
            other.open("open", ids(9), SequenceOptions(tenant="gone"))
            assert planted in client.dump(OUTPUTS)
            one.delete("gone")
            soon(lambda: counts(one).unsent_deletions == 0 and counts(other).deletions == 1)
            assert client.xlen(OUTPUTS) == 5
            assert planted not in client.dump(OUTPUTS)
            other.close("open", output(20))
            one.remember(output(11), tenant="gone")
            soon(lambda: knows_by_now(other, 11, "gone"))
            assert what_is_known(other) == ([11], [0, 2, 4, 6, 8])
            assert planted not in (tmp_path / "other" / "generations.mdb").read_bytes()
        with sharing(server.url, tmp_path / "away") as away:
            soon(lambda: knows_by_now(away, 11, "gone"))
            assert what_is_known(away) == ([11], [0, 2, 4, 6, 8])
        with sharing(server.url) as new:
            soon(lambda: counts(new).learned == 6)
            assert what_is_known(new) == ([11], [0, 2, 4, 6, 8])


def test_a_deleted_sessions_outputs_are_gone_everywhere(
    server: RedisServer, tmp_path: Path
) -> None:
    """The other sessions' and tenants' stay, also those that learned from them."""
    planted = output(1).astype("<u2").tobytes()
    with sharing(server.url) as one, server.client() as client:
        with sharing(server.url, tmp_path / "away") as away:
            for number in range(8):
                session, tenant = ("gone" if number % 2 else "kept"), ("a" if number < 6 else "b")
                one.open(session, ids(9), SequenceOptions(tenant=tenant))
                one.close(session, output(number))
            soon(lambda: counts(away).learned == 8)
        with sharing(server.url, tmp_path / "other") as other:
            soon(lambda: counts(other).learned == 8)
            for session in ("gone", "kept"):
                other.open(session, ids(9), SequenceOptions(tenant="a"))
            assert planted in client.dump(OUTPUTS)
            one.delete("a", "gone")
            soon(lambda: counts(one).unsent_deletions == 0 and counts(other).deletions == 1)
            assert client.xlen(OUTPUTS) == 5
            assert planted not in client.dump(OUTPUTS)
            assert planted not in (tmp_path / "other" / "generations.mdb").read_bytes()
            with pytest.raises(UnknownSessionError):
                other.close("gone", output(20))
            other.close("kept", output(21))
            assert what_is_known_of(other, "a") == [0, 2, 4, 21]
            assert what_is_known_of(other, "b") == [6, 7]
            soon(lambda: knows(one, 21, "a"))
            assert what_is_known_of(one, "a") == [0, 2, 4, 21]
        with sharing(server.url, tmp_path / "away") as away:
            soon(lambda: knows_by_now(away, 21, "a"))
            assert what_is_known_of(away, "a") == [0, 2, 4, 21]
            assert what_is_known_of(away, "b") == [6, 7]


def what_is_known_of(drafter: EmbeddedDrafter, tenant: str) -> list[int]:
    return [number for number in range(22) if knows(drafter, number, tenant)]


def what_is_known(drafter: EmbeddedDrafter) -> tuple[list[int], list[int]]:
    return what_is_known_of(drafter, "gone"), what_is_known_of(drafter, "kept")


def test_what_comes_late_of_a_deleted_tenant_is_not_learned(
    server: RedisServer, tmp_path: Path
) -> None:
    """Another drafter generated it before the deletion, and published it afterwards."""
    with sharing(server.url, tmp_path / "state") as one, server.client() as client:
        before = time.time()
        one.delete("gone")
        soon(lambda: client.xlen(DELETIONS) == 1)
    with sharing(server.url, tmp_path / "state") as one, server.client() as client:
        soon(lambda: counts(one).connected)
        publish(client, Record(OTHER, 1, "gone", before, output(1)))
        publish(client, Record(OTHER, 2, "kept", before, output(2)))
        soon(lambda: counts(one).learned == 1)
        assert counts(one).skipped == {"deleted": 1}
        soon(lambda: client.xlen(OUTPUTS) == 1)


def test_a_tenant_of_many_deletions_pushes_out_none_of_anothers(
    server: RedisServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(replication_state, "MAX_TENANT_DELETIONS", 4)
    before = time.time()
    with server.client() as client:
        with sharing(server.url) as one:
            for number in range(2):
                one.delete("few", f"s{number}")
            for number in range(30):
                one.delete("many", f"s{number}")
            soon(lambda: counts(one).unsent_deletions == 0 and client.xlen(DELETIONS) == 6)
        # It has ended: of what comes it would take out, unseen by others, what was deleted.
        with sharing(server.url) as other:
            soon(lambda: counts(other).connected)
            for number, tenant in enumerate(("few", "few", "many", "many"), 1):
                name = "s0" if number % 2 else "s29"
                name = name if tenant == "many" else f"s{number - 1}"
                origin = session_origin(name)
                publish(client, Record(OTHER, number, tenant, before, output(number), origin))
            soon(lambda: counts(other).learned + sum(counts(other).skipped.values()) == 4)
            assert [knows(other, 3, "many"), counts(other).skipped] == [
                True,
                {"deleted": 3},
            ]


def test_a_deletion_waits_for_a_server_that_is_away(server: RedisServer, tmp_path: Path) -> None:
    """It outlives the process; what waited of the tenant is never published."""
    with sharing(server.url) as other:
        with sharing(server.url, tmp_path / "state") as one:
            one.remember(output(1), tenant="gone")
            soon(lambda: knows(other, 1, "gone"))
            server.kill()
            soon(lambda: not counts(one).connected)
            one.remember(output(2), tenant="gone")
            one.delete("gone")
            one.delete("kept", "s")
            assert (
                counts(one).unsent_deletions,
                counts(one).queued,
            ) == (
                2,
                0,
            )
        server.start()
        with sharing(server.url, tmp_path / "state") as one:
            soon(lambda: counts(one).unsent_deletions == 0 and counts(other).deletions == 2)
            assert not knows(other, 1, "gone")


def test_what_was_remembered_before_a_deletion_is_not_published_after_it() -> None:
    """As where a session is closed while its tenant is deleted."""
    with sharing("redis://127.0.0.1:1") as one:
        for tenant in ("gone", "kept"):
            one.open(tenant, ids(9), SequenceOptions(tenant=tenant))
            one.state.end(SessionKey("", tenant), output(1))  # which publishes nothing yet
        one.delete("gone")
        one.state.flush()
        assert (
            counts(one).queued,
            counts(one).unsent_deletions,
        ) == (1, 1)


def test_a_deletion_that_the_disk_refuses_is_tried_again(
    server: RedisServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with sharing(server.url) as one, sharing(server.url, tmp_path / "state") as other:
        one.remember(output(1), tenant="gone")
        soon(lambda: counts(other).learned == 1)
        delete = Pools.delete_logged
        refusals = iter([StateError("the disk is full")])

        def delete_at_last(pools: Pools, scope: Scope) -> None:
            if pools.is_logged:  # only the other one's
                for refusal in refusals:
                    raise refusal
            delete(pools, scope)

        monkeypatch.setattr(Pools, "delete_logged", delete_at_last)
        one.delete("gone")
        soon(lambda: counts(other).deletions == 1)
        assert counts(other).failures == 1
        assert not knows(other, 1, "gone")


def test_an_output_that_comes_late_is_forgotten_in_time() -> None:
    now = 100.0
    generations = Generations(1024, max_age_s=50, clock=lambda: now)
    for time_s, length in ((80.0, 10), (60.0, 20), (90.0, 30)):
        generations.add(np.arange(length, dtype=np.int32), time_s)
    assert generations.num_tokens == 63
    now = 111.0  # the first one goes with the second, which stands behind it
    assert generations.num_tokens == 31
    now = 141.0
    assert generations.num_tokens == 0
