"""Engines that decode batch after batch without a pause, on streams of their own."""

import asyncio
import gc
import time
from collections.abc import Sequence
from functools import partial
from typing import Any, Final

import grpc
from grpc import aio

from benchmarks.serving.soak.caller import BUDGET, TEXT_TOKENS, Caller, keep
from retriever.v1 import retriever_pb2 as pb

WIDTHS: Final = (1, 1, 1, 1, 4, 16)
"""Sequences of an engine's steps: the same for all its life, so that as many are open always."""

_BATCHES: Final = 4


async def run_engines(caller: Caller, num_engines: int) -> None:
    """Decode on so many streams until the end."""
    widths = (WIDTHS[at % len(WIDTHS)] for at in range(num_engines))
    engines = (keep(caller, partial(_engine, width=width)) for width in widths)
    await asyncio.gather(*engines, keep(caller, _collect, 2.0))


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
        end = self._lengths[name] = min(begin + self._rng.randrange(1, 7), TEXT_TOKENS)
        new = self._texts[name][begin:end]
        return pb.SessionStep(session_id=name, new_token_ids=new, length=end, budget_nodes=BUDGET)


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
    """Release connections: cancelled gRPC calls hold them in reference cycles."""
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
