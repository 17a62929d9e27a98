"""OpenTelemetry traces of sampled calls and steps: durations, never contents."""

import random
import time
from collections.abc import AsyncIterator, Callable
from typing import TYPE_CHECKING, Any

from grpc import aio

from retriever.errors import SettingsError
from retriever.operations.lifecycle import SERVICE
from retriever.operations.observer import Ended, Tracing
from retriever.wire.messages import num_nodes_of

if TYPE_CHECKING:
    from opentelemetry.sdk.trace.export import SpanExporter


def tracing_of(ratio: float, endpoint: str | None) -> Tracing | None:
    """Return a tracer for a share of calls and steps; None for a share of 0.

    A separate thread sends spans by OTLP over gRPC; spans that cannot be sent are dropped.

    Raises:
        SettingsError: tracing is on and its library is missing.
    """
    if ratio <= 0:
        return None
    try:
        from opentelemetry.exporter.otlp.proto.grpc import (  # noqa: PLC0415  (an extra)
            trace_exporter as otlp,
        )
    except ModuleNotFoundError as error:
        raise SettingsError(
            f"--trace-ratio: {error.name} is missing: run `pip install 'foredraft[tracing]'`"
        ) from error
    return SampledTraces(ratio, otlp.OTLPSpanExporter(endpoint=endpoint))


class SampledTraces:
    """Traces a share of calls and steps; `Tracing`.

    Sampling is decided first, so that unsampled calls cost a tenth of a microsecond. Spans of a
    stream's steps have no parent, because a stream lasts for days.

    Args:
        ratio: sampled share, above 0 and up to 1.
        exporter: where spans go.
        chance: returns uniform random numbers from 0 to 1.
    """

    def __init__(
        self,
        ratio: float,
        exporter: "SpanExporter",
        chance: Callable[[], float] = random.random,
    ) -> None:
        from opentelemetry.sdk.resources import Resource  # noqa: PLC0415  (an extra)
        from opentelemetry.sdk.trace import TracerProvider  # noqa: PLC0415
        from opentelemetry.sdk.trace.export import BatchSpanProcessor  # noqa: PLC0415

        self._ratio = ratio
        self._chance = chance
        resource = Resource.create({"service.name": "foredraft"})
        self._provider = TracerProvider(resource=resource, shutdown_on_exit=False)
        self._provider.add_span_processor(BatchSpanProcessor(exporter))
        self._tracer = self._provider.get_tracer("foredraft")

    def call(self, method: str, context: aio.ServicerContext[Any, Any]) -> Ended | None:
        """Return a function to call when the call ends; None if it is not sampled."""
        if self._chance() >= self._ratio:
            return None
        span = self._tracer.start_span(f"{SERVICE}/{method}", attributes=_attributes(method))

        def ended() -> None:
            code: Any = context.code()
            number = getattr(code, "value", (code,))[0]
            span.set_attribute("rpc.grpc.status_code", number or 0)
            span.end()

        return ended

    async def steps(
        self, requests: AsyncIterator[Any], answer: Callable[[AsyncIterator[Any]], Any]
    ) -> AsyncIterator[Any]:
        """Yield the responses to requests, with a span for each step that is sampled."""
        begun: list[int] = [0]

        async def timed() -> AsyncIterator[Any]:
            async for request in requests:
                begun[0] = time.time_ns() if self._chance() < self._ratio else 0
                yield request

        async for response in answer(timed()):
            if begun[0]:
                self._step(begun[0], response)
            yield response

    def _step(self, begun_ns: int, response: Any) -> None:
        sizes = [num_nodes_of(tree) for tree in response.trees]
        attributes = _attributes("DraftStream") | {
            "foredraft.sequences": len(sizes),
            "foredraft.nodes": sum(sizes),
        }
        span = self._tracer.start_span(
            f"{SERVICE}/DraftStream step", start_time=begun_ns, attributes=attributes
        )
        span.end()

    def shut_down(self) -> None:
        """Send the remaining spans."""
        self._provider.shutdown()


def _attributes(method: str) -> dict[str, str | int]:
    return {"rpc.system": "grpc", "rpc.service": SERVICE, "rpc.method": method}
