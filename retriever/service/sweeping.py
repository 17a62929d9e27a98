"""Ending sessions that nobody asks for any longer."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from typing import Final

from retriever.embedded import EmbeddedDrafter

_LONGEST_PERIOD_S: Final = 60.0


@asynccontextmanager
async def sweeping(drafter: EmbeddedDrafter) -> AsyncIterator[None]:
    """End idle sessions during the block, each at most a tenth of its time too late."""
    period_s = min(drafter.limits.idle_session_s / 10, _LONGEST_PERIOD_S)
    task = asyncio.create_task(_sweep(drafter, period_s))
    try:
        yield
    finally:
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task


async def _sweep(drafter: EmbeddedDrafter, period_s: float) -> None:
    while True:
        await asyncio.sleep(period_s)
        drafter.end_idle()
