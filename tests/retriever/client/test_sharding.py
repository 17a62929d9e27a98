"""Several servers as one drafter: real servers, some late, some killed."""

import asyncio
import json
import os
import signal
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

from indexer.reader import Vocabulary
from retriever.client.asynchronous import AsyncResilientDrafter
from retriever.client.connecting import connect
from retriever.client.conversation import FailOpen
from retriever.client.merging import merge_trees
from retriever.client.resilient import ResilientDrafter
from retriever.client.strict import RemoteDrafter
from retriever.drafter import FORGOTTEN, Drafter, DraftRequest
from retriever.errors import (
    InvalidRequestError,
    OutOfSequenceError,
    SessionExistsError,
    UnknownSessionError,
    VocabularyMismatchError,
)
from retriever.limits import Limits
from retriever.sessions.embedded import EmbeddedDrafter
from retriever.tree import DraftTree
from tests.patience import can_be_kept
from tests.retriever.client.shard_servers import SlowService, planted_index, slowed
from tests.retriever.conftest import start_service, stop_service

PATIENT_S = 60.0
"""A deadline that no server misses."""

BEGINNING = [1, 2, 3, 4, 5, 6]
LEFT = [*BEGINNING, 20, 21, 22]
RIGHT = [*BEGINNING, 30, 31, 32]


@pytest.fixture(scope="module")
def left(tmp_path_factory: pytest.TempPathFactory, vocabulary: Vocabulary) -> Path:
    return planted_index(tmp_path_factory.mktemp("left") / "left", LEFT, vocabulary)


@pytest.fixture(scope="module")
def right(tmp_path_factory: pytest.TempPathFactory, vocabulary: Vocabulary) -> Path:
    return planted_index(tmp_path_factory.mktemp("right") / "right", RIGHT, vocabulary)


@pytest.fixture
def slow(right: Path) -> Iterator[SlowService]:
    """A server in this process that holds the right part."""
    drafter = EmbeddedDrafter.open_indexes([right])
    with slowed(drafter) as service:
        yield service
    drafter.shut_down()


@pytest.fixture(scope="module")
def left_address(left: Path) -> Iterator[str]:
    process, address = start_service("--index", str(left), "--address", "127.0.0.1:0")
    yield address
    stop_service(process)


def parts(addresses: list[str], *, wait_s: float = 30, **options: Any) -> ResilientDrafter:
    """Return a client of servers that each hold a part of a corpus, those that are up connected."""
    drafter = ResilientDrafter(addresses, are_parts=True, local=False, **options)
    drafter.wait(wait_s)
    return drafter


def request(session: str, tokens: list[int], length: int, budget: int = 8) -> DraftRequest:
    return DraftRequest(session, np.array(tokens, np.int32), length, budget)


def first_tokens(tree: DraftTree) -> set[int]:
    return set(tree.token_ids[tree.parents == -1].tolist())


def eventually(holds: Callable[[], bool], timeout_s: float = 60.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_drafts_hold_the_evidence_of_all_shards(left_address: str, slow: SlowService) -> None:
    with parts([left_address, slow.address], deadline_s=PATIENT_S) as drafter:
        drafter.open("s", BEGINNING)
        (tree,) = drafter.draft([request("s", [], 6)])
        assert {20, 30} <= first_tokens(tree)
        assert sorted(tree.token_ids.tolist()) == [20, 21, 22, 30, 31, 32]
        drafter.close("s")
        assert not drafter.fail_opens


def test_draft_is_the_merger_of_what_embedded_drafters_give(
    left: Path, right: Path, left_address: str, slow: SlowService
) -> None:
    rng = np.random.default_rng(3)
    embedded = [EmbeddedDrafter.open_indexes([left]), EmbeddedDrafter.open_indexes([right])]
    with parts([left_address, slow.address], deadline_s=PATIENT_S) as drafter:
        everyone: list[Drafter] = [drafter, *embedded]
        for each in everyone:
            each.open("a", np.array([9, *BEGINNING], np.int32), FORGOTTEN)
            each.open("b", np.array(LEFT, np.int32), FORGOTTEN)
        lengths = {"a": 7, "b": 9}
        for _ in range(10):
            step = []
            for name, length in lengths.items():
                new = rng.integers(0, 40, int(rng.integers(0, 4))).tolist()
                lengths[name] = length + len(new)
                step.append(request(name, new, length + len(new), 12))
            merged, *alone = [each.draft(step) for each in everyone]
            for at, tree in enumerate(merged):
                expected = merge_trees([trees[at] for trees in alone], 12)
                assert tree.token_ids.tolist() == expected.token_ids.tolist()
                assert tree.probabilities.tolist() == expected.probabilities.tolist()


@pytest.mark.faults
@can_be_kept
def test_slow_shard_costs_its_evidence_and_no_more_than_the_deadline(
    left_address: str, slow: SlowService
) -> None:
    with parts([left_address, slow.address], deadline_s=0.25, lost_after_s=20) as drafter:
        drafter.open("s", [7])
        drafter.draft([request("s", [], 1)])
        slow.pause_s = 3.0
        length = 1
        for token in BEGINNING:
            began = time.monotonic()
            length += 1
            (tree,) = drafter.draft([request("s", [token], length)])
            assert time.monotonic() - began < 1.5
        assert 20 in first_tokens(tree)
        assert 30 not in first_tokens(tree)
        assert drafter.fail_opens.total() >= 4
        slow.pause_s = 0.0

        def has_caught_up() -> bool:
            return {20, 30} <= first_tokens(drafter.draft([request("s", [], length)])[0])

        eventually(has_caught_up)
        assert slow.lengths() == [length]
        assert not drafter.fail_opens[FailOpen.DOWN]


@pytest.mark.faults
@can_be_kept
def test_session_closed_while_a_shard_is_late_is_learned_from_by_it(
    left_address: str, slow: SlowService
) -> None:
    with parts([left_address, slow.address], deadline_s=0.2, lost_after_s=20) as drafter:
        drafter.open("s", [7])
        slow.pause_s = 3.0
        drafter.draft([request("s", [40, 41], 3)])
        drafter.draft([request("s", [42, 43], 5)])
        began = time.monotonic()
        drafter.close("s", np.array([44, 45, 46], np.int32))
        assert time.monotonic() - began < 1.5
        drafter.shut_down(PATIENT_S)
    assert slow.lengths() == []
    tree = slow.drafter.draft_context([40, 41, 42, 43], 4)
    assert tree.token_ids[:3].tolist() == [44, 45, 46]


@pytest.mark.faults
@can_be_kept
def test_session_that_a_slow_shard_lost_is_ended_there_and_forgotten(
    left_address: str, slow: SlowService
) -> None:
    with parts([left_address, slow.address], deadline_s=0.1, lost_after_s=0.4) as drafter:
        drafter.open("s", [7])
        drafter.draft([request("s", [40, 41, 42, 43, 44], 6)])
        slow.pause_s = 2.0

        def is_given_up() -> bool:
            drafter.draft([request("s", [], 6)])
            return not drafter.is_up(slow.address)

        eventually(is_given_up)
        slow.pause_s = 0.0

        def has_one_session() -> bool:
            drafter.draft([request("s", [], 6)])
            return drafter.is_up(slow.address) and slow.lengths() == [6]

        eventually(has_one_session)
        assert 44 not in slow.drafter.draft_context([40, 41, 42, 43], 4).token_ids
        drafter.close("s", np.array([45], np.int32))
    assert slow.drafter.draft_context([40, 41, 42, 43], 4).token_ids[:2].tolist() == [44, 45]


@pytest.mark.faults
@can_be_kept
def test_killed_shard_costs_its_evidence_until_it_is_back(left_address: str, right: Path) -> None:
    process, address = start_service("--index", str(right), "--address", "127.0.0.1:0")
    with parts([left_address, address], deadline_s=2.0) as drafter:
        drafter.open("s", [7])
        drafter.draft([request("s", [], 1)])
        os.kill(process.pid, signal.SIGKILL)
        process.communicate(timeout=60)
        for new, length in (([8], 2), ([9], 3), (BEGINNING, 9)):
            began = time.monotonic()
            (tree,) = drafter.draft([request("s", new, length)])
            assert time.monotonic() - began < 1.5
        assert 20 in first_tokens(tree)
        assert 30 not in first_tokens(tree)
        assert not drafter.is_up(address)
        assert drafter.fail_opens.total() == 3
        process, _ = start_service("--index", str(right), "--address", address)

        def is_back() -> bool:
            return {20, 30} <= first_tokens(drafter.draft([request("s", [], 9)])[0])

        eventually(is_back)
        assert drafter.is_up(address)
        drafter.close("s", np.array([8], np.int32))
    stop_service(process)


@pytest.mark.faults
@can_be_kept
def test_stopped_shard_is_given_up_and_taken_back(left_address: str, right: Path) -> None:
    process, address = start_service("--index", str(right), "--address", "127.0.0.1:0")
    with parts([left_address, address], deadline_s=0.2, lost_after_s=2.0) as drafter:
        drafter.open("s", BEGINNING)
        os.kill(process.pid, signal.SIGSTOP)
        times_s = []

        def is_given_up() -> bool:
            began = time.monotonic()
            drafter.draft([request("s", [], 6)])
            times_s.append(time.monotonic() - began)
            return not drafter.is_up(address)

        eventually(is_given_up)
        assert max(times_s) < 1.5
        os.kill(process.pid, signal.SIGCONT)
        eventually(lambda: 30 in first_tokens(drafter.draft([request("s", [], 6)])[0]))
    stop_service(process)


def test_without_any_shard_drafts_are_local() -> None:
    addresses = ["127.0.0.1:1", "127.0.0.1:2"]
    for local in (False, True):
        with ResilientDrafter(addresses, are_parts=True, local=local) as drafter:
            drafter.open("s", [*BEGINNING, *BEGINNING])
            for length in (13, 14):
                (tree,) = drafter.draft([request("s", [length - 12], length)])
                assert (len(tree) > 0) is local
            drafter.close("s")
            assert drafter.fail_opens == {FailOpen.DOWN: 4}


def test_all_shards_that_begin_late_are_found(tmp_path: Path, left: Path) -> None:
    address = f"unix:{tmp_path}/late.sock"
    with parts([address], deadline_s=PATIENT_S, wait_s=0.1) as drafter:
        drafter.open("s", BEGINNING)
        assert len(drafter.draft([request("s", [], 6)])[0]) == 0
        process, _ = start_service("--index", str(left), "--address", address)
        eventually(lambda: 20 in first_tokens(drafter.draft([request("s", [], 6)])[0]))
    stop_service(process)


def is_refused(drafter: ResilientDrafter) -> bool:
    """Return whether sequences are refused; until all are connected, they may not be."""
    try:
        drafter.open("early", [1])
    except VocabularyMismatchError:
        return True
    drafter.close("early")
    return False


def test_shard_of_another_vocabulary_is_refused_by_name(left_address: str, tmp_path: Path) -> None:
    other = planted_index(tmp_path / "other", LEFT, Vocabulary(50, "cd" * 32))
    process, address = start_service("--index", str(other), "--address", "127.0.0.1:0")
    known = {"vocabulary_fingerprint": "ab" * 32}
    for options, told in (
        ({}, r"shard 127.*than shard 127"),
        (known, f"shard {address} .*at hand"),
    ):
        with parts([left_address, address], wait_s=0.1, **options) as drafter:
            eventually(partial(is_refused, drafter))
            with pytest.raises(VocabularyMismatchError, match=told):
                drafter.open("s", [1])
    stop_service(process)


def test_requests_at_fault_are_refused_and_nothing_is_kept(
    left_address: str, slow: SlowService
) -> None:
    with parts([left_address, slow.address], deadline_s=PATIENT_S) as drafter:
        drafter.open("s", BEGINNING)
        with pytest.raises(SessionExistsError):
            drafter.open("s", [1])
        with pytest.raises(OutOfSequenceError, match="lost or repeated"):
            drafter.draft([request("s", [4], 9)])
        with pytest.raises(InvalidRequestError, match="twice"):
            drafter.draft([request("s", [4], 7), request("s", [4], 8)])
        with pytest.raises(InvalidRequestError):
            drafter.draft([DraftRequest("s", np.array([0.5]), 7, 4)])
        for name in ("", "x" * 257):
            with pytest.raises(InvalidRequestError, match="bytes"):
                drafter.open(name, [1])
        for call in (lambda: drafter.draft([request("t", [4], 1)]), lambda: drafter.close("t")):
            with pytest.raises(UnknownSessionError):
                call()
        assert {20, 30} <= first_tokens(drafter.draft([request("s", [], 6)])[0])
        assert not drafter.fail_opens


def test_what_a_shard_has_no_room_for_costs_its_evidence_alone(
    left_address: str, right: Path
) -> None:
    small = EmbeddedDrafter.open_indexes([right], limits=Limits(max_sessions=1))
    with (
        slowed(small) as shard,
        parts([left_address, shard.address], deadline_s=PATIENT_S) as drafter,
    ):
        drafter.open("s", BEGINNING)
        drafter.draft([request("s", [], 6)])
        drafter.open("t", BEGINNING)
        (tree, other) = drafter.draft([request("s", [], 6, 4), request("t", [], 6, 4)])
        assert first_tokens(tree) == {20, 30}
        assert first_tokens(other) == {20}
        assert drafter.fail_opens == {FailOpen.LIMIT: 1}


def test_outcomes_are_drafted_for_by_all_shards(left_address: str, slow: SlowService) -> None:
    with parts([left_address, slow.address], deadline_s=PATIENT_S) as drafter:
        drafter.open("s", BEGINNING[:-1])
        outcome = np.array(BEGINNING[-1:], np.int32)
        asked = request("s", [], 5)._replace(outcomes=(outcome,))
        ((tree,),) = drafter.draft_ahead([asked], PATIENT_S)
        assert first_tokens(tree) == {20, 30}


def test_parts_are_awaited_on_an_event_loop_too(left_address: str, slow: SlowService) -> None:
    async def draft() -> DraftTree:
        addresses = [left_address, slow.address]
        async with AsyncResilientDrafter(
            addresses, are_parts=True, deadline_s=PATIENT_S
        ) as drafter:
            assert await drafter.wait(PATIENT_S)
            await drafter.open("s", BEGINNING)
            (tree,) = await drafter.draft([request("s", [], 6)])
            return tree

    assert first_tokens(asyncio.run(draft())) == {20, 30}


def test_addresses_are_needed_and_differ() -> None:
    with pytest.raises(InvalidRequestError, match="no address"):
        parts([])
    with pytest.raises(InvalidRequestError, match="twice"):
        parts(["127.0.0.1:1", "127.0.0.1:1"])


@pytest.mark.plugin("retriever.plugins.replay")
def test_replay_drafts_from_several_servers(
    left_address: str, slow: SlowService, tmp_path: Path
) -> None:
    app = import_module("retriever.plugins.replay.replay_cli").app
    rows = [{"prompt_ids": BEGINNING, "output_ids": tokens[6:]} for tokens in (LEFT, RIGHT)]
    traces, warm = tmp_path / "traces.jsonl", tmp_path / "warm.jsonl"
    traces.write_text("".join(json.dumps(row) + "\n" for row in rows))
    warm.write_text(json.dumps({"output_ids": [40, 41, 42, 43, 44, 45]}))

    def steps(*servers: str) -> int:
        options = [part for server in servers for part in ("--server", server)]
        arguments = ["replay", str(traces), *options, "--warm", str(warm), "--json"]
        result = CliRunner().invoke(app, arguments)
        assert result.exit_code == 0, result.output
        return int(json.loads(result.stdout)["steps"])

    assert (
        steps(left_address, slow.address) == 2
    )  # each output is drafted whole by the one or the other
    assert len(slow.drafter.draft_context([40, 41, 42, 43], 2)) == 2
    refused = CliRunner().invoke(app, ["replay", str(traces), "--server", "a", "--index", "b"])
    assert refused.exit_code == 1
    assert "leave out" in refused.stderr


def test_threads_draft_at_once(left_address: str, slow: SlowService) -> None:
    def decode(name: str) -> list[int]:
        drafter.open(name, BEGINNING, FORGOTTEN)
        trees = [drafter.draft([request(name, [7], length)])[0] for length in range(7, 27)]
        drafter.close(name)
        return [len(tree) for tree in trees]

    with parts([left_address, slow.address], deadline_s=PATIENT_S) as drafter:
        alone = decode("alone")
        with ThreadPoolExecutor(4) as pool:
            assert list(pool.map(decode, "abcdefgh")) == [alone] * 8
        assert not drafter.fail_opens


def test_one_address_may_be_a_string() -> None:
    with connect("127.0.0.1:1") as drafter:
        assert isinstance(drafter, RemoteDrafter)
