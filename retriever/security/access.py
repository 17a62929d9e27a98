"""The access file: maps tokens and certificates to tenants.

This module also makes and hashes bearer tokens, and compares them in constant time. A token is
`fdt_`, 16 hexadecimal digits that name it, `_`, and 256 random bits in base64url. Tokens are
random, so a dictionary attack is impossible and a slow hash would only slow down every call. The
file stores the HMAC-SHA-256 of each token, keyed with a salt, so that a leaked file admits no
caller.

A line is a JSON object: `{"tenant": NAME, "token": HASH, "scopes": [SCOPE, …]}`, or with
`"certificate": IDENTITY` in place of the token. An identity is `URI:…`, `DNS:…`, `EMAIL:…` or
`IP:…` for a subject's alternative name, or `CN:…` for its common name. `"scopes"` says what the
credential may do, `"name": NAME` is its name in logs, and `"added": DAY` is when it was made, as
`2026-11-28`. A line whose only scope is `admin` needs no tenant. Empty lines and those that begin
with `#` are ignored.
"""

import hmac
import json
import re
import secrets
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from enum import StrEnum
from hashlib import sha256
from pathlib import Path
from typing import Any, Final, Self

from retriever.errors import CredentialsError, InvalidRequestError
from retriever.limits import check_tenant_name
from retriever.security.private_files import read_private_file
from retriever.security.rewriting import rewrite

_TOKEN: Final = re.compile(r"fdt_([0-9a-f]{16})_[A-Za-z0-9_-]{43}")
_HASH: Final = re.compile(r"([0-9a-f]{16}):([0-9a-f]{32}):([0-9a-f]{64})")
_LONGEST: Final = 128


@dataclass(frozen=True, slots=True)
class TokenHash:
    """The stored form of a token.

    Attributes:
        name: name of the token; not secret.
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
            ValueError: this is not a token.
        """
        name = name_of(token)
        if name is None:
            raise ValueError("this is not a token")
        salt = secrets.token_bytes(16)
        return cls(name, salt, _digest(salt, token))

    @classmethod
    def parsed(cls, text: str) -> Self:
        """Return the hash that `str` wrote.

        Raises:
            ValueError: this is not the hash of a token.
        """
        found = _HASH.fullmatch(text)
        if found is None:
            raise ValueError("this is not the hash of a token")
        return cls(found[1], bytes.fromhex(found[2]), bytes.fromhex(found[3]))

    def __str__(self) -> str:
        return f"{self.name}:{self.salt.hex()}:{self.digest.hex()}"

    def fits(self, token: str) -> bool:
        """Compare the hash with a token in constant time."""
        return hmac.compare_digest(self.digest, _digest(self.salt, token))


def new_token() -> str:
    """Return a random token."""
    return f"fdt_{secrets.token_hex(8)}_{secrets.token_urlsafe(32)}"


def unknown_hash() -> TokenHash:
    """Return a hash that matches no token, for comparing unknown ones."""
    return TokenHash("", secrets.token_bytes(16), secrets.token_bytes(32))


def name_of(token: str) -> str | None:
    """Return the name of a token; None if this is not a token."""
    found = _TOKEN.fullmatch(token)
    return found[1] if found is not None else None


def _digest(salt: bytes, token: str) -> bytes:
    return hmac.digest(salt, token[:_LONGEST].encode("utf-8", "replace"), sha256)


class Scope(StrEnum):
    """What a credential may be used for."""

    DRAFT = "draft"
    DELETE = "delete"
    ADMIN = "admin"


TENANT_SCOPES: Final = frozenset({Scope.DRAFT, Scope.DELETE})
"""The scopes that concern a tenant's own data."""


@dataclass(frozen=True, slots=True)
class Grant:
    """What a credential's holder may do.

    Attributes:
        name: name of the credential in logs: its own name, else that of the token or the identity.
        tenant: tenant that the holder acts for; "" for an administrator without a tenant.
        scopes: scopes of the credential.
        added: day on which the credential was made, as `2026-11-28`; "" if its line states none.
    """

    name: str
    tenant: str
    scopes: frozenset[Scope]
    added: str = ""


_IDENTITY: Final = re.compile(r"(URI|DNS|EMAIL|IP|CN):.+", re.DOTALL)
_NAME: Final = re.compile(r"(?![0-9a-f]{16}$)[A-Za-z0-9][A-Za-z0-9._@-]{0,63}")
_DAY: Final = re.compile(r"[0-9]{4}-[0-9]{2}-[0-9]{2}")
_KEYS: Final = frozenset({"tenant", "token", "certificate", "scopes", "name", "added"})
_NO_IDENTITY: Final = "is not an identity: write DNS:…, URI:…, EMAIL:…, IP:… or CN:…"


@dataclass(frozen=True, slots=True)
class Access:
    """Credentials and their grants.

    Attributes:
        tokens: hash and grant of each token, by token name.
        certificates: grants by identity.
    """

    tokens: Mapping[str, tuple[TokenHash, Grant]] = field(default_factory=dict)
    certificates: Mapping[str, Grant] = field(default_factory=dict)
    _unknown: tuple[TokenHash, Grant] = field(
        default_factory=lambda: (unknown_hash(), Grant("", "", frozenset()))
    )

    def grant_of_token(self, token: str) -> Grant | None:
        """Return a token's grant, None for a wrong token; always one hash and one comparison."""
        expected, grant = self.tokens.get(name_of(token) or "", self._unknown)
        return grant if expected.fits(token) else None

    def grant_of_certificate(self, identities: Iterable[str]) -> Grant | None:
        """Return the grant of the first identity that has one; None if none has."""
        found = (self.certificates.get(identity) for identity in identities)
        return next((grant for grant in found if grant is not None), None)

    def named(self, name: str) -> Grant | None:
        """Return the grant of a token's name, an identity, or a credential's name."""
        if name in self.tokens:
            return self.tokens[name][1]
        if name in self.certificates:
            return self.certificates[name]
        grants = (*(grant for _, grant in self.tokens.values()), *self.certificates.values())
        return next((grant for grant in grants if grant.name == name), None)


def read_access(path: Path, *, by_operator: bool = False) -> Access:
    """Read an access file.

    Args:
        path: path of the file.
        by_operator: whether root may read a file of any user.

    Raises:
        CredentialsError: the file cannot be read, others may read or change it, or a line is wrong.
    """
    return _parsed(read_private_file(path, by_operator=by_operator), path)


def add_token(
    path: Path,
    tenant: str,
    scopes: Collection[Scope] = (Scope.DRAFT,),
    name: str | None = None,
) -> str:
    """Make a token, append its hash to an access file, and return it.

    Args:
        path: path of the file; created with mode 0600 if it does not exist.
        tenant: tenant that the token acts for; "" for a token that only administers.
        scopes: scopes of the token.
        name: name of the token in logs; None for its 16 digits.

    Raises:
        CredentialsError: the file cannot be used, or the name is invalid or taken.
        InvalidRequestError: the tenant's name is invalid.
    """
    token = new_token()
    _add(path, {"token": str(TokenHash.of(token))}, Grant(name or "", tenant, frozenset(scopes)))
    return token


def add_certificate(
    path: Path,
    tenant: str,
    identity: str,
    scopes: Collection[Scope] = (Scope.DRAFT,),
    name: str | None = None,
) -> None:
    """Add a certificate's identity, as `add_token` adds a token.

    Raises:
        CredentialsError: the file cannot be used, or the identity is invalid or taken.
        InvalidRequestError: the tenant's name is invalid.
    """
    if _IDENTITY.fullmatch(identity) is None:
        raise CredentialsError(f"{identity!r} {_NO_IDENTITY}")
    _add(path, {"certificate": identity}, Grant(name or "", tenant, frozenset(scopes)))


def remove(path: Path, name: str) -> Grant:
    """Remove a credential by token name, by certificate identity, or by the name in its line.

    Returns:
        The grant that the credential had.

    Raises:
        CredentialsError: the file cannot be used, or has no such credential.
    """
    return _change(path, name, lambda _: "", lambda left: left is None)


def set_scopes(path: Path, name: str, scopes: Collection[Scope]) -> Grant:
    """Set the scopes of a credential; `name` as for `remove`.

    Returns:
        The grant that the credential had.

    Raises:
        CredentialsError: the file cannot be used, has no such credential, or the credential cannot
            have these scopes.
    """
    wanted = frozenset(scopes)

    def line_of(record: dict[str, Any]) -> str:
        return _line_of({**record, "scopes": sorted(wanted)})

    return _change(path, name, line_of, lambda left: left is not None and left.scopes == wanted)


def _add(path: Path, record: dict[str, Any], grant: Grant) -> None:
    """Append a line, and check that it is in effect."""
    check_tenant_name(grant.tenant)
    record |= {"tenant": grant.tenant} if grant.tenant else {}
    record |= {"name": grant.name} if grant.name else {}
    record["scopes"] = sorted(grant.scopes)
    record["added"] = f"{datetime.now(UTC):%Y-%m-%d}"
    line = _line_of(record)
    name = record.get("certificate") or record["token"].partition(":")[0]
    try:
        _grant_of(_record(line))
    except ValueError as error:
        raise CredentialsError(str(error)) from error

    def added(content: bytes) -> bytes:
        if name in (found := _parsed(content, path)).certificates:
            raise CredentialsError(f"{name} has a tenant in {path}: remove it first")
        if grant.name and found.named(grant.name) is not None:
            raise CredentialsError(f"{path} has a credential {grant.name}: choose another name")
        return content + b"\n" * (content[-1:] not in {b"", b"\n"}) + line.encode()

    _check(rewrite(path, added, make=True), path, name, lambda left: left is not None)


def _change(
    path: Path,
    name: str,
    line_of: Callable[[dict[str, Any]], str],
    is_right: Callable[[Grant | None], bool],
) -> Grant:
    """Replace or remove the line of a credential; return the grant that it had."""
    found: list[Grant] = []

    def changed(content: bytes) -> bytes:
        grant = _parsed(content, path).named(name)
        if grant is None:
            raise CredentialsError(f"{path} has no token or certificate {name!r}")
        found[:] = [grant]
        text = "".join(_changed_lines(content.decode(), grant, line_of))
        _parsed(text.encode(), path)  # refuses a change that would make the file invalid
        return text.encode()

    _check(rewrite(path, changed), path, name, is_right)
    return found[0]


def _changed_lines(
    text: str, grant: Grant, line_of: Callable[[dict[str, Any]], str]
) -> Iterator[str]:
    lines = text.split("\n")
    for line in lines if lines[-1] else lines[:-1]:
        if not _has_record(line):
            yield f"{line}\n"
        elif _grant_of(record := _record(line)) == grant:
            yield line_of(record)
        else:
            yield f"{line}\n"


def _check(content: bytes, path: Path, name: str, is_right: Callable[[Grant | None], bool]) -> None:
    """Check that a change is in the file.

    Raises:
        CredentialsError: the change is not in the file.
    """
    if not is_right(_parsed(content, path).named(name)):
        raise CredentialsError(f"{path} was changed meanwhile: the change of {name} is not in it")


def _parsed(content: bytes, path: Path) -> Access:
    tokens: dict[str, tuple[TokenHash, Grant]] = {}
    certificates: dict[str, Grant] = {}
    lines_of: dict[str, int] = {}
    try:
        text = content.decode()
    except UnicodeDecodeError as error:
        raise CredentialsError(f"{path} is not UTF-8, so not an access file") from error
    for number, line in enumerate(text.split("\n"), 1):
        if not _has_record(line):
            continue
        try:
            record = _record(line)
            grant = _grant_of(record)
            _take(record, grant, tokens, certificates)
        except (ValueError, InvalidRequestError) as error:
            raise CredentialsError(f"{path}, line {number}: {error}") from error
        if lines_of.setdefault(grant.name, number) != number:
            raise CredentialsError(
                f"{path}, line {number}: {grant.name} is in line {lines_of[grant.name]} as "
                "well: one name, one credential; remove one of the lines"
            )
    return Access(tokens, certificates)


def _has_record(line: str) -> bool:
    return bool(line.strip()) and not line.startswith("#")


def _record(line: str) -> dict[str, Any]:
    try:
        record: Any = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise ValueError(
            'it is not {"tenant": …, "token": …} in JSON, or is cut off: correct or remove the line'
        ) from error
    if not isinstance(record, dict) or not set(record) <= _KEYS:
        raise ValueError(f"it must be an object with no other keys than {', '.join(sorted(_KEYS))}")
    if ("token" in record) == ("certificate" in record):
        raise ValueError('it must have the key "tenant" and either "token" or "certificate"')
    if not all(isinstance(value, str) for key, value in record.items() if key != "scopes"):
        raise ValueError("its values must be strings")
    return record


def _grant_of(record: dict[str, Any]) -> Grant:
    """Return the grant of a line.

    Raises:
        ValueError: the name, tenant, scopes or day is invalid.
        InvalidRequestError: the tenant's name is invalid.
    """
    scopes = _scopes_of(record)
    if "tenant" not in record and scopes != {Scope.ADMIN}:
        raise ValueError('it must have the key "tenant": only the scope admin alone needs none')
    check_tenant_name(record.get("tenant", ""))
    name = record.get("name")
    if name is not None and _NAME.fullmatch(name) is None:
        raise ValueError(
            f"{name[:64]!r} is not a valid name: 1 to 64 letters, digits and . _ @ -, and not "
            "like the name of a token"
        )
    name = name or record.get("certificate") or record.get("token", "").partition(":")[0]
    added = record.get("added", "")
    if added and _DAY.fullmatch(added) is None:
        raise ValueError(f'"added" is {added[:64]!r}: it must be a day like 2026-11-28')
    return Grant(name, record.get("tenant", ""), scopes, added)


def _scopes_of(record: dict[str, Any]) -> frozenset[Scope]:
    named = record.get("scopes")
    if not isinstance(named, list) or not named or any(each not in list(Scope) for each in named):
        raise ValueError(f'"scopes" must be a list of one or more of {", ".join(Scope)}')
    return frozenset(map(Scope, named))


def _take(
    record: dict[str, Any],
    grant: Grant,
    tokens: dict[str, tuple[TokenHash, Grant]],
    certificates: dict[str, Grant],
) -> None:
    if "token" in record:
        token = TokenHash.parsed(record["token"])
        if token.name in tokens:
            raise ValueError(f"the token {token.name} is there twice: remove one of the lines")
        tokens[token.name] = token, grant
        return
    identity = record["certificate"]
    if _IDENTITY.fullmatch(identity) is None:
        raise ValueError(f"{identity!r} {_NO_IDENTITY}")
    if identity in certificates:
        raise ValueError(f"the certificate {identity} is there twice: remove one of the lines")
    certificates[identity] = grant


def _line_of(record: dict[str, Any]) -> str:
    return json.dumps(record, ensure_ascii=False) + "\n"
