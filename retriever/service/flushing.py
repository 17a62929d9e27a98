"""Keeping on disk what ended sequences generated, while drafts go on."""

import asyncio

from retriever.embedded import EmbeddedDrafter


class Flushing:
    """Flushes a drafter in another thread: one flush for all that ended during the last."""

    def __init__(self, drafter: EmbeddedDrafter) -> None:
        self._drafter = drafter
        self._task: asyncio.Task[None] | None = None
        self._is_needed = False

    def request(self) -> None:
        """See to it that what has ended by now is kept soon."""
        self._is_needed = True
        if self._task is None or self._task.done():
            self._task = asyncio.create_task(self._flush())

    async def _flush(self) -> None:
        while self._is_needed:
            self._is_needed = False
            await asyncio.to_thread(self._drafter.flush)
