"""The open streams of a service, which end with a status when the service ends."""

import asyncio
from collections.abc import AsyncIterator
from typing import Any, TypeVar

from retriever.errors import DrainingError

_Message = TypeVar("_Message")


class OpenStreams:
    """Ends streams between two messages, so that no response is cut and no call is cancelled.

    gRPC cancels the remaining streams at shutdown, which a client cannot distinguish from a crash.
    """

    def __init__(self) -> None:
        self._waiting: set[asyncio.Task[Any]] = set()
        self._is_ending = False

    async def until_end(self, messages: AsyncIterator[_Message]) -> AsyncIterator[_Message]:
        """Yield the messages of a stream until the caller or the service ends it.

        Raises:
            DrainingError: the service ends the stream.
        """
        task = asyncio.current_task()
        if task is None:
            raise RuntimeError("a stream is read in a task")
        while not self._is_ending:
            self._waiting.add(task)
            try:
                message = await anext(messages)
            except StopAsyncIteration:
                return
            except asyncio.CancelledError:
                if not self._is_ending or task.uncancel():  # the caller has left as well
                    raise
                break
            finally:
                self._waiting.discard(task)
            yield message
            del message  # a message may be megabytes, and the next may come late
        raise DrainingError("the service ends now: open the sessions on another one, or later")

    def end(self) -> None:
        """End streams that wait for a message immediately, and the others after their response."""
        self._is_ending = True
        for task in self._waiting:
            task.cancel()
