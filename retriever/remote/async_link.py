"""The link to one server on an event loop: a task that connects, reads, and connects again."""

import asyncio
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from logging import getLogger
from typing import Any

import grpc
from grpc import aio

from retriever.errors import CredentialsError
from retriever.remote.backoff import Backoff
from retriever.remote.credentials import Credentials
from retriever.remote.link import CONNECT_TIMEOUT_S
from retriever.v1 import retriever_pb2 as pb
from retriever.v1.retriever_pb2_grpc import RetrieverServiceStub
from retriever.wire import CLIENT_OPTIONS

OpenAsyncChannel = Callable[[str], aio.Channel]
"""Opens a channel to an address: with its credentials, if there are any."""

_log = getLogger(__name__)


def remote_async_channel(address: str, credentials: Credentials | None) -> aio.Channel:
    """Open a channel to a service.

    Raises:
        CredentialsError: a file of the credentials cannot be used.
    """
    if credentials is None:
        return aio.insecure_channel(address, options=CLIENT_OPTIONS)
    return credentials.aio_channel(address, CLIENT_OPTIONS)


class AsyncLinkStream:
    """One stream: sending never waits."""

    def __init__(self, channel: aio.Channel) -> None:
        self._outbox: asyncio.Queue[pb.DraftStreamRequest | None] = asyncio.Queue()
        stub: Any = RetrieverServiceStub(channel)
        self.call: Any = stub.DraftStream(self._messages())

    def send(self, message: pb.DraftStreamRequest) -> None:
        """Send a message, at once or never."""
        self._outbox.put_nowait(message)

    def end(self) -> None:
        """End the stream."""
        self._outbox.put_nowait(None)
        self.call.cancel()

    async def _messages(self) -> AsyncIterator[pb.DraftStreamRequest]:
        while (message := await self._outbox.get()) is not None:
            yield message


@dataclass(frozen=True, slots=True)
class AsyncLinkEvent:
    """What a link reports; see `LinkEvent`."""

    address: str
    stream: AsyncLinkStream | None = None
    response: pb.DraftStreamResponse | None = None


class AsyncLink:
    """Keeps a stream to one server, in a task of its own; see `Link`.

    Args:
        address: of the server.
        open_channel: makes its channel.
        report: called with all that happens, in order.
    """

    def __init__(
        self,
        address: str,
        open_channel: OpenAsyncChannel,
        report: Callable[[AsyncLinkEvent], None],
    ) -> None:
        self._address = address
        self._open_channel = open_channel
        self._report = report
        self._task = asyncio.create_task(self._run(), name="foredraft-link")

    async def shut_down(self) -> None:
        """End the stream and the task."""
        self._task.cancel()
        await asyncio.wait([self._task])

    async def _run(self) -> None:
        backoff = Backoff()
        while True:
            try:
                async with self._open_channel(self._address) as channel:
                    stub: Any = RetrieverServiceStub(channel)
                    await stub.ListIndexes(pb.ListIndexesRequest(), timeout=CONNECT_TIMEOUT_S)
                    backoff.reset()
                    await self._converse(channel)
            except (grpc.RpcError, CredentialsError) as error:
                _log.info("no draft service at %s: %s", self._address, error)
            except asyncio.CancelledError:
                # A call that was cancelled says so with the very error of a task that is.
                if (task := asyncio.current_task()) is None or task.cancelling():
                    raise
            await asyncio.sleep(backoff.next_pause_s())

    async def _converse(self, channel: aio.Channel) -> None:
        stream = AsyncLinkStream(channel)
        self._report(AsyncLinkEvent(self._address, stream))
        try:
            async for response in stream.call:
                self._report(AsyncLinkEvent(self._address, response=response))
        finally:
            stream.end()
            self._report(AsyncLinkEvent(self._address))
