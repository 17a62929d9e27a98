"""Turns: streams are worked on in short slices, so that a long step keeps no other one waiting."""

import asyncio
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

SLICE_S: Final = 0.0005
"""After so much work others have their turn, in seconds; a draft takes a tenth of it."""


class Turns:
    """Lets whoever is ready have a turn, in the order in which they became so.

    The event loop's own queue is that order: who gives way goes to its end.
    """

    def __init__(self) -> None:
        self._num_streams = 0

    @contextmanager
    def taking_part(self) -> Iterator[None]:
        """Count a stream during the block."""
        self._num_streams += 1
        try:
            yield
        finally:
            self._num_streams -= 1

    async def begin(self) -> None:
        """Give way to all that became ready before; a stream alone does not wait."""
        if self._num_streams > 1:
            await asyncio.sleep(0)

    async def give_way(self, began_s: float) -> float:
        """Let others have their turn if the slice that began then is over.

        Returns:
            When the slice that goes on began, by `time.monotonic`.
        """
        now_s = time.monotonic()
        if now_s - began_s < SLICE_S:
            return began_s
        await asyncio.sleep(0)
        return time.monotonic()
