"""Metrics and the status page over HTTP: read only, in separate threads."""

import ipaddress
import logging
import socket
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from socketserver import TCPServer, ThreadingMixIn
from threading import BoundedSemaphore, Thread
from typing import Any, Final, Self
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer

from retriever.errors import AddressInUseError, SettingsError
from retriever.operations.service_report import Service
from retriever.operations.status_page import HEADERS, History, page

_MAX_REQUESTS: Final = 8  # a scraper and a few browsers; each takes a thread
_TIMEOUT_S: Final = 5.0  # frees threads of clients that send nothing
_MAX_PORT: Final = 65535

_logger = logging.getLogger(__name__)


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
                f"--metrics-address {text}: an address is HOST:PORT, or a port of loopback"
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


def bound(address: WebAddress, act: Callable[[], None]) -> WSGIServer:
    """Return a listening server that calls `act` periodically while it serves.

    Raises:
        AddressInUseError: the address is taken or cannot be bound.
    """
    kind = _Server6 if ":" in address.host else _Server
    try:
        return kind((address.host, address.port), act)
    except (OSError, UnicodeError) as error:
        reason = getattr(error, "strerror", None) or error
        raise AddressInUseError(
            f"cannot listen on {address}: {reason}; choose another --metrics-address"
        ) from error


class _Server(ThreadingMixIn, WSGIServer):
    """Answers up to `_MAX_REQUESTS` at a time; further connections are closed."""

    daemon_threads = True
    allow_reuse_port = False

    def __init__(self, address: tuple[str, int], act: Callable[[], None]) -> None:
        self._act = act
        self._free = BoundedSemaphore(_MAX_REQUESTS)
        super().__init__(address, _Requests)

    def server_bind(self) -> None:
        """Bind as the library does, without its reverse look-up of the name, which can block."""
        TCPServer.server_bind(self)
        self.server_name, self.server_port = str(self.server_address[0]), self.server_address[1]
        self.setup_environ()

    def service_actions(self) -> None:
        """Call `act`."""
        self._act()

    def process_request(self, request: Any, client_address: Any) -> None:
        """Answer in a separate thread, if one is free."""
        if self._free.acquire(blocking=False):
            super().process_request(request, client_address)
        else:
            self.shutdown_request(request)

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        """Answer, and free the thread."""
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._free.release()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Log a failed request; usually the client has disconnected."""
        del request, client_address
        _logger.debug("a request over HTTP failed", exc_info=sys.exc_info())


class _Server6(_Server):
    address_family = socket.AF_INET6


class _Requests(WSGIRequestHandler):
    timeout = _TIMEOUT_S

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002  (the library's name)
        """Log nothing: the request is a caller's text."""


_POLL_S: Final = 0.2  # longest delay of a shutdown
_PLAIN: Final = "text/plain; charset=utf-8"

_StartResponse = Callable[[str, list[tuple[str, str]]], Any]
_Answer = tuple[str, str, bytes, Iterable[tuple[str, str]]]


class Web:
    """Serves metrics, and optionally the status page, until closed.

    `/metrics`, `/ready` (200 or 503) and, with the page, `/`.

    Args:
        service: to report on.
        address: where to listen.
        status_page: whether to serve the page; None to serve it on loopback only.

    Raises:
        AddressInUseError: the address is taken or cannot be bound.
        SettingsError: the library for metrics is missing.
    """

    def __init__(
        self, service: Service, address: WebAddress, *, status_page: bool | None = None
    ) -> None:
        self._service = service
        self._on_loopback = address.is_loopback
        self._has_page = self._on_loopback if status_page is None else status_page
        self._history = History(lambda: service.draft_counts)
        self._metrics = _exposition(service)
        self._server = bound(address, self._history.sample)
        self._server.set_app(self._answer)
        self.address = WebAddress(address.host, self._server.server_port)
        self._thread = Thread(
            target=self._server.serve_forever,
            args=(_POLL_S,),
            name="foredraft-metrics",
            daemon=True,
        )
        self._thread.start()

    def close(self) -> None:
        """Stop serving."""
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()

    def _answer(self, environ: dict[str, Any], start_response: _StartResponse) -> Iterable[bytes]:
        status, kind, body, headers = self._routed(environ)
        length = ("Content-Length", str(len(body)))
        start_response(status, [("Content-Type", kind), length, *headers])
        return [] if environ["REQUEST_METHOD"] == "HEAD" else [body]

    def _routed(self, environ: dict[str, Any]) -> _Answer:
        if environ["REQUEST_METHOD"] not in ("GET", "HEAD"):
            return "405 Method Not Allowed", _PLAIN, b"read only\n", [("Allow", "GET, HEAD")]
        if self._on_loopback and not _is_local(environ.get("HTTP_HOST", "")):
            # DNS rebinding: a foreign page whose host name resolves to this machine.
            return "403 Forbidden", _PLAIN, b"ask by a name of this machine\n", ()
        path = environ["PATH_INFO"]
        if path == "/metrics":
            body, kind = self._metrics(environ.get("HTTP_ACCEPT", ""))
            return "200 OK", kind, body, ()
        if path == "/ready":
            return self._readiness()
        if path == "/" and self._has_page:
            body = page(self._service, self._history).encode()
            return "200 OK", "text/html; charset=utf-8", body, HEADERS
        return "404 Not Found", _PLAIN, b"nothing is here\n", ()

    def _readiness(self) -> _Answer:
        lifecycle = self._service.observer.lifecycle
        status = "200 OK" if lifecycle.is_ready else "503 Service Unavailable"
        return status, _PLAIN, f"{lifecycle.phase.value}\n".encode(), ()


def _exposition(service: Service) -> Callable[[str], tuple[bytes, str]]:
    """Return a function that renders the metrics in the format of an Accept header."""
    try:
        from prometheus_client import exposition  # noqa: PLC0415  (an extra)

        from retriever.operations.metrics import registry_of  # noqa: PLC0415
    except ModuleNotFoundError as error:
        raise SettingsError(
            f"--metrics-address: {error.name} is missing: run `pip install 'foredraft[operations]'`"
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
