"""Admission: finds the caller and tenant of every call before it is answered."""

import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Iterable, Mapping
from contextlib import aclosing
from functools import lru_cache
from inspect import isasyncgenfunction
from pathlib import Path
from typing import Any, Final

import grpc
from grpc import aio

from retriever.errors import AccessRefusedError, NotPermittedError
from retriever.security.access import Access, read_access
from retriever.security.certificates import Certified, certified
from retriever.security.private_files import Reloaded
from retriever.wire.statuses import abort

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


_REFUSAL: Final = "credentials are missing or not valid: see --token-file, --certificate and --key"
_NO_TENANT: Final = "these credentials have no tenant here: have them added to the access file"
_BEARER: Final = "bearer "
_LOGGER: Final = logging.getLogger(__name__)


class Doorkeeper:
    """Finds a caller's tenant: by its token if it sends one, else by its certificate.

    Args:
        access: the access file; None: certificates act for the tenant of their own name.

    Attributes:
        refused: refused calls and steps.

    Raises:
        CredentialsError: the access file cannot be used.
    """

    def __init__(self, access: Path | None) -> None:
        self.refused = 0
        self._access = None if access is None else Reloaded([access], lambda: read_access(access))

    def current(self) -> Access | None:
        """Return the current access file; the same object while it is unchanged."""
        return None if self._access is None else self._access.current()

    def tenant(
        self, access: Access | None, token: str | None, certificate: Certified | None
    ) -> str:
        """Return the tenant of a caller's credentials.

        Raises:
            AccessRefusedError: it has no valid credentials.
            NotPermittedError: it is known but has no tenant.
        """
        try:
            if token is not None:
                return _of_token(access, token)
            return _of_certificate(access, certificate)
        except AccessRefusedError:
            self.refused += 1
            raise


class Caller:
    """The caller of a call; its credentials are checked as long as the call lasts.

    Args:
        doorkeeper: finds tenants.
        token: of the call, or None.
        certificate: of the connection, or None.

    Raises:
        AccessRefusedError: these are not valid.
    """

    __slots__ = ("_access", "_certificate", "_doorkeeper", "_tenant", "_token")

    def __init__(
        self, doorkeeper: Doorkeeper, token: str | None, certificate: Certified | None
    ) -> None:
        self._doorkeeper = doorkeeper
        self._token = token
        self._certificate = certificate
        self._access = doorkeeper.current()
        self._tenant = doorkeeper.tenant(self._access, token, certificate)

    @property
    def tenant(self) -> str:
        """The tenant that it acts for.

        Raises:
            AccessRefusedError: its credentials have expired, were revoked, or moved to another
            tenant.
        """
        access = self._doorkeeper.current()
        by_certificate = self._token is None
        if access is not self._access or by_certificate:
            tenant = self._doorkeeper.tenant(access, self._token, self._certificate)
            if tenant != self._tenant:
                raise AccessRefusedError("these credentials act for another tenant now: call again")
            self._access = access
        return self._tenant


class AdmittedContext:
    """A call's context with its caller.

    Attributes:
        caller: of the call.
    """

    __slots__ = ("_context", "caller")

    def __init__(self, context: Any, caller: Caller) -> None:
        self._context = context
        self.caller = caller

    def __getattr__(self, name: str) -> Any:
        return getattr(self._context, name)


class Admission(aio.ServerInterceptor):
    """Admits callers with valid credentials; ends other calls before their messages are read.

    Args:
        doorkeeper: who decides.
        open_methods: full names of methods without authentication, such as health checks.
    """

    def __init__(self, doorkeeper: Doorkeeper, open_methods: Collection[str] = ()) -> None:
        self._doorkeeper = doorkeeper
        self._open_methods = frozenset(open_methods)

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Any]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Any:
        """Return a handler that checks the caller; see `aio.ServerInterceptor`."""
        handler = await continuation(handler_call_details)
        if handler is None or handler_call_details.method in self._open_methods:
            return handler
        guarded = self._guarded(getattr(handler, kind_of(handler)))
        return rebuilt(handler, guarded, handler.request_deserializer)

    def _guarded(self, behaviour: Callable[..., Any]) -> Callable[..., Any]:
        if not isasyncgenfunction(behaviour):

            async def answer(request: Any, context: Any) -> Any:
                return await behaviour(request, await self._admit(context))

            return answer

        async def stream(request: Any, context: Any) -> AsyncIterator[Any]:
            async with aclosing(behaviour(request, await self._admit(context))) as responses:
                async for response in responses:
                    yield response

        return stream

    async def _admit(self, context: Any) -> AdmittedContext:
        try:
            token = token_in(context.invocation_metadata() or ())
            caller = Caller(self._doorkeeper, token, certificate_of(context.auth_context()))
        except AccessRefusedError as error:
            if not isinstance(error, NotPermittedError):
                _LOGGER.debug("not let in: %s", context.peer())
            await abort(context, error)
        return AdmittedContext(context, caller)


def token_in(metadata: Iterable[tuple[str, Any]]) -> str | None:
    """Return the bearer token of a call, None where it carries none."""
    for key, value in metadata:
        if key == "authorization":
            text = value if isinstance(value, str) else bytes(value).decode("latin-1")
            return text[len(_BEARER) :] if text[: len(_BEARER)].lower() == _BEARER else ""
    return None


def certificate_of(auth_context: Mapping[str, Iterable[bytes]]) -> Certified | None:
    """Return the client certificate of a connection, None without one."""
    found = list(auth_context.get("x509_pem_cert", ()))
    return _certified(bytes(found[0])) if found else None


_certified = lru_cache(maxsize=4096)(certified)


def _of_token(access: Access | None, token: str) -> str:
    tenant = None if access is None else access.tenant_of_token(token)
    if tenant is None:
        raise AccessRefusedError(_REFUSAL)
    return tenant


def _of_certificate(access: Access | None, certificate: Certified | None) -> str:
    if certificate is None or certificate.expires_at_s < time.time():
        raise AccessRefusedError(_REFUSAL)
    if access is not None:
        tenant = access.tenant_of_certificate(certificate.identities)
    else:
        tenant = next(iter(certificate.identities), None)
    if tenant is None:
        raise NotPermittedError(_NO_TENANT)
    return tenant
