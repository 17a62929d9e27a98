"""The lifecycle of a service: starting, ready, draining; and its health checks.

Health checks need no credentials. They accept four names. The whole server (the empty name) and
`retriever.v1.RetrieverService` report whether calls are taken (readiness). `liveness` reports
whether the event loop answers, even while the service starts or drains. `credentials` reports
whether all credential files can be used.

An unusable credential file shows in `credentials` immediately, and in readiness once the grace
period is over. Until then callers are admitted as before; otherwise all services that share the
file would leave their load balancer at the same time. After the grace period this service refuses
every call, so callers should use another service.
"""

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from enum import Enum
from typing import Any, Final

import grpc
from grpc import aio
from grpc_health.v1 import health, health_pb2, health_pb2_grpc

from retriever.errors import DrafterUnavailableError, DrainingError
from retriever.security.protection import FileState
from retriever.v1 import retriever_pb2 as pb

SERVICE: Final = pb.DESCRIPTOR.services_by_name["RetrieverService"].full_name
"""The service name in health checks; the empty name is the whole server."""

MAX_WATCHERS: Final = 256
"""Most concurrent watchers of health: each holds a stream, and anyone may watch."""

LIVENESS: Final = "liveness"
CREDENTIALS: Final = "credentials"

HEALTH_METHODS: Final = frozenset(
    f"/{health.SERVICE_NAME}/{method}" for method in ("Check", "Watch", "List")
)
"""Full names of the calls that take no credentials."""

_SERVING: Final = health_pb2.HealthCheckResponse.SERVING
_NOT_SERVING: Final = health_pb2.HealthCheckResponse.NOT_SERVING
_ALWAYS: Final = frozenset({"GetServerInfo"})
_BEGINNING: Final = frozenset({"OpenSession", "DraftStream"})
_WHILE_COMPILING: Final = frozenset({"Draft", "DraftStream", "Step"})
_DRAINING: Final = "the service is about to end: open the session on another one, or later"
_UNKNOWN: Final = health_pb2.HealthCheckResponse.SERVICE_UNKNOWN
_LOOK_S: Final = 0.05  # longest shutdown delay after the last session


class HealthStatuses(health_pb2_grpc.HealthServicer):
    """Answers health checks.

    Replaces the servicer of grpc_health, which forgets all watchers of a name when one leaves, and
    sets every name to NOT_SERVING when a server drains.

    Attributes:
        statuses: statuses by name.
    """

    def __init__(self) -> None:
        self.statuses: dict[str, Any] = {}
        self._changed = asyncio.Event()
        self._num_watchers = 0

    def show(self, serves: Mapping[str, bool]) -> None:
        """Set the names whose checks report SERVING, and notify watchers."""
        statuses = {name: _SERVING if each else _NOT_SERVING for name, each in serves.items()}
        if statuses != self.statuses:
            self.statuses = statuses
            changed, self._changed = self._changed, asyncio.Event()
            changed.set()

    async def Check(  # noqa: D102, N802  (name from the protocol)
        self, request: health_pb2.HealthCheckRequest, context: Any
    ) -> Any:
        status = self.statuses.get(request.service)
        if status is None:
            known = ", ".join(filter(None, self.statuses))
            await context.abort(
                grpc.StatusCode.NOT_FOUND,
                f"health is known by these names: the empty one, {known}",
            )
        return health_pb2.HealthCheckResponse(status=status)

    async def Watch(  # noqa: D102, N802  (name from the protocol)
        self, request: health_pb2.HealthCheckRequest, context: Any
    ) -> AsyncIterator[Any]:
        if self._num_watchers >= MAX_WATCHERS:
            await context.abort(
                grpc.StatusCode.RESOURCE_EXHAUSTED,
                f"{MAX_WATCHERS} callers are watching already: use Check",
            )
        self._num_watchers += 1
        try:
            last = None
            while True:
                changed, status = self._changed, self.statuses.get(request.service, _UNKNOWN)
                if status != last:
                    yield health_pb2.HealthCheckResponse(status=status)
                last = status
                await changed.wait()
        finally:
            self._num_watchers -= 1

    async def list_all(self, request: bytes, context: Any) -> bytes:
        """Return a HealthListResponse, whose single field maps names to HealthCheckResponse.

        The call is part of the protocol but not of grpc_health yet.
        """
        del request, context
        return b"".join(map(_entry, self.statuses.items()))


def _entry(status: tuple[str, Any]) -> bytes:
    """Return an entry of the map in field 1; the entry's key and value are its fields 1 and 2."""
    name, value = status[0].encode(), health_pb2.HealthCheckResponse(status=status[1])
    content = b"\x0a%c%b" % (len(name), name) + b"\x12\x02" + value.SerializeToString()
    return b"\x0a%c%b" % (len(content), content)


class Phase(Enum):
    """The phases of a service."""

    STARTING = "starting"
    READY = "ready"
    DRAINING = "draining"


class Lifecycle:
    """The phase of a service, for health checks and for refusing calls.

    Attributes:
        phase: current phase.
        is_compiling: whether kernels are being compiled, during which drafts are empty.
        credentials: state of the credential files; empty if there are none.
    """

    def __init__(self) -> None:
        self.phase = Phase.STARTING
        self.is_compiling = False
        self.credentials: Sequence[FileState] = ()
        self._is_up = asyncio.Event()
        self._health = HealthStatuses()
        self._show()

    @property
    def is_ready(self) -> bool:
        """Whether calls are taken; false if a credential file no longer admits anyone."""
        return self.phase is Phase.READY and all(each.admits for each in self.credentials)

    async def attach(self, server: aio.Server) -> None:
        """Answer health checks on a server that has not started; they report not serving."""
        listing: Any = grpc.unary_unary_rpc_method_handler(self._health.list_all)
        handler = grpc.method_handlers_generic_handler(health.SERVICE_NAME, {"List": listing})
        server.add_generic_rpc_handlers((handler,))
        health_pb2_grpc.add_HealthServicer_to_server(self._health, server)

    async def begin_compiling(self) -> None:
        """Answer steps with empty drafts until `become_ready`; other calls are refused."""
        self.is_compiling = True
        self.phase = Phase.READY
        self._is_up.set()
        self._show()

    async def ready(self) -> None:
        """Wait until calls are taken."""
        await self._is_up.wait()

    async def become_ready(self) -> None:
        """Start to take calls."""
        self.is_compiling = False
        self.phase = Phase.READY
        self._is_up.set()
        self._show()

    def note_credentials(self, files: Sequence[FileState]) -> None:
        """Publish the state of the credential files."""
        self.credentials = tuple(files)
        self._show()

    async def drain(self, is_idle: Callable[[], bool], drain_s: float) -> bool:
        """Refuse new sessions; wait up to `drain_s` until no work is in progress.

        Returns:
            Whether all work has ended.
        """
        self.phase = Phase.DRAINING
        self._show()
        deadline = asyncio.get_running_loop().time() + drain_s
        # Polled: there is a count of work in progress, but no event for its end.
        while not is_idle() and asyncio.get_running_loop().time() < deadline:  # noqa: ASYNC110
            await asyncio.sleep(_LOOK_S)
        return is_idle()

    def check(self, method: str) -> None:
        """Refuse a call that cannot be taken now.

        Raises:
            DrafterUnavailableError: calls are refused in this phase.
        """
        if method in _ALWAYS:
            return
        if self.phase is Phase.STARTING:
            raise DrafterUnavailableError(
                "the service is starting: its health check tells when it is ready"
            )
        if self.is_compiling and method not in _WHILE_COMPILING:
            raise DrafterUnavailableError(
                "kernels are being compiled for this machine: drafts are empty for about half a "
                "minute, and other calls are taken after that"
            )
        if self.is_draining and method in _BEGINNING:
            raise DrainingError(_DRAINING)

    def check_opening(self) -> None:
        """Refuse a session that is opened within a stream while the service drains.

        Raises:
            DrainingError: the service drains.
        """
        if self.is_draining:
            raise DrainingError(_DRAINING)

    @property
    def is_draining(self) -> bool:
        """Whether the service is draining."""
        return self.phase is Phase.DRAINING

    def _show(self) -> None:
        self._health.show(
            {
                "": self.is_ready,
                SERVICE: self.is_ready,
                LIVENESS: True,
                CREDENTIALS: all(each.failing_s is None for each in self.credentials),
            }
        )
