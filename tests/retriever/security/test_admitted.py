"""Who a running service answers: health to all, calls by scope, and nothing to the revoked."""

import asyncio
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from threading import Event
from typing import Any

import grpc
import numpy as np
import pytest
from google.protobuf import descriptor_pb2, descriptor_pool, message_factory
from grpc_health.v1 import health_pb2, health_pb2_grpc

from retriever.client.credentials import Credentials
from retriever.client.strict import RemoteDrafter
from retriever.drafter import DraftRequest
from retriever.errors import AccessRefusedError, NotPermittedError
from retriever.operations import lifecycle
from retriever.operations.lifecycle import HealthStatuses
from retriever.security import private_files
from retriever.security.access import (
    TENANT_SCOPES,
    Scope,
    add_certificate,
    add_token,
    name_of,
    remove,
)
from retriever.security.protection import Protection, ProtectionFiles
from retriever.service import jobs
from retriever.sessions.embedded import EmbeddedDrafter
from retriever.sessions.explaining import explain_prepared
from retriever.v1 import retriever_pb2 as pb
from retriever.v1.retriever_pb2_grpc import RetrieverServiceStub
from tests.patience import free_port
from tests.retriever.conftest import start_service, stop_service
from tests.retriever.security.authorities import signed
from tests.retriever.security.in_process import serving
from tests.retriever.token_ids import ids
from tests.retriever.warm_interpreter import run

SERVING = health_pb2.HealthCheckResponse.SERVING
NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING
NAMES = ("", "retriever.v1.RetrieverService", "liveness", "credentials")


@contextmanager
def health_at(address: str) -> Iterator[Callable[[str], int]]:
    """Give a function that asks for the health of a name, without credentials."""
    with grpc.insecure_channel(address) as channel:
        stub: Any = health_pb2_grpc.HealthStub(channel)
        yield lambda name: stub.Check(health_pb2.HealthCheckRequest(service=name), timeout=5).status


def until(holds: Callable[[], bool], timeout_s: float = 20.0) -> float:
    """Wait until something holds; return how long it took, in seconds."""
    began = time.monotonic()
    while not holds():
        assert time.monotonic() < began + timeout_s, "it never did"
        time.sleep(0.02)
    return time.monotonic() - began


def step(client: RemoteDrafter, length: int) -> None:
    client.draft([DraftRequest("s", ids(length), length, 4)])


class Slow:
    """Explanations that wait for the test."""

    def __init__(self) -> None:
        self.began, self.released = Event(), Event()

    def explain_prepared(self, *arguments: Any) -> Any:
        self.began.set()
        assert self.released.wait(20)
        return explain_prepared(*arguments)


def test_health_is_told_without_credentials_and_nothing_else_is(tmp_path: Path) -> None:
    access = tmp_path / "access"
    add_token(access, "acme")
    process, address = start_service("--address", f"unix:{tmp_path}/s", "--access", str(access))
    with health_at(address) as status, grpc.insecure_channel(address) as channel:
        assert [status(name) for name in NAMES] == [SERVING] * 4
        with pytest.raises(grpc.RpcError) as unknown:
            status("acme")
        assert unknown.value.code() is grpc.StatusCode.NOT_FOUND
        stub: Any = health_pb2_grpc.HealthStub(channel)
        one, other, none = (
            stub.Watch(health_pb2.HealthCheckRequest(service=name)) for name in ("", "", "acme")
        )
        assert [next(each).status for each in (one, other)] == [SERVING] * 2
        assert next(none).status == health_pb2.HealthCheckResponse.SERVICE_UNKNOWN
        one.cancel()  # the other goes on
        lists: Any = channel.unary_unary("/grpc.health.v1.Health/List")
        listed: bytes = lists(b"", timeout=5)
        assert all(name.encode() in listed for name in NAMES)
        assert b"acme" not in listed
        with pytest.raises(grpc.RpcError) as refused:
            RetrieverServiceStub(channel).ListIndexes(pb.ListIndexesRequest(), timeout=5)
        assert refused.value.code() is grpc.StatusCode.UNAUTHENTICATED
        process.terminate()
        assert next(other).status == NOT_SERVING
    process.communicate(timeout=30)


def test_a_listed_health_response_is_the_protocols() -> None:
    """Read by descriptors made from the protocol's text, not by what wrote it."""
    file = descriptor_pb2.FileDescriptorProto(name="list.proto", package="p", syntax="proto3")
    check = file.message_type.add(name="Check")
    check.field.add(name="status", number=1, type="TYPE_INT32", label="LABEL_OPTIONAL")
    response = file.message_type.add(name="Response")
    entry = response.nested_type.add(name="StatusesEntry")
    entry.options.map_entry = True
    entry.field.add(name="key", number=1, type="TYPE_STRING", label="LABEL_OPTIONAL")
    value = entry.field.add(name="value", number=2, type="TYPE_MESSAGE", label="LABEL_OPTIONAL")
    value.type_name = ".p.Check"
    field = response.field.add(name="statuses", number=1, type="TYPE_MESSAGE")
    field.label, field.type_name = field.LABEL_REPEATED, ".p.Response.StatusesEntry"
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    kind: Any = message_factory.GetMessageClass(pool.FindMessageTypeByName("p.Response"))
    health = HealthStatuses()
    health.show({"": True, "liveness": True, "credentials": False})
    found = kind.FromString(asyncio.run(health.list_all(b"", None)))
    assert {name: each.status for name, each in found.statuses.items()} == {
        "": SERVING,
        "liveness": SERVING,
        "credentials": NOT_SERVING,
    }


def test_strangers_watch_in_limited_numbers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lifecycle, "MAX_WATCHERS", 1)
    drafter = EmbeddedDrafter()
    with (
        serving(drafter, f"unix:{tmp_path}/s") as address,
        grpc.insecure_channel(address) as channel,
    ):
        stub: Any = health_pb2_grpc.HealthStub(channel)
        first = stub.Watch(health_pb2.HealthCheckRequest())
        assert next(first).status == SERVING
        with pytest.raises(grpc.RpcError, match="use Check"):
            next(stub.Watch(health_pb2.HealthCheckRequest(), timeout=5))
        first.cancel()

        def may_watch() -> bool:
            try:
                return bool(next(stub.Watch(health_pb2.HealthCheckRequest(), timeout=5)))
            except grpc.RpcError:
                return False

        until(may_watch)
    drafter.shut_down()


def test_the_probe_of_an_image_needs_no_token_and_trusts_the_services_own_certificate(
    tmp_path: Path,
) -> None:
    access = tmp_path / "access"
    add_token(access, "acme")
    server = signed(tmp_path, "server", signed(tmp_path, "authority"))
    port = free_port()
    variables = {
        "FOREDRAFT_ADDRESS": f"0.0.0.0:{port}",
        "FOREDRAFT_CERTIFICATE": str(server.certificate),
        "FOREDRAFT_KEY": str(server.key),
        "FOREDRAFT_ACCESS": str(access),
        "PATH": "/usr/bin:/bin",
        "PYTHONPATH": ":".join(sys.path),
        "HOME": str(tmp_path),
    }
    process, _ = start_service(
        *("--address", f"127.0.0.1:{port}", "--access", str(access)),
        *("--certificate", str(server.certificate), "--key", str(server.key)),
    )
    try:
        for rest in ([], ["--live"]):
            done = run("-m", "retriever.operations.health", *rest, env=variables)
            assert (done.returncode, done.stderr) == (0, ""), rest
    finally:
        stop_service(process)


def test_calls_take_their_scope(tmp_path: Path) -> None:
    access = tmp_path / "access"
    shown = {
        name: Credentials(token=add_token(access, tenant, scopes))
        for name, tenant, scopes in (
            ("draft", "a", {Scope.DRAFT}),
            ("delete", "a", {Scope.DELETE}),
            ("both", "a", TENANT_SCOPES),
            ("admin", "", {Scope.ADMIN}),
        )
    }
    drafter = EmbeddedDrafter()
    protection = Protection.of(ProtectionFiles(access=access))
    may = {"draft": ("both", "draft"), "delete": ("both", "delete")}
    with serving(drafter, f"unix:{tmp_path}/s", protection) as address:
        for name, credentials in shown.items():
            with RemoteDrafter(address, credentials=credentials, timeout_s=10) as client:
                calls: dict[str, Callable[[], Any]] = {
                    "draft": client.list_indexes,
                    "delete": client.delete_tenant_data,
                }
                for scope, call in calls.items():
                    if name in may[scope]:
                        call()
                    else:
                        with pytest.raises(NotPermittedError, match=f"of the scope {scope}, but"):
                            call()
    drafter.shut_down()


def test_what_waits_when_its_token_is_revoked_is_not_answered(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(private_files, "LOOK_EVERY_S", 0.0)
    access = tmp_path / "access"
    token = add_token(access, "a")
    drafter, slow = EmbeddedDrafter(), Slow()
    monkeypatch.setattr(jobs, "explain_prepared", slow.explain_prepared)
    protection = Protection.of(ProtectionFiles(access=access))
    with (
        serving(drafter, f"unix:{tmp_path}/s", protection) as address,
        grpc.insecure_channel(address) as channel,
    ):
        stub: Any = RetrieverServiceStub(channel)
        call = stub.Explain.future(
            pb.ExplainRequest(context=[1, 2]), metadata=[("authorization", f"Bearer {token}")]
        )
        assert slow.began.wait(20)
        remove(access, name_of(token) or "")
        time.sleep(0.1)  # whoever was looking has seen the file of before
        slow.released.set()
        with pytest.raises(grpc.RpcError) as raised:
            call.result(timeout=20)
    assert raised.value.code() is grpc.StatusCode.UNAUTHENTICATED
    drafter.shut_down()


def test_a_stream_that_waits_ends_with_its_revoked_certificate(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(private_files, "LOOK_EVERY_S", 0.0)
    access, authority = tmp_path / "access", signed(tmp_path, "authority")
    server, engine = signed(tmp_path, "server", authority), signed(tmp_path, "engine", authority)
    for name in ("acme", "other"):
        add_certificate(access, name, {"acme": "CN:engine", "other": "CN:other"}[name])
    protection = Protection.of(
        ProtectionFiles(server.certificate, server.key, authority.certificate, access)
    )
    shown = Credentials(authority.certificate, engine.certificate, engine.key)
    drafter = EmbeddedDrafter()
    with (
        serving(drafter, protection=protection) as address,
        RemoteDrafter(address, credentials=shown, timeout_s=10) as client,
    ):
        client.open("s", ids(1, 2))
        step(client, 3)
        assert remove(access, "CN:engine").tenant == "acme"
        time.sleep(0.1)  # as above
        with pytest.raises(NotPermittedError, match="no tenant here"):
            step(client, 4)
    drafter.shut_down()


@pytest.mark.faults
def test_a_file_that_cannot_be_read_shows_at_once_and_admits_nobody_after_the_grace(
    tmp_path: Path,
) -> None:
    access, port, grace_s = tmp_path / "access", free_port(), 3.0
    token = add_token(access, "acme")
    content = access.read_bytes()
    process, address = start_service(
        *("--address", f"unix:{tmp_path}/s", "--access", str(access), "--log-format", "json"),
        *("--credentials-grace-s", str(grace_s), "--metrics-address", str(port)),
    )

    def metrics() -> dict[str, float]:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10) as answer:
            lines = answer.read().decode().splitlines()
        return {
            name: float(value)
            for name, _, value in (line.rpartition(" ") for line in lines)
            if name.startswith(("foredraft_ready", "foredraft_credentials"))
        }

    with (
        health_at(address) as status,
        RemoteDrafter(address, credentials=Credentials(token=token), timeout_s=10) as client,
    ):
        client.open("s", np.array([1, 2], np.int32))
        step(client, 3)
        access.write_bytes(content[:-9])  # half written; no call looks at it
        assert until(lambda: status("credentials") == NOT_SERVING) < 1.5
        assert status("") == SERVING
        found = metrics()
        assert found['foredraft_credentials_unreadable{file="access"}'] == 1
        assert found['foredraft_credentials_admitting{file="access"}'] == 1
        step(client, 4)
        until(lambda: status("") == NOT_SERVING)
        assert status("liveness") == SERVING
        with pytest.raises(AccessRefusedError, match="missing or not valid"):
            step(client, 5)
        with pytest.raises(AccessRefusedError, match="missing or not valid"):
            client.open("t", np.array([1], np.int32))
        found = metrics()
        assert found['foredraft_credentials_unreadable_seconds{file="access"}'] >= grace_s
        assert (
            found["foredraft_ready"],
            found['foredraft_credentials_admitting{file="access"}'],
        ) == (
            0,
            0,
        )
        with pytest.raises(urllib.error.HTTPError, match="503"):
            urllib.request.urlopen(f"http://127.0.0.1:{port}/ready", timeout=10)
        access.write_bytes(content)
        until(lambda: status("") == status("credentials") == SERVING)
        client.open("u", np.array([1], np.int32))
    process.terminate()
    _, logged = process.communicate(timeout=30)
    assert logged.count("stays in force for 3 s") == 1
    assert logged.count("it admits no caller") == 1
    assert logged.count("read again") == 1
