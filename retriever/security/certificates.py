"""Certificates and keys for TLS: read, checked, and read again when their files change."""

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any, Final

import grpc

from retriever.errors import CredentialsError
from retriever.security.private_files import Reloaded, read_file, read_private_file

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
            _day(material.expires_at),
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


def read_pair(certificate: Path, key: Path, now: datetime) -> tuple[bytes, bytes]:
    """Return the PEM of a certificate and of its key.

    Raises:
        CredentialsError: they cannot be read, do not belong together, or are not valid now.
    """
    chain = read_file(certificate)
    certificates = _certificates(chain, certificate)
    secret = read_private_file(key)
    if _public_bytes(_private_key(secret, key).public_key()) != _public_bytes(
        certificates[0].public_key()
    ):
        raise CredentialsError(
            f"{key} is not the key of {certificate}: the first certificate in a file must be the "
            "one that the key was made for"
        )
    _check_dates(certificates, certificate, now)
    return chain, secret


def read_authorities(path: Path, now: datetime) -> bytes:
    """Return the PEM of certificates of authorities.

    Raises:
        CredentialsError: it cannot be read, holds another certificate, or one not valid now.
    """
    content = read_certificates(path, now)
    for certificate in _certificates(content, path):
        if not _is_authority(certificate):
            raise CredentialsError(
                f"{path} holds the certificate of {certificate.subject.rfc4514_string()}, which "
                "is no authority: name the file of the authority that signs certificates"
            )
    return content


def read_certificates(path: Path, now: datetime) -> bytes:
    """Return the PEM of certificates, of whomever.

    Raises:
        CredentialsError: it cannot be read, or holds one that is not valid now.
    """
    content = read_file(path)
    _check_dates(_certificates(content, path), path, now)
    return content


def expiry_of(content: bytes, path: Path) -> datetime:
    """Return when the first of the certificates in a PEM file expires.

    Raises:
        CredentialsError: there is none.
    """
    expiry: datetime = min(each.not_valid_after_utc for each in _certificates(content, path))
    return expiry


def _certificates(content: bytes, path: Path) -> Sequence[Any]:
    x509 = library().x509
    try:
        certificates: Sequence[Any] = x509.load_pem_x509_certificates(content)
    except ValueError as error:
        raise CredentialsError(f"{path} holds no certificate in PEM that can be read") from error
    return certificates


def _private_key(content: bytes, path: Path) -> Any:
    cryptography = library()
    try:
        return cryptography.hazmat.primitives.serialization.load_pem_private_key(content, None)
    except TypeError as error:
        raise CredentialsError(
            f"{path} is encrypted: decrypt it, for example with `openssl pkey`, and protect it by "
            "its mode"
        ) from error
    except (ValueError, cryptography.exceptions.UnsupportedAlgorithm) as error:
        raise CredentialsError(f"{path} holds no private key in PEM that can be read") from error


def _public_bytes(key: Any) -> bytes:
    forms = library().hazmat.primitives.serialization
    encoded: bytes = key.public_bytes(forms.Encoding.DER, forms.PublicFormat.SubjectPublicKeyInfo)
    return encoded


def _is_authority(certificate: Any) -> bool:
    x509 = library().x509
    try:
        constraints = certificate.extensions.get_extension_for_class(x509.BasicConstraints)
    except (x509.ExtensionNotFound, ValueError):
        return False
    return bool(constraints.value.ca)


def _check_dates(certificates: Sequence[Any], path: Path, now: datetime) -> None:
    for certificate in certificates:
        begins, ends = certificate.not_valid_before_utc, certificate.not_valid_after_utc
        if ends < now:
            raise CredentialsError(f"{path} expired on {_day(ends)}: have it renewed")
        if begins > now:
            raise CredentialsError(
                f"{path} is not valid before {_day(begins)}: wait, or look at this machine's clock"
            )


def _day(time: datetime) -> str:
    return f"{time:%Y-%m-%d %H:%M} UTC"


def library() -> Any:
    """Return the package `cryptography`, with what is used of it.

    Raises:
        CredentialsError: it is not installed.
    """
    try:
        import cryptography.exceptions  # noqa: PLC0415  (an extra)
        import cryptography.hazmat.primitives.serialization  # noqa: PLC0415
        import cryptography.x509  # noqa: PLC0415
    except ImportError as error:
        raise CredentialsError(
            "certificates are read with a library that is missing: run "
            "`pip install 'foredraft[secure]'`"
        ) from error
    return cryptography
