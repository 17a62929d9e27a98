"""Bytes that are no message are the caller's mistake, and answered as one.

gRPC for asyncio would answer UNKNOWN, with the name of a Python class, and log a traceback each
time.
"""

from collections.abc import Awaitable, Callable
from typing import Any, Final

import grpc
from google.protobuf.message import DecodeError
from grpc import aio

from retriever.errors import InvalidRequestError
from retriever.security.handlers import kind_of, rebuilt

_NO_MESSAGE: Final = "what was sent is no message of this call: see the contract for its form"

_Parse = Callable[[bytes], Any]


class Reading(aio.ServerInterceptor):
    """Ends calls with INVALID_ARGUMENT that bring bytes which are no message."""

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Any]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Any:
        """Return a handler that reads what it can; see `aio.ServerInterceptor`."""
        handler = await continuation(handler_call_details)
        if handler is None or handler.request_deserializer is None:
            return handler
        behaviour, parse = getattr(handler, kind_of(handler)), _parsing(handler)
        if handler.request_streaming:  # the servicer awaits messages, and the error with them
            return rebuilt(handler, behaviour, parse)
        if handler.response_streaming:  # none of ours
            return handler
        return rebuilt(handler, _answering(behaviour), _late(parse))


def _parsing(handler: Any) -> _Parse:
    def parse(content: bytes) -> Any:
        try:
            return handler.request_deserializer(content)
        except DecodeError as error:
            raise InvalidRequestError(_NO_MESSAGE) from error

    return parse


def _late(parse: _Parse) -> _Parse:
    """Return the error in the place of a message: it is read where no status can be given."""

    def read(content: bytes) -> Any:
        try:
            return parse(content)
        except InvalidRequestError as error:
            return error

    return read


def _answering(behaviour: Callable[..., Awaitable[Any]]) -> Callable[..., Awaitable[Any]]:
    async def answer(request: Any, context: Any) -> Any:
        if isinstance(request, InvalidRequestError):
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, str(request))
        return await behaviour(request, context)

    return answer
