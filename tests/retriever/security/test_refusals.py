"""What a refusal tells: the limit in force, and nothing of what others do or of the machine."""

import asyncio
import re
from dataclasses import fields, replace
from pathlib import Path

import grpc
import numpy as np
import pytest

from retriever.client.strict import RemoteDrafter
from retriever.drafter import SequenceOptions
from retriever.errors import InvalidRequestError, LimitExceededError, RetrieverError, StateError
from retriever.limits import Limits
from retriever.predict.context import context_bytes
from retriever.predict.generations import POOL_BYTES, generations_bytes
from retriever.predict.stores import GENERATIONS_ALONE
from retriever.sequences import SessionKey
from retriever.service.servicer import Deleting
from retriever.sessions.embedded import EmbeddedDrafter
from retriever.sessions.service_face import ServiceFace
from retriever.v1 import retriever_pb2 as pb
from retriever.v1.retriever_pb2_grpc import RetrieverServiceStub
from tests.retriever.log.state_folders import drafter_on
from tests.retriever.security.in_process import serving
from tests.retriever.token_ids import ids

SESSION = context_bytes(300)
POOL = generations_bytes(0, GENERATIONS_ALONE) + POOL_BYTES
LIMITS = Limits(
    max_sessions=9,
    max_tenant_sessions=6,
    max_bytes=2 * POOL + 7 * SESSION + SESSION // 2,
    max_tenant_bytes=POOL + 5 * SESSION + SESSION // 2,
    max_sequence_tokens=400,
)
FEW = replace(LIMITS, max_sessions=7, max_bytes=1 << 30, max_tenant_bytes=1 << 30)
NAMES = {field.name for field in fields(Limits)}


def refusals(sessions: int, tokens: int, limits: Limits = LIMITS) -> list[str]:
    """What a tenant is told while another has so many sessions of so many tokens."""
    drafter = EmbeddedDrafter(limits=limits)
    told: list[str] = []

    def begin(tenant: str, name: str, length: int) -> None:
        key = SessionKey(tenant, name)
        prompt = np.arange(length, dtype=np.int32)
        drafter.state.begin(key, drafter.state.prepare(prompt, SequenceOptions(tenant=tenant)))

    for number in range(sessions):
        begin("other", str(number), tokens)
    try:
        for number in range(9):
            begin("mine", str(number), 300)
    except LimitExceededError as error:
        told.append(str(error))
    drafter.shut_down()
    return told


def test_a_refusal_names_the_limit_and_not_what_others_use() -> None:
    by_bytes = [refusals(4, 250), refusals(5, 260), refusals(5, 200)]
    assert all(told == by_bytes[0] for told in by_bytes)
    assert "(max_bytes)" in by_bytes[0][0]
    by_sessions = refusals(4, 1, FEW)
    assert by_sessions == refusals(5, 1, FEW)
    assert "(max_sessions)" in by_sessions[0]
    assert "(max_tenant_bytes)" in refusals(0, 1)[0]
    for text, limits in ((by_bytes[0][0], LIMITS), (by_sessions[0], FEW)):
        limit = text[text.rindex("(") + 1 : -1]
        assert limit in NAMES
        assert str(getattr(limits, limit)) in text
        numbers = set(map(int, re.findall(r"\d+", text)))
        assert numbers <= {getattr(limits, limit), SESSION, 5}


def test_the_tokens_that_a_session_ends_with_are_not_taken_from_others() -> None:
    drafter = EmbeddedDrafter(limits=LIMITS)
    for number in range(50):
        drafter.open(str(number), ids(1, 2, 3))
        drafter.close(str(number), np.arange(300, dtype=np.int32))
    assert drafter.state.census().session_tokens == 0
    for number in range(5):
        drafter.open(str(number), np.arange(250, dtype=np.int32))
    with pytest.raises(LimitExceededError):
        drafter.open("s", ids(1))
    drafter.shut_down()


@pytest.mark.parametrize("fingerprint", ["\n\x02", "x" * 12, "ab" * 65, "caf\u00e9"])
def test_what_cannot_be_a_fingerprint_is_not_taken_for_one(fingerprint: str) -> None:
    drafter = EmbeddedDrafter()
    with pytest.raises(InvalidRequestError, match="hexadecimal digits"):
        ServiceFace(drafter.state).check_vocabulary(fingerprint)
    ServiceFace(drafter.state).check_vocabulary("ab" * 32)
    drafter.shut_down()


def test_a_name_of_megabytes_is_answered_in_few_words() -> None:
    drafter = EmbeddedDrafter()
    with serving(drafter) as address, grpc.insecure_channel(address) as channel:
        request = pb.CloseSessionRequest(session_id="\n" * (1 << 20))
        with pytest.raises(grpc.RpcError) as raised:
            RetrieverServiceStub(channel).CloseSession(request)
        assert raised.value.code() is grpc.StatusCode.NOT_FOUND
        details = raised.value.details() or ""
        assert details.isprintable()
        assert 0 < len(details) < 300
    drafter.shut_down()


def test_deletions_take_turns() -> None:
    async def most_at_once() -> int:
        deleting, running, most = Deleting(lambda: 60), 0, 0

        async def delete() -> None:
            nonlocal running, most
            async with deleting.turn("a"):
                running += 1
                most = max(most, running)
                await asyncio.sleep(0)
                running -= 1

        await asyncio.gather(*(delete() for _ in range(20)))
        return most

    assert asyncio.run(most_at_once()) == 1


def test_a_service_refuses_more_deletions_than_its_limit(tmp_path: Path) -> None:
    limits = Limits(max_tenant_deletions=2)
    with (
        drafter_on(tmp_path, limits) as drafter,
        serving(drafter) as address,
        RemoteDrafter(address, timeout_s=10) as client,
    ):
        client.delete_tenant_data()
        client.delete_session_data("s")
        for call in (client.delete_tenant_data, lambda: client.delete_session_data("s")):
            with pytest.raises(LimitExceededError, match="try again in 30 s"):
                call()


def test_a_failure_of_the_disk_names_no_file_to_callers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with drafter_on(tmp_path) as drafter, serving(drafter) as address:

        def refuse(*_: object, **__: object) -> None:
            raise StateError(f"what {tmp_path} has cannot be removed")

        monkeypatch.setattr(drafter.state, "delete", refuse)
        with RemoteDrafter(address) as client, pytest.raises(RetrieverError) as raised:
            client.delete_tenant_data()
    assert str(tmp_path) not in str(raised.value)
    assert "log says why" in str(raised.value)
    assert str(tmp_path) in caplog.text
