"""The lifecycle of a service: starting, ready, draining; and its health checks."""

import asyncio
from collections.abc import Callable
from enum import Enum
from typing import Final

from grpc import aio
from grpc_health.v1 import health, health_pb2, health_pb2_grpc

from retriever.errors import DrafterUnavailableError, DrainingError
from retriever.v1 import retriever_pb2 as pb

SERVICE: Final = pb.DESCRIPTOR.services_by_name["RetrieverService"].full_name
"""The service name in health checks; the empty name is the whole server."""

_SERVING: Final = health_pb2.HealthCheckResponse.SERVING
_NOT_SERVING: Final = health_pb2.HealthCheckResponse.NOT_SERVING
_ALWAYS: Final = frozenset({"GetServerInfo"})
_BEGINNING: Final = frozenset({"OpenSession", "DraftStream"})
_DRAINING: Final = "the service is about to end: open the session on another one, or later"
_LOOK_S: Final = 0.05  # longest delay of a shutdown after the last session


class Phase(Enum):
    """The phases of a service."""

    STARTING = "starting"
    READY = "ready"
    DRAINING = "draining"


class Lifecycle:
    """The phase of a service, for health checks and for refusing calls.

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
        """Refuse new sessions; wait up to `drain_s` until no work is under way.

        Returns:
            Whether all work has ended.
        """
        self.phase = Phase.DRAINING
        await self._health.enter_graceful_shutdown()
        deadline = asyncio.get_running_loop().time() + drain_s
        # Polled: there is a count of work under way, but no event for its end.
        while not is_idle() and asyncio.get_running_loop().time() < deadline:  # noqa: ASYNC110
            await asyncio.sleep(_LOOK_S)
        return is_idle()

    def refusal(self, method: str) -> DrafterUnavailableError | None:
        """Return why a call must be refused now; None if it may proceed."""
        if method in _ALWAYS:
            return None
        if self.phase is Phase.STARTING:
            return DrafterUnavailableError(
                "the service is starting: its health says when it is ready"
            )
        if self.is_draining and method in _BEGINNING:
            return DrainingError(_DRAINING)
        return None

    def check_opening(self) -> None:
        """Refuse a session that is opened within a stream while the service drains.

        Raises:
            DrainingError: it drains.
        """
        if self.is_draining:
            raise DrainingError(_DRAINING)

    @property
    def is_draining(self) -> bool:
        """Whether the service is about to end."""
        return self.phase is Phase.DRAINING
