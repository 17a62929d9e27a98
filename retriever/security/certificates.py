"""Certificates and keys in PEM: reading, checks and identities."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

from retriever.errors import CredentialsError
from retriever.security.private_files import read_file, read_private_file


def read_pair(certificate: Path, key: Path, now: datetime) -> tuple[bytes, bytes]:
    """Return the PEM of a certificate and the PEM of its key.

    Raises:
        CredentialsError: the files cannot be read, do not belong together, or are not valid now.
    """
    chain = read_file(certificate)
    certificates = _certificates(chain, certificate)
    secret = read_private_file(key)
    if _public_bytes(_private_key(secret, key).public_key()) != _public_bytes(
        certificates[0].public_key()
    ):
        raise CredentialsError(
            f"{key} is not the key of {certificate}: the first certificate in the file must be the "
            "one that the key belongs to"
        )
    _check_dates(certificates, certificate, now)
    return chain, secret


def read_authorities(path: Path, now: datetime) -> bytes:
    """Return the PEM of a file of CA certificates.

    Raises:
        CredentialsError: the file cannot be read, or holds a certificate that is not a CA's or not
            valid now.
    """
    content = read_certificates(path, now)
    for certificate in _certificates(content, path):
        if not _is_authority(certificate):
            raise CredentialsError(
                f"{path} holds the certificate of {certificate.subject.rfc4514_string()}, which "
                "is not an authority: name the file of the authority that signs certificates"
            )
    return content


def read_certificates(path: Path, now: datetime) -> bytes:
    """Return the PEM of a file of certificates.

    Raises:
        CredentialsError: the file cannot be read, or holds a certificate that is not valid now.
    """
    content = read_file(path)
    _check_dates(_certificates(content, path), path, now)
    return content


def expiry_of(content: bytes, path: Path) -> datetime:
    """Return the earliest expiry of the certificates in a PEM file.

    Raises:
        CredentialsError: there is no certificate.
    """
    expiry: datetime = min(each.not_valid_after_utc for each in _certificates(content, path))
    return expiry


def _certificates(content: bytes, path: Path) -> Sequence[Any]:
    x509 = library().x509
    try:
        certificates: Sequence[Any] = x509.load_pem_x509_certificates(content)
    except ValueError as error:
        raise CredentialsError(f"{path} holds no readable PEM certificate") from error
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
        raise CredentialsError(f"{path} holds no readable PEM private key") from error


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
            raise CredentialsError(f"{path} expired on {day_of(ends)}: have it renewed")
        if begins > now:
            raise CredentialsError(
                f"{path} is not valid before {day_of(begins)}: wait, or set this machine's clock"
            )


def day_of(time: datetime) -> str:
    """Format the date of a time for messages."""
    return f"{time:%Y-%m-%d %H:%M} UTC"


def library() -> Any:
    """Return the package `cryptography`, with the modules that are used here.

    Raises:
        CredentialsError: the package is not installed.
    """
    try:
        import cryptography.exceptions  # noqa: PLC0415  (an extra)
        import cryptography.hazmat.primitives.serialization  # noqa: PLC0415
        import cryptography.x509  # noqa: PLC0415
    except ImportError as error:
        raise CredentialsError(
            "a library for reading certificates is missing: run `pip install 'foredraft[server]'`"
        ) from error
    return cryptography


@dataclass(frozen=True, slots=True)
class Certified:
    """The verified client certificate of a connection.

    Attributes:
        identities: `URI:…`, `DNS:…`, `EMAIL:…`, `IP:…` and `CN:…`, in this order.
        expires_at_s: expiry, in seconds since 1970.
    """

    identities: tuple[str, ...]
    expires_at_s: float


def certified(pem: bytes) -> Certified:
    """Return a certificate's identities and expiry; no identities, and expired, if unreadable."""
    x509 = library().x509
    try:
        certificate = x509.load_pem_x509_certificate(pem)
        names = tuple(_identities(certificate, x509))
    except ValueError:
        return Certified((), 0.0)
    return Certified(names, certificate.not_valid_after_utc.timestamp())


def _identities(certificate: Any, x509: Any) -> Iterator[str]:
    kinds = {
        "URI": x509.UniformResourceIdentifier,
        "DNS": x509.DNSName,
        "EMAIL": x509.RFC822Name,
        "IP": x509.IPAddress,
    }
    try:
        names = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
        for kind, type_ in kinds.items():
            yield from (f"{kind}:{name}" for name in names.get_values_for_type(type_))
    except x509.ExtensionNotFound:
        pass
    for attribute in certificate.subject.get_attributes_for_oid(x509.NameOID.COMMON_NAME):
        yield f"CN:{attribute.value}"
