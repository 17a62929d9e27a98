"""Authorities that sign certificates for tests."""

import ipaddress
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat

LOOPBACK = x509.IPAddress(ipaddress.ip_address("127.0.0.1"))


@dataclass(frozen=True)
class Signed:
    """A certificate and its key, and the files they are in."""

    x509: x509.Certificate
    secret: ec.EllipticCurvePrivateKey
    certificate: Path
    key: Path


def signed(  # noqa: PLR0913  (what a certificate consists of)
    folder: Path,
    name: str,
    by: Signed | None = None,
    *,
    hours: tuple[float, float] = (-1, 24 * 365),
    names: tuple[x509.GeneralName, ...] = (LOOPBACK,),
    is_authority: bool = False,
) -> Signed:
    """Make a certificate, valid from and until so many hours from now.

    It is an authority's if nobody signs it, or if that is said.
    """
    secret = ec.generate_private_key(ec.SECP256R1())
    subject = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, name)])
    now = datetime.now(UTC)
    builder = (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(by.x509.subject if by else subject)
        .public_key(secret.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now + timedelta(hours=hours[0]))
        .not_valid_after(now + timedelta(hours=hours[1]))
        .add_extension(
            x509.BasicConstraints(ca=by is None or is_authority, path_length=None), critical=True
        )
    )
    if by is not None and names:
        builder = builder.add_extension(x509.SubjectAlternativeName(names), critical=False)
    made = builder.sign(by.secret if by else secret, hashes.SHA256())
    return Signed(made, secret, *_written(folder, name, made, secret))


def _written(
    folder: Path, name: str, made: x509.Certificate, secret: ec.EllipticCurvePrivateKey
) -> tuple[Path, Path]:
    certificate, key = folder / f"{name}.pem", folder / f"{name}.key"
    certificate.write_bytes(made.public_bytes(Encoding.PEM))
    key.touch(0o600)
    key.write_bytes(secret.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()))
    return certificate, key
