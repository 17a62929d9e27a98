"""The link to one server: a thread that connects, reads, and connects again."""

from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from logging import getLogger
from queue import SimpleQueue
from threading import Event, Thread
from typing import Any, Final

import grpc

from retriever.remote.backoff import Backoff
from retriever.v1 import retriever_pb2 as pb
from retriever.v1.retriever_pb2_grpc import RetrieverServiceStub
from retriever.wire import CLIENT_OPTIONS

CONNECT_TIMEOUT_S: Final = 1.0
"""How long an attempt to connect may take, in seconds."""

OpenChannel = Callable[[str], grpc.Channel]
"""Opens a channel to an address: with its credentials, if there are any."""

_log = getLogger(__name__)


def insecure_channel(address: str) -> grpc.Channel:
    """Open a channel without credentials."""
    return grpc.insecure_channel(address, options=CLIENT_OPTIONS)


class LinkStream:
    """One stream: sending never waits."""

    def __init__(self, channel: grpc.Channel) -> None:
        self._outbox: SimpleQueue[pb.DraftStreamRequest | None] = SimpleQueue()
        self.call: Any = RetrieverServiceStub(channel).DraftStream(iter(self._outbox.get, None))

    def send(self, message: pb.DraftStreamRequest) -> None:
        """Send a message, at once or never."""
        self._outbox.put(message)

    def end(self) -> None:
        """End the stream."""
        self._outbox.put(None)
        self.call.cancel()


@dataclass(frozen=True, slots=True)
class LinkEvent:
    """What a link reports.

    Attributes:
        address: of its server.
        stream: the stream that has begun; None otherwise.
        response: what has come; None where nothing has: the stream has begun, or is gone.
    """

    address: str
    stream: LinkStream | None = None
    response: pb.DraftStreamResponse | None = None


class Link:
    """Keeps a stream to one server, in a thread of its own.

    Args:
        address: of the server.
        open_channel: makes its channel.
        events: where it reports, in order.
        on_begin: called in a thread of its own once a new stream was reported.
    """

    def __init__(
        self,
        address: str,
        open_channel: OpenChannel,
        events: "SimpleQueue[LinkEvent]",
        on_begin: Callable[[], None],
    ) -> None:
        self._address = address
        self._open_channel = open_channel
        self._events = events
        self._on_begin = on_begin
        self._is_shut_down = Event()
        self._stream: LinkStream | None = None
        self._thread = Thread(target=self._run, name="foredraft-link", daemon=True)
        self._thread.start()

    def shut_down(self) -> None:
        """End the stream and the thread; does not wait for them."""
        self._is_shut_down.set()
        stream = self._stream
        if stream is not None:
            stream.end()

    def join(self, timeout_s: float) -> None:
        """Wait for the thread to end."""
        self._thread.join(timeout_s)

    def _run(self) -> None:
        backoff = Backoff()
        while not self._is_shut_down.is_set():
            channel = self._open_channel(self._address)
            try:
                RetrieverServiceStub(channel).ListIndexes(
                    pb.ListIndexesRequest(), timeout=CONNECT_TIMEOUT_S
                )
                backoff.reset()
                self._converse(channel)
            except grpc.RpcError as error:
                _log.info("no draft service at %s: %s", self._address, error)
            finally:
                channel.close()
            self._is_shut_down.wait(backoff.next_pause_s())

    def _converse(self, channel: grpc.Channel) -> None:
        stream = self._stream = LinkStream(channel)
        self._events.put(LinkEvent(self._address, stream))
        if self._is_shut_down.is_set():
            stream.end()
        # Not in this thread: it may have to wait for somebody who waits for what is read here.
        Thread(target=self._on_begin, name="foredraft-catch-up", daemon=True).start()
        try:
            for response in stream.call:
                self._events.put(LinkEvent(self._address, response=response))
        finally:
            self._stream = None
            stream.end()
            with suppress(grpc.RpcError):
                self._events.put(LinkEvent(self._address))
