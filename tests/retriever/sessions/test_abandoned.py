"""What a caller leaves behind in the middle of long work: nothing that is locked, nothing held."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import TypeVar

import numpy as np
import pytest

from retriever.errors import LimitExceededError
from retriever.limits import Limits
from retriever.service.draft_stream import DraftStream
from retriever.service.jobs import Jobs
from retriever.sessions.embedded import EmbeddedDrafter
from retriever.sessions.service_face import ServiceFace
from retriever.v1 import retriever_pb2 as pb

LONG = 200_000
TOKENS = (np.arange(LONG) * 7919 % 5000).tolist()
NAMES = ("a", "b", "c")

_Result = TypeVar("_Result")


def scheduled(limits: Limits, run: Callable[[Jobs], Awaitable[_Result]]) -> _Result:
    """Return what something comes to that uses a jobs on one loop."""

    async def alone() -> _Result:
        drafter = EmbeddedDrafter(limits=limits)
        jobs = Jobs(ServiceFace(drafter.state))
        try:
            return await run(jobs)
        finally:
            jobs.close()
            drafter.shut_down()

    return asyncio.run(alone())


async def nothing_is_held(drafter: ServiceFace) -> None:
    """Wait until no memory is charged but that of empty pools."""
    empty = EmbeddedDrafter()
    empty.state.pool("t")
    least = empty.state.census().reserved_bytes
    for _ in range(500):
        held = (await asyncio.to_thread(drafter.state.census)).reserved_bytes
        if held <= least:
            return
        await asyncio.sleep(0.01)
    raise AssertionError(f"{held} bytes are held, {least} by what is empty")


def stepping(number: int, length: int, tokens: list[int]) -> pb.DraftStreamRequest:
    steps = [
        pb.SessionStep(session_id=name, new_token_ids=tokens, length=length, budget_nodes=4)
        for name in NAMES
    ]
    return pb.DraftStreamRequest(sequence_number=number, steps=steps)


@pytest.mark.parametrize("after", range(12))
def test_sessions_can_go_on_after_a_message_was_given_up_within_long_steps(after: int) -> None:
    """Wherever it was: a step is noted as a whole or not at all, and none stays under way."""

    async def run(jobs: Jobs) -> None:
        drafter = jobs.drafter
        with jobs.fair.slot("t", is_stream=True) as slot:
            stream = DraftStream(jobs, "t", slot)
            openings = [pb.OpenSessionRequest(session_id=name, prompt=[1, 2]) for name in NAMES]
            await stream.answer(pb.DraftStreamRequest(sequence_number=1, openings=openings))
            given_up = asyncio.create_task(stream.answer(stepping(2, LONG + 2, TOKENS)))
            for _ in range(after):
                await asyncio.sleep(0.002)
            given_up.cancel()
            await asyncio.gather(given_up, return_exceptions=True)
            was_done = not given_up.cancelled()
            del given_up  # its error holds its frames
            if was_done:
                return
            for name in NAMES:  # a commit that has begun is finished without its caller
                for _ in range(500):
                    # In streams of their own, each with a first message.
                    others = [DraftStream(jobs, "t", slot) for _ in range(2)]
                    lengths = zip(others, (3, LONG + 3), strict=True)
                    taken = [await took(other, name, length) for other, length in lengths]
                    if any(taken):
                        break
                    await asyncio.sleep(0.01)
                assert sum(taken) == 1, name
            stream.close()
        await nothing_is_held(drafter)

    async def took(stream: DraftStream, name: str, length: int) -> bool:
        """Return whether a session takes a step of one token to a length."""
        step = pb.SessionStep(session_id=name, new_token_ids=[7], length=length, budget_nodes=4)
        answer = await stream.answer(pb.DraftStreamRequest(sequence_number=1, steps=[step]))
        return not answer.statuses

    scheduled(Limits(), run)


def test_what_is_refused_or_given_up_holds_no_memory() -> None:
    """Errors hold the frames in which they arose, and those the charges of what they were about."""

    async def run(jobs: Jobs) -> int:
        requests = [pb.DraftRequest(context=TOKENS, budget_nodes=4) for _ in range(20)]
        calls = [asyncio.create_task(draft(jobs, request)) for request in requests]
        await asyncio.sleep(0.02)
        for call in calls[::3]:
            call.cancel()
        came_to = await asyncio.gather(*calls, return_exceptions=True)
        num_refused = sum(isinstance(each, LimitExceededError) for each in came_to)
        del calls, came_to, call
        await nothing_is_held(jobs.drafter)
        return num_refused

    async def draft(jobs: Jobs, request: pb.DraftRequest) -> None:
        with jobs.call("t") as slot:
            await jobs.draft(slot, "t", request, 4)

    room = 40 << 20
    assert scheduled(Limits(max_bytes=room, max_tenant_bytes=room), run) > 0
