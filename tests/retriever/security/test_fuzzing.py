"""Whatever is sent, calls end with a response or a status, and leak nothing."""

import asyncio
from collections.abc import Iterator

import grpc
import pytest
from hypothesis import given, settings, strategies as st

from retriever.log.pools import Pools
from retriever.predict.pool import Pool
from retriever.sessions.embedded import EmbeddedDrafter
from retriever.v1 import retriever_pb2 as pb
from tests.oracles.fuzz.fuzzing import Fuzzer, LeakError
from tests.oracles.fuzz.raw_bytes import outcome_of, send_raw, send_to_socket
from tests.retriever.security.in_process import serving
from tests.suite_parts import cases

STATUSES = {
    "OK",
    "INVALID_ARGUMENT",
    "NOT_FOUND",
    "ALREADY_EXISTS",
    "RESOURCE_EXHAUSTED",
    "FAILED_PRECONDITION",
    "ABORTED",
}
"""What a call may end with: the others tell of a mistake that is ours."""

NUM_MESSAGES = cases(3000, of=10_000)
METHODS = pb.DESCRIPTOR.services_by_name["RetrieverService"].methods


@pytest.fixture
def drafter() -> Iterator[EmbeddedDrafter]:
    made = EmbeddedDrafter()
    yield made
    made.shut_down()


@pytest.fixture(scope="module")
def address() -> Iterator[str]:
    made = EmbeddedDrafter()
    with serving(made) as bound:
        yield bound
    made.shut_down()


@pytest.mark.seeds
def test_generated_messages_end_with_a_status_and_leak_nothing(drafter: EmbeddedDrafter) -> None:
    fuzzer = Fuzzer(drafter, seed=1)
    asyncio.run(fuzzer.send(NUM_MESSAGES))
    assert sum(fuzzer.outcomes.values()) == NUM_MESSAGES
    reached = {"OK", "unreadable", "INVALID_ARGUMENT", "NOT_FOUND", "RESOURCE_EXHAUSTED"}
    assert reached <= set(fuzzer.outcomes)
    assert "INTERNAL" not in fuzzer.outcomes


def test_a_planted_leak_between_pools_is_found(
    drafter: EmbeddedDrafter, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = Pools.get

    def shared(self: Pools, _tenant: str) -> Pool:
        return own(self, "everybody")

    monkeypatch.setattr(Pools, "get", shared)
    with pytest.raises(LeakError, match="another tenant's tokens"):
        asyncio.run(Fuzzer(drafter, seed=1).send(NUM_MESSAGES))


@pytest.mark.seeds
def test_raw_bytes_over_a_socket_end_with_a_status(address: str) -> None:
    outcomes = send_raw(address, cases(300, of=1000), seed=1)
    assert set(outcomes) <= STATUSES
    assert {"OK", "INVALID_ARGUMENT"} <= set(outcomes)
    send_to_socket(address, cases(15, of=50), seed=1)
    assert send_raw(address, 1, seed=2)


@settings(max_examples=cases(40, of=150), deadline=None)
@given(method=st.sampled_from([method.name for method in METHODS]), content=st.binary(max_size=200))
def test_any_bytes_end_with_a_status(address: str, method: str, content: bytes) -> None:
    with grpc.insecure_channel(address) as channel:
        assert outcome_of(channel, method, content) in STATUSES
