"""How a service starts, and how it ends."""

import asyncio
import signal
from typing import Final

from grpc import aio

from retriever import wire
from retriever.embedded import EmbeddedDrafter
from retriever.errors import AddressInUseError
from retriever.service.listening import UNIX, check_address
from retriever.service.servicer import RetrieverServicer
from retriever.service.sweeping import sweeping
from retriever.v1 import retriever_pb2_grpc as pb_grpc

_GRACE_S: Final = 2.0


async def start(drafter: EmbeddedDrafter, address: str) -> tuple[aio.Server, str]:
    """Start serving.

    Args:
        drafter: what answers; warmed here, so that the first draft waits for no compiler.
        address: `host:port` (port 0: a free one), or `unix:/path`.

    Returns:
        The running server, and the address that it listens on.

    Raises:
        AddressInUseError: the address is taken or cannot be bound.
    """
    check_address(address)
    drafter.warm()
    server = aio.server(options=wire.server_options(drafter.limits))
    pb_grpc.add_RetrieverServiceServicer_to_server(RetrieverServicer(drafter), server)
    try:
        port = server.add_insecure_port(address)
    except RuntimeError as error:
        raise AddressInUseError(
            f"cannot listen on {address}: it is taken or not an address of this machine; "
            "choose another with --address"
        ) from error
    await server.start()
    if address.startswith(UNIX):
        return server, address
    return server, f"{address.rpartition(':')[0]}:{port}"


async def serve(drafter: EmbeddedDrafter, address: str) -> None:
    """Serve until SIGINT or SIGTERM; calls under way get two seconds to end.

    Raises:
        AddressInUseError: the address is taken or cannot be bound.
    """
    stopped = asyncio.Event()
    for signal_number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(signal_number, stopped.set)
    server, bound = await start(drafter, address)
    print(f"serving on {bound}", flush=True)  # noqa: T201  (says when it is ready, and where)
    async with sweeping(drafter):
        await stopped.wait()
    await server.stop(_GRACE_S)
