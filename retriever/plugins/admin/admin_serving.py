"""The server of the admin plane, at a separate address and only for operators."""

import logging
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any, Final, Self, cast

from grpc import aio

from retriever.errors import InsecureAddressError
from retriever.operations.logs import log_event
from retriever.operations.resolving import Resolved
from retriever.operations.service_report import Service
from retriever.operations.settings import Settings
from retriever.plugins.admin.admin_servicer import Administered, AdminServicer
from retriever.plugins.admin.audit import AuditLog
from retriever.plugins.admin.live_settings import LiveSettings
from retriever.security.protection import Protection
from retriever.service.addresses import OWNER_ALONE, UNIX, check_address, listen
from retriever.service.gate import Gate
from retriever.v1 import admin_pb2_grpc as pb_grpc
from retriever.wire.channels import server_options

MAX_MESSAGE_BYTES: Final = 1 << 16
"""Largest request, in bytes; this is enough for a path and a few names."""

_MAX_CALLS: Final = 32  # concurrent calls of operators and their tools
_GRACE_S: Final = 1.0  # for the last responses

_LOGGER: Final = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class AdminPlane:
    """The address that operators call, and the check of who may call.

    Without an access file, the permission to open the unix socket, which has mode 0600, is the
    credential. With an access file, or on any other address, a caller needs the scope `admin`.

    Attributes:
        address: HOST:PORT or unix:PATH.
        administered: the objects that calls work on.
        protection: protection of the service.
        has_access: whether the service has an access file.
    """

    address: str
    administered: Administered
    protection: Protection
    has_access: bool

    @classmethod
    def of(
        cls,
        resolved: Resolved[Settings],
        resolve_again: Callable[[], Resolved[Settings]],
        service: Service,
        protection: Protection,
    ) -> Self:
        """Return the admin plane of a service, after checking that it may listen on its address.

        Args:
            resolved: settings of the service, which give the address.
            resolve_again: reads the settings again.
            service: service to administer.
            protection: protection of the service.

        Raises: as for `check`.
        """
        settings = resolved.settings
        snapshots = None if settings.snapshots is None else settings.snapshots.absolute()
        live = LiveSettings(resolved, resolve_again)
        administered = Administered(service, live, AuditLog(settings.audit_log), snapshots)
        address = settings.admin_address or ""
        plane = cls(address, administered, protection, has_access=settings.access is not None)
        plane.check(settings.address)
        return plane

    def check(self, draft_address: str) -> None:
        """Refuse an address at which anyone could administer the service.

        Raises:
            InsecureAddressError: the address is open to others, or is the address for drafts.
            AddressInUseError: the address is in use or cannot be bound.
        """
        if self.address == draft_address and not self.address.endswith(":0"):
            raise InsecureAddressError(
                f"{self.address} is where drafts are served: give another --admin-address"
            )
        if not self.address.startswith(UNIX):
            if not self.has_access:
                raise InsecureAddressError(
                    f"anyone can administer the service at {self.address}: give --access, "
                    "which grants the scope admin, or --admin-address unix:PATH"
                )
            self.protection.check(self.address)
        check_address(self.address, "--admin-address")

    @asynccontextmanager
    async def serving(self) -> AsyncIterator[str]:
        """Run the server during the block; yield the address.

        Raises:
            AddressInUseError: the address is in use or cannot be bound.
        """
        servicer = AdminServicer(self.administered)
        server = aio.server(
            interceptors=[Gate(self.protection.authenticator if self.has_access else None)],
            options=server_options(MAX_MESSAGE_BYTES),
            maximum_concurrent_rpcs=_MAX_CALLS,
        )
        pb_grpc.add_AdminServiceServicer_to_server(cast(Any, servicer), server)
        is_local = self.address.startswith(UNIX)
        tls = None if is_local else self.protection.tls
        port = listen(server, self.address, tls, OWNER_ALONE)
        await server.start()
        address = self.address if is_local else f"{self.address.rpartition(':')[0]}:{port}"
        log_event(_LOGGER, logging.INFO, "admin", "operators are answered", address=address)
        try:
            yield address
        finally:
            await server.stop(_GRACE_S)
            servicer.shut_down()
