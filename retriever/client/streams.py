"""Streams to servers, and the threads that keep them open."""

import time
from collections import deque
from collections.abc import Callable
from contextlib import closing
from logging import getLogger
from queue import SimpleQueue
from threading import Event, Thread
from typing import Any, Final, NamedTuple, Protocol

import grpc

from retriever.backoff import Backoff
from retriever.client.credentials import Credentials, open_channel
from retriever.client.planner import Agreement, Plan, Planner
from retriever.errors import (
    AccessRefusedError,
    CredentialsError,
    DrafterUnavailableError,
    RetrieverError,
    VocabularyMismatchError,
)
from retriever.v1 import retriever_pb2 as pb
from retriever.v1.retriever_pb2_grpc import RetrieverServiceStub
from retriever.wire.channels import CLIENT_OPTIONS
from retriever.wire.statuses import error_of

LOST_AFTER_S: Final = 1.0
"""Time without an answer after which a stream is given up, in seconds. It is well above a step's
deadline, so that a slow server does not count as lost."""

ORPHANS: Final[list[object]] = []
"""Connections of a parent process. They are never closed, because gRPC's threads stayed in the
parent and closing can hang."""


class MessageStream(Protocol):
    """One stream to a server; no call blocks."""

    def send(self, message: pb.DraftStreamRequest) -> None:
        """Send a message; dropped if the stream has ended."""
        ...

    def end(self) -> None:
        """End the stream."""
        ...


class LinkEvent(NamedTuple):
    """An event from a link.

    Attributes:
        address: address of its server.
        stream: stream that has started; None otherwise.
        response: response; None if the stream has started or is gone.
    """

    address: str
    stream: MessageStream | None = None
    response: pb.DraftStreamResponse | None = None


class StreamTable:
    """The streams to the servers of a planner. Callers hold a lock.

    Args:
        planner: plans the messages.
        lost_after_s: time without an answer after which a stream is given up, in seconds.
    """

    def __init__(self, planner: Planner, lost_after_s: float) -> None:
        self._planner = planner
        self._lost_after_s = lost_after_s
        self._streams: dict[str, MessageStream] = {}

    def note(self, event: LinkEvent) -> None:
        """Use a stream that has started, forget one that is gone, or process a response.

        A stream that is out of order is given up.
        """
        address, stream, response = event
        if stream is not None:
            self._streams[address] = stream
            self._planner.conversations[address].begin()
        elif response is None:
            self._streams.pop(address, None)
            self._planner.lose(address)
        elif self._planner.take(address, response):
            self._give_up(address)

    def ask(self, plan: Plan) -> None:
        """Send the messages of a plan."""
        for address, part in plan.parts.items():
            if part.message is not None:
                self._streams[address].send(part.message)

    def tell_rest(self) -> None:
        """Send pending closes and outputs to every server."""
        for address, stream in self._streams.items():
            message = self._planner.conversations[address].rest(time.monotonic())
            if message is not None:
                stream.send(message)

    def give_up_lost(self) -> None:
        """Give up streams without answers."""
        lost_s = time.monotonic() - self._lost_after_s
        for address, conversation in self._planner.conversations.items():
            oldest_s = conversation.oldest_unanswered_s()
            if oldest_s is not None and oldest_s < lost_s:
                self._give_up(address)

    def _give_up(self, address: str) -> None:
        self._planner.lose(address)
        stream = self._streams.pop(address, None)
        if stream is not None:
            stream.end()


CONNECT_TIMEOUT_S: Final = 1.0
"""Longest duration of a connection attempt, in seconds: a host that drops packets must not block
retries."""

SETTLED_S: Final = 1.0
"""A stream that ends before this many seconds counts as a failed attempt. So a server that refuses
each stream immediately is not called ten times a second."""

_AWAY: Final = frozenset({pb.PHASE_STARTING, pb.PHASE_DRAINING})


def check_usable(
    address: str, info: pb.GetServerInfoResponse, vocabulary: Agreement | None
) -> None:
    """Check that a service opens sessions and has the required vocabulary.

    Raises:
        DrafterUnavailableError: the service is starting, or about to shut down.
        VocabularyMismatchError: the service has another vocabulary.
    """
    if info.phase in _AWAY:
        phase = pb.Phase.Name(info.phase).removeprefix("PHASE_").lower()
        raise DrafterUnavailableError(f"the service is {phase}: it opens no sessions now")
    if vocabulary is not None:
        vocabulary.check(address, info.vocabulary_fingerprint)


_TO_MEND: Final = (AccessRefusedError, CredentialsError, VocabularyMismatchError)
"""Errors that a person has to fix before there are drafts."""


class OutageLog:
    """Logs why there is no stream to a service; errors that a person has to fix become one warning.

    When a token is rotated, a stream that was opened with the old token is refused, and the next
    attempt sends the new token. So only a second refusal in a row becomes a warning.

    Args:
        address: address of the service.
    """

    def __init__(self, address: str) -> None:
        self._address = address
        self._told = self._seen = ""
        self._is_out = False

    def note(self, error: Exception) -> None:
        """Log an error of a connection attempt or a stream."""
        reason = error_of(error, self._address) if isinstance(error, grpc.RpcError) else error
        text = str(reason)
        is_again, self._seen, self._is_out = text == self._seen, text, True
        if isinstance(reason, _TO_MEND) and is_again and text != self._told:
            self._told = text
            _log.warning("no drafts from %s: %s", self._address, text)
        else:
            _log.info("no draft service at %s: %s", self._address, text)

    def connected(self) -> None:
        """Note that there is a stream."""
        if self._is_out:
            self._is_out = False
            _log.info("drafts from %s again", self._address)

    def end(self) -> None:
        """Note that a stream has lasted for some time."""
        self._told = self._seen = ""


OpenChannel = Callable[[str], grpc.Channel]
"""Opens a channel to an address, with credentials if there are any."""

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
    """One stream; sending never blocks.

    Args:
        channel: channel to the server.
        report: called with every response, in order, in gRPC's receiving thread. Handing it to
            another thread would take a third of a step's time.
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
        """Send a message; dropped if the stream has ended."""
        self._outbox.put(message)

    def end(self) -> None:
        """End the stream."""
        self._outbox.put(None)
        self._call.cancel()

    def read(self) -> None:
        """Receive responses until the stream ends.

        Raises:
            grpc.RpcError: the stream has ended with an error.
        """
        deque(self._call, maxlen=0)

    def _receive(self, data: bytes) -> pb.DraftStreamResponse:
        response = pb.DraftStreamResponse.FromString(data)
        self._report(response)
        return response


class Link:
    """Keeps a stream to one server open, in its own thread.

    Args:
        address: address of the server.
        open_channel: opens a channel to the server.
        vocabulary: vocabulary that the server must have; None to accept any.
        report: called with every event, in order, in threads of the link and of gRPC.
    """

    def __init__(
        self,
        address: str,
        open_channel: OpenChannel,
        vocabulary: Agreement | None,
        report: Callable[[LinkEvent], None],
    ) -> None:
        self._address = address
        self._open_channel = open_channel
        self._vocabulary = vocabulary
        self._report = report
        self._is_shut_down = Event()
        self._stream: LinkStream | None = None
        self._thread = Thread(target=self._run, name="foredraft-link", daemon=True)
        self._thread.start()

    def shut_down(self) -> None:
        """End the stream and the thread; does not block."""
        self._is_shut_down.set()
        stream = self._stream
        if stream is not None:
            stream.end()

    def join(self, timeout_s: float) -> None:
        """Wait for the thread to end."""
        self._thread.join(timeout_s)

    def _run(self) -> None:
        backoff, outage = Backoff(), OutageLog(self._address)
        while not self._is_shut_down.is_set():
            try:
                with closing(self._open_channel(self._address)) as channel:
                    asking = pb.GetServerInfoRequest()
                    stub = RetrieverServiceStub(channel)
                    info = stub.GetServerInfo(asking, timeout=CONNECT_TIMEOUT_S)
                    check_usable(self._address, info, self._vocabulary)
                    outage.connected()
                    began_s = time.monotonic()
                    try:
                        self._converse(channel)
                    finally:
                        if time.monotonic() - began_s > SETTLED_S:
                            backoff.succeed()
                            outage.end()
            except (grpc.RpcError, RetrieverError) as error:
                if not self._is_shut_down.is_set():
                    outage.note(error)
            self._is_shut_down.wait(backoff.fail())

    def _converse(self, channel: grpc.Channel) -> None:
        def receive(response: pb.DraftStreamResponse) -> None:
            self._report(LinkEvent(self._address, response=response))

        stream = self._stream = LinkStream(channel, receive)
        self._report(LinkEvent(self._address, stream))
        if self._is_shut_down.is_set():
            stream.end()
        try:
            stream.read()
        finally:
            self._stream = None
            stream.end()
            self._report(LinkEvent(self._address))
