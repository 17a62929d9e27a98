"""Handlers of calls, taken apart and put together again by interceptors."""

from collections.abc import Callable, Mapping
from typing import Any, Final

import grpc

_MAKERS: Final[Mapping[str, Callable[..., Any]]] = {
    "unary_unary": grpc.unary_unary_rpc_method_handler,
    "unary_stream": grpc.unary_stream_rpc_method_handler,
    "stream_unary": grpc.stream_unary_rpc_method_handler,
    "stream_stream": grpc.stream_stream_rpc_method_handler,
}


def kind_of(handler: Any) -> str:
    """Return the name of the attribute that holds a handler's behaviour."""
    request = "stream" if handler.request_streaming else "unary"
    response = "stream" if handler.response_streaming else "unary"
    return f"{request}_{response}"


def rebuilt(
    handler: Any, behaviour: Callable[..., Any], deserializer: Callable[[bytes], Any] | None
) -> Any:
    """Return a handler of the same kind with another behaviour and another deserializer."""
    return _MAKERS[kind_of(handler)](behaviour, deserializer, handler.response_serializer)
