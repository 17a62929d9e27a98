"""One stream of drafts on the wire: numbers, statuses, sessions and limits of its messages."""

import asyncio
import time
from collections.abc import Iterator
from pathlib import Path

import grpc
import numpy as np
import pytest

from retriever.drafter import DraftRequest, SequenceOptions
from retriever.errors import LimitExceededError, UnknownSessionError
from retriever.limits import Limits
from retriever.predict.context import context_bytes
from retriever.predict.generations import POOL_BYTES, generations_bytes
from retriever.predict.stores import GENERATIONS_ALONE
from retriever.sequences import SessionKey
from retriever.service.serving import sweeping
from retriever.sessions.embedded import EmbeddedDrafter
from retriever.sessions.service_face import ServiceFace
from retriever.v1 import retriever_pb2 as pb
from retriever.v1.retriever_pb2_grpc import RetrieverServiceStub
from tests.retriever.conftest import start_service, stop_service
from tests.retriever.draft_streams import Exchange, codes, opening, step, stream
from tests.retriever.service.decodes import wait_until

ABORTED = grpc.StatusCode.ABORTED.value[0]
LATE = grpc.StatusCode.DEADLINE_EXCEEDED.value[0]
LIMIT = grpc.StatusCode.RESOURCE_EXHAUSTED.value[0]
INVALID = grpc.StatusCode.INVALID_ARGUMENT.value[0]
NOT_FOUND = grpc.StatusCode.NOT_FOUND.value[0]
EXISTS = grpc.StatusCode.ALREADY_EXISTS.value[0]


def test_bad_session_fails_alone(service: str) -> None:
    with stream(service) as ask:
        opened = ask(1, openings=[opening("bad-a"), opening("good"), opening("bad-a")])
        assert codes(opened) == {"bad-a": EXISTS}
        steps = [
            step("bad-a", [4], 99),
            step("good", [1], 7),
            step("none", [1], 1),
            step("bad-b", [1 << 31], 1),
        ]
        response = ask(2, steps=steps, openings=[opening("bad-b", ())])
        assert codes(response) == {"bad-a": ABORTED, "none": NOT_FOUND, "bad-b": INVALID}
        assert [len(tree.token_ids) > 0 for tree in response.trees] == [False, True, False, False]
        response = ask(3, steps=[step("bad-a", [1], 7), step("good", [2], 8)])
        assert not response.statuses
        assert all(len(tree.token_ids) for tree in response.trees)


def test_repeated_message_is_answered_again_and_does_nothing(service: str) -> None:
    with stream(service) as ask:
        first = ask(1, openings=[opening("s")], steps=[step("s", [1], 7)])
        assert ask(1, openings=[opening("s")], steps=[step("s", [1], 7)]) == first
        assert not ask(2, steps=[step("s", [2], 8)]).statuses


@pytest.mark.parametrize(("number", "why"), [(5, "lost"), (1, "stale")])
def test_lost_and_stale_messages_do_nothing(service: str, number: int, why: str) -> None:
    with stream(service) as ask:
        ask(1, openings=[opening("s")])
        ask(2)
        (status,) = ask(number, steps=[step("s", [1], 7)]).statuses
        assert (status.code, status.session_id) == (ABORTED, "")
        assert why in status.message
        assert "message 3 is expected" in status.message
        assert not ask(3, steps=[step("s", [1], 7)]).statuses  # the session has noted nothing


def test_session_ends_with_its_stream_and_one_opened_by_a_call_does_not(service: str) -> None:
    with grpc.insecure_channel(service) as channel:
        RetrieverServiceStub(channel).OpenSession(opening("by-call"))
        one = Exchange(channel)
        assert not one(1, openings=[opening("mine"), opening("ended")]).statuses
        assert not one(2, closings=[pb.CloseSessionRequest(session_id="ended")]).statuses
        one.call.cancel()
        other = Exchange(channel)
        deadline = time.monotonic() + 10
        number = 0
        while time.monotonic() < deadline:
            number += 1
            response = other(number, steps=[step("mine", [], 6), step("by-call", [], 6)])
            assert "by-call" not in codes(response)
            if codes(response) == {"mine": NOT_FOUND}:
                break
        assert codes(response) == {"mine": NOT_FOUND}
        other.end()
        RetrieverServiceStub(channel).CloseSession(pb.CloseSessionRequest(session_id="by-call"))


def test_what_is_drafted_too_late_is_noted_and_left_out(service: str) -> None:
    names = [f"late-{at}" for at in range(200)]
    with stream(service) as ask:
        ask(1, openings=[opening(name) for name in names])
        steps = [step(name, [1], 7, 64) for name in names]
        response = ask(2, steps=steps, timeout_us=1)
        assert codes(response) == {"": LATE}
        assert [len(tree.token_ids) for tree in response.trees] == [0] * 200
        again = ask(3, steps=[step(name, [2], 8, 64) for name in names])
        assert not again.statuses  # the tokens of the late step were noted
        assert all(len(tree.token_ids) for tree in again.trees)


def test_message_beyond_a_limit_is_refused_as_a_whole_and_names_it(service: str) -> None:
    limits = Limits()
    with stream(service) as ask:
        ask(1, openings=[opening("s")])
        many = [step(str(at), [], 0) for at in range(limits.max_batch + 1)]
        (status,) = ask(2, steps=[step("s", [1], 7), *many]).statuses
        assert (status.code, "max_batch" in status.message) == (LIMIT, True)
        wide = [step(str(at), [], 0, 256) for at in range(limits.max_step_nodes // 256)]
        (status,) = ask(3, steps=[step("s", [1], 7), *wide]).statuses
        assert (status.code, "max_step_nodes" in status.message) == (LIMIT, True)
        (status,) = ask(4, closings=[pb.CloseSessionRequest()] * (limits.max_batch + 1)).statuses
        assert (status.code, "max_batch" in status.message) == (LIMIT, True)
        (status,) = ask(5, steps=[step("s", [1], 7)] * 2).statuses
        assert (status.code, "twice" in status.message) == (INVALID, True)
        assert not ask(6, steps=[step("s", [1], 7)]).statuses
        with pytest.raises(grpc.RpcError) as raised:
            ask(7, steps=[step("s", [1] * (17 << 20), 8)])
    assert raised.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert str(limits.max_message_bytes) in (raised.value.details() or "")


@pytest.mark.parametrize("num_before", [0, 2])
def test_message_without_a_number_does_nothing_and_ends_the_stream(
    service: str, num_before: int
) -> None:
    with stream(service) as ask:
        for number in range(1, num_before + 1):
            ask(number)
        with pytest.raises(grpc.RpcError, match="set sequence_number") as raised:
            ask(0, openings=[opening("never")])
    assert raised.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    with stream(service) as ask:
        assert codes(ask(1, steps=[step("never", [], 6)])) == {"never": NOT_FOUND}


@pytest.mark.soak
def test_slow_consumer_holds_its_own_messages_and_nobody_elses(index: Path) -> None:
    process, address = start_service("--index", str(index), "--address", "127.0.0.1:0")
    names = [str(at) for at in range(64)]

    def flood() -> Iterator[pb.DraftStreamRequest]:
        opened = [opening(name) for name in names]
        yield pb.DraftStreamRequest(sequence_number=1, openings=opened)
        for number in range(2, 1 << 30):
            steps = [step(name, [], 6, 64) for name in names]
            yield pb.DraftStreamRequest(sequence_number=number, steps=steps)

    with grpc.insecure_channel(address) as channel:
        call = RetrieverServiceStub(channel).DraftStream(flood())
        next(call)  # and never again
        time.sleep(1.5)
        settled = resident_bytes(process.pid)
        with stream(address) as ask:
            ask(1, openings=[opening("quick")])
            for number in range(2, 50):
                began = time.monotonic()
                assert not ask(number, steps=[step("quick", [], 6)]).statuses
                assert time.monotonic() - began < 0.5
        time.sleep(1.0)
        assert resident_bytes(process.pid) < settled + (8 << 20)
        call.cancel()
    stop_service(process)


def resident_bytes(pid: int) -> int:
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * 4096


def test_tenants_cannot_reach_one_anothers_sessions_and_share_limits_fairly() -> None:
    pool = generations_bytes(0, GENERATIONS_ALONE) + POOL_BYTES
    session = context_bytes(10)
    limits = Limits(
        max_sessions=5,
        max_tenant_sessions=2,
        max_bytes=3 * pool + 4 * session + session // 2,
        max_tenant_bytes=pool + 3 * session,
    )
    drafter = EmbeddedDrafter(limits=limits)
    prompt = np.arange(10, dtype=np.int32)

    def begin(tenant: str, name: str) -> None:
        drafter.state.begin(
            SessionKey(tenant, name), drafter.state.prepare(prompt, SequenceOptions(tenant=tenant))
        )

    begin("a", "s")
    begin("b", "s")
    with pytest.raises(UnknownSessionError):
        drafter.state.end(SessionKey("", "s"))
    begin("a", "t")
    with pytest.raises(LimitExceededError, match="max_tenant_sessions"):
        begin("a", "u")
    begin("b", "t")
    with pytest.raises(LimitExceededError, match="max_bytes"):
        begin("c", "s")
    drafter.state.end(SessionKey("a", "s"))
    drafter.state.end(SessionKey("b", "t"))
    (full,) = ServiceFace(drafter.state).commit_each([request("s", 5000)], "b")
    assert isinstance(full, LimitExceededError)
    assert full.limit == "max_tenant_bytes"
    assert drafter.state.census().session_tokens == 20
    del full
    for key in (SessionKey("b", "s"), SessionKey("a", "t")):
        drafter.state.end(key, np.zeros(5000, np.int32), remember=False)  # needs no room
    assert drafter.state.census().session_tokens == len(drafter.state.sessions) == 0
    for tenant, name in ("aq", "ar", "bq", "br"):  # all of the room is there again
        begin(tenant, name)
    with pytest.raises(LimitExceededError, match="max_bytes"):
        begin("c", "s")


def request(name: str, num_new: int) -> DraftRequest:
    return DraftRequest(name, np.zeros(num_new, np.int32), 10 + num_new, 4)


def test_idle_sessions_end_by_themselves() -> None:
    began = time.monotonic()
    drafter = EmbeddedDrafter(limits=Limits(idle_session_s=0.1))
    drafter.open("idle", np.zeros(4, np.int32))

    async def has_ended() -> bool:
        async with sweeping(drafter, lambda: False):
            return await asyncio.to_thread(wait_until, lambda: not len(drafter.state.sessions))

    assert asyncio.run(has_ended())
    assert time.monotonic() - began > 0.1
    assert drafter.state.census().session_tokens == 0
