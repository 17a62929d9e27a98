"""Answering GET over HTTP/1.1, one request a connection, whatever the callers do.

Connections wait on an event loop, so that one that sends nothing costs a descriptor and no thread.
Each has so much time in all, and the oldest makes room for a new one. What takes milliseconds to
render goes to two threads; what must be answered at once is answered on the loop.
"""

import asyncio
import io
import logging
import socket
from collections.abc import Awaitable, Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from http import HTTPStatus
from http.client import HTTPException, parse_headers
from threading import Thread
from typing import Final

_MAX_HEAD_BYTES: Final = 8192  # of a request; a browser's has about 1,000
_PERIOD_S: Final = 1.0

_logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class HttpLimits:
    """What callers over HTTP may take.

    Attributes:
        max_open: connections; a descriptor and some 10 KB each.
        read_s: for a whole request, in seconds: callers are near, and send it in one piece.
        total_s: for request and answer, in seconds; a scraper's own limit is usually 10 s.
        renderers: threads for what takes milliseconds: a scraper and a browser.
    """

    max_open: int = 256
    read_s: float = 2.0
    total_s: float = 10.0
    renderers: int = 2


DEFAULT_LIMITS: Final = HttpLimits()


@dataclass(frozen=True, slots=True)
class HttpRequest:
    """A request.

    Attributes:
        method: in capitals.
        path: without the query.
        host: of the header; empty if there is none.
        accept: the same.
    """

    method: str
    path: str
    host: str = ""
    accept: str = ""


@dataclass(frozen=True, slots=True)
class HttpAnswer:
    """An answer.

    Attributes:
        status: of HTTP.
        kind: the content's type.
        body: the content; not sent for HEAD.
        headers: further ones.
    """

    status: HTTPStatus
    kind: str
    body: bytes
    headers: Iterable[tuple[str, str]] = field(default=())


class Connections:
    """Serves a listening socket in a thread of its own, until closed.

    Args:
        listening: bound; closed at the end.
        at_once: answers a request in microseconds, or returns None.
        rendered: answers the others, in another thread.
        act: called every second.
        limits: of what callers may take.
    """

    def __init__(
        self,
        listening: socket.socket,
        at_once: Callable[[HttpRequest], HttpAnswer | None],
        rendered: Callable[[HttpRequest], HttpAnswer],
        act: Callable[[], None],
        limits: HttpLimits = DEFAULT_LIMITS,
    ) -> None:
        self._limits = limits
        self._listening = listening
        self._at_once = at_once
        self._rendered = rendered
        self._act = act
        self._open: dict[asyncio.StreamWriter, None] = {}  # oldest first
        self._renderers = ThreadPoolExecutor(limits.renderers, "foredraft-render")
        self._loop = asyncio.new_event_loop()
        self._ended = asyncio.Event()
        self._thread = Thread(target=self._run, name="foredraft-metrics", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop serving; connections are cut."""
        self._loop.call_soon_threadsafe(self._ended.set)
        self._thread.join()
        self._renderers.shutdown(wait=False, cancel_futures=True)

    def _run(self) -> None:
        with asyncio.Runner(loop_factory=lambda: self._loop) as runner:
            runner.run(self._serve())

    async def _serve(self) -> None:
        server = await asyncio.start_server(
            self._connected, sock=self._listening, limit=_MAX_HEAD_BYTES
        )
        while not self._ended.is_set():
            self._act()
            with suppress(TimeoutError):
                await asyncio.wait_for(self._ended.wait(), _PERIOD_S)
        server.close()
        for writer in self._open:
            writer.transport.abort()

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if len(self._open) >= self._limits.max_open:
            oldest = next(iter(self._open))
            del self._open[oldest]
            oldest.transport.abort()
        self._open[writer] = None
        try:
            async with asyncio.timeout(self._limits.total_s):
                await self._answer(reader, writer)
        except (OSError, EOFError, HTTPException) as error:  # a timeout is an OSError
            _logger.debug("a request over HTTP was not answered: %s", type(error).__name__)
            writer.transport.abort()
        finally:
            self._open.pop(writer, None)

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.transport.set_write_buffer_limits(0)  # so that `drain` waits for all of it
        try:
            async with asyncio.timeout(self._limits.read_s):
                request = _parsed(await reader.readuntil(b"\r\n\r\n"))
        except asyncio.LimitOverrunError:
            request, status = None, HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE
        except ValueError:
            request, status = None, HTTPStatus.BAD_REQUEST
        answer = (
            await self._answered(request)
            if request is not None
            else HttpAnswer(status, "text/plain; charset=utf-8", f"{status.phrase}\n".encode())
        )
        writer.write(_written(answer, has_body=request is None or request.method != "HEAD"))
        await writer.drain()
        writer.close()

    def _answered(self, request: HttpRequest) -> Awaitable[HttpAnswer]:
        answer = self._at_once(request)
        if answer is None:
            return self._loop.run_in_executor(self._renderers, self._render, request)
        ready = self._loop.create_future()
        ready.set_result(answer)
        return ready

    def _render(self, request: HttpRequest) -> HttpAnswer:
        try:
            return self._rendered(request)
        except Exception:
            _logger.exception("an answer over HTTP failed")
            status = HTTPStatus.INTERNAL_SERVER_ERROR
            return HttpAnswer(status, "text/plain; charset=utf-8", b"see the log\n")


def _parsed(head: bytes) -> HttpRequest:
    """Return the request that a head states.

    Raises:
        ValueError: it is none.
        HTTPException: it has too many headers.
    """
    line, _, rest = head.partition(b"\r\n")
    method, target, version = line.decode("latin-1").split(" ")  # three, or ValueError
    if not version.startswith("HTTP/1."):
        raise ValueError(version)
    headers = parse_headers(io.BytesIO(rest))
    path = target.partition("?")[0]
    return HttpRequest(method, path, headers.get("Host", ""), headers.get("Accept", ""))


def _written(answer: HttpAnswer, *, has_body: bool) -> bytes:
    lines = [
        f"HTTP/1.1 {answer.status.value} {answer.status.phrase}",
        f"Content-Type: {answer.kind}",
        f"Content-Length: {len(answer.body)}",
        *(f"{name}: {value}" for name, value in answer.headers),
        "Connection: close",
    ]
    head = "\r\n".join([*lines, "", ""]).encode("latin-1")
    return head + answer.body if has_body else head
