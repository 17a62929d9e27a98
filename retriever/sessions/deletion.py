"""Deletion of a drafter's data: first in memory, then on disk; other callers draft meanwhile."""

import time
from collections.abc import Callable, Iterator
from threading import Lock
from typing import Final

from retriever.log.pools import Pools
from retriever.predict.generations import Scope, session_origin
from retriever.predict.pool import Pool
from retriever.sequences import SessionKey
from retriever.sessions.drafter_plugins import Plugins
from retriever.sessions.session_table import Session, Sessions

_DONE: Final = object()


def forget(  # noqa: PLR0913, PLR0917  (what holds data, and what is deleted of it)
    sessions: Sessions,
    pools: Pools,
    plugins: Plugins,
    lock: Lock,
    scope: Scope,
    tell: Callable[[Scope], None],
) -> None:
    """Delete the data of a scope, and report it before any later output is learned.

    Other callers can draft while this waits for the disk.

    Args:
        sessions: the open sessions.
        pools: generations, and their log.
        plugins: delete their own data; plugins that cannot distinguish sessions delete all data of
            the tenant.
        lock: held while sessions or pools are used.
        scope: what to delete.
        tell: called with the scope, and with the lock held, before anything is removed.

    Raises:
        StateError: the disk refuses; the data in memory is deleted anyway.
        LimitExceededError: the tenant's data is being deleted already.
    """
    with pools.deletion(scope.tenant) as pool:
        ended = _sessions_of(scope, sessions, lock)
        with lock:
            tell(scope)
            sessions.wipe(ended)
            rest = _emptying(pool, scope, sessions)
            is_done = next(rest, _DONE) is _DONE
        while not is_done:
            time.sleep(0)  # lets others draft
            with lock:
                is_done = next(rest, _DONE) is _DONE
        plugins.on_deleted(scope)
        if not scope.origin:
            pools.evict(scope.tenant)
        pools.delete_logged(scope)


def _sessions_of(scope: Scope, sessions: Sessions, lock: Lock) -> list[tuple[SessionKey, Session]]:
    """Return the open sessions of an origin; none for a whole tenant, whose sessions continue."""
    if not scope.origin:
        return []
    with lock:
        found = sessions.of(scope.tenant)
    return [each for each in found if session_origin(each[0].name) == scope.origin]


def _emptying(pool: Pool | None, scope: Scope, sessions: Sessions) -> Iterator[None]:
    """Delete a scope from a pool; after the first step, all of the scope is unreadable."""
    if pool is None:
        return
    if scope.origin:
        yield from pool.forgetting(scope.origin)
    else:
        pool.clear()
        sessions.forget(pool)
