"""The link to one server: a thread that connects, reads, and connects again."""

from collections import deque
from collections.abc import Callable
from contextlib import closing
from logging import getLogger
from queue import SimpleQueue
from threading import Event, Thread
from typing import Any, Final, NamedTuple

import grpc

from retriever.errors import CredentialsError
from retriever.remote.backoff import Backoff
from retriever.remote.credentials import Credentials, open_channel
from retriever.v1 import retriever_pb2 as pb
from retriever.v1.retriever_pb2_grpc import RetrieverServiceStub
from retriever.wire import CLIENT_OPTIONS

CONNECT_TIMEOUT_S: Final = 1.0
"""How long an attempt to connect may take, in seconds."""

OpenChannel = Callable[[str], grpc.Channel]
"""Opens a channel to an address: with its credentials, if there are any."""

_SERVICE: Final = pb.DESCRIPTOR.services_by_name["RetrieverService"].full_name
_DRAFT_STREAM: Final = f"/{_SERVICE}/DraftStream"

_log = getLogger(__name__)


def remote_channel(address: str, credentials: Credentials | None) -> grpc.Channel:
    """Open a channel to a service.

    Raises:
        CredentialsError: a file of the credentials cannot be used.
    """
    return open_channel(address, credentials, CLIENT_OPTIONS)


class LinkStream:
    """One stream: sending never waits.

    Args:
        channel: to the server.
        report: called with every response, in order, in the thread that gRPC receives it in: to
            wait for another thread to read it would cost a third of what a step takes.
    """

    def __init__(
        self, channel: grpc.Channel, report: Callable[[pb.DraftStreamResponse], None]
    ) -> None:
        self._outbox: SimpleQueue[pb.DraftStreamRequest | None] = SimpleQueue()
        self._report = report
        method = channel.stream_stream(
            _DRAFT_STREAM,
            request_serializer=pb.DraftStreamRequest.SerializeToString,
            response_deserializer=self._receive,
        )
        self._call: Any = method(iter(self._outbox.get, None))

    def send(self, message: pb.DraftStreamRequest) -> None:
        """Send a message, at once or never."""
        self._outbox.put(message)

    def end(self) -> None:
        """End the stream."""
        self._outbox.put(None)
        self._call.cancel()

    def read(self) -> None:
        """Have responses received until the stream ends.

        Raises:
            grpc.RpcError: it has ended with an error.
        """
        deque(self._call, maxlen=0)

    def _receive(self, data: bytes) -> pb.DraftStreamResponse:
        response = pb.DraftStreamResponse.FromString(data)
        self._report(response)
        return response


class LinkEvent(NamedTuple):
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
            try:
                with closing(self._open_channel(self._address)) as channel:
                    RetrieverServiceStub(channel).ListIndexes(
                        pb.ListIndexesRequest(), timeout=CONNECT_TIMEOUT_S
                    )
                    backoff.reset()
                    self._converse(channel)
            except (grpc.RpcError, CredentialsError) as error:
                _log.info("no draft service at %s: %s", self._address, error)
            self._is_shut_down.wait(backoff.next_pause_s())

    def _converse(self, channel: grpc.Channel) -> None:
        stream = self._stream = LinkStream(channel, self._report)
        self._events.put(LinkEvent(self._address, stream))
        if self._is_shut_down.is_set():
            stream.end()
        # Not in this thread: it may have to wait for somebody who waits for what is read here.
        Thread(target=self._on_begin, name="foredraft-catch-up", daemon=True).start()
        try:
            stream.read()
        finally:
            self._stream = None
            stream.end()
            self._events.put(LinkEvent(self._address))

    def _report(self, response: pb.DraftStreamResponse) -> None:
        self._events.put(LinkEvent(self._address, response=response))
