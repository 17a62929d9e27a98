"""Callers of the metrics' address that are slow, idle, many or hostile: probes are answered."""

import resource
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http import HTTPStatus
from pathlib import Path

import pytest

from retriever.operations import http_connections
from retriever.operations.lifecycle import Phase
from retriever.operations.web import Web
from tests.retriever.operations.watched import asked, watched
from tests.retriever.service.decodes import wait_until

MANY = 300  # more than are kept open
HEAD = b"GET /metrics HTTP/1.1\r\nHost: localhost\r\n"


@pytest.fixture(scope="module")
def web(index: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Web]:
    with watched(index, tmp_path_factory.mktemp("web")) as (service, web):
        service.observer.lifecycle.phase = Phase.READY
        yield web


@contextmanager
def connected(web: Web, num: int) -> Iterator[list[socket.socket]]:
    callers = [socket.create_connection(("127.0.0.1", web.address.port)) for _ in range(num)]
    try:
        yield callers
    finally:
        for each in callers:
            each.close()


def all_of(caller: socket.socket) -> int | bytes:
    """What is received until the end; its length where the connection was cut."""
    caller.settimeout(5)
    received = bytearray()
    try:
        while part := caller.recv(1 << 20):
            received += part
    except ConnectionError:
        return len(received)
    return bytes(received)


def assert_answers(web: Web) -> None:
    """Both probes and the metrics answer at once."""
    for path in ("/ready", "/live", "/metrics"):
        began = time.monotonic()
        assert asked(web, path)[0] == 200
        assert time.monotonic() - began < 1


def test_idle_connections_keep_no_probe_waiting(web: Web) -> None:
    """Before, eight of them did, for five seconds each time."""
    for num in (8, MANY):
        with connected(web, num):
            assert_answers(web)


def test_a_request_that_comes_byte_by_byte_is_cut(
    web: Web, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before, each byte gave it five more seconds."""
    monkeypatch.setattr(http_connections, "_READ_S", 0.5)
    ended, cut = threading.Event(), set[socket.socket]()

    def drip(slow: list[socket.socket]) -> None:
        for number in range(1000):
            for each in slow:
                try:
                    each.sendall(HEAD[number % len(HEAD) :][:1])
                except OSError:
                    cut.add(each)
            if ended.wait(0.1) or len(cut) == len(slow):
                return

    with connected(web, 20) as slow:
        dripping = threading.Thread(target=drip, args=[slow])
        dripping.start()
        assert_answers(web)
        dripping.join(http_connections._READ_S + 3)
        ended.set()
        dripping.join()
        assert len(cut) == len(slow)


def test_who_does_not_read_the_answer_is_cut(web: Web, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_connections, "_TOTAL_S", 0.3)
    large = http_connections.Answer(HTTPStatus.OK, "text/plain", bytes(32 << 20))
    rendered = web._connections._rendered
    monkeypatch.setattr(web._connections, "_rendered", lambda _: large)
    with connected(web, 4) as deaf:
        for each in deaf:
            each.sendall(HEAD + b"\r\n")
        assert wait_until(lambda: bool(web._connections._open), 5)
        assert wait_until(lambda: not web._connections._open, 5)
        monkeypatch.setattr(web._connections, "_rendered", rendered)
        assert_answers(web)
        for each in deaf:
            received = all_of(each)
            length = received if isinstance(received, int) else len(received)
            assert length < len(large.body)


def test_neither_threads_nor_descriptors_grow_with_callers(web: Web) -> None:
    before = threading.active_count()
    with connected(web, MANY):
        assert_answers(web)
        assert threading.active_count() <= before + http_connections._RENDERERS
        assert len(web._connections._open) <= http_connections._MAX_OPEN


@pytest.mark.parametrize(
    ("sent", "status"),
    [
        (b"GARBAGE\r\n\r\n", b"400"),
        (b"GET / HTTP/2\r\n\r\n", b"400"),
        (b"\r\n\r\n", b"400"),
        (b"GET /ready HTTP/1.1\r\nHost: " + b"x" * 9000 + b"\r\n\r\n", b"431"),
        (HEAD + b"X: y\r\n" * 200 + b"\r\n", None),  # more headers than are read
        (b"HEAD /live HTTP/1.1\r\nHost: localhost\r\n\r\n", b"200"),
        (b"\xff\xfe\x00 / HTTP/1.1\r\n\r\n", b"405"),
    ],
)
def test_what_is_no_request_gets_a_status_or_is_cut(
    web: Web, sent: bytes, status: bytes | None
) -> None:
    with connected(web, 1) as (caller,):
        caller.sendall(sent)
        received = all_of(caller)
    if status is None:
        assert received in (0, b"")
    else:
        assert isinstance(received, bytes)
        assert received.split(b" ")[1] == status
    assert_answers(web)


def test_a_flood_of_metrics_keeps_no_probe_waiting(web: Web) -> None:
    with connected(web, 100) as callers:
        for each in callers:
            each.sendall(HEAD + b"\r\n")
        began = time.monotonic()
        assert asked(web, "/live")[0] == 200
        assert time.monotonic() - began < 1
        for each in callers:
            each.settimeout(10)
            assert each.recv(15) == b"HTTP/1.1 200 OK"


def test_there_are_descriptors_for_all_callers() -> None:
    assert resource.getrlimit(resource.RLIMIT_NOFILE)[0] > 2 * MANY + 50
