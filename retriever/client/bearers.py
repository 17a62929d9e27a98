"""Interceptors that add a bearer token to the calls of a channel."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import grpc
from grpc import aio


class _CallDetails(NamedTuple):
    """Details of a call, as gRPC reads them."""

    method: str
    timeout: float | None
    metadata: Sequence[tuple[str, str | bytes]] | None
    credentials: grpc.CallCredentials | None
    wait_for_ready: bool | None
    compression: grpc.Compression | None


class Bearer(
    grpc.UnaryUnaryClientInterceptor,
    grpc.UnaryStreamClientInterceptor,
    grpc.StreamStreamClientInterceptor,
):
    """Adds the current token to every call."""

    def __init__(self, token: Callable[[], str]) -> None:
        self._token = token

    def intercept_unary_unary(
        self, continuation: Any, client_call_details: Any, request: Any
    ) -> Any:
        """Intercept a call; see gRPC's interface of this name."""
        return continuation(self._with_token(client_call_details), request)

    def intercept_unary_stream(
        self, continuation: Any, client_call_details: Any, request: Any
    ) -> Any:
        """Intercept a call; see gRPC's interface of this name."""
        return continuation(self._with_token(client_call_details), request)

    def intercept_stream_stream(
        self, continuation: Any, client_call_details: Any, request_iterator: Any
    ) -> Any:
        """Intercept a call; see gRPC's interface of this name."""
        return continuation(self._with_token(client_call_details), request_iterator)

    def _with_token(self, details: Any) -> _CallDetails:
        return _CallDetails(
            details.method,
            details.timeout,
            (*(details.metadata or ()), ("authorization", f"Bearer {self._token()}")),
            details.credentials,
            getattr(details, "wait_for_ready", None),
            getattr(details, "compression", None),
        )


class _AsyncBearer:
    """Adds the current token to every call of an asyncio channel."""

    def __init__(self, token: Callable[[], str]) -> None:
        self._token = token

    def _with_token(self, details: Any) -> Any:
        metadata = aio.Metadata(*(details.metadata or ()))
        metadata.add("authorization", f"Bearer {self._token()}")
        return details._replace(metadata=metadata)


class _AsyncUnaryBearer(_AsyncBearer, aio.UnaryUnaryClientInterceptor):
    async def intercept_unary_unary(
        self, continuation: Any, client_call_details: Any, request: Any
    ) -> Any:
        return await continuation(self._with_token(client_call_details), request)


class _AsyncStreamBearer(_AsyncBearer, aio.StreamStreamClientInterceptor):
    async def intercept_stream_stream(
        self, continuation: Any, client_call_details: Any, request_iterator: Any
    ) -> Any:
        return await continuation(self._with_token(client_call_details), request_iterator)


def async_bearers(token: Callable[[], str]) -> list[Any]:
    """Return interceptors that add a token to every call of an asyncio channel."""
    return [_AsyncUnaryBearer(token), _AsyncStreamBearer(token)]
