"""A small HTTP server of the standard library's, and where it listens."""

import ipaddress
import logging
import socket
import sys
from collections.abc import Callable
from dataclasses import dataclass
from socketserver import TCPServer, ThreadingMixIn
from threading import BoundedSemaphore
from typing import Any, Final, Self
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer

from retriever.errors import AddressInUseError, SettingsError

_MAX_REQUESTS: Final = 8
_TIMEOUT_S: Final = 5.0
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
        """Return the address that is meant by `HOST:PORT`, or by a port of loopback.

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
        """Whether it can be reached from this machine alone."""
        try:
            return ipaddress.ip_address(self.host).is_loopback
        except ValueError:
            return self.host == "localhost"

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


def bound(address: WebAddress, act: Callable[[], None]) -> WSGIServer:
    """Return a server that listens, and acts now and then while it serves.

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
    """Answers a few requests at a time; whoever comes beyond them is turned away."""

    daemon_threads = True
    allow_reuse_port = False

    def __init__(self, address: tuple[str, int], act: Callable[[], None]) -> None:
        self._act = act
        self._free = BoundedSemaphore(_MAX_REQUESTS)
        super().__init__(address, _Requests)

    def server_bind(self) -> None:
        """Bind as the library does, but do not look the address's name up: that may wait."""
        TCPServer.server_bind(self)
        self.server_name, self.server_port = str(self.server_address[0]), self.server_address[1]
        self.setup_environ()

    def service_actions(self) -> None:
        """Do what is to be done now and then."""
        self._act()

    def process_request(self, request: Any, client_address: Any) -> None:
        """Answer in a thread of its own, if one is free."""
        if self._free.acquire(blocking=False):
            super().process_request(request, client_address)
        else:
            self.shutdown_request(request)

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        """Answer, and make room for the next."""
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._free.release()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Log that a request failed; most often somebody went away."""
        del request, client_address
        _logger.debug("a request over HTTP failed", exc_info=sys.exc_info())


class _Server6(_Server):
    address_family = socket.AF_INET6


class _Requests(WSGIRequestHandler):
    timeout = _TIMEOUT_S

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002  (the library's name)
        """Log nothing: what is asked for is what somebody wrote."""
