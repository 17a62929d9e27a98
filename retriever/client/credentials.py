"""Client credentials: what a client sends to a service, and which authorities it trusts.

Files are read again when they change, because tokens, certificates and authorities are rotated
while clients run. gRPC is only imported to open a channel, so that commands can show their options
without it.
"""

import ipaddress
import os
import tomllib
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Self
from urllib.parse import urlsplit

from retriever.errors import CredentialsError
from retriever.wire.channels import ENABLE_PROXY

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
    "FOREDRAFT_REMOTE_PROXY": "proxy",
}
"""Environment variables equivalent to the keys of a credentials file."""

_PATHS: Final = ("ca", "certificate", "key", "token_file")
_KEYS: Final = (*VARIABLES.values(), "tls")

_Options = Sequence[tuple[str, Any]]


@dataclass(frozen=True, slots=True)
class Credentials:
    """A client's certificate and token, and the authorities that it trusts.

    Attributes:
        ca: PEM file of the authorities trusted to sign the service's certificate; None for gRPC's
            own.
        certificate: PEM file of the client's certificate, for mutual TLS.
        key: PEM file of the certificate's key.
        token: bearer token.
        token_file: file with a bearer token, instead of `token`.
        server_name: name in the service's certificate, if it differs from the host of the address.
        tls: whether to encrypt. None means yes, except for a unix socket or a loopback address
            without `ca` and `certificate`. False is for fully trusted networks: a token is sent in
            the clear.
        proxy: URL of an HTTP proxy to reach the service through. If empty, it is called directly,
            even if `http_proxy` is set in the environment.

    Raises:
        CredentialsError: there is a certificate without a key or the reverse, both a token and a
            token file, or an invalid token.
    """

    ca: Path | None = None
    certificate: Path | None = None
    key: Path | None = None
    token: str | None = field(default=None, repr=False)
    server_name: str = ""
    tls: bool | None = None
    token_file: Path | None = None
    proxy: str = ""

    def __post_init__(self) -> None:
        if (self.certificate is None) != (self.key is None):
            raise CredentialsError("a certificate and its key belong together: give both")
        if self.tls is False and (self.ca or self.certificate):
            raise CredentialsError(
                "ca and certificate are for TLS: leave them out, or leave out tls = false"
            )
        if self.token is not None:
            _check_token(self.token)
            if self.token_file is not None:
                raise CredentialsError("a token and a token file are given: leave out one")
        if self.proxy and not self.proxy.startswith("http://"):
            raise CredentialsError(
                f"{self.proxy!r} is not the URL of a proxy to a service: give http://HOST:PORT"
            )

    @classmethod
    def from_file(cls, path: Path) -> Self:
        """Read credentials from a TOML file whose keys are the attributes.

        Paths in the file are relative to its folder.

        Raises:
            CredentialsError: the file cannot be read, has an unknown key, or names a file that
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
                    f"{path}: {key} must be {'true or false' if key == 'tls' else 'a text'}"
                )
        return cls._of(found, path.parent)

    @classmethod
    def from_environment(cls, variables: Mapping[str, str] = os.environ) -> Self | None:
        """Read credentials from `VARIABLES`; None if none is set.

        Raises:
            CredentialsError: a file that the variables name cannot be used.
        """
        found = {key: variables[name] for name, key in VARIABLES.items() if variables.get(name)}
        return cls._of(found, Path()) if found else None

    @classmethod
    def _of(cls, found: Mapping[str, Any], folder: Path) -> Self:
        values = {key: folder / found[key] if key in _PATHS else found[key] for key in found}
        credentials = cls(**values)
        credentials.shown_token()
        return credentials

    def shown_token(self) -> Callable[[], str] | None:
        """Return a function that returns the token of each call; None for calls without a token.

        Raises:
            CredentialsError: the token file cannot be used.
        """
        if self.token_file is not None:
            return TokenFile(self.token_file)
        token = self.token
        return None if token is None else lambda: token

    def stamp(self) -> tuple[object, ...]:
        """Return a stamp that changes when the file of a certificate or of authorities changes."""
        paths = (self.ca, self.certificate, self.key)
        return tuple(_stamp(path) for path in paths if path is not None)

    def channel(self, address: str, options: _Options) -> "grpc.Channel":
        """Return a channel to a service; it connects at first use.

        Raises:
            CredentialsError: a file cannot be used.
        """
        import grpc  # noqa: PLC0415  (only for a channel)

        from retriever.client.bearers import Bearer  # noqa: PLC0415  (the same)

        token = self.shown_token()
        bearer: list[Any] = [] if token is None else [Bearer(token)]
        options = self._with_own(options)
        if not self._encrypts(address):
            return grpc.intercept_channel(grpc.insecure_channel(address, options), *bearer)
        channel = grpc.secure_channel(address, self._for_tls(), options)
        return grpc.intercept_channel(channel, *bearer)

    def aio_channel(self, address: str, options: _Options) -> "aio.Channel":
        """Return a channel for asyncio, as `channel` does."""
        from grpc import aio  # noqa: PLC0415  (only for a channel)

        from retriever.client.bearers import async_bearers  # noqa: PLC0415  (the same)

        token = self.shown_token()
        bearer: Any = [] if token is None else async_bearers(token)
        options = self._with_own(options)
        if not self._encrypts(address):
            return aio.insecure_channel(address, options, interceptors=bearer)
        return aio.secure_channel(address, self._for_tls(), options, interceptors=bearer)

    def check(self, addresses: Iterable[str]) -> None:
        """Check the files, without connecting to any of the services.

        Raises:
            CredentialsError: a file cannot be used.
        """
        self.shown_token()
        if any(map(self._encrypts, addresses)):
            self._for_tls()

    def _encrypts(self, address: str) -> bool:
        if self.tls is not None:
            return self.tls
        return bool(self.ca or self.certificate) or not _is_local(address)

    def _with_own(self, options: _Options) -> list[tuple[str, Any]]:
        """Return channel options, and add the options that these credentials require."""
        own: list[tuple[str, Any]] = []
        if self.server_name:
            own.append(("grpc.ssl_target_name_override", self.server_name))
        if self.proxy:
            options = [each for each in options if each[0] != ENABLE_PROXY]
            own += [(ENABLE_PROXY, 1), ("grpc.http_proxy", self.proxy)]
        return [*options, *own]

    def _for_tls(self) -> "grpc.ChannelCredentials":
        import grpc  # noqa: PLC0415  (only for a channel)

        if find_spec("cryptography") is not None:
            self._check()
        ca, key, chain = (
            None if path is None else _read(path) for path in (self.ca, self.key, self.certificate)
        )
        return grpc.ssl_channel_credentials(ca, key, chain)

    def _check(self) -> None:
        """Raise if the files are invalid, since the service would only close the connection."""
        from retriever.security import certificates  # noqa: PLC0415  (an extra)

        now = datetime.now(UTC)
        if self.ca is not None:
            certificates.read_certificates(self.ca, now)
        if self.certificate is not None and self.key is not None:
            certificates.read_pair(self.certificate, self.key, now)


class TokenFile:
    """The token in a file, which is read again when the file changes.

    While the file cannot be read or has no token, for example while it is being replaced, the last
    token is used.

    Args:
        path: path of the file.

    Raises:
        CredentialsError: the file cannot be used now.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._stamp = _stamp(path)
        self._token = self._read()

    def __call__(self) -> str:
        """Return the token."""
        stamp = _stamp(self._path)
        if stamp is not None and stamp != self._stamp:
            with suppress(CredentialsError):
                self._token = self._read()
                self._stamp = stamp
        return self._token

    def _read(self) -> str:
        token = _read(self._path).decode("ascii", "replace").strip()
        try:
            _check_token(token)
        except CredentialsError as error:
            raise CredentialsError(f"{self._path}: {error}") from error
        return token


def _check_token(token: str) -> None:
    if not (token and token.isascii() and token.isprintable()):
        raise CredentialsError("the token is empty or has invalid characters")


def _stamp(path: Path) -> tuple[int, int, int] | None:
    """Return a stamp that changes when a file is written or replaced; None if there is no file."""
    try:
        found = path.stat()
    except OSError:
        return None
    return found.st_mtime_ns, found.st_size, found.st_ino


def open_channel(
    address: str, credentials: Credentials | None, options: _Options
) -> "grpc.Channel":
    """Return a channel to a service; without credentials it is not encrypted.

    Raises:
        CredentialsError: a file of the credentials cannot be used.
    """
    import grpc  # noqa: PLC0415  (only for a channel)

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


def without_credentials(url: str) -> str:
    """Return a server's URL without name, password and query, for display."""
    try:
        parts = urlsplit(url)
        _ = parts.port
    except ValueError:
        return "a URL that cannot be read"
    if not parts.scheme:  # possibly a bare password
        return "a URL that cannot be read"
    # The password is not percent-encoded.
    if "@" in parts.path + parts.query + parts.fragment:
        return f"{parts.scheme}://"
    return f"{parts.scheme}://{parts.netloc.rpartition('@')[2]}{parts.path}"
