"""Faults against real processes: the decode goes on, in time, to the same output."""

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable

import numpy as np
import pytest

from retriever.client.conversation import FailOpen
from retriever.client.resilient import ResilientDrafter
from retriever.client.strict import RemoteDrafter
from retriever.drafter import DraftRequest
from retriever.tree import Source
from tests.patience import can_be_kept, free_address
from tests.retriever.conftest import start_service, stop_service
from tests.retriever.service.decodes import (
    DEADLINE_S,
    PROMPT,
    assert_unharmed,
    decode,
    drafter_on,
    plain,
    proxy_to,
    wait_until,
)

NUM_TOKENS = 1500


def in_time(act: Callable[[], object], after_s: float) -> threading.Timer:
    """Act in another thread, so that it falls into the middle of a step."""
    timer = threading.Timer(after_s, act)
    timer.start()
    return timer


@pytest.mark.faults
@can_be_kept
def test_server_killed_in_a_step_and_restarted() -> None:
    address = free_address()
    first, _ = start_service("--address", address)
    with drafter_on(address) as drafter:
        assert drafter.wait(60)
        decode(drafter, "before", 50)
        assert not drafter.fail_opens
        timer = in_time(first.kill, 0.2)
        done = decode(drafter, "during", NUM_TOKENS, pause_s=0.005)
        timer.join()
        first.communicate(timeout=60)
        assert_unharmed(done)
        assert not drafter.is_up(address)
        assert set(drafter.fail_opens) <= {FailOpen.DOWN, FailOpen.TIMEOUT, FailOpen.BUSY}
        second, _ = start_service("--address", address)
        assert drafter.wait(60)
        failed = drafter.fail_opens.total()
        assert_unharmed(decode(drafter, "after", 300))
        assert drafter.fail_opens.total() == failed  # it drafts again
    with RemoteDrafter(address) as other:  # what was generated without it, it knows
        tree = other.draft_context(np.array(plain(900)[-12:]), 16)
    assert Source.GENERATIONS in tree.sources
    stop_service(second)


@pytest.mark.faults
@can_be_kept
def test_open_session_goes_on_with_a_restarted_server() -> None:
    address = free_address()
    process, _ = start_service("--address", address)

    def fault(step: int) -> None:
        nonlocal process
        if step == 10:
            process.kill()
            process.communicate(timeout=60)
            process, _ = start_service("--address", address)
            assert drafter.wait(60)

    with drafter_on(address) as drafter:
        assert drafter.wait(60)
        done = decode(drafter, "s", 400, on_step=fault)
        assert_unharmed(done)
        assert drafter.fail_opens.total() == 0  # it was up again before the next step
    stop_service(process)


@pytest.mark.faults
@can_be_kept
def test_paused_server_costs_one_wait() -> None:
    process, address = start_service("--address", "127.0.0.1:0")
    with drafter_on(address) as drafter:
        assert drafter.wait(60)
        os.kill(process.pid, signal.SIGSTOP)
        timer = in_time(lambda: os.kill(process.pid, signal.SIGCONT), 3.0)
        began = time.monotonic()
        while time.monotonic() < began + 3.0:
            done = decode(drafter, "s", 500, pause_s=0.01)
            assert_unharmed(done)
            began = min(began, time.monotonic())
        timer.join()
        assert drafter.fail_opens[FailOpen.TIMEOUT] <= 2
        assert drafter.wait(60)
        failed = drafter.fail_opens.total()
        assert_unharmed(decode(drafter, "t", 300))
        assert drafter.fail_opens.total() == failed
    stop_service(process)


@pytest.mark.faults
@can_be_kept
def test_half_open_connection(service: str) -> None:
    with proxy_to(service) as proxy, drafter_on(proxy.address) as drafter:
        assert drafter.wait(60)

        def fault(step: int) -> None:
            if step == 20:
                proxy.freeze()
            if step == 120:
                proxy.thaw()

        done = decode(drafter, "s", NUM_TOKENS, on_step=fault, pause_s=0.01)
        assert_unharmed(done)
        assert drafter.fail_opens[FailOpen.TIMEOUT] == 1
        assert drafter.wait(60)


@pytest.mark.faults
@can_be_kept
def test_network_cut_and_healed(service: str) -> None:
    """Nothing passes and nothing closes for longer than streams are kept; then all passes again."""
    with proxy_to(service) as proxy, drafter_on(proxy.address) as drafter:
        assert drafter.wait(60)
        decode(drafter, "before", 50)
        assert not drafter.fail_opens
        in_time(proxy.freeze, 0.1)
        healing = in_time(proxy.thaw, 3.1)
        done = decode(drafter, "during", NUM_TOKENS, pause_s=0.025)
        healing.join()
        assert_unharmed(done)
        assert drafter.fail_opens[FailOpen.TIMEOUT] == 1
        assert drafter.fail_opens[FailOpen.DOWN] > 0  # the stream was given up
        assert drafter.wait(60)
        failed = drafter.fail_opens.total()
        assert_unharmed(decode(drafter, "after", 300))
        assert drafter.fail_opens.total() == failed


@pytest.mark.faults
@can_be_kept
def test_network_cut_that_resets(service: str) -> None:
    """Connections are reset again and again in the middle of steps."""
    with proxy_to(service) as proxy, drafter_on(proxy.address) as drafter:
        assert drafter.wait(60)
        resets = [in_time(proxy.reset, 0.2 * at) for at in range(1, 6)]
        done = decode(drafter, "during", NUM_TOKENS, pause_s=0.01)
        for each in resets:
            each.join()
        assert_unharmed(done)
        assert set(drafter.fail_opens) <= {FailOpen.DOWN, FailOpen.TIMEOUT, FailOpen.BUSY}
        assert drafter.wait(60)
        failed = drafter.fail_opens.total()
        assert_unharmed(decode(drafter, "after", 300))
        assert drafter.fail_opens.total() == failed


FORKED = """
import os, sys, time
import numpy as np
from retriever.drafter import DraftRequest
from retriever.client.resilient import ResilientDrafter
is_supported = "GRPC_ENABLE_FORK_SUPPORT" in os.environ
drafter = ResilientDrafter(sys.argv[1], deadline_s=2 if is_supported else 0.2)
assert drafter.wait(60)
prompt = np.arange(40, dtype=np.int32) % 7
drafter.open("s", prompt)
child = os.fork()
if child or is_supported:
    assert drafter.wait(60)
for length in range(41, 46):
    request = DraftRequest("s", np.array([(length - 1) % 7], np.int32), length, 8)
    began = time.monotonic()
    (tree,) = drafter.draft([request])
    assert time.monotonic() - began < 1.2 * (2 if is_supported else 0.2)
    assert len(tree) >= 7
    assert not drafter.fail_opens or (not is_supported and not child), drafter.fail_opens
drafter.shut_down(0.5)
if child:
    assert os.waitpid(child, 0)[1] == 0
"""


@pytest.mark.parametrize("support", [{"GRPC_ENABLE_FORK_SUPPORT": "1"}, {}])
@can_be_kept
def test_forked_process_goes_on(service: str, support: dict[str, str]) -> None:
    """With gRPC's support for it on a connection of its own; without, it never waits too long."""
    environment = {**os.environ, **support}
    command = [sys.executable, "-c", FORKED, service]
    assert subprocess.run(command, check=False, timeout=120, env=environment).returncode == 0


@pytest.mark.faults
@can_be_kept
def test_sessions_move_only_while_their_server_is_away() -> None:
    started = [start_service("--address", "127.0.0.1:0") for _ in range(3)]
    processes = {address: process for process, address in started}
    names = [f"s{at}" for at in range(30)]
    with drafter_on(*processes) as drafter:
        assert drafter.wait(60)

        def homes() -> dict[str, str]:
            return {name: drafter.server_of(name) for name in names}

        for name in names:
            drafter.open(name, PROMPT)
        step = [DraftRequest(name, np.zeros(0, np.int32), len(PROMPT), 4) for name in names]
        drafter.draft(step)
        before = homes()
        gone = before[names[0]]
        assert len(set(before.values())) == 3
        processes[gone].kill()
        processes[gone].communicate(timeout=60)
        assert wait_until(lambda: bool(drafter.draft(step)) and not drafter.is_up(gone))
        failed = drafter.fail_opens.total()
        assert all(len(tree) for tree in drafter.draft(step))
        assert drafter.fail_opens.total() == failed
        after = homes()
        assert {name for name in names if before[name] != after[name]} == {
            name for name in names if before[name] == gone
        }
        assert len(set(after.values())) == 2
    for address, process in processes.items():
        if address != gone:
            stop_service(process)


@pytest.mark.parametrize("address", ["127.0.0.1:1", "unix:/nonexistent/x.sock"])
@can_be_kept
def test_nobody_there_is_no_error(address: str) -> None:
    with drafter_on(address) as drafter:
        done = decode(drafter, "s", 300)
        assert_unharmed(done)
        assert set(drafter.fail_opens) == {FailOpen.DOWN}
        assert drafter.fail_opens.total() == len(done.waits_s)


@can_be_kept
def test_server_for_another_tokenizer_is_not_used(service: str) -> None:
    with ResilientDrafter(
        service, deadline_s=DEADLINE_S, vocabulary_fingerprint="cd" * 32
    ) as drafter:
        assert drafter.wait(60)
        assert_unharmed(decode(drafter, "s", 300))
        assert drafter.fail_opens[FailOpen.VOCABULARY] == 1
