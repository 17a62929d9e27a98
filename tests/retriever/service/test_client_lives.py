"""A client that comes back after a crash has its places again, and its earlier life has none."""

import contextlib
from collections.abc import Iterator

import grpc
import numpy as np
import pytest

from retriever.errors import InvalidRequestError, LimitExceededError, StaleClientError
from retriever.limits import Limits
from retriever.sequences import SessionKey
from retriever.sessions import client_lives
from retriever.sessions.administration import SessionFilter
from retriever.sessions.client_lives import Client, ClientLives
from retriever.sessions.embedded import EmbeddedDrafter
from retriever.v1 import retriever_pb2 as pb
from retriever.v1.retriever_pb2_grpc import RetrieverServiceStub
from tests.retriever.conftest import start_service, stop_service
from tests.retriever.draft_streams import Exchange, opening

PLACES = 3
FIRST, SECOND = (pb.Client(name="engine-0", incarnation=life) for life in (1, 2))


@pytest.fixture(scope="module")
def address() -> Iterator[str]:
    process, address = start_service("--max-tenant-sessions", str(PLACES))
    yield address
    stop_service(process)


def named(name: str, client: pb.Client) -> pb.OpenSessionRequest:
    return pb.OpenSessionRequest(session_id=name, prompt=[1, 2, 3], client=client)


def status_of(failed: grpc.RpcError) -> grpc.StatusCode:
    code: grpc.StatusCode = failed.code()
    return code


def test_a_client_that_comes_back_has_its_places_again(address: str) -> None:
    """Those of calls and those of a stream that the crashed host left half open."""
    with contextlib.ExitStack() as stack:
        channels = [stack.enter_context(grpc.insecure_channel(address)) for _ in range(3)]
        crashed, again, other = map(RetrieverServiceStub, channels)
        half_open, unnamed = Exchange(channels[0]), Exchange(channels[2])
        assert not half_open(1, openings=[opening("streamed")], client=FIRST).statuses
        crashed.OpenSession(named("called", FIRST))
        assert not unnamed(1, openings=[opening("other")]).statuses
        with pytest.raises(grpc.RpcError) as full:
            other.OpenSession(pb.OpenSessionRequest(session_id="more"))
        assert status_of(full.value) is grpc.StatusCode.RESOURCE_EXHAUSTED

        again.OpenSession(named("called", SECOND))  # under the same name
        back = Exchange(channels[1])
        assert not back(1, openings=[opening("streamed")], client=SECOND).statuses

        with pytest.raises(grpc.RpcError) as late:
            crashed.OpenSession(named("late", FIRST))
        assert status_of(late.value) is grpc.StatusCode.FAILED_PRECONDITION
        with pytest.raises(grpc.RpcError) as stale:
            half_open(2)
        assert status_of(stale.value) is grpc.StatusCode.FAILED_PRECONDITION
        # The end of the old stream ends nothing of the new one, nor of those without a client.
        step = pb.SessionStep(session_id="streamed", length=6)
        assert not back(2, steps=[step]).statuses
        assert not unnamed(2, steps=[pb.SessionStep(session_id="other", length=6)]).statuses
        for exchange in (back, unnamed):
            exchange.end()
        again.CloseSession(pb.CloseSessionRequest(session_id="called"))


def test_a_session_that_was_being_read_when_its_client_came_back_is_refused() -> None:
    drafter = EmbeddedDrafter()
    prepared = drafter.prepare([1, 2, 3], tenant="a")
    prepared.client = Client("engine", 1)
    drafter.admit_client("a", prepared.client)
    drafter.admit_client("a", Client("engine", 2))
    with pytest.raises(StaleClientError, match="incarnation 2"):
        drafter.begin(SessionKey("a", "s"), prepared)
    assert not drafter.num_sessions
    drafter.admit_client("b", Client("engine", 1))  # another tenant's client


def test_names_of_clients_take_bounded_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client_lives, "MAX_CLIENTS", 3)
    monkeypatch.setattr(client_lives, "MAX_TENANTS", 2)
    lives = ClientLives()
    for name in "abcd":
        assert lives.begins("t", Client(name, 5))
    with pytest.raises(StaleClientError):
        lives.begins("t", Client("d", 4))
    assert lives.begins("t", Client("a", 4))  # forgotten
    assert not lives.begins("t", Client("d", 5))
    lives.begins("u", Client("a"))
    lives.begins("v", Client("a"))
    assert lives.begins("t", Client("d", 5))


@pytest.mark.parametrize("name", ["", "x" * 257])
def test_names_of_clients_are_checked(name: str) -> None:
    with pytest.raises(InvalidRequestError, match="client's name"):
        EmbeddedDrafter().admit_client("", Client(name))


class Timed:
    """A drafter whose sessions are as old as a test says."""

    def __init__(self, **limits: int) -> None:
        self.now_s = 0.0
        self.drafter = EmbeddedDrafter(
            limits=Limits(idle_eviction_s=60.0, **limits), clock=lambda: self.now_s
        )

    def begin(self, tenant: str, name: str) -> None:
        prepared = self.drafter.prepare(np.arange(3), tenant=tenant)
        self.drafter.begin(SessionKey(tenant, name), prepared)

    @property
    def names(self) -> list[str]:
        (listed,) = self.drafter.administration.sessions(SessionFilter())
        return [f"{each.tenant}{each.name}" for each in listed]


def test_idle_sessions_of_a_tenant_make_room_before_it_is_refused() -> None:
    timed = Timed(max_tenant_sessions=2)
    for tenant, name in ("b1", "a1", "a2"):
        timed.begin(tenant, name)
    timed.now_s = 59.0
    with pytest.raises(LimitExceededError, match="max_tenant_sessions") as refused:
        timed.begin("a", "3")
    assert refused.value.retry_after_s == 5.0
    timed.now_s = 61.0
    timed.begin("a", "3")
    assert timed.names == ["b1", "a2", "a3"]  # no other tenant's, however idle


def test_idle_sessions_make_room_but_for_those_within_a_tenants_share() -> None:
    timed = Timed(max_sessions=4)
    for tenant, name in ("a1", "b1", "b2", "b3"):
        timed.begin(tenant, name)
    timed.now_s = 61.0
    timed.begin("b", "4")
    assert timed.names == ["a1", "b2", "b3", "b4"]
    timed.begin("c", "1")
    assert timed.names == ["b2", "b3", "b4", "c1"]  # it had nothing: the longest idle one goes
