"""The asynchronous client that never fails a decode; on the event loop that first calls it."""

import asyncio
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Self

from numpy.typing import ArrayLike

from retriever.drafter import Drafter, DraftRequest
from retriever.remote.async_link import (
    AsyncLink,
    AsyncLinkEvent,
    AsyncLinkStream,
    OpenAsyncChannel,
    remote_async_channel,
)
from retriever.remote.credentials import Credentials
from retriever.remote.fail_opens import FailOpens
from retriever.remote.local import LocalDrafter
from retriever.remote.pace import Pace
from retriever.remote.planner import Planner
from retriever.remote.switchboard import LOST_AFTER_S, Switchboard
from retriever.tree import DraftTree


class AsyncResilientDrafter:
    """`ResilientDrafter`, awaited: drafts from services and never fails because of them.

    Several coroutines may draft at the same time, each for sequences of its own. What `local` does
    is done on the event loop.

    Args:
        addresses: one address, or several; `host:port` or `unix:/path`.
        deadline_s: longest wait of a step, in seconds; None to take a quarter of what the engine
            itself takes for a step, as measured, from 5 to 20 ms.
        local: what drafts while a server does not; True for a `LocalDrafter`, False for nothing.
        lost_after_s: a stream without an answer for so long is given up, in seconds.
        vocabulary_fingerprint: of the tokenizer at hand; a service for another one is not used.
        credentials: what to show, and whom to trust; None for services that ask for nothing.
        pad_requests: pad messages, so that their size tells little of the sequences; see
            `docs/security.md`.
        open_channel: opens a channel to an address, in the place of one with the credentials.

    Raises:
        CredentialsError: a file of the credentials cannot be used.
        InvalidRequestError: there is no address, or one twice.
    """

    def __init__(  # noqa: PLR0913  (all but the addresses are given by name)
        self,
        addresses: str | Sequence[str],
        *,
        deadline_s: float | None = None,
        local: Drafter | bool = True,
        lost_after_s: float = LOST_AFTER_S,
        vocabulary_fingerprint: str = "",
        credentials: Credentials | None = None,
        pad_requests: bool = False,
        open_channel: OpenAsyncChannel | None = None,
    ) -> None:
        listed = [addresses] if isinstance(addresses, str) else addresses
        beside = local if not isinstance(local, bool) else LocalDrafter() if local else None
        self._planner = Planner(listed, vocabulary_fingerprint, beside, pads=pad_requests)
        self._pace = Pace(deadline_s)
        self._switchboard: Switchboard[AsyncLinkStream] = Switchboard(self._planner, lost_after_s)
        if credentials is not None:
            credentials.check(listed)
        self._open_channel = open_channel or partial(remote_async_channel, credentials=credentials)
        self._links: list[AsyncLink] = []
        self._changed = asyncio.Event()

    @property
    def fail_opens(self) -> FailOpens:
        """How many steps of sequences went on without a server's draft, by reason."""
        return self._planner.fail_opens

    @property
    def deadline_s(self) -> float:
        """How long a step may wait now, in seconds."""
        return self._pace.deadline_s

    def is_up(self, address: str) -> bool:
        """Tell whether a server can be asked, as far as is known."""
        return self._planner.conversations[address].is_up

    async def wait(self, timeout_s: float) -> bool:
        """Wait until every server can be asked; tell whether that is so."""
        self._start()
        conversations = self._planner.conversations.values()
        await self._wait(
            lambda: all(each.is_up for each in conversations), time.monotonic() + timeout_s
        )
        return all(each.is_up for each in conversations)

    async def open(self, session: str, prompt: ArrayLike, *, remember: bool = True) -> None:
        """Begin a sequence; see `Drafter.open`. Servers are told with its first step."""
        self._start()
        self._planner.open(session, prompt, remember=remember)

    async def draft(self, requests: Sequence[DraftRequest]) -> list[DraftTree]:
        """Commit new tokens and draft for each sequence; see `Drafter.draft`.

        Raises only what is the caller's fault; it is never an error that a server is away.
        """
        self._start()
        deadline_s = self._pace.begin(time.monotonic())
        self._switchboard.give_up_lost()
        plan = self._planner.plan(requests, time.monotonic(), deadline_s)
        try:
            self._switchboard.ask(plan)
            await self._wait(lambda: plan.is_done, deadline_s)
        finally:  # even if whoever waits is cancelled
            trees = self._planner.finish(plan)
        self._switchboard.tell_rest()
        self._pace.end(time.monotonic())
        return trees

    async def close(
        self, session: str, new_tokens: ArrayLike | None = None, *, remember: bool = True
    ) -> None:
        """End a sequence; see `Drafter.close`. Its server learns of it soon.

        Args:
            session: the name that it was opened with.
            new_tokens: integers[n], tokens committed since its last request.
            remember: false to keep nothing of it, whatever it was opened with.
        """
        self._start()
        self._planner.close(session, new_tokens, remember=remember)
        self._switchboard.tell_rest()

    async def shut_down(self, timeout_s: float = 1.0) -> None:
        """Tell servers what they are still to be told, and disconnect.

        Args:
            timeout_s: longest wait for them, in seconds.
        """
        self._switchboard.tell_rest()
        conversations = self._planner.conversations.values()
        await self._wait(
            lambda: not any(each.oldest_unanswered_s() for each in conversations),
            time.monotonic() + timeout_s,
        )
        for link in self._links:
            await link.shut_down()
        self._links.clear()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.shut_down()

    def _start(self) -> None:
        """Connect at the first call."""
        self._links = self._links or [
            AsyncLink(address, self._open_channel, self._take)
            for address in self._planner.conversations
        ]

    async def _wait(self, is_done: Callable[[], bool], until_s: float) -> None:
        """Take in what links report until it is done, or time is up."""
        while not is_done() and (left_s := until_s - time.monotonic()) > 0:
            try:
                async with asyncio.timeout(left_s):
                    await self._changed.wait()
            except TimeoutError:
                return

    def _take(self, event: AsyncLinkEvent) -> None:
        """Take in what a link reports; everybody who waits looks whether it was for them."""
        if event.stream is not None:
            self._switchboard.connect(event.address, event.stream)
            self._switchboard.tell_rest()
        elif event.response is None:
            self._switchboard.lose(event.address)
        else:
            self._switchboard.take(event.address, event.response)
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()
