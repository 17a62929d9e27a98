"""Metrics, probes and a status page over HTTP: read only, in separate threads.

The server is the standard library's, with bounds on the number of connections and the total time of
each. So a client that sends nothing or does not read cannot block others.
"""

import io
import ipaddress
import logging
import socket
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import BoundedSemaphore, Lock, Thread
from typing import Any, Final, NamedTuple, Self

from indexer.launch import is_installed, plugged
from retriever.errors import AddressInUseError, SettingsError
from retriever.operations.lifecycle import Phase
from retriever.operations.resolving import without_password
from retriever.operations.service_report import Service

_MAX_PORT: Final = 65535
_MAX_HEAD_BYTES: Final = 8192  # largest request head; a browser's has about 1,000
_PERIOD_S: Final = 0.2  # longest time that a connection is open after its limit
_STATUS_PAGE: Final = "retriever.plugins.status_page"

_logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class WebAddress:
    """An address to listen on for HTTP.

    Attributes:
        host: name or IP address.
        port: port; 0 for any free one.
    """

    host: str
    port: int

    @classmethod
    def parsed(cls, text: str) -> Self:
        """Return the address for `HOST:PORT` or for a port on loopback.

        Raises:
            SettingsError: the text is neither.
        """
        host, _, port = text.rpartition(":")
        is_port = port.isascii() and port.isdigit() and int(port) <= _MAX_PORT
        if not is_port or text.startswith(":") or (":" in host and not host.startswith("[")):
            raise SettingsError(
                f"--metrics-address {without_password(text)}: give HOST:PORT, or a port on loopback"
            )
        return cls(host.strip("[]") or "127.0.0.1", int(port))

    @property
    def is_loopback(self) -> bool:
        """Whether only this machine can reach the address."""
        try:
            return ipaddress.ip_address(self.host).is_loopback
        except ValueError:
            return self.host == "localhost"

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


def bound(address: WebAddress) -> socket.socket:
    """Return a listening socket.

    Raises:
        AddressInUseError: the address is in use or cannot be bound.
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


class Answer(NamedTuple):
    """An HTTP answer: its status, content type, content, and further headers."""

    status: HTTPStatus
    kind: str
    body: bytes
    headers: tuple[tuple[str, str], ...] = ()


@dataclass(frozen=True, slots=True)
class WebLimits:
    """Limits on HTTP callers.

    Attributes:
        max_open: most open connections, each with a thread; one more replaces the oldest.
        total_s: time for request and answer together, in seconds; a scraper's own limit is usually
            10 s.
        renderers: most answers that are rendered concurrently: a scraper's and a browser's.
    """

    max_open: int = 128
    total_s: float = 5.0
    renderers: int = 2


DEFAULT_LIMITS: Final = WebLimits()

Rendered = Callable[[str], Answer]
"""Function that renders the answer of a path, given the Accept header of a request."""


class Web:
    """Serves metrics, and optionally the status page, until closed.

    `/metrics`, `/live` (200 while the process answers), `/ready` (200 or 503) and, with the page,
    `/`.

    Args:
        service: service to report on.
        address: where to listen.
        status_page: whether to serve the page; None to serve it on loopback only.
        limits: limits on callers.

    Raises:
        AddressInUseError: the address is in use or cannot be bound.
        SettingsError: the library for metrics is missing.
        MissingPluginError: the page is requested but not part of this installation.
    """

    def __init__(
        self,
        service: Service,
        address: WebAddress,
        *,
        status_page: bool | None = None,
        limits: WebLimits = DEFAULT_LIMITS,
    ) -> None:
        self._service = service
        self._on_loopback = address.is_loopback
        rendered = {"/metrics": _exposition(service)}
        has_page = self._on_loopback if status_page is None else status_page
        if has_page and (status_page or is_installed(_STATUS_PAGE)):
            rendered["/"] = plugged(f"{_STATUS_PAGE}.status_page", "--status-page").page_of(service)
        self._rendered = rendered
        listening = bound(address)
        self.address = WebAddress(address.host, listening.getsockname()[1])
        self._connections = Connections(listening, self._at_once, rendered, limits)

    def close(self) -> None:
        """Stop serving."""
        self._connections.close()

    def _at_once(self, path: str, host: str) -> Answer | None:
        """Return the answer to a probe or a refused request; None if it must be rendered."""
        if self._on_loopback and not _is_local(host):
            # DNS rebinding: a foreign page whose host name resolves to this machine.
            return Answer(HTTPStatus.FORBIDDEN, _PLAIN, b"ask by a name of this machine\n")
        if path == "/live":
            return Answer(HTTPStatus.OK, _PLAIN, b"live\n")
        if path == "/ready":
            return self._readiness()
        if path in self._rendered:
            return None
        return Answer(HTTPStatus.NOT_FOUND, _PLAIN, b"nothing is here\n")

    def _readiness(self) -> Answer:
        lifecycle = self._service.observer.lifecycle
        if lifecycle.is_ready:
            return Answer(HTTPStatus.OK, _PLAIN, b"ready\n")
        is_up = lifecycle.phase is Phase.READY  # but no caller is admitted
        why = "credentials cannot be read" if is_up else lifecycle.phase.value
        return Answer(HTTPStatus.SERVICE_UNAVAILABLE, _PLAIN, f"{why}\n".encode())


class Connections(ThreadingHTTPServer):
    """Serves a listening socket with one thread per connection, until closed.

    Args:
        listening: bound socket; closed at the end.
        at_once: returns the answer to a path and a Host header within microseconds, or None.
        rendered: functions that render the other answers, by path.
        limits: limits on callers.
    """

    daemon_threads = True
    block_on_close = False

    def __init__(
        self,
        listening: socket.socket,
        at_once: Callable[[str, str], Answer | None],
        rendered: Mapping[str, Rendered],
        limits: WebLimits = DEFAULT_LIMITS,
    ) -> None:
        super().__init__(listening.getsockname()[:2], _Handler, bind_and_activate=False)
        self.socket.close()
        self.socket = listening
        self.at_once = at_once
        self.rendered = rendered
        self.rendering = BoundedSemaphore(limits.renderers)
        self._limits = limits
        self._open: dict[Any, float] = {}  # start times, the oldest first
        self._lock = Lock()
        self._thread = Thread(
            target=self.serve_forever, args=[_PERIOD_S], name="foredraft-metrics", daemon=True
        )
        self._thread.start()

    def close(self) -> None:
        """Stop serving; connections are cut."""
        self.shutdown()
        self._thread.join()
        self._cut_before(float("inf"))
        self.server_close()

    def process_request(self, request: Any, client_address: Any) -> None:
        """Answer a connection in its own thread; the oldest is cut if there are too many."""
        with self._lock:
            if len(self._open) >= self._limits.max_open:
                _cut(next(iter(self._open)))
                del self._open[next(iter(self._open))]
            self._open[request] = time.monotonic()
        request.settimeout(self._limits.total_s)
        super().process_request(request, client_address)

    def service_actions(self) -> None:
        """Cut the connections whose time is up; called periodically while the server runs."""
        self._cut_before(time.monotonic() - self._limits.total_s)

    def shutdown_request(self, request: Any) -> None:
        """End a connection."""
        with self._lock:
            self._open.pop(request, None)
        super().shutdown_request(request)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Log that a client left or was cut before the answer, which is not a failure."""
        del request, client_address
        _logger.debug("a request over HTTP was not answered")

    def _cut_before(self, time_s: float) -> None:
        with self._lock:
            for request in [each for each, since_s in self._open.items() if since_s < time_s]:
                _cut(request)


def _cut(request: socket.socket) -> None:
    """Shut a connection down, so that its thread ends."""
    try:
        request.shutdown(socket.SHUT_RDWR)
    except OSError:
        return  # it has


class _Handler(BaseHTTPRequestHandler):
    """Answers one request, after reading its whole head."""

    server: Connections
    protocol_version = "HTTP/1.1"
    server_version = "foredraft"
    sys_version = ""

    def setup(self) -> None:
        """Read the head of a request, up to the limit."""
        super().setup()
        head = bytearray()
        while len(head) <= _MAX_HEAD_BYTES and (line := self.rfile.readline(_MAX_HEAD_BYTES)):
            head += line
            if line == b"\r\n" and head != line:
                break
        self.is_too_long = len(head) > _MAX_HEAD_BYTES
        self.rfile = io.BytesIO(head)

    def do_GET(self) -> None:
        """Answer a GET or HEAD request."""
        self._send(self._answer())

    do_HEAD = do_GET  # noqa: N815  (name from the library)

    def do_POST(self) -> None:
        """Refuse a request that would change something."""
        allowed = (("Allow", "GET, HEAD"),)
        self._send(Answer(HTTPStatus.METHOD_NOT_ALLOWED, _PLAIN, b"read only\n", allowed))

    do_PUT = do_PATCH = do_DELETE = do_OPTIONS = do_POST  # noqa: N815  (name from the library)

    def send_error(self, code: int, message: str | None = None, explain: str | None = None) -> None:
        """Refuse an invalid request, with a status line for any version that it states."""
        del message, explain
        self.request_version, self.command = self.protocol_version, self.command or ""
        status = HTTPStatus(code)
        self._send(Answer(status, _PLAIN, f"{status.phrase}\n".encode()))

    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002  (name from the library)
        """Log nothing: callers' text is never logged."""

    def _answer(self) -> Answer:
        if self.is_too_long:
            return Answer(HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE, _PLAIN, b"too long\n")
        path = self.path.partition("?")[0]
        answer = self.server.at_once(path, self.headers.get("Host", ""))
        if answer is not None:
            return answer
        with self.server.rendering:
            try:
                return self.server.rendered[path](self.headers.get("Accept", ""))
            except Exception:
                _logger.exception("an answer over HTTP failed")
                return Answer(HTTPStatus.INTERNAL_SERVER_ERROR, _PLAIN, b"see the log\n")

    def _send(self, answer: Answer) -> None:
        self.close_connection = True
        self.send_response(answer.status)
        length = ("Content-Length", str(len(answer.body)))
        for name, value in (
            ("Content-Type", answer.kind),
            length,
            *answer.headers,
            ("Connection", "close"),
        ):
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(answer.body)


def _exposition(service: Service) -> Rendered:
    """Return a function that renders the metrics in the format of an Accept header."""
    try:
        from prometheus_client import exposition  # noqa: PLC0415  (an extra)

        from retriever.operations.metrics import registry_of  # noqa: PLC0415
    except ModuleNotFoundError as error:
        raise SettingsError(
            f"--metrics-address: {error.name} is missing: run `pip install 'foredraft[server]'`"
        ) from error
    registry = registry_of(service)

    def expose(accept: str) -> Answer:
        encode, kind = exposition.choose_encoder(accept)
        return Answer(HTTPStatus.OK, kind, encode(registry))

    return expose


def _is_local(host: str) -> bool:
    """Return whether a request's Host header names this machine."""
    name = host.rpartition(":")[0] if not host.endswith("]") and ":" in host else host
    return WebAddress(name.strip("[]"), 0).is_loopback
