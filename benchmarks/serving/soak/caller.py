"""The callers of a soaked service: their common part, and the loop that keeps them calling."""

import asyncio
import random
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from itertools import count
from multiprocessing.synchronize import Event
from typing import Any, Final

import grpc
import numpy as np
from grpc import aio

from benchmarks.serving.soak.board import Board
from retriever.client.credentials import Credentials
from retriever.v1 import retriever_pb2 as pb
from retriever.v1.retriever_pb2_grpc import RetrieverServiceStub
from retriever.wire.channels import CLIENT_OPTIONS

VOCABULARY: Final = 32_000
BUDGET: Final = 16
TEXT_TOKENS: Final = 8192
FULL: Final = grpc.StatusCode.RESOURCE_EXHAUSTED

_TEXTS: Final = 64
_LONG: Final = 6000


@dataclass(frozen=True, slots=True)
class Load:
    """What callers need to know.

    Attributes:
        address: of the service.
        tokens: credentials by tenant: those that engines act for.
        rare: credentials by tenant: those that are asked for now and then.
        max_tenant_sessions: limit of the service.
        until: set once all is to end.
    """

    address: str
    tokens: dict[str, str]
    rare: dict[str, str]
    max_tenant_sessions: int
    until: Event


@dataclass(slots=True)
class Caller:
    """One process of callers.

    Attributes:
        load: what they ask.
        board: where they count.
        rng: what is drawn by lot.
        errors: what came that should not have come.
    """

    load: Load
    board: Board
    rng: random.Random
    texts: list[list[int]]
    errors: Counter[str] = field(default_factory=Counter)
    names: Any = field(default_factory=count)

    @property
    def goes_on(self) -> bool:
        """Whether there is more to ask."""
        return not self.load.until.is_set()

    def name(self) -> str:
        """Return a name that no session has."""
        return f"{self.board.number}/{next(self.names)}"

    def prompt_length(self) -> int:
        """Draw the length of a prompt: a few are long."""
        return _LONG if self.rng.random() < 0.02 else self.rng.randrange(20, 1500)  # noqa: PLR2004

    def text(self) -> list[int]:
        """Draw a text."""
        return self.rng.choice(self.texts)

    def fail(self, what: str) -> None:
        """Count what should not have come."""
        self.errors[what] += 1
        self.board.errors += 1

    @asynccontextmanager
    async def stub(self, token: str) -> AsyncIterator[Any]:
        """Give a connection of its own during the block."""
        async with Credentials(token=token).aio_channel(
            self.load.address, list(CLIENT_OPTIONS)
        ) as channel:
            yield RetrieverServiceStub(channel)


def texts(seed: int) -> list[list[int]]:
    """Return token ids: phrases that recur, and others between them."""
    rng = np.random.default_rng(seed)
    phrases = rng.integers(0, VOCABULARY, (200, 12))
    made = []
    for _ in range(_TEXTS):
        parts = [
            phrases[rng.integers(200)] if rng.random() < 0.8 else rng.integers(0, VOCABULARY, 5)  # noqa: PLR2004
            for _ in range(TEXT_TOKENS // 5)
        ]
        made.append(np.concatenate(parts)[:TEXT_TOKENS].tolist())
    return made


async def keep(
    caller: Caller, act: Callable[[Caller], Awaitable[None]], pause_s: float = 0.0
) -> None:
    """Act again and again; what fails is counted."""
    while caller.goes_on:
        try:
            await act(caller)
        except aio.AioRpcError as error:
            caller.fail(
                f"{getattr(act, '__name__', 'engine')}: {error.code().name}: {error.details()}"
            )
        await asyncio.sleep(pause_s * 2 * caller.rng.random())


async def expect(caller: Caller, answer: Awaitable[Any], *codes: grpc.StatusCode) -> Any:
    """Await an answer that should be one of these statuses."""
    try:
        response = await answer
    except aio.AioRpcError as error:
        if error.code() not in codes:
            raise
        caller.board.refused += 1
        return None
    if codes and grpc.StatusCode.OK not in codes:
        caller.fail(f"not refused: {codes[0].name} was expected")
    return response


def _rare(caller: Caller) -> str:
    return caller.rng.choice(list(caller.load.rare.values()))


async def fill(load: Load, num_tokens: int) -> None:
    """Give every tenant as many generations as are kept of it."""
    own = texts(0)
    for token in [*load.tokens.values(), *load.rare.values()]:
        async with Credentials(token=token).aio_channel(
            load.address, list(CLIENT_OPTIONS)
        ) as open_:
            stub: Any = RetrieverServiceStub(open_)
            for at in range(num_tokens // TEXT_TOKENS + 1):
                name = f"fill/{at}"
                await stub.OpenSession(pb.OpenSessionRequest(session_id=name))
                tokens = own[at % _TEXTS]
                await stub.CloseSession(
                    pb.CloseSessionRequest(session_id=name, new_token_ids=tokens)
                )
