"""Services in this process, on an event loop in a thread."""

import asyncio
from collections.abc import Coroutine, Iterator
from contextlib import contextmanager
from functools import cache
from threading import Thread
from typing import Any, TypeVar

from retriever.security.protection import NO_PROTECTION, Protection
from retriever.service.serving import start
from retriever.sessions.embedded import EmbeddedDrafter

_Result = TypeVar("_Result")


@contextmanager
def serving(
    drafter: EmbeddedDrafter,
    address: str = "127.0.0.1:0",
    protection: Protection = NO_PROTECTION,
    *,
    pad_replies: bool = False,
) -> Iterator[str]:
    """Serve during the block; give the address."""
    server, bound = on_loop(start(drafter, address, protection=protection, pad_replies=pad_replies))
    try:
        yield bound
    finally:
        on_loop(server.stop(0))


def on_loop(coroutine: Coroutine[Any, Any, _Result]) -> _Result:
    """Return what a coroutine returns on the services' event loop."""
    return asyncio.run_coroutine_threadsafe(coroutine, _loop()).result(60)


@cache
def _loop() -> asyncio.AbstractEventLoop:
    loop = asyncio.new_event_loop()
    Thread(target=loop.run_forever, daemon=True).start()
    return loop
