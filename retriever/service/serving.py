"""How a service starts, and how it ends."""

import asyncio
import signal
from typing import Final

from grpc import aio

from retriever import wire
from retriever.embedded import EmbeddedDrafter
from retriever.security.admission import Admission
from retriever.security.protection import NO_PROTECTION, Protection
from retriever.service.listening import UNIX, check_address, listen
from retriever.service.reading import Reading
from retriever.service.servicer import RetrieverServicer
from retriever.service.sweeping import sweeping
from retriever.v1 import retriever_pb2_grpc as pb_grpc

_GRACE_S: Final = 2.0
_FOR_ANYBODY: Final = ("/grpc.health.v1.Health/Check", "/grpc.health.v1.Health/Watch")
"""What tells whoever watches over a service that it runs, and nothing else."""


async def start(
    drafter: EmbeddedDrafter,
    address: str,
    protection: Protection = NO_PROTECTION,
    *,
    pad_replies: bool = False,
) -> tuple[aio.Server, str]:
    """Start serving.

    Args:
        drafter: what answers; warmed here, so that the first draft waits for no compiler.
        address: `host:port` (port 0: a free one), or `unix:/path`.
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
    drafter.warm()
    interceptors: list[aio.ServerInterceptor] = [Reading()]
    if protection.doorkeeper is not None:
        interceptors.insert(0, Admission(protection.doorkeeper, _FOR_ANYBODY))
    options = wire.server_options(drafter.limits)
    server = aio.server(interceptors=interceptors, options=options)
    servicer = RetrieverServicer(drafter, pad_replies=pad_replies)
    pb_grpc.add_RetrieverServiceServicer_to_server(servicer, server)
    port = listen(server, address, protection.tls)
    await server.start()
    if address.startswith(UNIX):
        return server, address
    return server, f"{address.rpartition(':')[0]}:{port}"


async def serve(
    drafter: EmbeddedDrafter,
    address: str,
    protection: Protection = NO_PROTECTION,
    *,
    pad_replies: bool = False,
) -> None:
    """Serve until SIGINT or SIGTERM; calls under way get two seconds to end.

    Raises:
        AddressInUseError: the address is taken or cannot be bound.
        InsecureAddressError: others reach the address, and it is not protected.
    """
    stopped = asyncio.Event()
    for signal_number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(signal_number, stopped.set)
    server, bound = await start(drafter, address, protection, pad_replies=pad_replies)
    watching = asyncio.create_task(protection.watch())
    print(f"serving on {bound}", flush=True)  # noqa: T201  (says when it is ready, and where)
    async with sweeping(drafter):
        await stopped.wait()
    watching.cancel()
    await server.stop(_GRACE_S)
