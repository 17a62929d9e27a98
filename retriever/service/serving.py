"""How a service starts, and how it ends."""

import asyncio
import logging
import os
import signal
from functools import partial
from typing import Final

from grpc import aio

from retriever import wire
from retriever.embedded import EmbeddedDrafter
from retriever.operations.logs import log_event
from retriever.operations.operator import Operator
from retriever.security.admission import Admission
from retriever.security.protection import NO_PROTECTION, Protection
from retriever.service.listening import UNIX, check_address, listen
from retriever.service.memory import settle
from retriever.service.reading import Reading
from retriever.service.servicer import RetrieverServicer
from retriever.service.sweeping import sweeping
from retriever.v1 import retriever_pb2_grpc as pb_grpc

DEFAULT_DRAIN_S: Final = 10.0

_GRACE_S: Final = 0.5

_logger = logging.getLogger(__name__)


async def start(
    drafter: EmbeddedDrafter,
    address: str,
    operator: Operator | None = None,
    protection: Protection = NO_PROTECTION,
    *,
    pad_replies: bool = False,
) -> tuple[aio.Server, str]:
    """Start serving. Until the drafter is warm, calls are refused and health says so.

    Args:
        drafter: what answers; warmed here, so that the first draft waits for no compiler.
        address: `host:port` (port 0: a free one), or `unix:/path`.
        operator: what looks after the service.
        protection: who is let in, and how connections are encrypted.
        pad_replies: whether drafts are padded, so that their sizes tell nothing of them.

    Returns:
        The running server, and the address that it listens on.

    Raises:
        AddressInUseError: the address is taken or cannot be bound.
        InsecureAddressError: others reach the address, and it is not protected.
    """
    check_address(address)
    protection.check(address)
    operator = operator or Operator()
    interceptors = [*operator.interceptors, Reading()]
    if protection.doorkeeper is not None:
        interceptors.insert(1, Admission(protection.doorkeeper))
    options = wire.server_options(drafter.limits)
    server = aio.server(interceptors=interceptors, options=options)
    servicer = RetrieverServicer(drafter, pad_replies=pad_replies)
    pb_grpc.add_RetrieverServiceServicer_to_server(servicer, server)
    await operator.attach(server)
    port = listen(server, address, protection.tls)
    await server.start()
    await asyncio.to_thread(drafter.warm)
    await operator.lifecycle.become_ready()
    if address.startswith(UNIX):
        return server, address
    return server, f"{address.rpartition(':')[0]}:{port}"


async def serve(  # noqa: PLR0913  (what a service consists of)
    drafter: EmbeddedDrafter,
    address: str,
    operator: Operator | None = None,
    protection: Protection = NO_PROTECTION,
    *,
    pad_replies: bool = False,
    drain_s: float = DEFAULT_DRAIN_S,
) -> None:
    """Serve until SIGINT or SIGTERM, and then as long as sessions go on, but within `drain_s`.

    A second signal ends the process at once, with 128 and the signal's number as its status. What
    is on disk is then as after `kill -9`: whole.

    Raises:
        AddressInUseError: the address is taken or cannot be bound.
        InsecureAddressError: others reach the address, and it is not protected.
    """
    operator = operator or Operator()
    stopped = asyncio.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, partial(_stop, stopped, number))
    server, bound = await start(drafter, address, operator, protection, pad_replies=pad_replies)
    settle()
    watching = asyncio.create_task(protection.watch())
    print(f"serving on {bound}", flush=True)  # noqa: T201  (says when it is ready, and where)
    log_event(_logger, logging.INFO, "serving", "ready", address=bound)
    async with sweeping(drafter):
        await stopped.wait()
        await _drain(drafter, operator, drain_s)
    watching.cancel()
    left = drafter.num_sessions
    await server.stop(_GRACE_S)
    log_event(_logger, logging.INFO, "ended", "ended", sessions_left=left)


async def _drain(drafter: EmbeddedDrafter, operator: Operator, drain_s: float) -> None:
    sessions = drafter.num_sessions
    log_event(_logger, logging.INFO, "draining", "no new sessions", sessions=sessions)
    await operator.lifecycle.drain(lambda: operator.is_idle(drafter), drain_s)


def _stop(stopped: asyncio.Event, signal_number: int) -> None:
    if stopped.is_set():
        os._exit(128 + signal_number)
    stopped.set()
