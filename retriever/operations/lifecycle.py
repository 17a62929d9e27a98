"""The life of a service: starting, ready, draining; and what its health says of it."""

import asyncio
from collections.abc import Callable
from enum import Enum
from typing import Final

from grpc import aio
from grpc_health.v1 import health, health_pb2, health_pb2_grpc

from retriever.v1 import retriever_pb2 as pb

SERVICE: Final = pb.DESCRIPTOR.services_by_name["RetrieverService"].full_name
"""The name that health is asked for; the empty name is the whole server."""

_SERVING: Final = health_pb2.HealthCheckResponse.SERVING
_NOT_SERVING: Final = health_pb2.HealthCheckResponse.NOT_SERVING
_LOOK_S: Final = 0.05


class Phase(Enum):
    """Where in its life a service is."""

    STARTING = "starting"
    READY = "ready"
    DRAINING = "draining"


class Lifecycle:
    """The phase of a service, as health checks see it and as calls meet it.

    Attributes:
        phase: the current one.
    """

    def __init__(self) -> None:
        self.phase = Phase.STARTING
        self._health = health.aio.HealthServicer()

    async def attach(self, server: aio.Server) -> None:
        """Answer health checks on a server that has not started: not serving yet."""
        await self._health.set("", _NOT_SERVING)
        await self._health.set(SERVICE, _NOT_SERVING)
        health_pb2_grpc.add_HealthServicer_to_server(self._health, server)

    async def become_ready(self) -> None:
        """Take calls from now on."""
        self.phase = Phase.READY
        await self._health.set("", _SERVING)
        await self._health.set(SERVICE, _SERVING)

    async def drain(self, is_idle: Callable[[], bool], drain_s: float) -> bool:
        """Take no new sessions; wait until nothing is under way, for so many seconds at most.

        Returns:
            Whether nothing was under way in the end.
        """
        self.phase = Phase.DRAINING
        await self._health.enter_graceful_shutdown()
        deadline = asyncio.get_running_loop().time() + drain_s
        # What is under way is counted, and nobody tells when it ends.
        while not is_idle() and asyncio.get_running_loop().time() < deadline:  # noqa: ASYNC110
            await asyncio.sleep(_LOOK_S)
        return is_idle()

    def refusal(self, method: str) -> str | None:
        """Return why a call must not be answered now; None if it may."""
        if self.phase is Phase.STARTING:
            return "the service is starting: its health says when it is ready"
        if self.phase is Phase.DRAINING and method == "OpenSession":
            return "the service is about to end: open the session on another one, or later"
        return None
