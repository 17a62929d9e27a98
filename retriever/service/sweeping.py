"""Ending sessions that nobody asks for any longer."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from typing import Final

from retriever.embedded import EmbeddedDrafter
from retriever.service.memory import give_back

_LONGEST_PERIOD_S: Final = 60.0
_GIVE_BACK_EVERY_S: Final = 10.0


@asynccontextmanager
async def sweeping(drafter: EmbeddedDrafter) -> AsyncIterator[None]:
    """End idle sessions during the block, each at most a tenth of its time too late.

    What memory they and others leave is given back now and then.
    """
    period_s = min(drafter.limits.idle_session_s / 10, _LONGEST_PERIOD_S)
    tasks = [asyncio.create_task(_sweep(drafter, period_s)), asyncio.create_task(_give_back())]
    try:
        yield
    finally:
        for task in tasks:
            task.cancel()
            with suppress(asyncio.CancelledError):
                await task


async def _sweep(drafter: EmbeddedDrafter, period_s: float) -> None:
    while True:
        await asyncio.sleep(period_s)
        drafter.end_idle()


async def _give_back() -> None:
    while True:
        await asyncio.sleep(_GIVE_BACK_EVERY_S)
        await asyncio.to_thread(give_back)
