"""Around every call of the wire contract: whether it may begin, how it ends."""

import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from typing import Any

import grpc
from grpc import aio

from retriever.operations.calls import Calls
from retriever.operations.lifecycle import SERVICE, Lifecycle
from retriever.operations.tracing import Tracing

_logger = logging.getLogger(__name__)

_Handler = Any  # gRPC's own, whose fields its stubs do not name
_Context = aio.ServicerContext[Any, Any]


class Interceptor(aio.ServerInterceptor):
    """Counts calls, and refuses those that come too early or too late.

    Other services of the server (health, reflection) are left alone.

    Args:
        calls: counted here.
        lifecycle: says what may begin.
        tracing: makes spans of a sample; None for none.
    """

    def __init__(self, calls: Calls, lifecycle: Lifecycle, tracing: Tracing | None = None) -> None:
        self._tracing = tracing
        self._calls = calls
        self._lifecycle = lifecycle

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[_Handler]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> _Handler:
        """Return the handler of a call, with what is around it."""
        handler = await continuation(handler_call_details)
        _, service, method = str(handler_call_details.method).rpartition(f"/{SERVICE}/")
        if handler is None or not service:
            return handler
        if handler.response_streaming:
            return grpc.stream_stream_rpc_method_handler(
                self._around_stream(method, handler.stream_stream),
                handler.request_deserializer,
                handler.response_serializer,
            )
        return grpc.unary_unary_rpc_method_handler(
            self._around_call(method, handler.unary_unary),
            handler.request_deserializer,
            handler.response_serializer,
        )

    def _around_call(self, method: str, answer: Callable[..., Awaitable[Any]]) -> Any:
        async def call(request: Any, context: _Context) -> Any:
            async with self._around(method, context):
                with self._traced(method, context):
                    return await answer(request, context)

        return call

    def _around_stream(self, method: str, answer: Callable[..., AsyncIterator[Any]]) -> Any:
        async def stream(requests: AsyncIterator[Any], context: _Context) -> AsyncIterator[Any]:
            async with self._around(method, context):
                responses = (
                    answer(requests, context)
                    if self._tracing is None
                    else self._tracing.steps(requests, lambda timed: answer(timed, context))
                )
                async for response in responses:
                    if response.statuses:
                        self._calls.refuse_within(method, response.statuses)
                    yield response

        return stream

    @contextmanager
    def _traced(self, method: str, context: _Context) -> Iterator[None]:
        ended = self._tracing.call(method, context) if self._tracing is not None else None
        try:
            yield
        finally:
            if ended is not None:
                ended()

    @asynccontextmanager
    async def _around(self, method: str, context: _Context) -> AsyncIterator[None]:
        """Count a call, refuse it at the wrong time, and tell its caller nothing of our faults.

        gRPC would send the text of an unexpected error, which may hold what another caller sent.
        """
        try:
            with self._calls.counted(method, context):
                refusal = self._lifecycle.refusal(method)
                if refusal is not None:
                    await context.abort(grpc.StatusCode.UNAVAILABLE, refusal)
                yield
        except aio.BaseError:
            raise  # gRPC's own: the call has its status, or has ended
        except Exception:
            _logger.exception("%s failed", method)
            await context.abort(grpc.StatusCode.INTERNAL, "the service failed: its log has more")
