"""What a client's certificate says of whoever holds it."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from retriever.security.certificates import library


@dataclass(frozen=True, slots=True)
class Certified:
    """A certificate that an authority of ours has signed: the connection was made with it.

    Attributes:
        identities: `URI:…`, `DNS:…`, `EMAIL:…`, `IP:…` and `CN:…`, in this order.
        expires_at_s: in seconds since 1970.
    """

    identities: tuple[str, ...]
    expires_at_s: float


def certified(pem: bytes) -> Certified:
    """Return what a certificate says; one that cannot be read says nothing and has expired."""
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
