"""The access file: maps tokens and certificates to tenants.

Bearer tokens: made, hashed, and compared in constant time. A token is `fdt_`, 16 hexadecimal digits
that name it, `_`, and 256 random bits in base64url. Tokens are random, so a dictionary attack is
impossible and a slow hash would only cost every call. Stored is HMAC-SHA-256 of the token, keyed
with a salt, so that a leaked file admits no caller.

A line is a JSON object: `{"tenant": NAME, "token": HASH}` or `{"tenant": NAME, "certificate":
IDENTITY}`. An identity is `URI:…`, `DNS:…`, `EMAIL:…` or `IP:…` for a subject's alternative name,
or `CN:…` for its common name. Empty lines and those that begin with `#` are ignored.
"""

import hmac
import json
import os
import re
import secrets
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from hashlib import sha256
from pathlib import Path
from typing import Any, Final, Self

from retriever.errors import CredentialsError, InvalidRequestError
from retriever.limits import check_tenant_name
from retriever.security.private_files import read_private_file

_TOKEN: Final = re.compile(r"fdt_([0-9a-f]{16})_[A-Za-z0-9_-]{43}")
_HASH: Final = re.compile(r"([0-9a-f]{16}):([0-9a-f]{32}):([0-9a-f]{64})")
_LONGEST: Final = 128


@dataclass(frozen=True, slots=True)
class TokenHash:
    """The stored form of a token.

    Attributes:
        name: of the token; no secret.
        salt: 16 random bytes.
        digest: 32 bytes.
    """

    name: str
    salt: bytes
    digest: bytes

    @classmethod
    def of(cls, token: str) -> Self:
        """Return the hash of a token, with a new salt.

        Raises:
            ValueError: this is no token.
        """
        name = name_of(token)
        if name is None:
            raise ValueError("this is no token")
        salt = secrets.token_bytes(16)
        return cls(name, salt, _digest(salt, token))

    @classmethod
    def parsed(cls, text: str) -> Self:
        """Return the hash that `str` wrote.

        Raises:
            ValueError: this is none.
        """
        found = _HASH.fullmatch(text)
        if found is None:
            raise ValueError("this is no hash of a token")
        return cls(found[1], bytes.fromhex(found[2]), bytes.fromhex(found[3]))

    def __str__(self) -> str:
        return f"{self.name}:{self.salt.hex()}:{self.digest.hex()}"

    def fits(self, token: str) -> bool:
        """Compare with a token in constant time."""
        return hmac.compare_digest(self.digest, _digest(self.salt, token))


def new_token() -> str:
    """Return a random token."""
    return f"fdt_{secrets.token_hex(8)}_{secrets.token_urlsafe(32)}"


def unknown_hash() -> TokenHash:
    """Return a hash that matches no token, for comparing unknown ones."""
    return TokenHash("", secrets.token_bytes(16), secrets.token_bytes(32))


def name_of(token: str) -> str | None:
    """Return a token's name, None if this is not a token."""
    found = _TOKEN.fullmatch(token)
    return found[1] if found is not None else None


def _digest(salt: bytes, token: str) -> bytes:
    return hmac.digest(salt, token[:_LONGEST].encode("utf-8", "replace"), sha256)


_IDENTITY: Final = re.compile(r"(URI|DNS|EMAIL|IP|CN):.+", re.DOTALL)
_KINDS: Final = ({"tenant", "token"}, {"tenant", "certificate"})


@dataclass(frozen=True, slots=True)
class Access:
    """Credentials and their tenants.

    Attributes:
        tokens: hash and tenant of each, by the token's name.
        certificates: tenants by identity.
    """

    tokens: Mapping[str, tuple[TokenHash, str]] = field(default_factory=dict)
    certificates: Mapping[str, str] = field(default_factory=dict)
    _unknown_hash: TokenHash = field(default_factory=unknown_hash)

    def tenant_of_token(self, token: str) -> str | None:
        """Return a token's tenant, None for a wrong one; one hash and one comparison for any."""
        expected, tenant = self.tokens.get(name_of(token) or "", (self._unknown_hash, ""))
        return tenant if expected.fits(token) else None

    def tenant_of_certificate(self, identities: Iterable[str]) -> str | None:
        """Return the tenant of the first identity that has one, None where none has."""
        found = (self.certificates.get(identity) for identity in identities)
        return next((tenant for tenant in found if tenant is not None), None)


def read_access(path: Path) -> Access:
    """Read an access file.

    Raises:
        CredentialsError: it cannot be read, others may read or change it, or a line is wrong.
    """
    tokens: dict[str, tuple[TokenHash, str]] = {}
    certificates: dict[str, str] = {}
    for number, line in _lines(path):
        try:
            _take(_record(line), tokens, certificates)
        except (ValueError, InvalidRequestError) as error:
            raise CredentialsError(f"{path}, line {number}: {error}") from error
    return Access(tokens, certificates)


def add_token(path: Path, tenant: str) -> str:
    """Make a token for a tenant, append its hash to an access file, and return it.

    Raises:
        CredentialsError: the file cannot be used.
        InvalidRequestError: the name cannot be a tenant's.
    """
    check_tenant_name(tenant)
    token = new_token()
    _append(path, {"tenant": tenant, "token": str(TokenHash.of(token))})
    return token


def add_certificate(path: Path, tenant: str, identity: str) -> None:
    """Add a certificate's identity for a tenant.

    Raises:
        CredentialsError: the file cannot be used, or this is no identity or one that is taken.
        InvalidRequestError: the name cannot be a tenant's.
    """
    check_tenant_name(tenant)
    if _IDENTITY.fullmatch(identity) is None:
        raise CredentialsError(
            f"{identity!r} is no identity: write DNS:…, URI:…, EMAIL:…, IP:… or CN:…"
        )
    if path.exists() and identity in read_access(path).certificates:
        raise CredentialsError(f"{identity} has a tenant in {path}: remove it first")
    _append(path, {"tenant": tenant, "certificate": identity})


def remove(path: Path, name: str) -> str:
    """Remove the token of a name, or a certificate's identity; return whose it was.

    Raises:
        CredentialsError: the file cannot be used, or has no such credential.
    """
    access = read_access(path)
    found = access.tokens.get(name, (None, access.certificates.get(name)))[1]
    if found is None:
        raise CredentialsError(f"{path} has no token or certificate {name!r}")
    kept = [line for _, line in _all_lines(path) if not _names(line, name)]
    _replace(path, "".join(f"{line}\n" for line in kept))
    return found


def _lines(path: Path) -> Iterator[tuple[int, str]]:
    """Yield numbers and texts of the lines with records."""
    for number, line in _all_lines(path):
        if line.strip() and not line.startswith("#"):
            yield number, line


def _all_lines(path: Path) -> Iterator[tuple[int, str]]:
    try:
        text = read_private_file(path).decode()
    except UnicodeDecodeError as error:
        raise CredentialsError(f"{path} is not UTF-8: it is no access file") from error
    yield from enumerate(text.splitlines(), 1)


def _record(line: str) -> dict[str, str]:
    try:
        record: Any = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise ValueError('it is no {"tenant": …, "token": …} in JSON') from error
    if not isinstance(record, dict) or set(record) not in _KINDS:
        raise ValueError('it must have the keys "tenant" and either "token" or "certificate"')
    if not all(isinstance(value, str) for value in record.values()):
        raise ValueError("its values must be texts")
    return record


def _take(
    record: dict[str, str],
    tokens: dict[str, tuple[TokenHash, str]],
    certificates: dict[str, str],
) -> None:
    tenant = record["tenant"]
    check_tenant_name(tenant)
    if "token" in record:
        token = TokenHash.parsed(record["token"])
        if token.name in tokens:
            raise ValueError(f"the token {token.name} stands there twice")
        tokens[token.name] = token, tenant
        return
    identity = record["certificate"]
    if _IDENTITY.fullmatch(identity) is None:
        raise ValueError(f"{identity!r} is no identity: write DNS:…, URI:…, EMAIL:…, IP:… or CN:…")
    if identity in certificates:
        raise ValueError(f"the certificate {identity} stands there twice")
    certificates[identity] = tenant


def _names(line: str, name: str) -> bool:
    try:
        record = _record(line)
    except ValueError:
        return False
    return record.get("certificate") == name or record.get("token", "").startswith(f"{name}:")


def _append(path: Path, record: dict[str, str]) -> None:
    """Append a line; the file is made with the mode 0600 if it is not there."""
    if path.exists():
        read_access(path)  # an invalid file is not extended
    line = json.dumps(record, ensure_ascii=False) + "\n"
    try:
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        with os.fdopen(descriptor, "wb") as file:
            file.write(line.encode())
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        raise CredentialsError(f"{path} cannot be written: {error.strerror or error}") from error


def _replace(path: Path, text: str) -> None:
    """Replace a file's text atomically."""
    try:
        descriptor, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}-")
        try:
            with os.fdopen(descriptor, "wb") as file:
                file.write(text.encode())
                file.flush()
                os.fsync(file.fileno())
            Path(name).replace(path)
        finally:
            with suppress(FileNotFoundError):
                Path(name).unlink()
    except OSError as error:
        raise CredentialsError(f"{path} cannot be written: {error.strerror or error}") from error
