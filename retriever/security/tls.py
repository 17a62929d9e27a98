"""The server's TLS material: read again when its files change, and warned of before it expires."""

import logging
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any, Final

import grpc

from retriever.security.certificates import day_of, expiry_of, read_authorities, read_pair
from retriever.security.private_files import Reloaded

WARN_BEFORE: Final = timedelta(days=14)
"""How long before a certificate expires it is warned of."""

WARN_EVERY: Final = timedelta(days=1)

_LOGGER: Final = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class TlsFiles:
    """Where the server's TLS material lies, as PEM files.

    Attributes:
        certificate: of the server, followed by those that lead from it to its authority.
        key: the private key that belongs to it; nobody but its owner and group may read it.
        client_ca: authorities whose clients alone are let in (mutual TLS); None: clients show
            no certificates.
    """

    certificate: Path
    key: Path
    client_ca: Path | None = None

    @property
    def paths(self) -> list[Path]:
        """All of them."""
        return [path for path in (self.certificate, self.key, self.client_ca) if path is not None]


@dataclass(frozen=True, slots=True)
class TlsMaterial:
    """What the files hold, checked.

    Attributes:
        certificate: PEM.
        key: PEM.
        client_ca: PEM, or None.
        expires_at: when the first of the certificates expires, and ...
        expires_first: ... which file it is in.
    """

    certificate: bytes
    key: bytes
    client_ca: bytes | None
    expires_at: datetime
    expires_first: Path


class ServerTls:
    """The server's TLS material, as its files are now.

    Args:
        files: where it lies.

    Raises:
        CredentialsError: a file cannot be read, is not PEM, others may read the key, key and
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
        """When the first of the certificates expires."""
        return self._reloaded.current().expires_at

    def credentials(self) -> grpc.ServerCredentials:
        """Return what gRPC takes; for every connection it asks what the files are now."""
        return grpc.dynamic_ssl_server_credentials(
            self._configuration(), self._configuration, require_client_authentication=self.is_mutual
        )

    def warn(self, now: datetime | None = None) -> bool:
        """Log a warning where a certificate expires soon, once a day; tell whether it did."""
        now = now or datetime.now(UTC)
        material = self._reloaded.current()
        if material.expires_at - now > WARN_BEFORE or now - self._warned_at < WARN_EVERY:
            return False
        self._warned_at = now
        _LOGGER.warning(
            "%s %s on %s: put a new one in its place, it is read without a restart",
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
    """Read and check what a server needs for TLS.

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
