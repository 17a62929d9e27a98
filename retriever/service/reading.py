"""Bytes that are no message are the caller's mistake, and answered as one.

gRPC for asyncio would answer UNKNOWN, with the name of a Python class, and log a traceback each
time.
"""

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import aclosing
from inspect import isasyncgenfunction
from typing import Any, Final

import grpc
from google.protobuf.message import DecodeError
from grpc import aio

from retriever.security.handlers import kind_of, rebuilt

_NO_MESSAGE: Final = "what was sent is no message of this call: see the contract for its form"


class _Unreadable:
    """Stands for bytes that are no message."""


class _UnreadableError(Exception):
    """A stream brought bytes that are no message."""


class Reading(aio.ServerInterceptor):
    """Ends calls with INVALID_ARGUMENT that bring bytes which are no message."""

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Any]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Any:
        """Return a handler that reads what it can; see `aio.ServerInterceptor`."""
        handler = await continuation(handler_call_details)
        if handler is None:
            return None
        return rebuilt(handler, _tolerant(handler), _deserializer(handler.request_deserializer))


def _deserializer(parse: Callable[[bytes], Any] | None) -> Callable[[bytes], Any] | None:
    if parse is None:
        return None

    def read(content: bytes) -> Any:
        try:
            return parse(content)
        except DecodeError:
            return _Unreadable()

    return read


def _tolerant(handler: Any) -> Callable[..., Any]:
    behaviour = getattr(handler, kind_of(handler))
    prepare = _readable if handler.request_streaming else _checked
    if not isasyncgenfunction(behaviour):

        async def answer(request: Any, context: Any) -> Any:
            try:
                return await behaviour(prepare(request), context)
            except _UnreadableError:
                await context.abort(grpc.StatusCode.INVALID_ARGUMENT, _NO_MESSAGE)

        return answer

    async def stream(request: Any, context: Any) -> AsyncIterator[Any]:
        try:
            async with aclosing(behaviour(prepare(request), context)) as responses:
                async for response in responses:
                    yield response
        except _UnreadableError:
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, _NO_MESSAGE)

    return stream


def _checked(request: Any) -> Any:
    if isinstance(request, _Unreadable):
        raise _UnreadableError
    return request


async def _readable(requests: AsyncIterator[Any]) -> AsyncIterator[Any]:
    async for request in requests:
        yield _checked(request)
