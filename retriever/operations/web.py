"""Metrics and the status page over HTTP: read only, in separate threads."""

import ipaddress
import socket
from collections.abc import Callable
from dataclasses import dataclass
from http import HTTPStatus
from typing import Final, Self

from retriever.errors import AddressInUseError, SettingsError
from retriever.operations.http_connections import (
    DEFAULT_LIMITS,
    Connections,
    HttpAnswer,
    HttpLimits,
    HttpRequest,
)
from retriever.operations.lifecycle import Phase
from retriever.operations.resolving import without_password
from retriever.operations.service_report import Service
from retriever.operations.status_page import HEADERS, History, page

_MAX_PORT: Final = 65535


@dataclass(frozen=True, slots=True)
class WebAddress:
    """Where to listen for HTTP.

    Attributes:
        host: a name or number.
        port: 0 for a free one.
    """

    host: str
    port: int

    @classmethod
    def parsed(cls, text: str) -> Self:
        """Return the address of `HOST:PORT`, or of a port on loopback.

        Raises:
            SettingsError: it is neither.
        """
        host, _, port = text.rpartition(":")
        is_port = port.isascii() and port.isdigit() and int(port) <= _MAX_PORT
        if not is_port or text.startswith(":") or (":" in host and not host.startswith("[")):
            raise SettingsError(
                f"--metrics-address {without_password(text)}: an address is HOST:PORT, or a port "
                "of loopback"
            )
        return cls(host.strip("[]") or "127.0.0.1", int(port))

    @property
    def is_loopback(self) -> bool:
        """Whether only this machine can reach it."""
        try:
            return ipaddress.ip_address(self.host).is_loopback
        except ValueError:
            return self.host == "localhost"

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


def bound(address: WebAddress) -> socket.socket:
    """Return a listening socket.

    Raises:
        AddressInUseError: the address is taken or cannot be bound.
    """
    family = socket.AF_INET6 if ":" in address.host else socket.AF_INET
    try:
        return socket.create_server((address.host, address.port), family=family)
    except (OSError, UnicodeError) as error:
        reason = getattr(error, "strerror", None) or error
        raise AddressInUseError(
            f"cannot listen on {address}: {reason}; choose another --metrics-address"
        ) from error


_PLAIN: Final = "text/plain; charset=utf-8"


class Web:
    """Serves metrics, and optionally the status page, until closed.

    `/metrics`, `/live` (200 while the process answers), `/ready` (200 or 503) and, with the page,
    `/`. Slow callers keep no other from an answer: see `http_connections`.

    Args:
        service: to report on.
        address: where to listen.
        status_page: whether to serve the page; None to serve it on loopback only.
        limits: of what callers may take.

    Raises:
        AddressInUseError: the address is taken or cannot be bound.
        SettingsError: the library for metrics is missing.
    """

    def __init__(
        self,
        service: Service,
        address: WebAddress,
        *,
        status_page: bool | None = None,
        limits: HttpLimits = DEFAULT_LIMITS,
    ) -> None:
        self._service = service
        self._on_loopback = address.is_loopback
        self._has_page = self._on_loopback if status_page is None else status_page
        self._history = History(lambda: service.stats(census=False).draft_counts)
        self._metrics = _exposition(service)
        listening = bound(address)
        self.address = WebAddress(address.host, listening.getsockname()[1])
        self._connections = Connections(
            listening, self._at_once, self._rendered, self._history.sample, limits
        )

    def close(self) -> None:
        """Stop serving."""
        self._connections.close()

    def _at_once(self, request: HttpRequest) -> HttpAnswer | None:
        """HttpAnswer probes and what is refused; None for what must be rendered."""
        if request.method not in ("GET", "HEAD"):
            allowed = [("Allow", "GET, HEAD")]
            return HttpAnswer(HTTPStatus.METHOD_NOT_ALLOWED, _PLAIN, b"read only\n", allowed)
        if self._on_loopback and not _is_local(request.host):
            # DNS rebinding: a foreign page whose host name resolves to this machine.
            return HttpAnswer(HTTPStatus.FORBIDDEN, _PLAIN, b"ask by a name of this machine\n")
        if request.path == "/live":
            return HttpAnswer(HTTPStatus.OK, _PLAIN, b"live\n")
        if request.path == "/ready":
            return self._readiness()
        if request.path == "/metrics" or (request.path == "/" and self._has_page):
            return None
        return HttpAnswer(HTTPStatus.NOT_FOUND, _PLAIN, b"nothing is here\n")

    def _rendered(self, request: HttpRequest) -> HttpAnswer:
        if request.path == "/metrics":
            body, kind = self._metrics(request.accept)
            return HttpAnswer(HTTPStatus.OK, kind, body)
        body = page(self._service, self._history).encode()
        return HttpAnswer(HTTPStatus.OK, "text/html; charset=utf-8", body, HEADERS)

    def _readiness(self) -> HttpAnswer:
        lifecycle = self._service.observer.lifecycle
        if lifecycle.is_ready:
            return HttpAnswer(HTTPStatus.OK, _PLAIN, b"ready\n")
        is_up = lifecycle.phase is Phase.READY  # and lets nobody in
        why = "credentials cannot be read" if is_up else lifecycle.phase.value
        return HttpAnswer(HTTPStatus.SERVICE_UNAVAILABLE, _PLAIN, f"{why}\n".encode())


def _exposition(service: Service) -> Callable[[str], tuple[bytes, str]]:
    """Return a function that renders the metrics in the format of an Accept header."""
    try:
        from prometheus_client import exposition  # noqa: PLC0415  (an extra)

        from retriever.operations.metrics import registry_of  # noqa: PLC0415
    except ModuleNotFoundError as error:
        raise SettingsError(
            f"--metrics-address: {error.name} is missing: run `pip install 'foredraft[server]'`"
        ) from error
    registry = registry_of(service)

    def expose(accept: str) -> tuple[bytes, str]:
        encode, kind = exposition.choose_encoder(accept)
        return encode(registry), kind

    return expose


def _is_local(host: str) -> bool:
    """Return whether a request's Host header names this machine."""
    name = host.rpartition(":")[0] if not host.endswith("]") and ":" in host else host
    return WebAddress(name.strip("[]"), 0).is_loopback
