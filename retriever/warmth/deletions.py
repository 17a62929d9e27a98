"""What was deleted, and when: what is older is never learned or told again."""

from collections import OrderedDict, deque
from typing import Final

from retriever.scopes import Scope

MAX_TENANT_DELETIONS: Final = 1 << 12
"""Deletions of sessions that are known of each tenant; of more, the last ones."""

MAX_DELETIONS: Final = 1 << 20
"""Those of all tenants together; beyond it, whoever has most loses its oldest."""


class Deletions:
    """Times of deletion by scope. Safe to call from any thread."""

    def __init__(self) -> None:
        self._tenants: dict[str, float] = {}
        self._sessions: dict[str, OrderedDict[bytes, float]] = {}
        self._num_sessions = 0

    def __len__(self) -> int:
        return len(self._tenants) + self._num_sessions

    def add(self, scope: Scope, time_s: float) -> None:
        """Note that what there was at this time, in seconds since 1970, is deleted.

        A tenant that deletes many sessions pushes out its own deletions, and never another's.
        """
        if not scope.origin:
            self._tenants[scope.tenant] = max(time_s, self._tenants.get(scope.tenant, time_s))
            return
        of_tenant = self._sessions.setdefault(scope.tenant, OrderedDict())
        self._num_sessions += scope.origin not in of_tenant
        of_tenant[scope.origin] = max(time_s, of_tenant.get(scope.origin, time_s))
        if len(of_tenant) > MAX_TENANT_DELETIONS:
            self._drop(of_tenant)
        elif self._num_sessions > MAX_DELETIONS:
            self._drop(max(self._sessions.copy().values(), key=len))

    def cover(self, scope: Scope, time_s: float) -> bool:
        """Whether what is of this time was deleted, by itself or with all of the tenant's."""
        of_tenant = self._sessions.get(scope.tenant)
        of_session = None if of_tenant is None else of_tenant.get(scope.origin)
        times = (self._tenants.get(scope.tenant), of_session)
        return any(deleted is not None and time_s <= deleted for deleted in times)

    def _drop(self, of_tenant: OrderedDict[bytes, float]) -> None:
        of_tenant.popitem(last=False)
        self._num_sessions -= 1


class Surplus:
    """Tells which entries of a stream of deletions are more than a tenant's share."""

    def __init__(self) -> None:
        self._entries: dict[str, deque[str]] = {}

    def add(self, scope: Scope, entry_id: str) -> list[str]:
        """Note an entry, in the order of the stream; return the ids of those to be removed."""
        entries = self._entries.setdefault(scope.tenant, deque())
        entries.append(entry_id)
        return [entries.popleft() for _ in range(len(entries) - MAX_TENANT_DELETIONS)]
