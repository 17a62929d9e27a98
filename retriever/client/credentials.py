"""Client credentials: what is sent to a service, and which authorities are trusted.

gRPC is imported to open a channel, and not to state credentials: commands show their options so.
"""

import ipaddress
import os
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Self

from retriever.errors import CredentialsError

if TYPE_CHECKING:
    import grpc
    from grpc import aio

VARIABLES: Final = {
    "FOREDRAFT_REMOTE_CA": "ca",
    "FOREDRAFT_REMOTE_CERTIFICATE": "certificate",
    "FOREDRAFT_REMOTE_KEY": "key",
    "FOREDRAFT_REMOTE_TOKEN": "token",
    "FOREDRAFT_REMOTE_TOKEN_FILE": "token_file",
    "FOREDRAFT_REMOTE_SERVER_NAME": "server_name",
}
"""Environment variables equivalent to the keys of a credentials file."""

_PATHS: Final = ("ca", "certificate", "key", "token_file")
_KEYS: Final = (*VARIABLES.values(), "tls")

_Options = Sequence[tuple[str, Any]]


@dataclass(frozen=True, slots=True)
class Credentials:
    """A client's certificate and token, and the authorities that it trusts.

    Attributes:
        ca: PEM file of the authorities trusted to sign the service's certificate; None: gRPC's own.
        certificate: PEM file of the client's certificate, for mutual TLS.
        key: PEM file of its key.
        token: bearer token.
        server_name: name in the service's certificate, where it differs from the address's host.
        tls: whether to encrypt. None: yes, except for a unix socket or a loopback address without
            `ca` and `certificate`. False is for networks that are trusted as a whole: a token
            travels in the clear.

    Raises:
        CredentialsError: a certificate without a key or the reverse, or an invalid token.
    """

    ca: Path | None = None
    certificate: Path | None = None
    key: Path | None = None
    token: str | None = field(default=None, repr=False)
    server_name: str = ""
    tls: bool | None = None

    def __post_init__(self) -> None:
        if (self.certificate is None) != (self.key is None):
            raise CredentialsError("a certificate and its key belong together: give both")
        if self.tls is False and (self.ca or self.certificate):
            raise CredentialsError("ca and certificate are for TLS: leave them out, or tls = false")
        token = self.token
        if token is not None and not (token and token.isascii() and token.isprintable()):
            raise CredentialsError("the token is empty or has characters that a token cannot have")

    @classmethod
    def from_file(cls, path: Path) -> Self:
        """Read credentials from a TOML file; its keys are the attributes, and `token_file`.

        Paths in it are relative to it.

        Raises:
            CredentialsError: it cannot be read, holds an unknown key, or a file that it names
                cannot be used.
        """
        try:
            found = tomllib.loads(path.read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise CredentialsError(f"{path} cannot be read as credentials: {error}") from error
        unknown = next((key for key in found if key not in _KEYS), None)
        if unknown is not None:
            raise CredentialsError(f"{path} has the key {unknown!r}: known are {', '.join(_KEYS)}")
        for key, value in found.items():
            if not isinstance(value, bool if key == "tls" else str):
                raise CredentialsError(
                    f"{path}: {key} must be {'a truth' if key == 'tls' else 'a text'}"
                )
        return cls._of(found, path.parent)

    @classmethod
    def from_environment(cls, variables: Mapping[str, str] = os.environ) -> Self | None:
        """Read credentials from `VARIABLES`; None where none is set.

        Raises:
            CredentialsError: a file that they name cannot be used.
        """
        found = {key: variables[name] for name, key in VARIABLES.items() if variables.get(name)}
        return cls._of(found, Path()) if found else None

    @classmethod
    def _of(cls, found: Mapping[str, Any], folder: Path) -> Self:
        values = {key: folder / found[key] if key in _PATHS else found[key] for key in found}
        token_file = values.pop("token_file", None)
        if token_file is not None:
            if "token" in values:
                raise CredentialsError("a token and a file of one are given: leave out one")
            values["token"] = _read(token_file).decode("ascii", "replace").strip()
        return cls(**values)

    def channel(self, address: str, options: _Options) -> "grpc.Channel":
        """Return a channel to a service; it connects when it is first used.

        Raises:
            CredentialsError: a file cannot be used.
        """
        import grpc  # noqa: PLC0415  (for a channel alone)

        from retriever.client.bearers import Bearer  # noqa: PLC0415  (the same)

        bearer: list[Any] = [] if self.token is None else [Bearer(self.token)]
        if not self._encrypts(address):
            return grpc.intercept_channel(grpc.insecure_channel(address, options), *bearer)
        channel = grpc.secure_channel(address, self._for_tls(), self._with_name(options))
        return grpc.intercept_channel(channel, *bearer)

    def aio_channel(self, address: str, options: _Options) -> "aio.Channel":
        """Return a channel as `channel` does, for asyncio."""
        from grpc import aio  # noqa: PLC0415  (for a channel alone)

        from retriever.client.bearers import async_bearers  # noqa: PLC0415  (the same)

        bearer: Any = [] if self.token is None else async_bearers(self.token)
        if not self._encrypts(address):
            return aio.insecure_channel(address, options, interceptors=bearer)
        return aio.secure_channel(
            address, self._for_tls(), self._with_name(options), interceptors=bearer
        )

    def check(self, addresses: Iterable[str]) -> None:
        """Check the files, without connecting to any of the services.

        Raises:
            CredentialsError: one cannot be used.
        """
        if any(map(self._encrypts, addresses)):
            self._for_tls()

    def _encrypts(self, address: str) -> bool:
        if self.tls is not None:
            return self.tls
        return bool(self.ca or self.certificate) or not _is_local(address)

    def _with_name(self, options: _Options) -> list[tuple[str, Any]]:
        name = [("grpc.ssl_target_name_override", self.server_name)] if self.server_name else []
        return [*options, *name]

    def _for_tls(self) -> "grpc.ChannelCredentials":
        import grpc  # noqa: PLC0415  (for a channel alone)

        if find_spec("cryptography") is not None:
            self._check()
        ca, key, chain = (
            None if path is None else _read(path) for path in (self.ca, self.key, self.certificate)
        )
        return grpc.ssl_channel_credentials(ca, key, chain)

    def _check(self) -> None:
        """Report what is wrong with the files: the service would only close the connection."""
        from retriever.security import certificates  # noqa: PLC0415  (an extra)

        now = datetime.now(UTC)
        if self.ca is not None:
            certificates.read_certificates(self.ca, now)
        if self.certificate is not None and self.key is not None:
            certificates.read_pair(self.certificate, self.key, now)


def open_channel(
    address: str, credentials: Credentials | None, options: _Options
) -> "grpc.Channel":
    """Return a channel to a service; without credentials it is not encrypted.

    Raises:
        CredentialsError: a file of the credentials cannot be used.
    """
    import grpc  # noqa: PLC0415  (for a channel alone)

    if credentials is None:
        return grpc.insecure_channel(address, options)
    return credentials.channel(address, options)


def _is_local(address: str) -> bool:
    """Return whether an address is a unix socket or a literal loopback address."""
    host = address.rpartition(":")[0].strip("[]")
    if address.startswith("unix:") or host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise CredentialsError(f"{path} cannot be read: {error.strerror or error}") from error
