"""The asynchronous client against real servers."""

import asyncio
import os
import signal
import time

import numpy as np
import pytest

from retriever.client.asynchronous import AsyncResilientDrafter
from retriever.client.conversation import FailOpen
from retriever.drafter import DraftRequest
from tests.patience import can_be_kept
from tests.retriever.conftest import start_service, stop_service
from tests.retriever.service.decodes import PROMPT, plain

DEADLINE_S = 0.1


async def decode(drafter: AsyncResilientDrafter, session: str, num_tokens: int) -> list[float]:
    """Decode greedily; return how long each step waited."""
    waits_s: list[float] = []
    tokens: list[int] = PROMPT.tolist()
    new: list[int] = []
    await drafter.open(session, PROMPT)
    while len(tokens) < len(PROMPT) + num_tokens:
        request = DraftRequest(session, np.array(new, np.int32), len(tokens), 16)
        began = time.monotonic()
        (tree,) = await drafter.draft([request])
        waits_s.append(time.monotonic() - began)
        written = plain(17, np.array(tokens))[len(tokens) :]
        new = written[: len(tree.follow(np.array(written))) + 1]
        tokens += new
    await drafter.close(session, np.array(new, np.int32))
    assert tokens == plain(len(tokens) - len(PROMPT))
    return waits_s


def test_many_coroutines_draft_over_one_stream(service: str) -> None:
    async def run() -> None:
        async with AsyncResilientDrafter(service, deadline_s=5) as drafter:
            assert await drafter.wait(60)
            done = await asyncio.gather(*(decode(drafter, f"s{at}", 100) for at in range(16)))
            assert not drafter.fail_opens
            assert all(len(waits_s) < 100 for waits_s in done)  # drafts were accepted

    asyncio.run(run())


@pytest.mark.faults
@can_be_kept
def test_paused_and_killed_server_costs_one_wait_each() -> None:
    process, address = start_service("--address", "127.0.0.1:0")

    async def run() -> None:
        async with AsyncResilientDrafter(address, deadline_s=DEADLINE_S) as drafter:
            assert await drafter.wait(60)
            os.kill(process.pid, signal.SIGSTOP)
            waits_s = await decode(drafter, "paused", 300)
            assert max(waits_s) < 1.2 * DEADLINE_S
            assert drafter.fail_opens[FailOpen.TIMEOUT] == 1
            os.kill(process.pid, signal.SIGCONT)
            await asyncio.sleep(0.2)
            failed = drafter.fail_opens.total()
            await decode(drafter, "again", 300)
            assert drafter.fail_opens.total() == failed
            process.kill()
            assert max(await decode(drafter, "killed", 300)) < 1.2 * DEADLINE_S
            assert drafter.fail_opens[FailOpen.DOWN] > 0
            second, _ = start_service("--address", address)
            assert await drafter.wait(60)
            failed = drafter.fail_opens.total()
            await decode(drafter, "restarted", 300)
            assert drafter.fail_opens.total() == failed
        stop_service(second)

    asyncio.run(run())
    process.communicate(timeout=60)
