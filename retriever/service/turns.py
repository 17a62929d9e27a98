"""Turns: streams are worked on in short slices, so that a long step keeps no other one waiting."""

import asyncio
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

SLICE_S: Final = 0.00025
"""After so much work others have their turn, in seconds; a draft takes a fifth of it."""


class Turns:
    """Lets whoever is ready have a turn, in the order in which they became so.

    The event loop's own queue is that order. Of those that give way in the middle of long steps,
    one has a turn each time round the loop, so that short steps pass between any two of them.
    """

    def __init__(self) -> None:
        self._num_streams = 0
        self._giving_way = asyncio.Lock()  # whoever waited longest gets it

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
        async with self._giving_way:
            await asyncio.sleep(0)
        return time.monotonic()
