"""What the contract says of all calls: one meaning of a budget, and what a service is."""

import asyncio
from pathlib import Path
from typing import Any

import grpc
import pytest
from grpc import aio

from retriever.client.strict import RemoteDrafter
from retriever.limits import Limits
from retriever.operations.observer import ServiceObserver
from retriever.service.serving import start
from retriever.sessions.embedded import EmbeddedDrafter
from retriever.v1 import retriever_pb2 as pb
from retriever.v1.retriever_pb2_grpc import RetrieverServiceStub
from retriever.wire.messages import DEFAULT_BUDGET_NODES
from retriever.wire.server_info import ServerInfo
from tests.retriever.conftest import start_service, stop_service
from tests.retriever.operations.watched import SlowToWarm
from tests.retriever.security.in_process import serving

CONTEXT = list(range(40)) * 3


def nodes(stub: Any, **budget: Any) -> tuple[int, int, int]:
    """Return how many nodes a bare draft, an explained one and a step get."""
    bare = stub.Draft(pb.DraftRequest(context=CONTEXT, **budget))
    explained = stub.Explain(pb.ExplainRequest(context=CONTEXT, **budget))
    assert len(explained.nodes) == len(explained.tree.token_ids)
    message = pb.DraftStreamRequest(
        sequence_number=1,
        openings=[pb.OpenSessionRequest(session_id="s", prompt=CONTEXT)],
        steps=[pb.SessionStep(session_id="s", length=len(CONTEXT), **budget)],
    )
    (stepped,) = next(stub.DraftStream(iter([message]))).trees
    return len(bare.tree.token_ids), len(explained.tree.token_ids), len(stepped.token_ids)


@pytest.mark.parametrize("pad_replies", [False, True])
def test_a_budget_means_the_same_in_every_call(*, pad_replies: bool) -> None:
    drafter = EmbeddedDrafter()
    with (
        serving(drafter, pad_replies=pad_replies) as address,
        grpc.insecure_channel(address) as channel,
    ):
        stub = RetrieverServiceStub(channel)
        assert nodes(stub) == (DEFAULT_BUDGET_NODES,) * 3
        assert nodes(stub, budget_nodes=0) == (0, 0, 0)
        assert nodes(stub, budget_nodes=5) == (5, 5, 5)
    drafter.shut_down()


def test_the_default_stays_within_the_limit() -> None:
    drafter = EmbeddedDrafter(limits=Limits(max_budget_nodes=7))
    with serving(drafter) as address, grpc.insecure_channel(address) as channel:
        assert nodes(RetrieverServiceStub(channel)) == (7, 7, 7)
        with RemoteDrafter(address) as remote:
            assert remote.server_info().default_budget_nodes == 7
            assert len(remote.draft_context(CONTEXT, 0)) == 0
            assert len(remote.explain(CONTEXT, 0).tree) == 0
    drafter.shut_down()


def test_a_service_says_what_it_is(index: Path) -> None:
    named = ("--model", "smol", "--model", "smoller", "--index", str(index))
    process, address = start_service("--address", "127.0.0.1:0", "--max-batch", "17", *named)
    with RemoteDrafter(address, timeout_s=10) as remote:
        info = remote.server_info()
    stop_service(process)
    assert info.phase == "ready"
    assert info.models == ("smol", "smoller")
    assert info.limits["max_batch"] == 17
    assert info.limits["generations_age_s"] == float("inf")
    assert info.version
    assert (info.vocabulary_size, info.vocabulary_fingerprint) == (50, "ab" * 32)
    assert ServerInfo.from_message(info.to_message()) == info


def test_a_service_says_so_while_it_starts_and_drains(tmp_path: Path) -> None:
    phases = asyncio.run(asyncio.wait_for(_phases(tmp_path), 60))
    assert phases == [pb.PHASE_STARTING, pb.PHASE_READY, pb.PHASE_DRAINING]


async def _phases(folder: Path) -> list[int]:
    drafter, observer, address = SlowToWarm(), ServiceObserver(), f"unix:{folder}/draft.sock"
    starting = asyncio.create_task(start(drafter, address, observer))
    async with aio.insecure_channel(address) as channel:
        await channel.channel_ready()
        stub: Any = RetrieverServiceStub(channel)

        async def phase() -> int:
            info = await stub.GetServerInfo(pb.GetServerInfoRequest())
            return int(info.phase)

        phases = [await phase()]
        drafter.released.set()
        server, _ = await starting
        phases.append(await phase())
        await observer.lifecycle.drain(lambda: True, 0)
        phases.append(await phase())
    await server.stop(0)
    drafter.shut_down()
    return phases
