"""A service says when it is ready, drains before it ends, and does not wait long."""

import asyncio
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest
from grpc import aio
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha.proto_reflection_descriptor_database import (
    ProtoReflectionDescriptorDatabase,
)

from retriever.client.strict import RemoteDrafter
from retriever.drafter import DraftRequest
from retriever.errors import DrafterUnavailableError
from retriever.operations.lifecycle import LIVENESS, SERVICE
from retriever.operations.logs import JsonLines
from retriever.operations.observer import End, ServiceObserver
from retriever.service.serving import start
from retriever.sessions.embedded import EmbeddedDrafter
from retriever.sessions.session_table import Session
from retriever.tree import DraftTree
from retriever.v1 import retriever_pb2 as pb
from retriever.v1.retriever_pb2_grpc import RetrieverServiceStub
from tests.patience import can_be_kept
from tests.retriever.conftest import start_service, stop_service
from tests.retriever.operations.watched import SlowToWarm
from tests.retriever.warm_interpreter import WarmProcess, run

READY = health_pb2.HealthCheckResponse.SERVING
NOT_READY = health_pb2.HealthCheckResponse.NOT_SERVING


def test_health_says_ready_once_the_drafter_is_warm(tmp_path: Path) -> None:
    asyncio.run(asyncio.wait_for(_start_slowly(tmp_path), 300))


async def _start_slowly(folder: Path) -> None:
    drafter, observer = SlowToWarm(), ServiceObserver()
    address = f"unix:{folder}/draft.sock"
    starting = asyncio.create_task(start(drafter, address, observer))
    async with aio.insecure_channel(address) as channel:
        await channel.channel_ready()
        health: Any = health_pb2_grpc.HealthStub(channel)
        stub: Any = RetrieverServiceStub(channel)
        for name in ("", SERVICE):
            answer = await health.Check(health_pb2.HealthCheckRequest(service=name))
            assert answer.status == NOT_READY
        answer = await health.Check(health_pb2.HealthCheckRequest(service=LIVENESS))
        assert answer.status == READY
        with pytest.raises(aio.AioRpcError, match="is starting") as raised:
            await stub.OpenSession(pb.OpenSessionRequest(session_id="s"))
        assert raised.value.code() is grpc.StatusCode.UNAVAILABLE
        drafter.released.set()
        server, _ = await starting
        for name in ("", SERVICE):
            answer = await health.Check(health_pb2.HealthCheckRequest(service=name))
            assert answer.status == READY
        await stub.OpenSession(pb.OpenSessionRequest(session_id="s"))
    await server.stop(0)
    assert observer.calls.ended == {
        End("OpenSession", "UNAVAILABLE"): 1,
        End("OpenSession", "OK"): 1,
    }
    drafter.shut_down()


def status_of(address: str, name: str = SERVICE) -> Any:
    with grpc.insecure_channel(address) as channel:
        asked = health_pb2.HealthCheckRequest(service=name)
        health: Any = health_pb2_grpc.HealthStub(channel)
        return health.Check(asked, timeout=5).status


def status_at_end(process: WarmProcess, timeout_s: float) -> int:
    process.communicate(timeout=timeout_s)
    return process.wait()


@contextmanager
def drafting(address: str) -> Iterator[RemoteDrafter]:
    """A client with a session of three tokens and a stream that is open."""
    with RemoteDrafter(address, timeout_s=5) as remote:
        remote.open("s", [1, 2, 3])
        remote.draft([DraftRequest("s", np.empty(0, np.int32), 3, 4)])
        yield remote


@can_be_kept
def test_a_drain_lets_sessions_end_and_takes_no_new_ones() -> None:
    process, address = start_service("--address", "127.0.0.1:0", "--drain-s", "20")
    with drafting(address) as remote:
        assert status_of(address) == READY
        process.terminate()
        while status_of(address) == READY:
            time.sleep(0.02)
        assert status_of(address, LIVENESS) == READY
        with pytest.raises(DrafterUnavailableError, match="about to end"):
            remote.open("t", [1])
        remote.draft([DraftRequest("s", np.array([1], np.int32), 4, 4)])
        assert process.poll() is None
        remote.close("s")
        began = time.monotonic()
        assert status_at_end(process, 10) == 0
        assert time.monotonic() - began < 5


@can_be_kept
def test_a_drain_ends_in_time_whoever_goes_on() -> None:
    process, address = start_service("--address", "127.0.0.1:0", "--drain-s", "0.5")
    with drafting(address) as remote:
        began = time.monotonic()
        process.send_signal(signal.SIGINT)
        assert status_at_end(process, 10) == 0
        assert 0.5 <= time.monotonic() - began < 4
        with pytest.raises(DrafterUnavailableError):
            remote.draft([DraftRequest("s", np.array([1], np.int32), 4, 4)])


@can_be_kept
def test_a_second_signal_ends_at_once() -> None:
    process, address = start_service("--address", "127.0.0.1:0", "--drain-s", "60")
    with drafting(address):
        process.terminate()
        while status_of(address) == READY:
            time.sleep(0.02)
        process.terminate()
        assert status_at_end(process, 30) == 128 + signal.SIGTERM


def services_listed(address: str) -> set[str]:
    with grpc.insecure_channel(address) as channel:
        return set(ProtoReflectionDescriptorDatabase(channel).get_services())


def test_reflection_is_behind_a_flag() -> None:
    process, address = start_service("--address", "127.0.0.1:0", "--reflection")
    assert {SERVICE, "grpc.health.v1.Health"} <= services_listed(address)
    stop_service(process)
    process, address = start_service("--address", "127.0.0.1:0")
    with pytest.raises(grpc.RpcError, match=r"(?i)unimplemented"):
        services_listed(address)
    stop_service(process)


@pytest.mark.faults
def test_an_interrupt_while_nobody_is_there_ends_with_status_0() -> None:
    """In an interpreter of its own, which imports and loads everything by itself."""
    command = [sys.executable, "-m", "retriever", "serve", "--address", "127.0.0.1:0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline().startswith("serving on ")
        process.send_signal(signal.SIGINT)
        assert process.wait(10) == 0


class Faulty(EmbeddedDrafter):
    """A drafter with a fault, whose error shows what somebody sent."""

    def __init__(self) -> None:
        super().__init__()

        def fail(prepared: Session, *_: Any, **__: Any) -> DraftTree:
            raise ValueError(f"cannot cope with {prepared.databases.context.last(1)!r}")

        self.state.draft_prepared = fail  # type: ignore[method-assign]


async def _fail(folder: Path) -> ServiceObserver:
    drafter, observer, address = Faulty(), ServiceObserver(), f"unix:{folder}/draft.sock"
    server, _ = await start(drafter, address, observer)
    async with aio.insecure_channel(address) as channel:
        stub: Any = RetrieverServiceStub(channel)
        with pytest.raises(aio.AioRpcError) as raised:
            await stub.Draft(pb.DraftRequest(context=[48611]))
        await stub.OpenSession(pb.OpenSessionRequest(session_id="s"))
    await server.stop(0)
    drafter.shut_down()
    assert raised.value.code() is grpc.StatusCode.INTERNAL
    assert raised.value.details() == "the service failed: its log has more"
    return observer


def test_a_fault_of_ours_is_counted_and_logged_and_told_to_nobody(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    observer = asyncio.run(_fail(tmp_path))
    assert observer.calls.ended[End("Draft", "INTERNAL", "ValueError")] == 1
    assert observer.calls.under_way["Draft"] == 0
    (record,) = [each for each in caplog.records if each.exc_info]
    assert "Draft failed" in record.message
    assert "48611" not in JsonLines().format(record)


def test_a_missing_library_is_answered_with_what_to_install() -> None:
    script = (
        "import sys; sys.modules['grpc_reflection'] = None;"
        "from retriever.commands import app;"
        "app(['serve', '--reflection', '--address', '127.0.0.1:0'])"
    )
    done = run("-c", script)
    assert done.returncode == 1
    assert "pip install 'foredraft[server]'" in done.stderr
    assert "Traceback" not in done.stderr
