"""Traces: of a sample, with sizes and statuses, and without tokens or names."""

import asyncio
from pathlib import Path
from typing import Any

import pytest
from grpc import aio
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from retriever.operations.lifecycle import SERVICE
from retriever.operations.observer import ServiceObserver
from retriever.plugins.tracing.tracing import SampledTraces, tracing_of
from retriever.service.serving import start
from retriever.sessions.embedded import EmbeddedDrafter
from retriever.v1 import retriever_pb2 as pb
from retriever.v1.retriever_pb2_grpc import RetrieverServiceStub

TOKEN, NAME = 48611, "a-name-that-nobody-may-see"


async def used(folder: Path, traces: SampledTraces) -> None:
    drafter, address = EmbeddedDrafter(), f"unix:{folder}/draft.sock"
    server, _ = await start(drafter, address, ServiceObserver(tracing=traces))
    async with aio.insecure_channel(address) as channel:
        stub: Any = RetrieverServiceStub(channel)
        await stub.OpenSession(pb.OpenSessionRequest(session_id=NAME, prompt=[TOKEN] * 9))
        with pytest.raises(aio.AioRpcError):
            await stub.OpenSession(pb.OpenSessionRequest(session_id=NAME))
        stream = stub.DraftStream()
        for number, length in enumerate(range(9, 13), 1):
            new = [TOKEN] if length > 9 else []
            step = pb.SessionStep(session_id=NAME, new_token_ids=new, length=length, budget_nodes=3)
            await stream.write(pb.DraftStreamRequest(sequence_number=number, steps=[step]))
            await stream.read()
        stream.cancel()
    await server.stop(0)
    traces.shut_down()
    drafter.shut_down()


def spans(folder: Path, ratio: float, chance: float) -> tuple[ReadableSpan, ...]:
    exporter = InMemorySpanExporter()
    asyncio.run(used(folder, SampledTraces(ratio, exporter, lambda: chance)))
    return exporter.get_finished_spans()


def test_calls_and_steps_are_traced_without_what_was_in_them(tmp_path: Path) -> None:
    found = spans(tmp_path, 0.5, 0.49)
    steps = [span for span in found if span.name == f"{SERVICE}/DraftStream step"]
    opened = [span for span in found if span.name == f"{SERVICE}/OpenSession"]
    assert (len(steps), len(opened), len(found)) == (4, 2, 6)
    for span in steps:
        assert span.attributes is not None
        assert (span.attributes["foredraft.sequences"], span.attributes["foredraft.nodes"]) == (
            1,
            3,
        )
        assert span.end_time is not None
        assert span.start_time is not None
        assert 0 <= span.end_time - span.start_time < 1e9
    statuses = [(span.attributes or {})["rpc.grpc.status_code"] for span in opened]
    assert statuses == [0, 6]
    everything = "".join(span.to_json() for span in found)
    assert NAME not in everything
    assert str(TOKEN) not in everything


def test_what_is_not_sampled_leaves_nothing(tmp_path: Path) -> None:
    assert spans(tmp_path, 0.5, 0.5) == ()


def test_traces_are_off_by_default_and_their_exporter_needs_nobody_there() -> None:
    assert tracing_of(0.0, None) is None
    traces = tracing_of(1.0, "http://127.0.0.1:1")
    assert isinstance(traces, SampledTraces)
    traces.shut_down()
