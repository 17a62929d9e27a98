"""A service listens before its indexes and its state are open, and says that it is not ready."""

import http.client
import signal
import time
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from retriever.client.strict import RemoteDrafter
from retriever.drafter import DraftRequest, SequenceOptions
from retriever.errors import DrafterUnavailableError
from retriever.log.generations_log import GenerationsLog
from tests.patience import free_port
from tests.retriever.conftest import start_service
from tests.retriever.warm_interpreter import WarmProcess, run, start

NOT_READY = health_pb2.HealthCheckResponse.NOT_SERVING

SLOW = """
import sys, time
from retriever.log import pools
loaded = pools.Pools.get
def get(self, tenant):
    print("opening", flush=True)
    sys.stdin.readline()
    return loaded(self, tenant)
pools.Pools.get = get
from retriever.commands import app
app(["serve", *sys.argv[1:]])
"""
"""A service that opens its state only once it is sent a line."""


def opening(*arguments: str) -> WarmProcess:
    """Start a service and wait until it opens its state."""
    process = start("-c", SLOW, *arguments)
    assert process.stdout.readline() == "opening\n"
    return process


def asked(port: int, path: str) -> tuple[int, str]:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=10)
    connection.request("GET", path)
    response = connection.getresponse()
    answer = response.status, response.read().decode()
    connection.close()
    return answer


@pytest.mark.plugin("retriever.plugins.status_page")
def test_health_metrics_and_page_answer_while_the_state_is_opened(tmp_path: Path) -> None:
    address, web = f"127.0.0.1:{free_port()}", free_port()
    process = opening("--address", address, "--metrics-address", str(web), "--state", str(tmp_path))
    with grpc.insecure_channel(address) as channel:
        health: Any = health_pb2_grpc.HealthStub(channel)
        assert health.Check(health_pb2.HealthCheckRequest(), timeout=5).status == NOT_READY
    with RemoteDrafter(address, timeout_s=5) as remote:
        with pytest.raises(DrafterUnavailableError, match="is starting"):
            remote.draft_context([1, 2, 3], 4)
        assert asked(web, "/ready") == (503, "starting\n")
        status, metrics = asked(web, "/metrics")
        assert status == 200
        assert "foredraft_ready 0.0" in metrics
        assert "foredraft_sessions 0.0" in metrics
        status, page = asked(web, "/")
        assert status == 200
        assert "starting, " in page
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdin.write("now\n" * 99)
        process.stdin.flush()
        while not (line := process.stdout.readline()).startswith("serving on"):
            assert line == "opening\n"
        remote.draft_context([1, 2, 3], 4)
        assert asked(web, "/ready") == (200, "ready\n")
        assert 'foredraft_drafts_total{kind="bare"} 1.0' in asked(web, "/metrics")[1]
    process.terminate()
    process.communicate(timeout=60)
    assert process.returncode == 0


def test_a_signal_while_the_state_is_opened_ends_in_order(tmp_path: Path) -> None:
    process = opening("--address", "127.0.0.1:0", "--state", str(tmp_path))
    process.send_signal(signal.SIGTERM)
    time.sleep(0.1)
    output, _ = process.communicate("now\n" * 99, timeout=20)
    assert process.returncode == 0
    assert "serving on" not in output


def test_what_cannot_be_opened_ends_the_process_with_one_line(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    state = tmp_path / "file"
    done = run("-m", "retriever", "serve", "--address", "127.0.0.1:0", "--state", state)
    assert done.returncode == 1
    assert done.stderr.startswith("error: cannot use the state directory")
    assert done.stderr.count("\n") == 1
    assert done.stdout == ""


def test_what_open_sessions_generated_is_remembered_when_a_drain_ends(tmp_path: Path) -> None:
    """But for one that said that it is not to be."""
    process, address = start_service(
        *("--address", "127.0.0.1:0", "--state", str(tmp_path), "--drain-s", "0.3")
    )
    with RemoteDrafter(address, timeout_s=5) as remote:
        for name, remember in (("kept", True), ("not", False)):
            remote.open(name, [1, 2, 3], SequenceOptions(remember=remember))
        kept, forgotten = np.arange(10, 20, dtype=np.int32), np.arange(30, 40, dtype=np.int32)
        remote.draft([DraftRequest("kept", kept, 13, 4), DraftRequest("not", forgotten, 13, 4)])
        process.terminate()
        process.communicate(timeout=60)
    log = GenerationsLog(tmp_path)
    outputs = [output.tokens.tolist() for output in log.load("").outputs]
    log.close()
    assert outputs == [kept.tolist()]
