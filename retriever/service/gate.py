"""The gate: what stands between gRPC and the work of a call.

A call passes it once, whatever it asks for: it is counted, refused while the service starts or
drains, let in with its credentials, and read; its errors become statuses. What was asked for with a
token may be answered long after that was revoked, as a message can wait for its turn: so callers
are looked at once more before each answer.
"""

import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Iterator, Mapping
from contextlib import aclosing, asynccontextmanager, contextmanager
from functools import partial
from typing import Any, Final, NamedTuple

import grpc
from grpc import aio

from retriever.errors import (
    AccessRefusedError,
    NotPermittedError,
    RetrieverError,
)
from retriever.operations.lifecycle import SERVICE
from retriever.operations.logs import log_event
from retriever.operations.observer import ServiceObserver
from retriever.security.admission import Authenticator, Caller, certificate_of, scope_for, token_in
from retriever.wire.reading import read
from retriever.wire.statuses import abort, status_of

LONG_MESSAGE: Final = 1 << 20
"""Bytes of a message that is read aside: copying its lists takes a tenth of a millisecond for each
megabyte, and ten times that into pages that are new."""

_FAILED: Final = "the service could not do this: its log says why; ask again, or its operator"
_CRASHED: Final = "the service failed: its log has more"
_LOGGER: Final = logging.getLogger(__name__)

_Context = aio.ServicerContext[Any, Any]

Aside = Callable[[str, Callable[[], Any]], Awaitable[Any]]
"""Does something that takes long for a tenant, and not on the event loop."""


class Call:
    """A call that was let in.

    Args:
        context: of gRPC.
        caller: whose it is; None where callers are not asked who they are.
        message: class of its messages.
        aside: reads long ones; None where all are short.

    Attributes:
        caller: as given.
    """

    __slots__ = ("_aside", "_context", "_message", "caller")

    def __init__(
        self, context: _Context, caller: Caller | None, message: Any, aside: Aside | None = None
    ) -> None:
        self.caller = caller
        self._context = context
        self._message = message
        self._aside = aside

    @property
    def tenant(self) -> str:
        """The caller's tenant, "" where callers are not authenticated.

        Raises:
            AccessRefusedError: they were revoked or have expired.
        """
        return "" if self.caller is None else self.caller.tenant

    @property
    def left_s(self) -> float | None:
        """The seconds that the caller still waits; None where it has no deadline."""
        left_s: float | None = self._context.time_remaining()
        return left_s

    async def read(self, content: bytes) -> Any:
        """Return the message that some bytes are, if the caller may still send it.

        Raises:
            RetrieverError: they are none, or it is refused; see `wire.reading`.
            AccessRefusedError: the caller's credentials were revoked or have expired.
        """
        tenant = self.tenant
        if len(content) <= LONG_MESSAGE or self._aside is None:
            return read(content, self._message)
        return await self._aside(tenant, partial(read, content, self._message))


class _Method(NamedTuple):
    """A call of a contract of ours, or of another service beside it.

    Attributes:
        name: without the service's, for calls that are counted.
        full_name: with it.
        message: class of its messages.
        takes_call: whether its servicer is ours and gets a `Call`, another gRPC's context.
        observer: counts it, and knows whether it can be taken now; None where nobody does.
    """

    name: str
    full_name: str
    message: Any
    takes_call: bool
    observer: ServiceObserver | None


_MAKERS: Final[Mapping[tuple[bool, bool], Callable[..., Any]]] = {
    (False, False): grpc.unary_unary_rpc_method_handler,
    (False, True): grpc.unary_stream_rpc_method_handler,
    (True, True): grpc.stream_stream_rpc_method_handler,
}


class Gate(aio.ServerInterceptor):
    """Lets calls in; the one interceptor of a server.

    A servicer of ours gets a `Call` in place of gRPC's context, and the bytes of a stream's
    messages, which it reads with that.

    Args:
        authenticator: who asks callers for credentials; None: nobody does.
        observer: counts calls, and knows the phase of the service; None: neither is kept.
        open_methods: full names of calls without credentials, such as health checks.

    Attributes:
        aside: reads long messages; set once the service can.
    """

    def __init__(
        self,
        authenticator: Authenticator | None,
        observer: ServiceObserver | None = None,
        open_methods: Collection[str] = (),
    ) -> None:
        self._authenticator = authenticator
        self._observer = observer
        self._open_methods = frozenset(open_methods)
        self.aside: Aside | None = None

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Any]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Any:
        """Return the handler of a call, behind this gate; see `aio.ServerInterceptor`."""
        handler: Any = await continuation(handler_call_details)
        if handler is None:
            return handler
        full_name = str(handler_call_details.method)
        deserializer = handler.request_deserializer
        if deserializer is None and full_name in self._open_methods:
            return handler  # it reads bytes itself
        _, service, name = full_name.rpartition(f"/{SERVICE}/")
        method = _Method(
            name,
            full_name,
            deserializer.__self__,
            takes_call=full_name.startswith("/retriever."),
            observer=self._observer if service else None,
        )
        around = self._stream if handler.response_streaming else self._answer
        behaviour = handler.unary_unary or handler.unary_stream or handler.stream_stream
        reads_itself = handler.request_streaming and not method.takes_call
        make = _MAKERS[handler.request_streaming, handler.response_streaming]
        return make(
            around(method, behaviour),
            deserializer if reads_itself else None,
            handler.response_serializer,
        )

    def _answer(self, method: _Method, behaviour: Callable[..., Awaitable[Any]]) -> Any:
        async def answer(content: bytes, context: _Context) -> Any:
            async with self._passing(method, context) as call:
                message = await call.read(content)
                response = await behaviour(message, call if method.takes_call else context)
                _look_again(call)
                return response

        return answer

    def _stream(self, method: _Method, behaviour: Callable[..., AsyncIterator[Any]]) -> Any:
        observer = method.observer
        tracing = None if observer is None else observer.tracing

        async def stream(contents: Any, context: _Context) -> AsyncIterator[Any]:
            async with self._passing(method, context) as call:
                asked = await call.read(contents) if isinstance(contents, bytes) else contents
                given: Any = call if method.takes_call else context
                responses: Any = (
                    behaviour(asked, given)
                    if tracing is None
                    else tracing.steps(asked, lambda timed: behaviour(timed, given))
                )
                async with aclosing(responses):
                    async for response in responses:
                        _look_again(call)
                        if observer is not None and response.statuses:
                            observer.calls.refuse_within(method.name, response.statuses)
                        yield response

        return stream

    @asynccontextmanager
    async def _passing(self, method: _Method, context: _Context) -> AsyncIterator[Call]:
        """Count a call and let it in; end it with the status of its error.

        gRPC would send the text of an unexpected error, which may hold another caller's input.
        """
        try:
            with _counted(method, context):
                try:
                    if method.observer is not None:
                        method.observer.lifecycle.check(method.name)
                    yield Call(context, self._caller(method, context), method.message, self.aside)
                except RetrieverError as error:
                    await abort(context, _for_caller(error))
        except aio.BaseError:
            raise  # gRPC's own: the call has its status, or has ended
        except Exception:
            _LOGGER.exception("%s failed", method.name)
            await abort(context, RetrieverError(_CRASHED))

    def _caller(self, method: _Method, context: _Context) -> Caller | None:
        """Return whose call it is.

        Raises:
            AccessRefusedError: it has no valid credentials, or may not make this call.
        """
        if self._authenticator is None or method.full_name in self._open_methods:
            return None
        try:
            token = token_in(context.invocation_metadata() or ())
            certificate = certificate_of(context.auth_context())
            return Caller(self._authenticator, token, certificate, scope_for(method.full_name))
        except AccessRefusedError as error:
            if not isinstance(error, NotPermittedError):
                _LOGGER.debug("not let in: %s", context.peer())
            raise


@contextmanager
def _counted(method: _Method, context: _Context) -> Iterator[None]:
    """Count a call during the block, and make a span of it if that is sampled."""
    observer = method.observer
    if observer is None:
        yield
        return
    with observer.calls.counted(method.name, context):
        tracing = observer.tracing if method.name != "DraftStream" else None
        ended = tracing.call(method.name, context) if tracing is not None else None
        try:
            yield
        finally:
            if ended is not None:
                ended()


def _look_again(call: Call) -> None:
    if call.caller is not None:
        call.caller.check()


def _for_caller(error: RetrieverError) -> RetrieverError:
    """Return what a caller is told; the service's own errors are logged alone: they name files."""
    if status_of(error) is not grpc.StatusCode.INTERNAL:
        return error
    log_event(_LOGGER, logging.ERROR, "failed", str(error))
    return RetrieverError(_FAILED)
