"""Attackers of a draft service: one tenant's clients that ask for as much work as they can.

Messages are serialized once and sent as bytes, so that an attacker takes little CPU itself. Each
attack runs while an event is set, in a process of its own.
"""

import asyncio
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from multiprocessing.synchronize import Event
from typing import Any, Final

import grpc
import numpy as np
from grpc import aio

from retriever.v1 import retriever_pb2 as pb
from retriever.wire.channels import server_options
from retriever.wire.reading import MOST_NUMBERS

_SERVICE: Final = "/retriever.v1.RetrieverService/"
_LONG: Final = 1_000_000
_VOCABULARY: Final = 32_000
_NODES: Final = 32
_PAUSED_S: Final = 0.01
_SPUN_S: Final = 0.01  # in which a control takes its share of a core: as long as two drafts' passes


@dataclass(slots=True)
class Tally:
    """What an attacker's calls came to."""

    answered: int = 0
    refused: int = 0
    failed: int = 0


class Attacker:
    """Calls of one tenant.

    Args:
        channel: to the service.
        token: of the tenant.
        go: set while the attack runs.
        tally: counts the calls.
        number: of this attacker among those of its attack; names its sessions.
    """

    def __init__(
        self, channel: aio.Channel, token: str, go: Event, tally: Tally, number: int
    ) -> None:
        self._channel = channel
        self._metadata = (("authorization", f"Bearer {token}"),)
        self._go = go
        self._tally = tally
        self._number = number
        self._rng = np.random.default_rng(number)

    async def repeat(self, once: Callable[[], Awaitable[None]]) -> None:
        """Attack again and again while the event is set."""
        while True:
            if not self._go.is_set():
                await asyncio.sleep(_PAUSED_S)
                continue
            try:
                await once()
            except aio.AioRpcError as error:
                if error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED:
                    self._tally.refused += 1
                    await asyncio.sleep(_PAUSED_S)
                else:
                    self._tally.failed += 1
            else:
                self._tally.answered += 1

    def tokens(self, num: int) -> bytes:
        """Return random token ids, as bytes: a million of them are refused as numbers."""
        return self._rng.integers(0, _VOCABULARY, num, np.int32).tobytes()

    def call(self, method: str, request: bytes) -> Any:
        """Begin a call of bytes."""
        begin: Any = self._channel.unary_unary(_SERVICE + method)
        return begin(request, metadata=self._metadata)

    def bare(self, num_tokens: int) -> Callable[[], Awaitable[None]]:
        """Draft for a bare context."""
        request = pb.DraftRequest(
            context_bytes=self.tokens(num_tokens), budget_nodes=_NODES
        ).SerializeToString()

        async def once() -> None:
            await self.call("Draft", request)

        return once

    def numbers(self) -> Callable[[], Awaitable[None]]:
        """Draft for a context of as many numbers as a message may hold."""
        context = np.frombuffer(self.tokens(MOST_NUMBERS), np.int32).tolist()
        request = pb.DraftRequest(context=context, budget_nodes=_NODES).SerializeToString()

        async def once() -> None:
            await self.call("Draft", request)

        return once

    def abandoned(self) -> Callable[[], Awaitable[None]]:
        """Begin a hundred drafts for long contexts, and cancel them."""
        request = pb.DraftRequest(context_bytes=self.tokens(1 << 16)).SerializeToString()

        async def once() -> None:
            calls = [self.call("Draft", request) for _ in range(100)]
            await asyncio.sleep(0.02)
            for call in calls:
                call.cancel()
            await asyncio.gather(*calls, return_exceptions=True)

        return once

    def explained(self) -> Callable[[], Awaitable[None]]:
        """Have 32 drafts explained at once."""
        request = pb.ExplainRequest(
            context_bytes=self.tokens(2000), budget_nodes=_NODES, max_documents=16
        ).SerializeToString()

        async def once() -> None:
            await asyncio.gather(*[self.call("Explain", request) for _ in range(32)])

        return once

    def sessions(self) -> Callable[[], Awaitable[None]]:
        """Open with a long prompt and close; open with none and close with a long output."""
        name = f"long{self._number}"
        tokens = self.tokens(_LONG)
        opening = pb.OpenSessionRequest(session_id=name, prompt_bytes=tokens).SerializeToString()
        closing = pb.CloseSessionRequest(session_id=name).SerializeToString()
        empty = pb.OpenSessionRequest(session_id=name).SerializeToString()
        long = pb.CloseSessionRequest(session_id=name, new_token_bytes=tokens).SerializeToString()

        async def once() -> None:
            for method, request in (
                ("OpenSession", opening),
                ("CloseSession", closing),
                ("OpenSession", empty),
                ("CloseSession", long),
            ):
                await self.call(method, request)

        return once

    def sessions_in_stream(self) -> Callable[[], Awaitable[None]]:
        """Do the same, and a step of a million tokens, within a stream."""
        name = f"streamed{self._number}"
        tokens = self.tokens(_LONG)
        opening = pb.OpenSessionRequest(session_id=name, prompt_bytes=tokens)
        empty = pb.OpenSessionRequest(session_id=name)
        closing = pb.CloseSessionRequest(session_id=name)
        long = pb.CloseSessionRequest(session_id=name, new_token_bytes=tokens)
        step = pb.SessionStep(
            session_id=name, new_token_bytes=tokens, length=_LONG, budget_nodes=_NODES
        )
        return self.streaming(
            [
                pb.DraftStreamRequest(openings=[opening], closings=[closing]),
                pb.DraftStreamRequest(openings=[empty], closings=[long]),
                pb.DraftStreamRequest(openings=[empty], steps=[step], closings=[closing]),
            ]
        )

    def wide(self, num_sequences: int) -> Callable[[], Awaitable[None]]:
        """Ask for steps of many sequences."""
        names = [f"wide{self._number}-{at}" for at in range(num_sequences)]
        openings = [
            pb.OpenSessionRequest(session_id=name, prompt_bytes=self.tokens(64)) for name in names
        ]
        steps = [pb.SessionStep(session_id=name, length=64, budget_nodes=_NODES) for name in names]
        return self.streaming(
            [pb.DraftStreamRequest(steps=steps)], pb.DraftStreamRequest(openings=openings)
        )

    def streaming(
        self, messages: list[pb.DraftStreamRequest], first: pb.DraftStreamRequest | None = None
    ) -> Callable[[], Awaitable[None]]:
        """Send messages again and again on one stream, after a first one.

        Numbers are put before the bytes of each message: fields may come in any order.
        """
        bodies = [message.SerializeToString() for message in messages]
        number = 0
        stream: Any = None

        async def once() -> None:
            nonlocal number, stream
            if stream is None:
                number = 0
                stream = self._channel.stream_stream(_SERVICE + "DraftStream")(
                    metadata=self._metadata
                )
                if first is not None:
                    await say(first.SerializeToString())
            try:
                for body in bodies:
                    await say(body)
            except aio.AioRpcError:
                stream = None
                raise

        async def say(body: bytes) -> None:
            nonlocal number
            number += 1
            head = pb.DraftStreamRequest(sequence_number=number).SerializeToString()
            await stream.write(head + body)
            response = pb.DraftStreamResponse.FromString(await stream.read())
            self._tally.refused += bool(response.statuses)

        return once


ATTACKS: Final[dict[str, tuple[int, Callable[[Attacker], Callable[[], Awaitable[None]]]]]] = {
    "bare-64k": (4, lambda attacker: attacker.bare(1 << 16)),
    "numbers-64k": (4, Attacker.numbers),
    "bare-1m": (4, lambda attacker: attacker.bare(_LONG)),
    "sessions-1m": (4, Attacker.sessions),
    "streamed-1m": (4, Attacker.sessions_in_stream),
    "explain-32": (1, Attacker.explained),
    "wide-1024": (2, lambda attacker: attacker.wide(1024)),
    "abandoned": (1, Attacker.abandoned),
    "streams-64": (64, lambda attacker: attacker.wide(1)),
}
"""Attacks by name: how many attackers at once, and what each does."""


def attack(kind: str, address: str, token: str, go: Event, outbox: Any) -> None:
    """Run an attack in this process until it is killed.

    Args:
        kind: of `ATTACKS`.
        address: of the service.
        token: of the attacking tenant.
        go: set while it is to run.
        outbox: gets a tally once a second.
    """
    asyncio.run(_attack(kind, address, token, go, outbox))


async def _attack(kind: str, address: str, token: str, go: Event, outbox: Any) -> None:
    number, begin = ATTACKS[kind]
    tally = Tally()
    async with aio.insecure_channel(address, options=server_options(1 << 25)) as channel:
        attackers = [Attacker(channel, token, go, tally, at) for at in range(number)]
        tasks = [asyncio.create_task(each.repeat(begin(each))) for each in attackers]
        outbox.put(tally)
        while True:
            done, _ = await asyncio.wait(tasks, timeout=0.5, return_when="FIRST_COMPLETED")
            for each in done:
                each.result()
            outbox.put(tally)


def spin(share: float, go: Event) -> None:
    """Take a share of one core while the event is set: a control that asks for nothing."""
    while go.wait():
        until_s = time.monotonic() + _SPUN_S * share
        while time.monotonic() < until_s:
            pass
        time.sleep(_SPUN_S * (1.0 - share))
