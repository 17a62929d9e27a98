"""Start and shutdown of a service."""

import asyncio
import ctypes
import gc
import logging
import os
import signal
import sys
from collections.abc import AsyncIterator, Callable, Collection, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from functools import partial
from typing import Any, Final, cast

from grpc import aio

from retriever.limits import MAX_MESSAGE_BYTES
from retriever.operations.lifecycle import HEALTH_METHODS
from retriever.operations.logs import log_event
from retriever.operations.observer import ServiceObserver
from retriever.security.protection import NO_PROTECTION, Protection
from retriever.service.addresses import OWNER_ALONE, UNIX, SocketAccess, check_address, listen
from retriever.service.gate import Gate
from retriever.service.servicer import RetrieverServicer
from retriever.sessions import cold_start
from retriever.sessions.embedded import EmbeddedDrafter
from retriever.sessions.service_face import ServiceFace
from retriever.v1 import retriever_pb2_grpc as pb_grpc
from retriever.wire.channels import server_options

_LIBRARY: Final[Any] = ctypes.CDLL(None) if os.name == "posix" else None
_set_option: Final[Any] = getattr(_LIBRARY, "mallopt", None)
_MMAP_THRESHOLD: Final = -3  # M_MMAP_THRESHOLD of malloc.h
_TRIM_THRESHOLD: Final = -1  # M_TRIM_THRESHOLD
_MOST_ARENAS: Final = -8  # M_ARENA_MAX
_trim: Final[Any] = getattr(_LIBRARY, "malloc_trim", None)
_SWITCH_S: Final = 0.0005


def give_back() -> None:
    """Return free pages to the system with glibc's malloc_trim; takes a few ms.

    Source: malloc_trim(3); since glibc 2.8 it trims all arenas.
    """
    if _trim is not None:
        _trim(0)


def keep_message_memory() -> None:
    """Have glibc reuse the memory of messages for later messages; `give_back` returns it.

    A message of a million tokens is copied twice as it is received. That takes 1 ms into memory
    that was used before and 5 ms into new pages, and all streams wait for it. By default glibc maps
    the first such blocks one by one, and returns free memory at the end of its heap. It also has
    one arena per thread, which returns its pages by separate rules. The change takes effect for
    threads that start later. Source: mallopt(3).
    """
    if _set_option is not None:
        _set_option(_MOST_ARENAS, 1)
        _set_option(_MMAP_THRESHOLD, 2 * MAX_MESSAGE_BYTES)
        _set_option(_TRIM_THRESHOLD, 16 * MAX_MESSAGE_BYTES)


def switch_quickly() -> None:
    """Let threads hold the GIL for at most 0.5 ms while another waits, instead of 5 ms.

    The event loop releases the GIL in every kernel, and waits for it while a pool thread holds it.
    """
    sys.setswitchinterval(_SWITCH_S)


def settle() -> None:
    """Exclude all current objects from garbage collection: they live until the end.

    A full collection takes 75 ms with all modules loaded; without them its time depends only on new
    objects. Source: Python's gc.freeze.
    """
    gc.collect()
    gc.freeze()


_SHORTEST_PERIOD_S: Final = 0.01  # a check takes microseconds
_LONGEST_PERIOD_S: Final = 60.0  # idle sessions are found at most this much too late
_GIVE_BACK_EVERY_S: Final = 5.0
_GIVE_BACK_AFTER_S: Final = 60.0
"""Memory is returned at least this often, even while long messages are being processed. The next
message of 4 MB then takes a thousand new pages of two microseconds each, and all streams wait for
it."""


@asynccontextmanager
async def sweeping(drafter: EmbeddedDrafter, is_busy: Callable[[], bool]) -> AsyncIterator[None]:
    """End idle sessions during the block, at most a tenth of the idle time too late.

    Freed memory is returned to the system regularly.

    Args:
        drafter: drafter of the sessions.
        is_busy: returns whether long messages are being processed.
    """
    tasks = [asyncio.create_task(_sweep(drafter)), asyncio.create_task(_give_back(is_busy))]
    try:
        yield
    finally:
        for task in tasks:
            task.cancel()
            with suppress(asyncio.CancelledError):
                await task


async def _sweep(drafter: EmbeddedDrafter) -> None:
    while True:  # the limit can change
        period_s = min(drafter.limits.idle_session_s / 10, _LONGEST_PERIOD_S)
        await asyncio.sleep(max(period_s, _SHORTEST_PERIOD_S))
        ServiceFace(drafter.state).end_idle()


async def _give_back(is_busy: Callable[[], bool]) -> None:
    waited_s = 0.0
    while True:
        await asyncio.sleep(_GIVE_BACK_EVERY_S)
        waited_s += _GIVE_BACK_EVERY_S
        if waited_s >= _GIVE_BACK_AFTER_S or not is_busy():
            await asyncio.to_thread(give_back)
            waited_s = 0.0


DEFAULT_DRAIN_S: Final = 10.0  # most generations end within this time; supervisors kill later

_GRACE_S: Final = 0.5  # for the last responses of calls

_LOOK_S: Final = 0.2  # interval between checks of the compiler process

_logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class _Listening:
    """A listening server that refuses every call until it has a drafter."""

    server: aio.Server
    servicer: RetrieverServicer
    observer: ServiceObserver
    address: str

    async def open(self, open_drafter: Callable[[], EmbeddedDrafter]) -> EmbeddedDrafter:
        """Open a drafter in another thread, warm it up, and take calls from then on."""
        switch_quickly()
        try:
            await self._ensure_kept(())
            drafter = await asyncio.to_thread(open_drafter)
            await self._ensure_kept(drafter.state.token_widths)
            self.servicer.answer_with(drafter)
            await asyncio.to_thread(drafter.warm)
            await asyncio.to_thread(cold_start.defer_rare)
        except BaseException:
            await self.server.stop(None)
            raise
        await self.observer.lifecycle.become_ready()
        return drafter

    async def _ensure_kept(self, widths: Collection[int]) -> None:
        """Compile kernels in another process, unless they are cached; answer calls meanwhile."""
        if await asyncio.to_thread(cold_start.are_kept, widths):
            return
        await self.observer.lifecycle.begin_compiling()
        log_event(_logger, logging.WARNING, "compiling", "kernels are compiled; no drafts yet")
        process = await asyncio.to_thread(cold_start.begin_compiling, widths)
        try:
            while process.poll() is None:  # noqa: ASYNC110  (the loop has no event for this)
                await asyncio.sleep(_LOOK_S)
        finally:
            process.kill()
        log_event(_logger, logging.INFO, "compiled", "drafts are made from now on")


async def start(
    drafter: EmbeddedDrafter,
    address: str,
    observer: ServiceObserver | None = None,
    protection: Protection = NO_PROTECTION,
    *,
    pad_replies: bool = False,
) -> tuple[aio.Server, str]:
    """Start serving. Until the drafter is warm, calls are refused and health checks say so.

    Args:
        drafter: drafter to serve; warmed up here, so that the first draft does not wait for the
            compiler.
        address: `host:port` (port 0: any free one), or `unix:/path`.
        observer: counts calls and knows the phase.
        protection: authentication of callers and encryption.
        pad_replies: whether drafts are padded to hide their size.

    Returns:
        The running server, and the address that it listens on.

    Raises:
        AddressInUseError: the address is in use or cannot be bound.
        InsecureAddressError: other machines can reach the address, and it is not protected.
    """
    observer = observer or ServiceObserver()
    listening = await _listen(
        drafter.limits.max_message_bytes, address, observer, protection, pad_replies=pad_replies
    )
    await listening.open(lambda: drafter)
    return listening.server, listening.address


async def serve(  # noqa: PLR0913  (what a service consists of)
    open_drafter: Callable[[], EmbeddedDrafter],
    max_message_bytes: int,
    address: str,
    observer: ServiceObserver,
    protection: Protection = NO_PROTECTION,
    *,
    socket_access: SocketAccess = OWNER_ALONE,
    pad_replies: bool = False,
    drain_s: float = DEFAULT_DRAIN_S,
    models: Sequence[str] = (),
) -> None:
    """Serve until SIGINT or SIGTERM, then until sessions have ended, for at most `drain_s`.

    Listens first, so that health checks are answered, then opens the drafter. Outputs of sessions
    that are open at the end are stored. A second signal ends the process immediately with status
    128 plus the signal's number; files stay consistent, as after `kill -9`.

    Args:
        open_drafter: opens the drafter, in another thread; the caller shuts it down.
        max_message_bytes: size of the largest accepted message.
        address: as for `start`.
        observer: counts calls and knows the phase.
        protection: authentication of callers and encryption.
        socket_access: who may connect, if the address is a unix socket.
        pad_replies: whether drafts are padded.
        drain_s: longest wait for open sessions at the end, in seconds.
        models: names of the models that the service drafts for, for `GetServerInfo`.

    Raises:
        AddressInUseError: the address is in use or cannot be bound.
        InsecureAddressError: other machines can reach the address, and it is not protected.
        RetrieverError: the drafter cannot be opened; an IndexerError may also be raised.
    """
    stopped = asyncio.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, partial(_stop, stopped, number))
    listening = await _listen(
        max_message_bytes,
        address,
        observer,
        protection,
        socket_access,
        pad_replies=pad_replies,
        models=models,
    )
    watching = asyncio.create_task(protection.watch(observer.lifecycle.note_credentials))
    telling = asyncio.create_task(_tell_ready(listening, stopped))
    opening = asyncio.create_task(listening.open(open_drafter))
    ending = asyncio.create_task(stopped.wait())
    await asyncio.wait({opening, ending}, return_when=asyncio.FIRST_COMPLETED)
    if not opening.done() and observer.lifecycle.is_compiling:  # there is nothing to store
        for task in (opening, watching, telling):
            task.cancel()
        with suppress(asyncio.CancelledError):
            await opening
        return
    drafter = await opening
    settle()
    await telling
    async with sweeping(drafter, listening.servicer.is_busy):
        await stopped.wait()
        await _drain(drafter, observer, drain_s)
    watching.cancel()
    left = len(drafter.state.sessions)
    remembered = await asyncio.to_thread(ServiceFace(drafter.state).remember_open)
    listening.servicer.streams.end()
    await listening.server.stop(_GRACE_S)
    listening.servicer.close()
    log_event(*(_logger, logging.INFO, "ended", "ended"), sessions_left=left, remembered=remembered)


async def _tell_ready(listening: _Listening, stopped: asyncio.Event) -> None:
    """Report the address once calls are taken, unless the service ends before."""
    await listening.observer.lifecycle.ready()
    if stopped.is_set():
        return
    print(f"serving on {listening.address}", flush=True)  # noqa: T201
    log_event(
        _logger, logging.INFO, "serving", "serving: it takes calls", address=listening.address
    )


async def _listen(  # noqa: PLR0913  (what a service consists of)
    max_message_bytes: int,
    address: str,
    observer: ServiceObserver,
    protection: Protection,
    socket_access: SocketAccess = OWNER_ALONE,
    *,
    pad_replies: bool,
    models: Sequence[str] = (),
) -> _Listening:
    """Start a server without a drafter."""
    keep_message_memory()
    check_address(address)
    protection.check(address)
    gate = Gate(protection.authenticator, observer, HEALTH_METHODS)
    server = aio.server(interceptors=[gate], options=server_options(max_message_bytes))
    servicer = RetrieverServicer(
        pad_replies=pad_replies, lifecycle=observer.lifecycle, models=models
    )
    gate.aside = servicer.aside
    pb_grpc.add_RetrieverServiceServicer_to_server(cast(Any, servicer), server)
    await observer.attach(server)
    port = listen(server, address, protection.tls, socket_access)
    await server.start()
    if not address.startswith(UNIX):
        address = f"{address.rpartition(':')[0]}:{port}"
    return _Listening(server, servicer, observer, address)


async def _drain(drafter: EmbeddedDrafter, observer: ServiceObserver, drain_s: float) -> None:
    sessions = len(drafter.state.sessions)
    log_event(_logger, logging.INFO, "draining", "draining: no new sessions", sessions=sessions)
    await observer.lifecycle.drain(lambda: observer.is_idle(drafter), drain_s)


def _stop(stopped: asyncio.Event, signal_number: int) -> None:
    if stopped.is_set():
        os._exit(128 + signal_number)
    stopped.set()
