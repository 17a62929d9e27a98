"""Callers of the metrics' address that are slow, idle, many or hostile: probes are answered."""

import resource
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from http import HTTPStatus
from pathlib import Path

import pytest

from retriever.operations.lifecycle import Phase
from retriever.operations.web import (
    DEFAULT_LIMITS,
    Answer,
    Connections,
    Web,
    WebAddress,
    WebLimits,
    bound,
)
from tests.retriever.operations.watched import asked, watched
from tests.retriever.service.decodes import wait_until

pytestmark = pytest.mark.faults

MANY = 300  # more than are kept open
HEAD = b"GET /metrics HTTP/1.1\r\nHost: localhost\r\n"
SOON = WebLimits(total_s=0.5)


@pytest.fixture(scope="module")
def both(index: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Web, Web]]:
    """A service over HTTP, and again where requests must be there soon."""
    with watched(index, tmp_path_factory.mktemp("web")) as (service, web):
        service.observer.lifecycle.phase = Phase.READY
        impatient = Web(service, WebAddress.parsed("0"), limits=SOON)
        yield web, impatient
        impatient.close()


@pytest.fixture(scope="module")
def web(both: tuple[Web, Web]) -> Web:
    return both[0]


@contextmanager
def connected(port: int, num: int) -> Iterator[list[socket.socket]]:
    callers = [socket.create_connection(("127.0.0.1", port)) for _ in range(num)]
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
        assert time.monotonic() - began < 2  # a caller that is waited for takes five


def test_idle_connections_keep_no_probe_waiting(web: Web) -> None:
    """Before, eight of them did, for five seconds each time."""
    for num in (8, MANY):
        with connected(web.address.port, num):
            assert_answers(web)


def test_a_request_that_comes_byte_by_byte_is_cut(both: tuple[Web, Web]) -> None:
    """Before, each byte gave it five more seconds."""
    _, web = both
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

    with connected(web.address.port, 20) as slow:
        dripping = threading.Thread(target=drip, args=[slow])
        dripping.start()
        assert_answers(web)
        dripping.join(SOON.total_s + 3)
        ended.set()
        dripping.join()
        assert len(cut) == len(slow)


SMALL, LARGE = (Answer(HTTPStatus.OK, "text/plain", bytes(size)) for size in (1, 32 << 20))
LIVE = b"GET /live HTTP/1.1\r\n\r\n"


@contextmanager
def connections(limits: WebLimits, rendered: Callable[[str], Answer]) -> Iterator[int]:
    """Answer `/live` at once and the metrics by a function; give the port."""

    def at_once(path: str, _: str) -> Answer | None:
        return SMALL if path == "/live" else None

    listening = bound(WebAddress.parsed("0"))
    port = listening.getsockname()[1]
    served = Connections(listening, at_once, {"/metrics": rendered}, limits)
    try:
        yield port
    finally:
        served.close()


def test_who_does_not_read_the_answer_is_cut() -> None:
    total_s, asked_s = 0.3, list[float]()

    def large(_: str) -> Answer:
        asked_s.append(time.monotonic())
        return LARGE

    with connections(WebLimits(total_s=total_s), large) as port, connected(port, 4) as deaf:
        for each in deaf:
            each.sendall(HEAD + b"\r\n")
        assert wait_until(lambda: len(asked_s) == len(deaf), 5)
        with connected(port, 1) as (other,):
            other.sendall(LIVE)
            assert str(all_of(other)).startswith("b'HTTP/1.1 200")
        time.sleep(max(0.0, asked_s[-1] + total_s + 0.2 - time.monotonic()))
        for each in deaf:
            received = all_of(each)
            length = received if isinstance(received, int) else len(received)
            assert length < len(LARGE.body)


def test_threads_do_not_grow_with_callers(web: Web) -> None:
    before = threading.active_count()
    with connected(web.address.port, MANY):
        assert_answers(web)
        assert threading.active_count() <= before + DEFAULT_LIMITS.max_open


def test_the_oldest_connection_makes_room_for_a_new_one() -> None:
    limits = WebLimits(max_open=8, total_s=60.0)
    with connections(limits, lambda _: SMALL) as port, connected(port, 20) as callers:
        assert wait_until(lambda: sum(map(is_cut, callers)) == 12, 5)
        assert [is_cut(each) for each in callers] == [True] * 12 + [False] * 8
        callers[-1].setblocking(True)
        callers[-1].sendall(LIVE)
        assert str(all_of(callers[-1])).startswith("b'HTTP/1.1 200")


def is_cut(caller: socket.socket) -> bool:
    """Whether a connection on which nothing was sent has been ended from the other side."""
    caller.setblocking(False)
    try:
        return not caller.recv(1)
    except BlockingIOError:
        return False
    except ConnectionError:
        return True


@pytest.mark.parametrize(
    ("sent", "status"),
    [
        (b"GARBAGE\r\n\r\n", b"400"),
        (b"GET / HTTP/2\r\n\r\n", b"400"),
        (b"\r\n\r\n", None),
        (b"GET /ready HTTP/1.1\r\nHost: " + b"x" * 9000 + b"\r\n\r\n", b"431"),
        (HEAD + b"X: y\r\n" * 200 + b"\r\n", b"431"),  # more headers than are read
        (b"HEAD /live HTTP/1.1\r\nHost: localhost\r\n\r\n", b"200"),
        (b"\xff\xfe\x00 / HTTP/1.1\r\n\r\n", b"501"),
    ],
)
def test_what_is_no_request_gets_a_status_or_is_cut(
    web: Web, sent: bytes, status: bytes | None
) -> None:
    with connected(web.address.port, 1) as (caller,):
        caller.sendall(sent)
        received = all_of(caller)
    if status is None:
        assert received in (0, b"")
    else:
        assert isinstance(received, bytes)
        assert received.split(b" ")[1] == status
    assert_answers(web)


def test_a_flood_of_metrics_keeps_no_probe_waiting(web: Web) -> None:
    with connected(web.address.port, 100) as callers:
        for each in callers:
            each.sendall(HEAD + b"\r\n")
        began = time.monotonic()
        assert asked(web, "/live")[0] == 200
        assert time.monotonic() - began < 2  # a caller that is waited for takes five
        for each in callers:
            each.settimeout(10)
            assert each.recv(15) == b"HTTP/1.1 200 OK"


@pytest.mark.faults
def test_a_thousand_who_ask_at_once_keep_no_probe_waiting(web: Web) -> None:
    """As many as may be are answered, and the others are cut; in between, probes are answered."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(hard, 8192), hard))
    try:
        with connected(web.address.port, 1000) as callers:
            for each in callers:
                with suppress(OSError):  # it was cut
                    each.sendall(HEAD + b"\r\n")
            assert wait_until(lambda: asked(web, "/live")[0] == 200, 10)
            outcomes = [all_of(each) for each in callers]
        whole = [each for each in outcomes if isinstance(each, bytes) and each]
        assert len(whole) >= DEFAULT_LIMITS.max_open / 2
        assert all(each.startswith(b"HTTP/1.1 200") for each in whole)
        assert_answers(web)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_there_are_descriptors_for_all_callers() -> None:
    assert resource.getrlimit(resource.RLIMIT_NOFILE)[0] > 2 * MANY + 50
