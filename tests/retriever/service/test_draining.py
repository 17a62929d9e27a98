"""A service that is about to end tells its streams so, and ends each with a status."""

import asyncio
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import grpc
import pytest

from retriever.client.strict import RemoteDrafter
from retriever.errors import DrainingError
from retriever.operations.lifecycle import Lifecycle
from retriever.service.open_streams import OpenStreams
from retriever.v1 import retriever_pb2 as pb
from retriever.v1.retriever_pb2_grpc import RetrieverServiceStub
from retriever.wire.statuses import error_of, error_of_status
from tests.retriever.conftest import start_service
from tests.retriever.draft_streams import codes, opening, step, stream
from tests.retriever.service.decodes import wait_until
from tests.retriever.warm_interpreter import WarmProcess

UNAVAILABLE = grpc.StatusCode.UNAVAILABLE.value[0]


@contextmanager
def drained(drain_s: float) -> Iterator[tuple[WarmProcess, str]]:
    process, address = start_service("--address", "127.0.0.1:0", "--drain-s", str(drain_s))
    yield process, address
    process.kill()
    process.wait()


def begin_drain(process: WarmProcess, address: str) -> None:
    with RemoteDrafter(address, timeout_s=10) as remote:
        process.terminate()
        assert wait_until(lambda: remote.server_info().phase == "draining")


def test_streams_are_told_of_a_drain_and_begin_no_sessions() -> None:
    with drained(60) as (process, address), stream(address) as ask, stream(address) as other:
        assert not ask(1, openings=[opening("a")], steps=[step("a", [], 6)]).is_draining
        other(1, openings=[opening("b")])
        begin_drain(process, address)
        response = ask(2, openings=[opening("c")], steps=[step("a", [4], 7)])
        assert response.is_draining
        assert codes(response) == {"c": UNAVAILABLE}
        (status,) = response.statuses
        assert isinstance(error_of_status(status), DrainingError)
        assert len(response.trees) == 1  # of the session that is open
        assert other(2, steps=[step("b", [4], 7)]).is_draining
        with (
            grpc.insecure_channel(address) as channel,
            pytest.raises(grpc.RpcError) as refused,
        ):
            next(RetrieverServiceStub(channel).DraftStream(iter(())))
        assert isinstance(error_of(refused.value), DrainingError)
        for asked, name in ((ask, "a"), (other, "b")):
            asked(3, closings=[pb.CloseSessionRequest(session_id=name)])
        _, log = process.communicate(timeout=10)  # nobody drafts any more
        assert process.returncode == 0
        assert "Traceback" not in log


def test_streams_that_are_open_at_the_end_end_with_a_status() -> None:
    with drained(1) as (process, address), stream(address) as ask, stream(address) as idle:
        ask(1, openings=[opening("a")])
        idle(1, openings=[opening("i")])
        idle(2, closings=[pb.CloseSessionRequest(session_id="i")])
        process.send_signal(signal.SIGINT)
        answered = 0

        def decode_to_the_end() -> None:
            nonlocal answered
            while True:
                ask(answered + 2, steps=[step("a", [1], 7 + answered)])
                answered += 1

        with pytest.raises(grpc.RpcError) as ended:
            decode_to_the_end()
        assert answered > 10
        assert isinstance(error_of(ended.value), DrainingError)
        with pytest.raises(grpc.RpcError) as of_idle:
            next(idle.call)
        assert isinstance(error_of(of_idle.value), DrainingError)
        _, log = process.communicate(timeout=10)
        assert process.returncode == 0
        assert "Traceback" not in log
        assert "remembered=1" in log


def test_a_drain_within_a_drain_waits_no_longer_than_each_was_told() -> None:
    async def both() -> list[float]:
        lifecycle, loop = Lifecycle(), asyncio.get_running_loop()
        began = loop.time()

        async def drain(drain_s: float) -> float:
            assert not await lifecycle.drain(lambda: False, drain_s)
            assert lifecycle.is_draining
            return loop.time() - began

        return list(await asyncio.gather(drain(0.4), drain(0.1)))

    long_s, short_s = asyncio.run(both())
    assert 0.1 <= short_s < 0.4 <= long_s


def test_a_stream_whose_caller_leaves_as_it_is_ended_is_cancelled() -> None:
    async def both() -> tuple[Any, bool]:
        streams = OpenStreams()

        async def never() -> Any:
            await asyncio.sleep(60)
            yield 1

        async def read() -> None:
            async for _ in streams.until_end(never()):
                pass

        ended, left = asyncio.create_task(read()), asyncio.create_task(read())
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        streams.end()
        left.cancel()
        results = await asyncio.gather(ended, left, return_exceptions=True)
        return results[0], left.cancelled()

    ended, was_cancelled = asyncio.run(both())
    assert isinstance(ended, DrainingError)
    assert was_cancelled
