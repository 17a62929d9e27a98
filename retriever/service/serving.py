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
from retriever.errors import AddressInUseError
from retriever.operations.logs import log_event
from retriever.operations.operator import Operator
from retriever.service.listening import UNIX, check_address
from retriever.service.servicer import RetrieverServicer
from retriever.v1 import retriever_pb2_grpc as pb_grpc

DEFAULT_DRAIN_S: Final = 10.0

_GRACE_S: Final = 0.5
_SERVER_OPTIONS: Final = (*wire.CHANNEL_OPTIONS, ("grpc.so_reuseport", 0))

_logger = logging.getLogger(__name__)


async def start(
    drafter: EmbeddedDrafter, address: str, operator: Operator | None = None
) -> tuple[aio.Server, str]:
    """Start serving. Until the drafter is warm, calls are refused and health says so.

    Args:
        drafter: what answers; warmed here, so that the first draft waits for no compiler.
        address: `host:port` (port 0: a free one), or `unix:/path`.
        operator: what looks after the service.

    Returns:
        The running server, and the address that it listens on.

    Raises:
        AddressInUseError: the address is taken or cannot be bound.
    """
    check_address(address)
    operator = operator or Operator()
    server = aio.server(options=_SERVER_OPTIONS, interceptors=operator.interceptors)
    pb_grpc.add_RetrieverServiceServicer_to_server(RetrieverServicer(drafter), server)
    await operator.attach(server)
    try:
        port = server.add_insecure_port(address)
    except RuntimeError as error:
        raise AddressInUseError(
            f"cannot listen on {address}: it is taken or not an address of this machine; "
            "choose another with --address"
        ) from error
    await server.start()
    await asyncio.to_thread(drafter.warm)
    await operator.lifecycle.become_ready()
    if address.startswith(UNIX):
        return server, address
    return server, f"{address.rpartition(':')[0]}:{port}"


async def serve(
    drafter: EmbeddedDrafter,
    address: str,
    operator: Operator | None = None,
    drain_s: float = DEFAULT_DRAIN_S,
) -> None:
    """Serve until SIGINT or SIGTERM, and then as long as sessions go on, but within `drain_s`.

    A second signal ends the process at once, with 128 and the signal's number as its status. What
    is on disk is then as after `kill -9`: whole.

    Raises:
        AddressInUseError: the address is taken or cannot be bound.
    """
    operator = operator or Operator()
    stopped = asyncio.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, partial(_stop, stopped, number))
    server, bound = await start(drafter, address, operator)
    print(f"serving on {bound}", flush=True)  # noqa: T201  (says when it is ready, and where)
    log_event(_logger, logging.INFO, "serving", "ready", address=bound)
    await stopped.wait()
    log_event(_logger, logging.INFO, "draining", "no new sessions", sessions=drafter.num_sessions)
    await operator.lifecycle.drain(lambda: operator.is_idle(drafter), drain_s)
    left = drafter.num_sessions
    await server.stop(_GRACE_S)
    log_event(_logger, logging.INFO, "ended", "ended", sessions_left=left)


def _stop(stopped: asyncio.Event, signal_number: int) -> None:
    if stopped.is_set():
        os._exit(128 + signal_number)
    stopped.set()
