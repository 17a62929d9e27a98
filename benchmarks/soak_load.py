"""Who asks a service that is soaked: engines without a pause, and callers of every other kind."""

import asyncio
import gc
import random
import sys
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from functools import partial
from itertools import count
from multiprocessing.synchronize import Event
from typing import Any, Final

import grpc
import numpy as np
from grpc import aio

from benchmarks.soak_board import Board
from retriever.drafter import DraftRequest
from retriever.remote.async_resilient import AsyncResilientDrafter
from retriever.remote.credentials import Credentials
from retriever.v1 import retriever_pb2 as pb
from retriever.v1.retriever_pb2_grpc import RetrieverServiceStub
from retriever.wire import CLIENT_OPTIONS

VOCABULARY: Final = 32_000
WIDTHS: Final = (1, 1, 1, 1, 4, 16)
"""Sequences of an engine's steps: the same for all its life, so that as many are open always."""

_BATCHES: Final = 4

_BUDGET: Final = 16
_TEXTS: Final = 64
_TEXT_TOKENS: Final = 8192
_LONG: Final = 6000
_FULL: Final = grpc.StatusCode.RESOURCE_EXHAUSTED


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
            for _ in range(_TEXT_TOKENS // 5)
        ]
        made.append(np.concatenate(parts)[:_TEXT_TOKENS].tolist())
    return made


def call(load: Load, board: Board, num_engines: int, failed: Any) -> None:
    """Run engines, or the other callers where these are none, until the end; report errors."""
    caller = Caller(load, board, random.Random(board.number), texts(board.number))  # noqa: S311
    asyncio.run(_engines(caller, num_engines) if num_engines else _others(caller))
    failed.put(dict(caller.errors))


async def _engines(caller: Caller, num_engines: int) -> None:
    widths = (WIDTHS[at % len(WIDTHS)] for at in range(num_engines))
    engines = (_keep(caller, partial(_engine, width=width)) for width in widths)
    await asyncio.gather(*engines, _keep(caller, _collect, 2.0))


async def _others(caller: Caller) -> None:
    chores = (
        (_visit, 0.2),
        (_refused, 0.2),
        (_bare, 0.2),
        (_delete, 2.0),
        (_delete_tenant, 15.0),
        (_resilient, 2.0),
        (_crowd, 10.0),
    )
    await asyncio.gather(*(_keep(caller, chore, pause_s) for chore, pause_s in chores))


async def _keep(
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


class _Sequences:
    """The sequences of an engine's steps."""

    def __init__(self, caller: Caller, width: int) -> None:
        self.prompts = {caller.name(): caller.prompt_length() for _ in range(width)}
        self._lengths = dict(self.prompts)
        self._texts = {name: caller.text() for name in self.prompts}
        self._rng = caller.rng

    def openings(self) -> list[pb.OpenSessionRequest]:
        """Return what begins them."""
        return [
            pb.OpenSessionRequest(session_id=name, prompt=self._texts[name][:length])
            for name, length in self.prompts.items()
        ]

    def steps(self) -> list[pb.SessionStep]:
        """Return a step of one to six new tokens each."""
        return [self._step(name) for name in self.prompts]

    def closings(self, names: Sequence[str]) -> list[pb.CloseSessionRequest]:
        """Return what ends some of them."""
        return [pb.CloseSessionRequest(session_id=name) for name in names]

    def _step(self, name: str) -> pb.SessionStep:
        begin = self._lengths[name]
        end = self._lengths[name] = min(begin + self._rng.randrange(1, 7), _TEXT_TOKENS)
        new = self._texts[name][begin:end]
        return pb.SessionStep(session_id=name, new_token_ids=new, length=end, budget_nodes=_BUDGET)


async def _engine(caller: Caller, width: int) -> None:
    """One connection, on which several batches are decoded; then it is closed, or dropped."""
    token = caller.rng.choice(list(caller.load.tokens.values()))
    async with caller.stub(token) as stub:
        stream, number = stub.DraftStream(), 0
        for _ in range(_BATCHES):
            if not caller.goes_on:
                break
            number = await _batch(caller, stream, number, width)
        if caller.rng.random() < 0.5:  # noqa: PLR2004
            stream.cancel()
            await stream.code()
        else:
            await stream.done_writing()
            await stream.read()  # its end


async def _batch(caller: Caller, stream: Any, number: int, width: int) -> int:
    """Decode a batch; leave some of its sequences open when it ends."""
    sequences = _Sequences(caller, width)
    num_steps = caller.rng.randrange(20, 300)
    for at in range(num_steps):
        if at and not caller.goes_on:
            break
        number += 1
        message = pb.DraftStreamRequest(
            sequence_number=number,
            openings=sequences.openings() if at == 0 else [],
            steps=sequences.steps(),
        )
        await _timed(caller, stream, message)
    names = [name for name in sequences.prompts if caller.rng.random() < 0.8]  # noqa: PLR2004
    message = pb.DraftStreamRequest(sequence_number=number + 1, closings=sequences.closings(names))
    await _timed(caller, stream, message)
    return number + 1


async def _collect(_: Caller) -> None:
    """Let go of connections: gRPC's calls that were cancelled hold them in cycles."""
    gc.collect()


async def _timed(caller: Caller, stream: Any, message: pb.DraftStreamRequest) -> None:
    began_s = time.perf_counter()
    await stream.write(message)
    answer = await stream.read()
    if answer is aio.EOF:
        caller.fail(f"a stream ended: {await stream.code()}: {await stream.details()}")
        raise aio.AioRpcError(
            await stream.code(), aio.Metadata(), aio.Metadata(), "the stream ended"
        )
    if not message.openings:
        caller.board.add(time.perf_counter() - began_s, len(message.steps))
    for status in answer.statuses:
        caller.fail(f"{grpc.StatusCode(_pair(status.code)).name}: {status.message}")


def _pair(code: int) -> tuple[int, str]:
    return next(each.value for each in grpc.StatusCode if each.value[0] == code)


async def _expect(caller: Caller, answer: Awaitable[Any], *codes: grpc.StatusCode) -> Any:
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


async def _visit(caller: Caller) -> None:
    """A session without a stream, of a tenant that is seldom here: closed, or left to idle."""
    async with caller.stub(_rare(caller)) as stub:
        name, text, length = caller.name(), caller.text(), caller.prompt_length()
        opening = pb.OpenSessionRequest(session_id=name, prompt=text[:length])
        await _expect(caller, stub.OpenSession(opening), grpc.StatusCode.OK, _FULL)
        if caller.rng.random() < 0.5:  # noqa: PLR2004
            closing = pb.CloseSessionRequest(
                session_id=name, new_token_ids=text[length : length + 200]
            )
            gone = grpc.StatusCode.NOT_FOUND
            await _expect(caller, stub.CloseSession(closing), grpc.StatusCode.OK, gone)


async def _refused(caller: Caller) -> None:
    """A request that must be refused, each kind as often."""
    wrong = "fdt_" + "0" * 16 + "_" + "x" * 43
    status = grpc.StatusCode
    requests: list[tuple[str, Any, str, grpc.StatusCode]] = [
        ("Draft", pb.DraftRequest(context=[1], budget_nodes=1 << 20), "", _FULL),
        ("Draft", pb.DraftRequest(context=[1 << 31]), "", status.INVALID_ARGUMENT),
        ("Draft", pb.DraftRequest(vocabulary_fingerprint="x"), "", status.FAILED_PRECONDITION),
        ("OpenSession", pb.OpenSessionRequest(session_id="x" * 300), "", status.INVALID_ARGUMENT),
        ("CloseSession", pb.CloseSessionRequest(session_id="none"), "", status.NOT_FOUND),
        ("ListIndexes", pb.ListIndexesRequest(), wrong, status.UNAUTHENTICATED),
    ]
    method, request, token, code = caller.rng.choice(requests)
    async with caller.stub(token or _rare(caller)) as stub:
        await _expect(caller, getattr(stub, method)(request), code)


async def _bare(caller: Caller) -> None:
    """Drafts for bare contexts, one of them explained."""
    async with caller.stub(_rare(caller)) as stub:
        context = caller.text()[: caller.rng.randrange(1, 400)]
        await _expect(
            caller, stub.Draft(pb.DraftRequest(context=context)), grpc.StatusCode.OK, _FULL
        )
        request = pb.ExplainRequest(context=context, max_documents=2)
        await _expect(caller, stub.Explain(request), grpc.StatusCode.OK, _FULL)
        await _expect(caller, stub.ListIndexes(pb.ListIndexesRequest()))


async def _delete(caller: Caller) -> None:
    """Open, end and delete a session's data: the log is written anew."""
    async with caller.stub(_rare(caller)) as stub:
        name, text = caller.name(), caller.text()
        opening = pb.OpenSessionRequest(session_id=name, prompt=text[:50])
        if await _expect(caller, stub.OpenSession(opening), grpc.StatusCode.OK, _FULL):
            closing = pb.CloseSessionRequest(session_id=name, new_token_ids=text[50:80])
            await stub.CloseSession(closing)
            await stub.DeleteSessionData(pb.DeleteSessionDataRequest(session_id=name))


async def _delete_tenant(caller: Caller) -> None:
    """Delete all that is kept of a tenant, and fill it again."""
    async with caller.stub(_rare(caller)) as stub:
        deletion = stub.DeleteTenantData(pb.DeleteTenantDataRequest())
        await _expect(caller, deletion, grpc.StatusCode.OK, _FULL)
        for _ in range(8):
            opening = pb.OpenSessionRequest(session_id=caller.name())
            closing = pb.CloseSessionRequest(
                session_id=opening.session_id, new_token_ids=caller.text()
            )
            if await _expect(caller, stub.OpenSession(opening), grpc.StatusCode.OK, _FULL):
                await stub.CloseSession(closing)


async def _crowd(caller: Caller) -> None:
    """As many sessions as a tenant may have and one more, left open where their stream ends."""
    async with caller.stub(_rare(caller)) as stub:
        stream, most = stub.DraftStream(), caller.load.max_tenant_sessions
        openings = [
            pb.OpenSessionRequest(session_id=caller.name(), prompt=[1, 2, 3])
            for _ in range(most + 1)
        ]
        await stream.write(pb.DraftStreamRequest(sequence_number=1, openings=openings))
        answer = await stream.read()
        codes = {status.code for status in answer.statuses}
        caller.board.refused += len(answer.statuses)
        if codes != {_FULL.value[0]}:
            caller.fail(f"{most + 1} sessions of one tenant: {codes}")
        await stream.done_writing()
        await stream.read()  # its end


async def _resilient(caller: Caller) -> None:
    """An engine with the client that fails open, for a few steps."""
    tenant = caller.rng.choice(list(caller.load.tokens))
    credentials = Credentials(token=caller.load.tokens[tenant])
    drafter = AsyncResilientDrafter(
        caller.load.address,
        deadline_s=0.5,
        open_channel=lambda address: credentials.aio_channel(address, list(CLIENT_OPTIONS)),
    )
    async with drafter:
        if not await drafter.wait(5):
            caller.fail("a client did not connect")
        text = np.array(caller.text(), np.int32)
        await drafter.open("s", text[:100])
        for at in range(100, 130):
            await drafter.draft([DraftRequest("s", text[at : at + 1], at + 1, _BUDGET)])
        await drafter.close("s")


async def fill(load: Load, num_tokens: int) -> None:
    """Give every tenant as many recent outputs as are kept of it."""
    own = texts(0)
    for token in [*load.tokens.values(), *load.rare.values()]:
        async with Credentials(token=token).aio_channel(
            load.address, list(CLIENT_OPTIONS)
        ) as open_:
            stub: Any = RetrieverServiceStub(open_)
            for at in range(num_tokens // _TEXT_TOKENS + 1):
                name = f"fill/{at}"
                await stub.OpenSession(pb.OpenSessionRequest(session_id=name))
                tokens = own[at % _TEXTS]
                await stub.CloseSession(
                    pb.CloseSessionRequest(session_id=name, new_token_ids=tokens)
                )


def hold(address: str, token: str, num_sessions: int) -> None:
    """Open sessions on a stream, say so, and wait to be killed."""
    with Credentials(token=token).channel(address, list(CLIENT_OPTIONS)) as channel:
        openings = [
            pb.OpenSessionRequest(session_id=f"held/{at}", prompt=list(range(500)))
            for at in range(num_sessions)
        ]
        stream = RetrieverServiceStub(channel).DraftStream(_once(openings))
        next(stream)
        print("held", flush=True)
        time.sleep(60)


def _once(openings: list[pb.OpenSessionRequest]) -> Any:
    yield pb.DraftStreamRequest(sequence_number=1, openings=openings)
    time.sleep(60)


if __name__ == "__main__":
    hold(sys.argv[1], sys.argv[2], int(sys.argv[3]))
