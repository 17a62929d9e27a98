"""After faults a service, and a client, hold what they held before."""

import os
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import grpc
import numpy as np
import pytest

from retriever.client.resilient import ResilientDrafter
from retriever.drafter import DraftRequest
from retriever.v1 import retriever_pb2 as pb
from retriever.v1.retriever_pb2_grpc import RetrieverServiceStub
from tests.patience import free_address
from tests.retriever.conftest import start_service, stop_service
from tests.retriever.service.decodes import proxy_to, wait_until

NUM_SESSIONS = 1000
TOLERATED_BYTES = 4 << 20

HOLDER = """
import sys, time
import numpy as np
from retriever.drafter import DraftRequest
from retriever.client.resilient import ResilientDrafter
drafter = ResilientDrafter(sys.argv[1], deadline_s=10)
assert drafter.wait(60)
names = [f"s{at}" for at in range(1000)]
for name in names:
    drafter.open(name, np.arange(500, dtype=np.int32) % 50)
drafter.draft([DraftRequest(name, np.zeros(0, np.int32), 500, 0) for name in names])
print(drafter.fail_opens.total(), flush=True)
time.sleep(60)
"""


def hold_and_kill(address: str, before: Callable[[], None] = lambda: None) -> None:
    """Open a thousand sessions in another process, and kill it."""
    command = [sys.executable, "-c", HOLDER, address]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == "0\n"
        before()
        holder.kill()


@dataclass(frozen=True)
class Served:
    """A service in a process of its own, and what it holds."""

    pid: int
    address: str
    metrics: str

    @property
    def resident_bytes(self) -> int:
        pages = int(Path(f"/proc/{self.pid}/statm").read_text().split()[1])
        return pages * os.sysconf("SC_PAGE_SIZE")

    @property
    def num_sessions(self) -> int:
        with urllib.request.urlopen(f"http://{self.metrics}/metrics", timeout=10) as page:
            lines = page.read().decode().splitlines()
        return next(
            int(float(line.split()[1])) for line in lines if line.startswith("foredraft_sessions ")
        )

    @property
    def num_descriptors(self) -> int:
        return len(list(Path(f"/proc/{self.pid}/fd").iterdir()))


@pytest.fixture
def served() -> Iterator[Served]:
    metrics = free_address()
    process, address = start_service("--address", "127.0.0.1:0", "--metrics-address", metrics)
    yield Served(process.pid, address, metrics)
    stop_service(process)


@pytest.mark.soak
def test_service_returns_to_its_level_after_each_fault(served: Served) -> None:
    """A thousand sessions are lost at a time; a tenant may have two thousand."""
    faults: list[Callable[[Served], None]] = [killed_client, slow_consumer, cut_network]
    for fault in faults:
        fault(served)
    settled, descriptors = level(served), served.num_descriptors
    for fault in [*faults, *faults]:
        fault(served)
        assert level(served) < settled + TOLERATED_BYTES, fault.__name__
        assert wait_until(lambda: served.num_descriptors <= descriptors), fault.__name__


@pytest.mark.soak
def test_sessions_of_a_half_open_connection_are_reclaimed(served: Served) -> None:
    """A client's machine that is gone says nothing: the service asks, within 15 s, and knows."""
    with proxy_to(served.address) as proxy:
        hold_and_kill(served.address)
        settled = level(served)
        hold_and_kill(proxy.address, proxy.freeze)
        assert served.num_sessions == NUM_SESSIONS
        assert wait_until(lambda: not served.num_sessions, timeout_s=25)
        assert level(served) < settled + TOLERATED_BYTES


def level(served: Served) -> int:
    """Wait until the service is idle; return its resident memory, in bytes."""
    assert wait_until(lambda: not served.num_sessions)
    return served.resident_bytes


def killed_client(served: Served) -> None:
    hold_and_kill(served.address)


def slow_consumer(served: Served) -> None:
    """Somebody asks and asks, and reads nothing."""
    names = [str(at) for at in range(64)]

    def flood() -> Iterator[pb.DraftStreamRequest]:
        openings = [pb.OpenSessionRequest(session_id=name, prompt=[1] * 500) for name in names]
        yield pb.DraftStreamRequest(sequence_number=1, openings=openings)
        for number in range(2, 1 << 30):
            steps = [pb.SessionStep(session_id=n, length=500, budget_nodes=64) for n in names]
            yield pb.DraftStreamRequest(sequence_number=number, steps=steps)

    with grpc.insecure_channel(served.address) as channel:
        call = RetrieverServiceStub(channel).DraftStream(flood())
        next(call)  # and never again
        time.sleep(0.5)
        call.cancel()


def cut_network(served: Served) -> None:
    """Nothing passes until the client has given its stream up; then the connection is reset."""
    with (
        proxy_to(served.address) as proxy,
        ResilientDrafter(proxy.address, deadline_s=2) as drafter,
    ):
        assert drafter.wait(60)
        names = [f"s{at}" for at in range(NUM_SESSIONS)]
        for name in names:
            drafter.open(name, np.arange(500, dtype=np.int32) % 50)
        step = [DraftRequest(name, np.zeros(0, np.int32), 500, 0) for name in names]
        drafter.draft(step)
        assert not drafter.fail_opens
        proxy.freeze()
        drafter.draft(step)
        time.sleep(1.0)
        drafter.draft(step)
        assert not drafter.is_up(proxy.address)
        proxy.thaw()
        proxy.reset()


AWAY = """
import sys
from pathlib import Path
import numpy as np
from retriever.drafter import DraftRequest
from retriever.client.resilient import ResilientDrafter
drafter = ResilientDrafter("127.0.0.1:1", deadline_s=0.1)
def resident():
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096
def decode(number):
    name = str(number)
    drafter.open(name, np.full(4000, number, np.int32))
    for at in range(4):
        drafter.draft([DraftRequest(name, np.array([at]), 4001 + at, 4)])
    drafter.close(name)
for number in range(500):
    decode(number)
settled = resident()
for number in range(500, 3000):
    decode(number)
print(resident() - settled)
"""


@pytest.mark.soak
def test_client_of_a_server_that_is_away_holds_no_more_and_no_more() -> None:
    """Ten thousand steps of 2,500 sequences: 40 MB of prompts, of which nothing is to be told."""
    done = subprocess.run(
        [sys.executable, "-c", AWAY], check=True, timeout=60, capture_output=True, text=True
    )
    assert int(done.stdout) < TOLERATED_BYTES


ADDRESS_SPACE_KIB = 1_800_000
"""Half of it is taken once the service is ready: libraries, threads."""


@pytest.mark.faults
@pytest.mark.parametrize("options", [(), ("--max-bytes", "4e9", "--max-tenant-bytes", "4e9")])
def test_prompts_beyond_the_address_space_are_refused(options: tuple[str, ...]) -> None:
    """Eighteen of a million tokens at once: by the ceiling, or, if that is beyond it, by trying."""
    command = f"ulimit -v {ADDRESS_SPACE_KIB}; exec {sys.executable} -m retriever serve "
    numbers = [str(int(float(word))) if word[0].isdigit() else word for word in options]
    process = subprocess.Popen(
        ["bash", "-c", " ".join([command, "--address 127.0.0.1:0", *numbers])],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    assert process.stdout is not None
    address = process.stdout.readline().removeprefix("serving on ").strip()
    prompt = (np.arange(1_000_000) * 7919 % 50_000).astype(np.int32).tobytes()
    openings = [pb.OpenSessionRequest(session_id=str(at), prompt_bytes=prompt) for at in range(18)]
    with grpc.insecure_channel(address, options=[("grpc.max_send_message_length", -1)]) as channel:
        stub = RetrieverServiceStub(channel)
        calls = [stub.OpenSession.future(opening) for opening in openings]
        codes = [call.code() for call in calls]
        assert process.poll() is None
        assert grpc.StatusCode.RESOURCE_EXHAUSTED in codes
        assert grpc.StatusCode.UNAVAILABLE not in codes
        opened = codes.index(grpc.StatusCode.OK)
        stub.CloseSession(pb.CloseSessionRequest(session_id=str(opened)))
        stub.OpenSession(pb.OpenSessionRequest(session_id="small", prompt=[1, 2, 3]))
    stop_service(process)
    assert process.returncode == 0
