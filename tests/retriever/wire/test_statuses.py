"""An error crosses the wire as itself: by its reason in details, or by its code without them."""

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NoReturn

import grpc
import pytest
from google.protobuf.any_pb2 import Any as AnyMessage
from google.rpc.error_details_pb2 import DebugInfo, ErrorInfo
from google.rpc.status_pb2 import Status

from retriever import errors
from retriever.client.conversation import FailOpen, reason_of
from retriever.client.strict import RemoteDrafter
from retriever.limits import Limits
from retriever.sessions.embedded import EmbeddedDrafter
from retriever.v1 import retriever_pb2 as pb
from retriever.v1.retriever_pb2_grpc import RetrieverServiceStub
from retriever.wire.statuses import (
    abort,
    error_of,
    error_of_status,
    late_status,
    refusal_in,
    refusal_of,
    session_status,
    status_of,
)
from tests.retriever.security.in_process import serving

WITH_REASON = [
    kind
    for kind in vars(errors).values()
    if isinstance(kind, type) and issubclass(kind, errors.RetrieverError) and kind.reason
]
LIMITED = errors.LimitExceededError("too many", limit="max_sessions", retry_after_s=1.25)


class Call(grpc.RpcError):
    """A call that a server has ended, as both sides see it."""

    def __init__(self) -> None:
        self._code: Any = None
        self._text = ""
        self.metadata: tuple[tuple[str, Any], ...] = ()

    async def abort(self, code: Any, text: str, metadata: Any = ()) -> NoReturn:
        self._code, self._text, self.metadata = code, text, tuple(metadata)
        raise self

    def code(self) -> Any:
        return self._code

    def details(self) -> str:
        return self._text

    def trailing_metadata(self) -> Any:
        return self.metadata


def ended_with(error: errors.RetrieverError) -> Call:
    call = Call()
    with pytest.raises(Call):
        asyncio.run(abort(call, error))
    return call


@pytest.mark.parametrize("kind", WITH_REASON)
def test_each_error_comes_back_as_its_own_class(kind: type[errors.RetrieverError]) -> None:
    error = kind("what to do")
    for back in (error_of(ended_with(error)), error_of_status(session_status("s", error))):
        assert type(back) is kind
        assert str(back) == "what to do"


def test_a_limit_and_a_wait_cross_the_wire() -> None:
    for back in (error_of(ended_with(LIMITED)), error_of_status(session_status("s", LIMITED))):
        assert isinstance(back, errors.LimitExceededError)
        assert (back.limit, back.retry_after_s) == ("max_sessions", 1.25)
    endless = errors.LimitExceededError("never", retry_after_s=float("inf"))
    assert error_of_status(session_status("s", endless)).retry_after_s  # type: ignore[attr-defined]


@pytest.mark.parametrize("kind", WITH_REASON)
def test_servers_without_details_are_understood_by_the_code(
    kind: type[errors.RetrieverError],
) -> None:
    error = kind("text")
    call = ended_with(error)
    call.metadata = ()
    status = session_status("s", error)
    del status.details[:]
    for back in (error_of(call), error_of_status(status)):
        assert status_of(back) is status_of(error)


def test_reasons_of_one_code_are_told_apart() -> None:
    for error, reason in (
        (errors.VocabularyMismatchError(""), FailOpen.VOCABULARY),
        (errors.DrainingError(""), FailOpen.DRAINING),
        (errors.DrafterUnavailableError(""), FailOpen.REFUSED),
        (LIMITED, FailOpen.LIMIT),
        (errors.OutOfSequenceError(""), FailOpen.LOST),
        (errors.InvalidRequestError(""), FailOpen.REFUSED),
    ):
        status = session_status("s", error)
        assert reason_of(status.code, refusal_in(status.details)) is reason
    late = late_status("late")
    assert reason_of(late.code, refusal_in(late.details)) is FailOpen.TIMEOUT
    del late.details[:]
    assert reason_of(late.code, refusal_in(late.details)) is FailOpen.TIMEOUT


def test_details_of_others_and_bytes_that_are_none_are_skipped() -> None:
    foreign, other = AnyMessage(), AnyMessage()
    foreign.Pack(ErrorInfo(reason="DRAINING", domain="elsewhere"))
    other.Pack(DebugInfo(detail="of somebody"))
    broken = AnyMessage(type_url=foreign.type_url, value=b"\xff")
    assert refusal_in([foreign, other, broken]) == ("", "", None)
    assert refusal_of([("grpc-status-details-bin", b"\xff\xff")]) == ("", "", None)
    assert refusal_of(None) == ("", "", None)


@contextmanager
def limited() -> Iterator[str]:
    drafter = EmbeddedDrafter(limits=Limits(max_tenant_sessions=1, idle_session_s=1000))
    with serving(drafter) as address:
        yield address
    drafter.shut_down()


def test_a_service_states_reason_and_limit_in_calls_and_streams() -> None:
    with limited() as address, RemoteDrafter(address, timeout_s=10) as remote:
        remote.open("a", [1, 2, 3])
        with pytest.raises(errors.LimitExceededError) as raised:
            remote.open("b", [1])
        assert raised.value.limit == "max_tenant_sessions"
        with grpc.insecure_channel(address) as channel:
            stub = RetrieverServiceStub(channel)
            first = pb.DraftStreamRequest(
                sequence_number=1, openings=[pb.OpenSessionRequest(session_id="c")]
            )
            responses = stub.DraftStream(iter([first]))
            (status,) = next(responses).statuses
            assert refusal_in(status.details)[:2] == ("LIMIT_EXCEEDED", "max_tenant_sessions")
            raw: Any = channel.unary_unary("/retriever.v1.RetrieverService/Draft")
            with pytest.raises(grpc.RpcError) as no_message:
                raw(b"\xff\xff")
        error: Any = no_message.value
        ((_, sent),) = error.trailing_metadata()
        (info,) = Status.FromString(sent).details
        assert ErrorInfo.FromString(info.value) == ErrorInfo(
            reason="INVALID_REQUEST", domain="foredraft"
        )
