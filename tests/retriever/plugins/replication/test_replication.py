"""Drafters that replicate outputs through a real Redis server."""

import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import retriever.plugins.replication
from indexer.reader import Vocabulary
from retriever.client.credentials import without_credentials
from retriever.client.strict import RemoteDrafter
from retriever.drafter import FORGOTTEN, DraftRequest
from retriever.errors import ReplicationError
from retriever.limits import Limits
from retriever.log.pools import Pools
from retriever.plugins.replication.options import ReplicationOptions
from retriever.sessions.embedded import EmbeddedDrafter
from tests.patience import free_port
from tests.retriever.conftest import start_service, stop_service
from tests.retriever.log.state_folders import knows, log_on, output
from tests.retriever.plugins.replication.redis_server import (
    OUTPUTS,
    VOCABULARY,
    RedisServer,
    counts,
    needs_redis,
    server,
    sharing,
    soon,
)
from tests.retriever.token_ids import ids

__all__ = ["server"]

pytestmark = needs_redis


def test_a_service_and_a_drafter_of_another_process_draft_what_the_other_generated(
    server: RedisServer,
) -> None:
    process, address = start_service("--address", "127.0.0.1:0", "--redis", server.url)
    try:
        with (
            RemoteDrafter(address, vocabulary_fingerprint=VOCABULARY.fingerprint) as service,
            sharing(server.url) as drafter,
        ):
            service.open("a", ids(9))
            service.close("a", output(1))
            soon(lambda: knows(drafter, 1))
            assert drafted(service, 2) == []
            drafter.remember(output(2))
            soon(lambda: drafted(service, 2) == output(2)[8:12].tolist())
    finally:
        stop_service(process)


def drafted(drafter: RemoteDrafter, number: int) -> list[int]:
    drafter.open("s", output(number)[:8], FORGOTTEN)
    tree = drafter.draft([DraftRequest("s", ids(), 8, 4)])[0]
    drafter.close("s", remember=False)
    return [int(token) for token in tree.token_ids]


def test_outputs_travel_both_ways_and_open_sessions_draft_from_them(server: RedisServer) -> None:
    with sharing(server.url) as one, sharing(server.url) as other:
        other.open("s", output(2)[:8])
        one.open("a", ids(9))
        one.close("a", output(2))
        other.remember(output(3))
        soon(lambda: knows(other, 2) and knows(one, 3))
        tree = other.draft([DraftRequest("s", ids(), 8, 4)])[0]
        assert tree.token_ids.tolist() == output(2)[8:12].tolist()
        assert other.state.census().session_tokens == 8
        soon(lambda: counts(one).skipped == {"own": 1} and counts(other).skipped == {"own": 1})
        assert (
            counts(one).learned,
            counts(one).learned_tokens,
            counts(one).published,
        ) == (1, 20, 1)


def test_long_outputs_and_large_ids_travel_whole(server: RedisServer) -> None:
    long = np.arange(1 << 19, (1 << 19) + 10_000, dtype=np.int32)
    with sharing(server.url) as one, sharing(server.url) as other:
        one.remember(long)
        soon(lambda: counts(other).learned_tokens == len(long))
        for start in (100, 4090, 9_000):
            if start != 4090:  # the parts meet there
                tree = other.draft_context(long[start : start + 8], 4)
                assert tree.token_ids.tolist() == long[start + 8 : start + 12].tolist()


def test_tenants_stay_apart(server: RedisServer) -> None:
    tenants = ["", "a", "aa", "a:", "\u00e4" * 128]
    with sharing(server.url) as one, sharing(server.url) as other:
        for number, tenant in enumerate(tenants):
            one.remember(output(number), tenant=tenant)
        soon(lambda: counts(other).learned == len(tenants))
        assert leaks(other, tenants) == []


def test_a_planted_leak_between_tenants_is_caught(
    server: RedisServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The test above would fail if what is learned went to the wrong tenant's pool."""
    with sharing(server.url) as one, sharing(server.url) as other:
        learn = Pools.learn
        monkeypatch.setattr(
            Pools,
            "learn",
            lambda pools, learned, *rest: learn(pools, [("a", o) for _, o in learned], *rest),
        )
        for number, tenant in enumerate(["", "a"]):
            one.remember(output(number), tenant=tenant)
        soon(lambda: counts(other).learned == 2)
        assert leaks(other, ["", "a"]) == [("", 0), ("a", 0)]


def leaks(drafter: EmbeddedDrafter, tenants: list[str]) -> list[tuple[str, int]]:
    """Who knows what is not theirs, or does not know what is."""
    return [
        (asking, number)
        for asking in tenants
        for number, tenant in enumerate(tenants)
        if knows(drafter, number, asking) != (asking == tenant)
    ]


def test_other_vocabularies_share_nothing(server: RedisServer) -> None:
    another = Vocabulary(1 << 20, "00" * 32)
    with sharing(server.url) as one, sharing(server.url, vocabulary=another) as other:
        one.remember(output(1))
        other.remember(output(2))
        soon(lambda: counts(one).skipped == {"own": 1} and counts(other).skipped == {"own": 1})
        assert not knows(other, 1)
        assert (
            counts(one).learned,
            counts(other).learned,
        ) == (0, 0)


def test_nothing_is_published_of_what_is_forgotten(server: RedisServer) -> None:
    with sharing(server.url) as one:
        one.open("opened", ids(9), FORGOTTEN)
        one.close("opened", output(1))
        one.open("closed", ids(9))
        one.close("closed", output(2), remember=False)
        one.remember(output(3))
        soon(lambda: counts(one).published == 1)
    with server.client() as client, sharing(server.url) as other:
        assert client.xlen(OUTPUTS) == 1
        soon(lambda: counts(other).learned == 1)
        assert [number for number in (1, 2, 3) if knows(other, number)] == [3]


def test_one_that_was_away_catches_up_from_where_it_was(
    server: RedisServer, tmp_path: Path
) -> None:
    with sharing(server.url) as one:
        with sharing(server.url, tmp_path / "state") as away:
            one.remember(output(1))
            away.remember(output(2))
            soon(lambda: counts(away).learned == 1 and counts(away).skipped == {"own": 1})
        for number in (3, 4):
            one.remember(output(number))
        soon(lambda: counts(one).published == 3)
        with sharing(server.url, tmp_path / "state") as away:
            soon(lambda: counts(away).learned == 2)
            assert all(knows(away, number) for number in (1, 2, 3, 4))
            assert counts(away).skipped == {}  # nothing was read twice
            away.remember(output(5))
            soon(lambda: knows(one, 5))
    with log_on(tmp_path / "state") as log:
        found = [int(kept.tokens[0]) // 100 for kept in log.load("").outputs]
    assert sorted(found) == [1, 2, 3, 4, 5]


def test_a_new_one_reads_back_what_its_ring_holds(server: RedisServer) -> None:
    with sharing(server.url) as one:
        for number in range(400):
            one.remember(output(number))
            one.remember(output(number + 1000, 1000), tenant="large")
        soon(lambda: counts(one).published == 800)
        # Of tenants that were heard of last each fills its ring: 48 outputs, and 1 of the large.
        with sharing(server.url, limits=Limits(generations_tokens=1024)) as new:
            soon(lambda: counts(new).learned >= 98)
            assert counts(new).learned <= 102
            assert knows(new, 399)
            assert knows(new, 353)
            assert knows(new, 1399, "large")
        # One tenant alone cannot have filled what the other's ring holds.
        with sharing(server.url, limits=Limits(generations_tokens=1 << 20)) as new:
            soon(lambda: counts(new).learned == 800)
            assert knows(new, 0)


def test_tenants_beyond_the_limit_are_learned_by_the_log_or_not_at_all(
    server: RedisServer, tmp_path: Path
) -> None:
    limits = Limits(generations_tokens=1024, max_tenants=2)
    with (
        sharing(server.url) as one,
        sharing(server.url, limits=limits) as without,
        sharing(server.url, tmp_path / "state", limits) as logged,
    ):
        for number in range(5):
            one.remember(output(number), tenant=str(number))
        soon(lambda: counts(logged).learned == 5)
        soon(lambda: counts(without).learned == 1 and counts(without).skipped == {"no-room": 4})
        assert all(knows(logged, number, str(number)) for number in range(5))
        assert knows(without, 0, "0")


def test_the_stream_is_bounded(server: RedisServer) -> None:
    with sharing(server.url, max_records=100) as one:
        for number in range(1000):
            one.remember(output(number))
        soon(lambda: counts(one).published == 1000)
    with server.client() as client:
        assert 100 <= client.xlen(OUTPUTS) <= 200  # "about": whole nodes of 100 entries leave


def test_services_without_the_server_start_and_share_later(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The queue is bounded: the newest of the queued outputs are shared."""
    late = RedisServer(tmp_path)
    with (
        sharing(late.url, max_queued_tokens=840) as one,
        sharing(late.url.replace("//", "//me:secret-word@"), timeout_s=0.5) as other,
    ):
        for number in range(30):
            one.remember(output(number))
        soon(lambda: counts(one).failures > 3)
        assert knows(one, 7)
        assert (
            counts(one).queued,
            counts(one).dropped,
            counts(one).connected,
        ) == (
            10,
            20,
            False,
        )
        late.arguments = ("--user", "me", "on", ">secret-word", "~*", "&*", "+@all")
        late.start()
        try:
            soon(lambda: counts(other).learned == 10)
            assert [number for number in range(30) if knows(other, number)] == [*range(20, 30)]
            warnings = [record for record in caplog.records if record.levelname == "WARNING"]
        finally:
            late.kill()
    assert sorted(record.getMessage().split(":")[0] for record in warnings) == [
        "outputs are not learned from redis",
        "outputs are not learned from redis",
        "outputs are not published to redis",
    ]
    assert all("drafting continues" in record.getMessage() for record in warnings)
    assert "secret-word" not in caplog.text


def test_a_password_is_never_shown(
    server: RedisServer, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with server.client() as client:
        client.config_set("requirepass", "secret-word")
    options = ReplicationOptions("redis://:secret-word@host/0")
    assert "secret" not in repr(options)
    assert without_credentials(options.url) == "redis://host/0"
    for mark in "/?#":
        assert "12" not in without_credentials(f"redis://:12{mark}3@host/0")
    with sharing(server.url.replace("//", "//:wrong-word@")) as one:
        soon(lambda: counts(one).failures > 1)
    monkeypatch.setenv("FOREDRAFT_REDIS_PASSWORD", "secret-word")
    with sharing(server.url) as one:
        one.remember(output(1))
        soon(lambda: counts(one).published == 1)
    assert "not learned" in caplog.text
    assert "-word" not in caplog.text


@pytest.mark.skipif(shutil.which("openssl") is None, reason="the program openssl is missing")
def test_outputs_are_replicated_over_tls(tmp_path: Path) -> None:
    """With a server whose certificate is trusted, and with no other."""
    certificate, key = tmp_path / "certificate.pem", tmp_path / "key.pem"
    subprocess.run(
        [
            *("openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256"),
            *("-nodes", "-days", "1", "-subj", "/CN=localhost"),
            *("-addext", "subjectAltName=DNS:localhost", "-keyout", key, "-out", certificate),
        ],
        check=True,
        capture_output=True,
    )
    port = free_port()
    started = RedisServer(tmp_path)
    started.arguments = (
        *("--tls-port", str(port), "--tls-auth-clients", "no"),
        *("--tls-cert-file", str(certificate), "--tls-key-file", str(key)),
        *("--tls-ca-cert-file", str(certificate)),
    )
    started.start()
    url = f"rediss://localhost:{port}/0"
    try:
        with sharing(f"{url}?ssl_ca_certs={certificate}") as one, sharing(url) as stranger:
            one.remember(output(1))
            soon(lambda: counts(one).published == 1 and counts(stranger).failures > 0)
            assert (
                counts(one).failures,
                counts(stranger).connected,
            ) == (
                0,
                False,
            )
    finally:
        started.kill()


@pytest.mark.parametrize(
    "url",
    ["", "host", "http://host/0", "redis://:pass/word@host", "redis://host:port", "redis://h?x=1"],
)
def test_urls_that_are_none_are_refused(url: str) -> None:
    with pytest.raises(ReplicationError, match="redis://HOST:PORT") as raised:
        EmbeddedDrafter(plugins=[ReplicationOptions(url)])
    assert "pass" not in str(raised.value).replace("a password", "")
    assert raised.value.__cause__ is None
    assert "word" not in without_credentials(url)


def test_a_missing_library_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "redis", None)
    for name in ("replication_threads", "redis_streams", "publisher", "consumer"):
        monkeypatch.delitem(sys.modules, f"retriever.plugins.replication.{name}", raising=False)
        monkeypatch.delattr(retriever.plugins.replication, name, raising=False)
    with pytest.raises(ReplicationError, match=r"pip install 'foredraft\[redis\]'"):
        EmbeddedDrafter(plugins=[ReplicationOptions("redis://localhost")])
