"""Protection of a service: TLS and authentication, reloaded with their files; safe addresses."""

import asyncio
import ipaddress
import logging
import socket
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any, Final, Self

import grpc

from retriever.errors import CredentialsError, InsecureAddressError
from retriever.security.admission import Authenticator
from retriever.security.certificates import day_of, expiry_of, read_authorities, read_pair
from retriever.security.private_files import DEFAULT_GRACE_S, LOOK_EVERY_S, Reloaded

WARN_BEFORE: Final = timedelta(days=14)
"""How long before a certificate's expiry warnings begin, to leave time to renew it."""

WARN_EVERY: Final = timedelta(days=1)

_LOGGER: Final = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class TlsFiles:
    """Paths of the server's TLS material, as PEM files.

    Attributes:
        certificate: certificate of the server, followed by the intermediate certificates up to its
            authority.
        key: the private key of the certificate; only its owner and group can read it.
        client_ca: authorities that sign client certificates (mutual TLS); None to require no client
            certificate.
    """

    certificate: Path
    key: Path
    client_ca: Path | None = None

    @property
    def paths(self) -> list[Path]:
        """All paths that are given."""
        return [path for path in (self.certificate, self.key, self.client_ca) if path is not None]


@dataclass(frozen=True, slots=True)
class TlsMaterial:
    """The checked content of the files.

    Attributes:
        certificate: PEM of the certificate file.
        key: PEM of the key file.
        client_ca: PEM of the authorities' file, or None.
        expires_at: earliest expiry of the certificates.
        expires_first: file of the certificate that expires first.
    """

    certificate: bytes
    key: bytes
    client_ca: bytes | None
    expires_at: datetime
    expires_first: Path


class ServerTls:
    """The server's TLS material, reloaded with its files.

    Args:
        files: paths of the files.

    Raises:
        CredentialsError: a file cannot be read or is not PEM, others may read the key, key and
            certificate do not belong together, or a certificate has expired or is not valid yet.
    """

    def __init__(self, files: TlsFiles) -> None:
        self._files = files
        self._reloaded = Reloaded(files.paths, lambda: read_tls(files))
        self._warned_at = datetime.min.replace(tzinfo=UTC)

    @property
    def is_mutual(self) -> bool:
        """Whether clients must show certificates."""
        return self._files.client_ca is not None

    @property
    def expires_at(self) -> datetime:
        """The earliest expiry of the certificates."""
        return self._reloaded.current().expires_at

    def credentials(self) -> grpc.ServerCredentials:
        """Return gRPC's credentials, which read the current files for every connection."""
        return grpc.dynamic_ssl_server_credentials(
            self._configuration(), self._configuration, require_client_authentication=self.is_mutual
        )

    @property
    def file(self) -> Reloaded[TlsMaterial]:
        """The reloaded files."""
        return self._reloaded

    def warn(self, now: datetime | None = None) -> bool:
        """Log a warning once a day if a certificate expires soon; return whether it did."""
        now = now or datetime.now(UTC)
        material = self._reloaded.current()
        if material.expires_at - now > WARN_BEFORE or now - self._warned_at < WARN_EVERY:
            return False
        self._warned_at = now
        _LOGGER.warning(
            "%s %s on %s: replace it, no restart is needed",
            material.expires_first,
            "expires" if material.expires_at > now else "expired",
            day_of(material.expires_at),
        )
        return True

    def _configuration(self) -> Any:
        material = self._reloaded.current()
        return grpc.ssl_server_certificate_configuration(
            [(material.key, material.certificate)], root_certificates=material.client_ca
        )


def read_tls(files: TlsFiles, now: datetime | None = None) -> TlsMaterial:
    """Read and check the TLS material of a server.

    Raises:
        CredentialsError: see `ServerTls`.
    """
    now = now or datetime.now(UTC)
    certificate, key = read_pair(files.certificate, files.key, now)
    expiring = [(expiry_of(certificate, files.certificate), files.certificate)]
    client_ca = None
    if files.client_ca is not None:
        client_ca = read_authorities(files.client_ca, now)
        expiring.append((expiry_of(client_ca, files.client_ca), files.client_ca))
    return TlsMaterial(certificate, key, client_ca, *min(expiring))


@dataclass(frozen=True, slots=True)
class FileState:
    """The state of a credential file: whether it can be used.

    Attributes:
        name: name of the setting that names the file.
        failing_s: how long the file has been unusable, in seconds; None while it is usable.
        admits: whether its last content still admits callers, which ends with the grace period.
    """

    name: str
    failing_s: float | None = None
    admits: bool = True


@dataclass(frozen=True, slots=True)
class ProtectionFiles:
    """Files of a service's protection.

    Attributes:
        certificate: certificate of the server, PEM; if given, connections are encrypted.
        key: private key of the certificate.
        client_ca: authorities; only clients with a certificate that they signed may connect.
        access: access file, which maps tokens and certificates to tenants.
        insecure: whether to listen without protection even on addresses that other machines can
            reach.
        grace_s: how long the last content of a file admits callers once the file cannot be used, in
            seconds.
    """

    certificate: Path | None = None
    key: Path | None = None
    client_ca: Path | None = None
    access: Path | None = None
    insecure: bool = False
    grace_s: float = DEFAULT_GRACE_S


@dataclass(frozen=True, slots=True)
class Protection:
    """A service's protection, ready for use.

    Attributes:
        tls: TLS material; None if connections are not encrypted.
        authenticator: identifies callers; None for no authentication: all callers act for the
            tenant "".
        insecure: whether to listen without protection even on addresses that other machines can
            reach.
    """

    tls: ServerTls | None = None
    authenticator: Authenticator | None = None
    insecure: bool = False

    @classmethod
    def of(cls, files: ProtectionFiles) -> Self:
        """Read and check the content of the files.

        Raises:
            CredentialsError: a file cannot be used, or a file that another one needs is missing.
        """
        if (files.certificate is None) != (files.key is None):
            raise CredentialsError("a certificate and its key belong together: give both")
        if files.client_ca is not None and files.certificate is None:
            raise CredentialsError(
                "client certificates need TLS: give --certificate and --key as well"
            )
        tls = None
        if files.certificate is not None and files.key is not None:
            tls = ServerTls(TlsFiles(files.certificate, files.key, files.client_ca))
        if files.access is None and files.client_ca is None:
            return cls(tls, None, files.insecure)
        return cls(tls, Authenticator(files.access, files.client_ca, files.grace_s), files.insecure)

    def check(self, address: str) -> None:
        """Refuse an address that other machines can reach without authentication or encryption.

        Raises:
            InsecureAddressError: the address is neither loopback nor a unix socket, encryption or
                authentication is missing, and `insecure` is not set.
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

    @property
    def files(self) -> list[FileState]:
        """The state of the files at the last check."""
        found: dict[str, Reloaded[Any]] = {}
        if self.tls is not None:
            found["certificate"] = self.tls.file
        if self.authenticator is not None:
            found |= self.authenticator.files
        return [
            FileState(name, file.failing_s, admits=not file.is_overdue)
            for name, file in found.items()
        ]

    def look(self) -> None:
        """Check all files now."""
        if self.tls is not None:
            self.tls.file.look()
        if self.authenticator is not None:
            self.authenticator.look()

    async def watch(self, tell: Callable[[list[FileState]], None]) -> None:
        """Check the files until cancelled, even without calls; warn before certificates expire.

        Args:
            tell: called with the state of the files after each check, twice a second.
        """
        if self.tls is None and self.authenticator is None:
            return
        # A separate thread: shared threads can be busy for longer than a revocation may take.
        with ThreadPoolExecutor(1, "credentials") as thread:
            while True:
                looking = asyncio.get_running_loop().run_in_executor(thread, self.look)
                while not looking.done():  # report even while a file system hangs
                    await asyncio.wait([looking], timeout=LOOK_EVERY_S)
                    tell(self.files)
                looking.result()
                if self.tls is not None:
                    self.tls.warn()
                await asyncio.sleep(LOOK_EVERY_S * _AHEAD)

    def _missing(self) -> str:
        if self.tls is None:
            return "connections are not encrypted"
        return "callers are not authenticated" if self.authenticator is None else ""


_AHEAD: Final = 0.9  # share of the interval: if this is late, calls check the files

NO_PROTECTION: Final = Protection()
"""The protection of loopback addresses and unix sockets: none."""


def is_local(address: str) -> bool:
    """Return whether only this machine can reach an address: a unix socket, or loopback.

    A host name is loopback if all addresses that it resolves to are loopback.
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
