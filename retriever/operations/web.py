"""Metrics and the status page over HTTP: read only, from threads of their own."""

from collections.abc import Callable, Iterable
from threading import Thread
from typing import Any, Final

from retriever.errors import SettingsError
from retriever.operations.history import History
from retriever.operations.lifecycle import Phase
from retriever.operations.report import Service
from retriever.operations.status_page import HEADERS, page
from retriever.operations.web_server import WebAddress, bound

_POLL_S: Final = 0.2
_PLAIN: Final = "text/plain; charset=utf-8"

_StartResponse = Callable[[str, list[tuple[str, str]]], Any]
_Answer = tuple[str, str, bytes, Iterable[tuple[str, str]]]


class Web:
    """Serves metrics, and the page where it is wanted, until it is closed.

    `/metrics`, `/ready` (200 or 503) and, with the page, `/`.

    Args:
        service: what is told of.
        address: where to listen.
        status_page: whether to serve the page; None for on loopback alone.

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
        self._history = History(lambda: service.tally)
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
            # A page from elsewhere whose name was made to mean this machine.
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
        phase = self._service.operator.lifecycle.phase
        status = "200 OK" if phase is Phase.READY else "503 Service Unavailable"
        return status, _PLAIN, f"{phase.value}\n".encode(), ()


def _exposition(service: Service) -> Callable[[str], tuple[bytes, str]]:
    """Return what gives the metrics in the format that a header accepts."""
    try:
        from prometheus_client import exposition  # noqa: PLC0415  (an extra)

        from retriever.operations.metrics import registry_of  # noqa: PLC0415
    except ModuleNotFoundError as error:
        raise SettingsError(
            f"--metrics-address: {error.name} is missing: run `pip install '.[operations]'`"
        ) from error
    registry = registry_of(service)

    def expose(accept: str) -> tuple[bytes, str]:
        encode, kind = exposition.choose_encoder(accept)
        return encode(registry), kind

    return expose


def _is_local(host: str) -> bool:
    """Tell whether the header of a request names this machine."""
    name = host.rpartition(":")[0] if not host.endswith("]") and ":" in host else host
    return WebAddress(name.strip("[]"), 0).is_loopback
