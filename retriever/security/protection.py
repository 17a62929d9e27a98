"""What protects a service, and where it may listen without it."""

import asyncio
import ipaddress
import logging
import socket
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Self

from retriever.errors import CredentialsError, InsecureAddressError
from retriever.security.admission import Doorkeeper
from retriever.security.tls import ServerTls, TlsFiles

_LOOK_EVERY_S: Final = 60.0
_LOGGER: Final = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class ProtectionFiles:
    """What a service is protected with, as files.

    Attributes:
        certificate: of the server, PEM; with it, connections are encrypted.
        key: of the certificate.
        client_ca: authorities whose clients alone may connect.
        access: whose tokens and certificates act for which tenant.
        insecure: listen even where the rest lets in whoever can reach the address.
    """

    certificate: Path | None = None
    key: Path | None = None
    client_ca: Path | None = None
    access: Path | None = None
    insecure: bool = False


@dataclass(frozen=True, slots=True)
class Protection:
    """What a service is protected with, ready for use.

    Attributes:
        tls: None: connections are not encrypted.
        doorkeeper: None: callers are not asked who they are, and all act for the tenant "".
        insecure: listen even where that lets in whoever can reach the address.
    """

    tls: ServerTls | None = None
    doorkeeper: Doorkeeper | None = None
    insecure: bool = False

    @classmethod
    def of(cls, files: ProtectionFiles) -> Self:
        """Read and check what the files hold.

        Raises:
            CredentialsError: a file cannot be used, or one is missing that belongs to another.
        """
        if (files.certificate is None) != (files.key is None):
            raise CredentialsError("a certificate and its key belong together: give both")
        if files.client_ca is not None and files.certificate is None:
            raise CredentialsError(
                "clients show certificates over TLS alone: give --certificate and --key as well"
            )
        tls = None
        if files.certificate is not None and files.key is not None:
            tls = ServerTls(TlsFiles(files.certificate, files.key, files.client_ca))
        asks = files.access is not None or files.client_ca is not None
        return cls(tls, Doorkeeper(files.access) if asks else None, files.insecure)

    def check(self, address: str) -> None:
        """Refuse to listen where whoever reaches the address would be let in, or could listen in.

        Raises:
            InsecureAddressError: it is neither loopback nor a unix socket, connections are not
                encrypted or callers not known, and nobody said that this is meant.
        """
        missing = self._missing()
        if not missing or is_local(address):
            return
        if not self.insecure:
            raise InsecureAddressError(
                f"{address} can be reached from other machines, and {missing}: give --certificate "
                "and --key, with --access or --client-ca; or listen on 127.0.0.1 or unix:PATH; or, "
                "where the network itself is trusted, add --insecure"
            )
        _LOGGER.warning("%s can be reached from other machines, and %s", address, missing)

    async def watch(self) -> None:
        """Warn of certificates that expire soon, until cancelled."""
        while self.tls is not None:
            self.tls.warn()
            await asyncio.sleep(_LOOK_EVERY_S)

    def _missing(self) -> str:
        if self.tls is None:
            return "connections are not encrypted"
        return "callers are not asked who they are" if self.doorkeeper is None else ""


NO_PROTECTION: Final = Protection()
"""For loopback and unix sockets."""


def is_local(address: str) -> bool:
    """Tell whether only this machine reaches an address: a unix socket, or loopback.

    A host name is loopback if all that it stands for is.
    """
    if address.startswith("unix:"):
        return True
    host, _, port = address.rpartition(":")
    try:
        found = socket.getaddrinfo(host.strip("[]"), port, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError):
        return False
    hosts = [str(each[4][0]).partition("%")[0] for each in found]
    return bool(hosts) and all(ipaddress.ip_address(each).is_loopback for each in hosts)
