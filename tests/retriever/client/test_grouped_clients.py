"""Groups and versions over the wire: every client tells its services of them."""

from typing import Any

import grpc
import numpy as np
import pytest

from retriever.client.local import LocalDrafter
from retriever.client.resilient import ResilientDrafter
from retriever.drafter import DraftRequest, Prediction, SequenceOptions
from retriever.errors import InvalidRequestError
from retriever.follower import Followers
from retriever.sequences import TokenSequence
from retriever.sessions.embedded import EmbeddedDrafter
from retriever.tree import Source
from retriever.v1 import retriever_pb2 as pb
from retriever.v1.retriever_pb2_grpc import RetrieverServiceStub
from tests.retriever.client.kinds_of_clients import clients, ready
from tests.retriever.open_sessions import WatchedDrafter
from tests.retriever.security.in_process import serving
from tests.retriever.token_ids import ids

PROMPT = [7, 8, 9]


def step(drafter: Any, session: str, new: list[int], length: int) -> Any:
    (tree,) = drafter.draft([DraftRequest(session, ids(*new), length, 16)])
    return tree


@clients
def test_sequences_of_a_group_draft_from_one_another(connect: Any) -> None:
    with serving(EmbeddedDrafter()) as address, ready(connect(address)) as drafter:
        for name, group in (("a", "g"), ("b", "g"), ("c", "other"), ("d", "")):
            drafter.open(name, PROMPT, SequenceOptions(group=group))
            step(drafter, name, [], 3)
        step(drafter, "a", [1, 2, 3, 4], 7)
        assert step(drafter, "b", [1], 4).token_ids.tolist()[:3] == [2, 3, 4]
        assert Source.SIBLINGS in step(drafter, "b", [2], 5).sources
        assert not len(step(drafter, "c", [1], 4))
        assert not len(step(drafter, "d", [1], 4))


@clients
def test_versions_travel(connect: Any) -> None:
    service = WatchedDrafter()
    with serving(service) as address, ready(connect(address)) as drafter:
        stated = SequenceOptions(group="g\u00e9", policy_version=1 << 40, oldest_version=3)
        drafter.open("s", PROMPT, stated)
        step(drafter, "s", [], 3)
        (session,) = service.open_sessions()
        assert session.options == stated
        drafter.open("t", PROMPT, SequenceOptions(policy_version=0))
        step(drafter, "t", [], 3)
        assert [each.options.policy_version for each in service.open_sessions()] == [1 << 40, 0]


@clients
@pytest.mark.parametrize("kin", [{"group": "g" * 300}, {"policy_version": -1}])
def test_clients_refuse_what_is_no_group_or_version(connect: Any, kin: dict[str, Any]) -> None:
    with (
        serving(EmbeddedDrafter()) as address,
        connect(address) as drafter,
        pytest.raises(InvalidRequestError),
    ):
        drafter.open("s", PROMPT, SequenceOptions(**kin))


@pytest.mark.parametrize(
    "kin", [{"group": "g" * 300}, {"policy_version": (1 << 64) - 1}, {"oldest_version": 2}]
)
def test_a_service_refuses_them_too(kin: dict[str, Any]) -> None:
    service = EmbeddedDrafter()
    with serving(service) as address, grpc.insecure_channel(address) as channel:
        stub = RetrieverServiceStub(channel)
        with pytest.raises(grpc.RpcError) as refused:
            stub.OpenSession(pb.OpenSessionRequest(session_id="s", prompt=PROMPT, **kin))
        assert refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT
        assert len(service.state.sessions) == 0
        stub.OpenSession(pb.OpenSessionRequest(session_id="s", prompt=PROMPT, group="g"))


def test_a_stream_that_ends_leaves_nothing_of_its_lanes() -> None:
    """A lane that dies in the middle: its client is gone without a word."""
    service = EmbeddedDrafter()
    with serving(service) as address, grpc.insecure_channel(address) as channel:
        stub = RetrieverServiceStub(channel)
        stub.OpenSession(pb.OpenSessionRequest(session_id="kin", prompt=PROMPT, group="g"))
        opening = pb.OpenSessionRequest(session_id="a", prompt=PROMPT, group="g")
        steps = [pb.SessionStep(session_id="a", new_token_ids=[1, 2, 3], length=6, budget_nodes=8)]
        message = pb.DraftStreamRequest(sequence_number=1, openings=[opening], steps=steps)
        (response,) = stub.DraftStream(iter([message]))
        assert not response.statuses
        assert len(service.state.sessions) == 1
        running = service.state.pool("").running
        assert running is not None
        assert (running.num_lanes, running.num_tokens) == (1, 0)
        assert not np.isin(running.tokens, [1, 2, 3]).any()


def test_a_drafter_that_uses_no_hints_is_told_them_and_no_tenant() -> None:
    told: list[SequenceOptions] = []

    class Plain:
        def open(self, _session: str, _prompt: Any, options: SequenceOptions) -> None:
            told.append(options)

    stated = SequenceOptions(group="g", predictions=(Prediction(ids(3)),))
    sequence = TokenSequence(ids(1, 2), options=stated)
    followers = Followers(Plain())  # type: ignore[arg-type]
    followers.open([followers.follow(sequence)])
    assert told == [stated]
    owned = TokenSequence(ids(1, 2), options=SequenceOptions(tenant="a"))
    with pytest.raises(InvalidRequestError, match="not keep tenants apart"):
        followers.open([followers.follow(owned)])
    assert told == [stated]
    local = Followers(LocalDrafter())
    local.open([local.follow(sequence)])
    with pytest.raises(InvalidRequestError, match="not keep tenants apart"):
        LocalDrafter().open("s", ids(1, 2), SequenceOptions(tenant="a"))


def test_replicas_have_a_group_together() -> None:
    """On two services its sequences could not draft from one another."""
    services = [WatchedDrafter(), WatchedDrafter()]
    with (
        serving(services[0]) as first,
        serving(services[1]) as second,
        ResilientDrafter([first, second], deadline_s=30.0, local=False) as drafter,
    ):
        ready(drafter)
        for group in ("g", "h", ""):
            for number in range(8):
                name = f"{group}-{number}"
                drafter.open(name, PROMPT, SequenceOptions(group=group))
                step(drafter, name, [], 3)
        for group in ("g", "h"):
            having = [{each.options.group for each in one.open_sessions()} for one in services]
            assert sum(group in each for each in having) == 1
