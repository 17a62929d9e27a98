"""Admission: identifies the caller and tenant of every call before it is answered."""

import logging
import math
import time
from collections.abc import Callable, Iterable, Mapping
from datetime import UTC, datetime
from functools import lru_cache
from pathlib import Path
from threading import Lock
from typing import Any, Final

from retriever.errors import AccessRefusedError, NotPermittedError
from retriever.security.access import TENANT_SCOPES, Access, Grant, Scope, name_of, read_access
from retriever.security.certificates import Certified, certified, read_authorities
from retriever.security.private_files import DEFAULT_GRACE_S, Reloaded

_REFUSAL: Final = (
    "credentials are missing or not valid: show a token (metadata authorization: Bearer TOKEN) or "
    "a certificate; foredraft takes them from --credentials FILE or the environment"
)
_NO_TENANT: Final = "these credentials have no tenant here: have them added to the access file"
_MOVED: Final = "these credentials act for another tenant now: call again"
_BEARER: Final = "bearer "
_SERVICE: Final = "/retriever.v1.RetrieverService/"
_SCOPES: Final[Mapping[str, Scope | None]] = {
    f"{_SERVICE}DeleteSessionData": Scope.DELETE,
    f"{_SERVICE}DeleteTenantData": Scope.DELETE,
    _SERVICE: Scope.DRAFT,
    "/retriever.v1.AdminService/": Scope.ADMIN,
    "/grpc.reflection.v1alpha.ServerReflection/": None,
    "/grpc.reflection.v1.ServerReflection/": None,
}
_NOBODY: Final = Access()
_BETWEEN_TOLD_S: Final = 60.0  # between log lines on refused calls
_MOST_SHOWN: Final = 200  # most characters of identities in a log line
_LOGGER: Final = logging.getLogger(__name__)


def scope_for(method: str) -> Scope | None:
    """Return the scope that a call requires, by its full name; None if any credential will do.

    Calls that are not listed require the scope admin, so a new call is closed until it is listed.
    """
    for name in (method, f"{method.rpartition('/')[0]}/"):
        if name in _SCOPES:
            return _SCOPES[name]
    return Scope.ADMIN


class Authenticator:
    """Finds what a caller may do, by its token if it sends one, else by its certificate.

    Args:
        access: the access file; None to let each certificate act for the tenant of its own name.
        client_ca: authorities of certificates; None if there are none, or something else checks the
            file.
        grace_s: how long the last content of a file admits callers once the file cannot be used, in
            seconds.
        clock: returns monotonic seconds.

    Attributes:
        refused: number of refused calls and steps.
        files: the files that admit callers, by the setting that names each.

    Raises:
        CredentialsError: a file cannot be used.
    """

    def __init__(
        self,
        access: Path | None,
        client_ca: Path | None = None,
        grace_s: float = DEFAULT_GRACE_S,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._clock = clock
        self.refused = self._told = 0
        self._tell_at_s = -math.inf
        self._current: Access | None = None
        self.files: dict[str, Reloaded[Any]] = {}
        self._access: Reloaded[Access] | None = None
        if access is not None:
            self._access = Reloaded([access], lambda: read_access(access), clock, grace_s=grace_s)
            self.files["access"] = self._access
        if client_ca is not None:
            self.files["client_ca"] = Reloaded(
                [client_ca], lambda: _authorities(client_ca), clock, grace_s=grace_s
            )
        self._files = tuple(self.files.values())
        self._lock = Lock()
        self._note()

    def current(self) -> Access | None:
        """Return the current access file; the same object while it is unchanged.

        If a file could not be used for longer than the grace period, the result lists no
        credentials.
        """
        if self._clock() < self._look_at_s:
            return self._current
        if not self._lock.acquire(blocking=False):  # another thread is checking
            return _NOBODY if any(file.is_overdue for file in self._files) else self._current
        try:
            for file in self._files:
                file.current()
            self._note()
        finally:
            self._lock.release()
        return self._current

    def look(self) -> None:
        """Check the files now."""
        with self._lock:
            for file in self._files:
                file.look()
            self._note()

    def _note(self) -> None:
        """Cache the state of the files, so that a call only needs to check the time."""
        if any(file.is_overdue for file in self._files):
            self._current = _NOBODY
        else:
            self._current = None if self._access is None else self._access.current()
        self._look_at_s = min((file.look_at_s for file in self._files), default=math.inf)

    def grant(
        self, access: Access | None, token: str | None, certificate: Certified | None
    ) -> Grant:
        """Return what a caller's credentials grant.

        Raises:
            AccessRefusedError: the caller has no valid credentials.
            NotPermittedError: the caller is known but has no tenant.
        """
        try:
            if token is not None:
                return _of_token(access, token)
            return _of_certificate(access, certificate)
        except AccessRefusedError:
            self._note_refusal(token, certificate)
            raise

    def _note_refusal(self, token: str | None, certificate: Certified | None) -> None:
        """Count a refusal and log it, at most once a minute: guessing must not fill the disk."""
        self.refused += 1
        if self._clock() < self._tell_at_s:
            return
        self._tell_at_s = self._clock() + _BETWEEN_TOLD_S
        more = self.refused - self._told - 1
        self._told = self.refused
        who = _who(token, certificate)
        _LOGGER.info("refused %s; %d more since this was logged last", who, more)


class Caller:
    """The caller of a call; its credentials are checked throughout the call.

    Args:
        authenticator: finds what the caller may do.
        token: token of the call, or None.
        certificate: certificate of the connection, or None.
        scope: scope that the call requires; None if any credential will do.

    Raises:
        AccessRefusedError: the credentials are not valid.
        NotPermittedError: the caller is known but may not do this.
    """

    __slots__ = ("_access", "_authenticator", "_certificate", "_grant", "_scope", "_token")

    def __init__(
        self,
        authenticator: Authenticator,
        token: str | None,
        certificate: Certified | None,
        scope: Scope | None = Scope.DRAFT,
    ) -> None:
        self._authenticator = authenticator
        self._token = token
        self._certificate = certificate
        self._scope = scope
        self._access = authenticator.current()
        self._grant = self._granted(self._access)

    @property
    def tenant(self) -> str:
        """The tenant that the caller acts for; "" for an administrator without a tenant.

        Raises:
            AccessRefusedError: the caller's credentials have expired, were revoked, or moved to
                another tenant.
            NotPermittedError: the credentials have lost the scope of the call.
        """
        self.check()
        return self._grant.tenant

    @property
    def name(self) -> str:
        """Name of the caller's credentials in logs: a token's name or an identity; not secret."""
        return self._grant.name

    @property
    def scopes(self) -> frozenset[Scope]:
        """The scopes of the caller's credentials."""
        return self._grant.scopes

    def check(self) -> None:
        """Check that the credentials still allow the call; takes less than a microsecond.

        Raises:
            AccessRefusedError: as for `tenant`.
        """
        access = self._authenticator.current()
        by_certificate = self._token is None
        if access is not self._access or by_certificate:
            grant = self._granted(access)
            if grant.tenant != self._grant.tenant:
                raise AccessRefusedError(_MOVED)
            self._access, self._grant = access, grant

    def _granted(self, access: Access | None) -> Grant:
        grant = self._authenticator.grant(access, self._token, self._certificate)
        if self._scope is not None and self._scope not in grant.scopes:
            raise NotPermittedError(
                f"this call takes credentials of the scope {self._scope}, but these only have "
                f"{', '.join(sorted(grant.scopes))}: ask the service's operator"
            )
        return grant


def _who(token: str | None, certificate: Certified | None) -> str:
    """Return a description of a refused caller for logs, without secrets."""
    if token is not None:
        name = name_of(token)
        return "a token of another form" if name is None else f"the token {name}"
    if certificate is not None:
        return f"the certificate of {', '.join(certificate.identities)[:_MOST_SHOWN]!r}"
    return "a call without a token or certificate"


def token_in(metadata: Iterable[tuple[str, Any]]) -> str | None:
    """Return the bearer token of a call; None if the call has none."""
    for key, value in metadata:
        if key == "authorization":
            text = value if isinstance(value, str) else bytes(value).decode("latin-1")
            return text[len(_BEARER) :] if text[: len(_BEARER)].lower() == _BEARER else ""
    return None


def certificate_of(auth_context: Mapping[str, Iterable[bytes]]) -> Certified | None:
    """Return the client certificate of a connection; None if the connection has none."""
    found = list(auth_context.get("x509_pem_cert", ()))
    return _certified(bytes(found[0])) if found else None


_certified = lru_cache(maxsize=4096)(certified)


def _of_token(access: Access | None, token: str) -> Grant:
    grant = None if access is None else access.grant_of_token(token)
    if grant is None:
        raise AccessRefusedError(_REFUSAL)
    return grant


def _of_certificate(access: Access | None, certificate: Certified | None) -> Grant:
    if access is _NOBODY or certificate is None or certificate.expires_at_s < time.time():
        raise AccessRefusedError(_REFUSAL)
    if access is not None:
        grant = access.grant_of_certificate(certificate.identities)
    else:  # an unlisted certificate never administers
        name = next(iter(certificate.identities), None)
        grant = None if name is None else _grant_itself(name)
    if grant is None:
        raise NotPermittedError(_NO_TENANT)
    return grant


def _authorities(path: Path) -> bytes:
    return read_authorities(path, datetime.now(UTC))


@lru_cache(maxsize=4096)
def _grant_itself(name: str) -> Grant:
    """Return a certificate's grant without an access file: for the tenant of the same name."""
    return Grant(name, name, TENANT_SCOPES)
