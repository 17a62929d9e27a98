"""The gate between gRPC and the work of a call.

Every call passes the gate once. The gate counts it, refuses it while the service starts or drains,
authenticates its caller, parses its message, and turns its errors into statuses. A message can wait
for its turn for so long that its token is revoked meanwhile, so callers are checked again before
each answer.
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
"""Messages of at least this many bytes are parsed in another thread. Copying lists takes a tenth of
a millisecond per megabyte, and ten times as long into new pages."""

_FAILED: Final = "the service could not do this: its log says why; try again, or ask its operator"
_CRASHED: Final = "the service failed: its log has more"
_LOGGER: Final = logging.getLogger(__name__)

_Context = aio.ServicerContext[Any, Any]

Aside = Callable[[str, Callable[[], Any]], Awaitable[Any]]
"""Runs long work for a tenant off the event loop."""


class Call:
    """A call that was admitted.

    Args:
        context: gRPC's context.
        caller: the caller; None if callers are not authenticated.
        message: class of its messages.
        aside: parses long messages; None if all are short.

    Attributes:
        caller: as passed to the constructor.
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
        """The caller's tenant; "" if callers are not authenticated.

        Raises:
            AccessRefusedError: the credentials were revoked or have expired.
        """
        return "" if self.caller is None else self.caller.tenant

    @property
    def left_s(self) -> float | None:
        """The seconds until the caller's deadline; None without a deadline."""
        left_s: float | None = self._context.time_remaining()
        return left_s

    async def read(self, content: bytes) -> Any:
        """Return the message in some bytes, if the caller may still send it.

        Raises:
            RetrieverError: the bytes are not a message, or the message is refused; see
                `wire.reading`.
            AccessRefusedError: the caller's credentials were revoked or have expired.
        """
        tenant = self.tenant
        if len(content) <= LONG_MESSAGE or self._aside is None:
            return read(content, self._message)
        return await self._aside(tenant, partial(read, content, self._message))


class _Method(NamedTuple):
    """A method of one of our contracts, or of another service on the same server.

    Attributes:
        name: name without the service's, for counts.
        full_name: name with the service's.
        message: class of its messages.
        takes_call: whether its servicer is ours and gets a `Call`; others get gRPC's context.
        observer: counts calls, and knows whether they can be taken now; None to skip both.
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
    """Admits calls; the only interceptor of a server.

    Our servicers get a `Call` instead of gRPC's context. For streams they get the bytes of the
    messages, and parse them with the `Call`.

    Args:
        authenticator: checks credentials of callers; None for no authentication.
        observer: counts calls, and knows the phase of the service; None to skip both.
        open_methods: full names of methods that need no credentials, such as health checks.

    Attributes:
        aside: parses long messages; set once the service can.
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
        """Return the handler of a call, wrapped by this gate; see `aio.ServerInterceptor`."""
        handler: Any = await continuation(handler_call_details)
        if handler is None:
            return handler
        full_name = str(handler_call_details.method)
        deserializer = handler.request_deserializer
        if deserializer is None and full_name in self._open_methods:
            return handler  # it parses bytes itself
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
        """Count and admit a call; end it with the status of its error.

        gRPC would send the text of an unexpected error, which may contain another caller's input.
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
            raise  # raised by gRPC: the call has its status, or has ended
        except Exception:
            _LOGGER.exception("%s failed", method.name)
            await abort(context, RetrieverError(_CRASHED))

    def _caller(self, method: _Method, context: _Context) -> Caller | None:
        """Return the caller of a call.

        Raises:
            AccessRefusedError: the caller has no valid credentials, or may not make this call.
        """
        if self._authenticator is None or method.full_name in self._open_methods:
            return None
        try:
            token = token_in(context.invocation_metadata() or ())
            certificate = certificate_of(context.auth_context())
            return Caller(self._authenticator, token, certificate, scope_for(method.full_name))
        except AccessRefusedError as error:
            if not isinstance(error, NotPermittedError):
                _LOGGER.debug("not admitted: %s", context.peer())
            raise


@contextmanager
def _counted(method: _Method, context: _Context) -> Iterator[None]:
    """Count a call during the block, and make a span for it if it is sampled."""
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
    """Return the error for the caller; internal errors, which name files, are only logged."""
    if status_of(error) is not grpc.StatusCode.INTERNAL:
        return error
    log_event(_LOGGER, logging.ERROR, "failed", str(error))
    return RetrieverError(_FAILED)
