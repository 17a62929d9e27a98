"""The asyncio client that never makes decoding fail; runs on the event loop of its first call."""

import asyncio
import math
import os
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import closing, suppress
from logging import getLogger
from typing import Any, ClassVar, Final, Self, TypeVar

import grpc
from grpc import aio
from numpy.typing import ArrayLike

from retriever.backoff import Backoff
from retriever.client.credentials import Credentials
from retriever.client.planner import Agreement
from retriever.client.resilient import FailOpenClient, Waits
from retriever.client.streams import (
    CONNECT_TIMEOUT_S,
    SETTLED_S,
    LinkEvent,
    OutageLog,
    check_usable,
)
from retriever.drafter import (
    DEFAULT,
    DraftRequest,
    Prediction,
    SequenceOptions,
    without_outcomes,
)
from retriever.errors import NotPossibleError, RetrieverError
from retriever.tree import DraftTree
from retriever.v1 import retriever_pb2 as pb
from retriever.v1.retriever_pb2_grpc import RetrieverServiceStub
from retriever.wire.channels import CLIENT_OPTIONS

_log = getLogger(__name__)

_Result = TypeVar("_Result")

_ran_in: Final[set[int]] = set()
"""Ids of the processes in which gRPC ran on an event loop: this process and its ancestors by
fork."""


def remote_async_channel(address: str, credentials: Credentials | None) -> aio.Channel:
    """Open a channel to a service.

    Raises:
        CredentialsError: a file of the credentials cannot be used.
    """
    if credentials is None:
        return aio.insecure_channel(address, options=CLIENT_OPTIONS)
    return credentials.aio_channel(address, CLIENT_OPTIONS)


class AsyncLinkStream:
    """One stream; sending never blocks."""

    def __init__(self, channel: aio.Channel) -> None:
        self._outbox: asyncio.Queue[pb.DraftStreamRequest | None] = asyncio.Queue()
        stub: Any = RetrieverServiceStub(channel)
        self.call: Any = stub.DraftStream(self._messages())

    def send(self, message: pb.DraftStreamRequest) -> None:
        """Send a message; dropped if the stream has ended."""
        self._outbox.put_nowait(message)

    def end(self) -> None:
        """End the stream."""
        self._outbox.put_nowait(None)
        self.call.cancel()

    async def _messages(self) -> AsyncIterator[pb.DraftStreamRequest]:
        while (message := await self._outbox.get()) is not None:
            yield message


class AsyncLink:
    """Keeps a stream to one server open, in its own task; see `Link`.

    Args:
        address: address of the server.
        open_channel: opens a channel to the server.
        vocabulary: vocabulary that the server must have; None to accept any.
        report: called with every event, in order.
    """

    def __init__(
        self,
        address: str,
        open_channel: Callable[[str], aio.Channel],
        vocabulary: Agreement | None,
        report: Callable[[LinkEvent], None],
    ) -> None:
        self._address = address
        self._open_channel = open_channel
        self._vocabulary = vocabulary
        self._report = report
        self._task = asyncio.create_task(self._run(), name="foredraft-link")

    async def shut_down(self) -> None:
        """End the stream and the task."""
        self._task.cancel()
        await asyncio.wait([self._task])

    async def _run(self) -> None:
        backoff, outage = Backoff(), OutageLog(self._address)
        while True:
            try:
                async with self._open_channel(self._address) as channel:
                    stub: Any = RetrieverServiceStub(channel)
                    asking = pb.GetServerInfoRequest()
                    info = await stub.GetServerInfo(asking, timeout=CONNECT_TIMEOUT_S)
                    check_usable(self._address, info, self._vocabulary)
                    outage.connected()
                    began_s = time.monotonic()
                    try:
                        await self._converse(channel)
                    finally:
                        if time.monotonic() - began_s > SETTLED_S:
                            backoff.succeed()
                            outage.end()
            except (grpc.RpcError, RetrieverError) as error:
                outage.note(error)
            except asyncio.CancelledError:
                # gRPC raises the same error for a cancelled call as asyncio does for a cancelled
                # task.
                if (task := asyncio.current_task()) is None or task.cancelling():
                    raise
            await asyncio.sleep(backoff.fail())

    async def _converse(self, channel: aio.Channel) -> None:
        stream = AsyncLinkStream(channel)
        self._report(LinkEvent(self._address, stream))
        try:
            async for response in stream.call:
                self._report(LinkEvent(self._address, response=response))
        finally:
            stream.end()
            self._report(LinkEvent(self._address))


class AsyncResilientDrafter(FailOpenClient):
    """`ResilientDrafter` for asyncio: drafts from services and never fails because of them.

    Several coroutines may draft at the same time, each for its own sequences. `local` runs on the
    event loop. If such a drafter ran before a fork, the child process cannot use one: its first
    call raises `NotPossibleError`.

    Args: as for `ResilientDrafter`.

    Raises:
        CredentialsError: a file of the credentials cannot be used.
        InvalidRequestError: there is no address, or a duplicate.
    """

    _remote_channel: ClassVar[Callable[..., Any]] = staticmethod(remote_async_channel)

    def _begin_in_process(self) -> None:
        super()._begin_in_process()
        self._links: list[AsyncLink] = []

    async def wait(self, timeout_s: float) -> bool:
        """Wait until every server is connected; return whether all are."""
        self._start()
        return await self._do(self._connecting(time.monotonic() + timeout_s))

    async def open(
        self,
        session: str,
        prompt: ArrayLike,
        options: SequenceOptions = DEFAULT,
    ) -> None:
        """Begin a sequence; see `Drafter.open`.

        Servers learn of the sequence with its first step.
        """
        self._start()
        self._planner.open(session, prompt, options)

    async def add_predictions(self, session: str, predictions: Sequence[Prediction]) -> None:
        """Add predictions of a sequence; see `EmbeddedDrafter.add_predictions`.

        The server gets them with the next step, and again whenever the session is reopened.
        """
        self._start()
        self._planner.add_predictions(session, predictions)

    async def draft(self, requests: Sequence[DraftRequest]) -> list[DraftTree]:
        """Commit new tokens and draft for each sequence; see `Drafter.draft`.

        Only faulty requests raise an error; an unreachable server never does.
        """
        self._start()
        deadline_s = self._pace.begin(time.monotonic())
        return await self._do(self._drafting(without_outcomes(requests), deadline_s))

    async def draft_ahead(
        self, requests: Sequence[DraftRequest], timeout_s: float = math.inf
    ) -> list[list[DraftTree]]:
        """Commit new tokens and draft for possible outcomes; see `ResilientDrafter.draft_ahead`."""
        self._start()
        deadline_s = self._pace.ahead(time.monotonic(), timeout_s)
        return await self._do(self._drafting_ahead(requests, deadline_s))

    async def close(
        self, session: str, new_tokens: ArrayLike | None = None, *, remember: bool = True
    ) -> None:
        """End a sequence; see `Drafter.close`. The server gets the close with the next message.

        Args:
            session: name that it was opened with.
            new_tokens: integers[n], tokens committed since its last request.
            remember: false to store nothing of the sequence; overrides the value given to `open`.
        """
        self._start()
        self._planner.close(session, new_tokens, remember=remember)
        self._streams.tell_rest()

    async def shut_down(self, timeout_s: float = 1.0) -> None:
        """Send pending closes and outputs, and disconnect.

        Args:
            timeout_s: longest wait for the servers, in seconds.
        """
        self._start()
        await self._do(self._ending(time.monotonic() + timeout_s))
        links, self._links = self._links, []
        for link in links:
            await link.shut_down()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.shut_down()

    def _start(self) -> None:
        """Connect at the first call.

        Raises:
            NotPossibleError: this process was forked from one in which gRPC ran on an event loop.
        """
        if _ran_in and os.getpid() not in _ran_in:
            raise NotPossibleError(
                "gRPC ran on an event loop before this process was forked, and cannot run on "
                "one here: start processes by spawn (multiprocessing.get_context('spawn')), or use "
                "ResilientDrafter"
            )
        _ran_in.add(os.getpid())
        if not self._links:
            self._changed = asyncio.Event()
            self._links = [
                AsyncLink(address, self._open_channel, self._planner.vocabulary, self._take)
                for address in self._planner.conversations
            ]

    async def _do(self, work: Waits[_Result]) -> _Result:
        """Do work, and await link events during its waits; close the work if this is cancelled."""
        with closing(work):
            while True:
                try:
                    is_done, until_s = next(work)
                except StopIteration as done:
                    result: _Result = done.value
                    return result
                with suppress(TimeoutError):
                    while not is_done() and (left_s := until_s - time.monotonic()) > 0:
                        async with asyncio.timeout(left_s):
                            await self._changed.wait()

    def _take(self, event: LinkEvent) -> None:
        """Process a link event and wake all waiting calls."""
        self._streams.note(event)
        if event.stream is not None:
            self._streams.tell_rest()
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()
