"""Faults of a service's disk, clock, state and indexes, against real processes."""

import http.client
import re
import resource
import time
from pathlib import Path

import numpy as np
import pytest

from indexer.build import build_from_tokens
from indexer.reader import Index, Vocabulary
from retriever.client.conversation import FailOpen
from retriever.client.resilient import ResilientDrafter
from retriever.client.strict import RemoteDrafter
from retriever.drafter import DraftRequest
from retriever.log.generations_log import GenerationsLog
from retriever.log.options import LogOptions
from retriever.predict.generations import Output
from retriever.predict.pool import Entry
from retriever.tree import DraftTree, Source
from tests.patience import can_be_kept, free_address, free_port
from tests.retriever.conftest import start_service, stop_service
from tests.retriever.libraries import Library, document, text, word_tokenizer
from tests.retriever.service.decodes import (
    PROMPT,
    assert_unharmed,
    decode,
    drafter_on,
    plain,
    wait_until,
)
from tests.retriever.warm_interpreter import WarmProcess, run, start

DAY_S = 86_400.0


def metric(port: int, name: str) -> float:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=10)
    connection.request("GET", "/metrics")
    found = re.search(rf"^{name} (\S+)$", connection.getresponse().read().decode(), re.MULTILINE)
    connection.close()
    assert found is not None
    return float(found[1])


def outputs_in(state: Path) -> list[list[int]]:
    log = GenerationsLog(state)
    outputs = [output.tokens.tolist() for output in log.load("").outputs]
    log.close()
    return outputs


@pytest.mark.faults
@can_be_kept
def test_full_disk_costs_outputs_and_nothing_else_and_is_got_over(tmp_path: Path) -> None:
    """The limit on a file's size stands for the disk: as there, what is written is refused."""
    web = free_port()
    process, address = start_service(
        *("--address", "127.0.0.1:0", "--state", str(tmp_path), "--metrics-address", str(web))
    )
    log = tmp_path / "generations.mdb"

    def failures() -> float:
        return metric(web, "foredraft_log_failures_total")

    begun = log.stat().st_size
    with drafter_on(address) as drafter:
        assert drafter.wait(60)
        assert_unharmed(decode(drafter, "before", 300))
        assert wait_until(lambda: log.stat().st_size > begun)
        resource.prlimit(
            process.pid, resource.RLIMIT_FSIZE, (log.stat().st_size, resource.RLIM_INFINITY)
        )
        for number in range(40):
            assert_unharmed(decode(drafter, f"full-{number}", 300))
        assert wait_until(lambda: failures() > 0)
        unlimited = (resource.RLIM_INFINITY, resource.RLIM_INFINITY)
        resource.prlimit(process.pid, resource.RLIMIT_FSIZE, unlimited)
        time.sleep(0.2)
        lost = failures()
        assert 0 < lost < 41
        assert_unharmed(decode(drafter, "after", 350))
        assert not drafter.fail_opens
        assert failures() == lost
    stop_service(process)
    outputs = outputs_in(tmp_path)
    assert len(outputs) == 42 - lost
    assert outputs[-1] == plain(350)[len(PROMPT) :]


CLOCK = """
import sys, time
from pathlib import Path
offset, real = Path(sys.argv[1]), time.time
time.time = lambda: real() + float(offset.read_text())
from retriever.commands import app
app(["serve", *sys.argv[2:]])
"""
"""A service whose clock is set by what a file says."""


def start_with_clock(offset: Path, *arguments: str) -> tuple[WarmProcess, str]:
    process = start("-c", CLOCK, offset, "--address", "127.0.0.1:0", *arguments)
    return process, process.stdout.readline().split()[-1]


def is_remembered(remote: RemoteDrafter) -> bool:
    tree = remote.draft_context(np.arange(100, 112), 8)
    return Source.GENERATIONS in tree.sources and tree.follow(np.arange(112, 120)).size > 4


@pytest.mark.faults
def test_clock_set_by_days_ends_no_session_and_forgets_nothing(tmp_path: Path) -> None:
    """Forward and back while it runs, and back over a restart."""
    offset, state = tmp_path / "offset", tmp_path / "state"
    offset.write_text(str(5 * DAY_S))
    options = ("--state", str(state), "--generations-age-s", str(DAY_S), "--idle-session-s", "20")
    process, address = start_with_clock(offset, *options)
    with RemoteDrafter(address, timeout_s=10) as remote:
        remote.open("live", [1, 2, 3])
        remote.open("told", [1])
        remote.close("told", np.arange(100, 160))
        for days in (15, -15, 5):
            offset.write_text(str(days * DAY_S))
            time.sleep(2.2)  # idle sessions are swept every two seconds
            remote.draft([DraftRequest("live", np.empty(0, np.int32), 3, 4)])
            assert is_remembered(remote)
        process.kill()
        process.communicate(timeout=60)
    offset.write_text("0")
    process, address = start_with_clock(offset, *options)
    with RemoteDrafter(address, timeout_s=10) as remote:
        assert is_remembered(remote)
    stop_service(process)


def test_what_a_clock_that_was_ahead_dated_is_not_kept_for_longer(tmp_path: Path) -> None:
    """Nor what came after it, which waits behind it to be removed."""
    now, tokens = 1e9, np.arange(5, dtype=np.int32)
    options = LogOptions(max_age_s=DAY_S)
    log = GenerationsLog(tmp_path, options=options, clock=lambda: now + 10 * DAY_S)
    for hours in (1, 0, 2):
        log.append(Entry("", Output(tokens, now + 10 * DAY_S - 3600 * hours)))
    log.commit()
    log.close()
    log = GenerationsLog(tmp_path, options=options, clock=lambda: now)
    log.append(Entry("", Output(tokens, now)))
    log.commit()
    assert [output.time_s for output in log.load("").outputs] == [now] * 4
    now += DAY_S - 1
    log.remove_expired()
    assert len(log.load("").outputs) == 4
    now += 2
    log.remove_expired()
    log.close()
    assert tokens.astype(np.uint16).tobytes() not in (tmp_path / "generations.mdb").read_bytes()


def test_second_service_on_one_log_is_refused_in_one_line(tmp_path: Path) -> None:
    process, _ = start_service("--address", "127.0.0.1:0", "--state", str(tmp_path))
    done = run("-m", "retriever", "serve", "--address", "127.0.0.1:0", "--state", tmp_path)
    assert done.returncode == 1
    assert done.stdout == ""
    assert done.stderr.count("\n") == 1
    assert f"another drafter uses the state directory {tmp_path}" in done.stderr
    assert "shut it down, or give this one a directory of its own" in done.stderr
    stop_service(process)


def restarted(process: WarmProcess, *arguments: str) -> WarmProcess:
    process.kill()
    process.communicate(timeout=60)
    return start_service(*arguments)[0]


@pytest.mark.faults
@can_be_kept
def test_clients_go_on_with_the_snapshot_that_a_restart_brings(tmp_path: Path) -> None:
    library = Library(tmp_path, word_tokenizer())
    with Index.open(library.path) as index:
        fingerprint = index.vocabulary.fingerprint
    address = free_address()
    served = ("--index", str(library.path), "--address", address)
    process, _ = start_service(*served)
    tokens = np.array(document(100), np.int32)

    def draft(drafter: ResilientDrafter) -> DraftTree:
        return drafter.draft([DraftRequest("s", np.empty(0, np.int32), 12, 16)])[0]

    with ResilientDrafter(address, deadline_s=1.0, vocabulary_fingerprint=fingerprint) as drafter:
        assert drafter.wait(60)
        drafter.open("s", tokens[:12])
        assert len(draft(drafter).follow(tokens[12:])) < 3
        (tmp_path / "new.txt").write_text(text(100))
        added = run("-m", "indexer", "add", library.path, tmp_path / "new.txt")
        assert added.returncode == 0, added.stderr
        process = restarted(process, *served)
        assert drafter.wait(60)
        assert wait_until(lambda: len(draft(drafter).follow(tokens[12:])) > 4)
        assert Source.CORPUS in draft(drafter).sources
        drafter.close("s")
    stop_service(process)


@pytest.mark.faults
@can_be_kept
def test_clients_do_without_a_service_that_restarts_for_another_tokenizer(
    index: Path, tmp_path: Path
) -> None:
    other = tmp_path / "other"
    build_from_tokens([("d", [1, 2, 3] * 9)], other, Vocabulary(50, "cd" * 32))
    address = free_address()
    process, _ = start_service("--index", str(index), "--address", address)
    with ResilientDrafter(address, deadline_s=0.1, vocabulary_fingerprint="ab" * 32) as drafter:
        assert drafter.wait(60)
        assert_unharmed(decode(drafter, "before", 100))
        assert not drafter.fail_opens

        def fault(step: int) -> None:
            nonlocal process
            if step == 10:
                process = restarted(process, "--index", str(other), "--address", address)
                assert drafter.wait(60)

        assert_unharmed(decode(drafter, "during", 400, on_step=fault))
        assert_unharmed(decode(drafter, "after", 200))
        assert drafter.fail_opens[FailOpen.VOCABULARY] > 0
    stop_service(process)
