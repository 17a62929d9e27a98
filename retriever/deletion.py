"""Deletion of what a tenant, or a session, has left: in memory, on disk and with others."""

import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from threading import Lock
from typing import Final

from retriever.errors import UnknownSessionError
from retriever.limits import check_session_name, check_tenant_name
from retriever.pool import Pool
from retriever.pools import Pools
from retriever.scopes import Scope, session_origin
from retriever.sessions import Session, SessionKey, Sessions
from retriever.warmth.sharing import NoWarmth

_DONE: Final = object()


class Deletion:
    """Deletes what is of a scope. Safe to call from any thread.

    Args:
        sessions: those that are open.
        pools: recent outputs, and their log.
        lock: held while either is used.

    Attributes:
        warmth: what tells the other drafters.
    """

    def __init__(self, sessions: Sessions, pools: Pools, lock: Lock) -> None:
        self._sessions = sessions
        self._pools = pools
        self._lock = lock
        self.warmth = NoWarmth()

    def tenant(self, tenant: str) -> None:
        """Delete what a tenant has; see `EmbeddedDrafter.delete_tenant`."""
        check_tenant_name(tenant)
        self._delete(Scope(tenant))

    def session(self, key: SessionKey, tenant: str) -> None:
        """Delete what came of sessions of a name; see `EmbeddedDrafter.delete_session`."""
        check_session_name(key.name)
        check_tenant_name(tenant)
        with self._lock, suppress(UnknownSessionError):
            self._sessions.remove(key).databases.context.clear()
        self._delete(Scope(tenant, session_origin(key.name)))

    def forget(self, scope: Scope, tell: Callable[[Scope], None]) -> None:
        """Forget what is of a scope, and tell of it before anything that comes later is learned.

        While the disk is waited for, others draft.
        """
        with self._pools.deletion(scope.tenant) as pool:
            ended = self._sessions_of(scope)
            with self._lock:
                tell(scope)
                self._sessions.wipe(ended)
                rest = self._emptying(pool, scope)
                is_done = next(rest, _DONE) is _DONE
            while not is_done:
                time.sleep(0)  # others may draft
                with self._lock:
                    is_done = next(rest, _DONE) is _DONE
            if not scope.origin:
                self._pools.let_go(scope.tenant)
            self._pools.delete_logged(scope)

    def _delete(self, scope: Scope) -> None:
        """Forget what is of a scope, and let the other drafters do so."""
        try:
            self.forget(scope, self.warmth.delete)
        finally:
            self.warmth.keep_position()

    def _sessions_of(self, scope: Scope) -> list[tuple[SessionKey, Session]]:
        """Return the open sessions of an origin: those of a whole tenant go on."""
        if not scope.origin:
            return []
        with self._lock:
            sessions = self._sessions.of(scope.tenant)
        return [each for each in sessions if session_origin(each[0].name) == scope.origin]

    def _emptying(self, pool: Pool | None, scope: Scope) -> Iterator[None]:
        """Empty a pool of what is of a scope, which is gone with the first step."""
        if pool is None:
            return
        if scope.origin:
            yield from pool.forgetting(scope.origin)
        else:
            pool.clear()
            self._sessions.forget(pool)
