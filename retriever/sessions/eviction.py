"""Eviction: makes room in memory by removing data; the longest idle data goes first."""

import logging
from collections import Counter
from collections.abc import Callable
from threading import Lock
from typing import Final

from retriever.log.pools import Pools
from retriever.predict.ledger import Ledger
from retriever.sessions.drafter_plugins import Plugins
from retriever.sessions.session_table import Sessions

EVICTED: Final = ("recycled", "pools", "generations", "sessions")
"""Kinds of evicted data: findings of decoders, all outputs of a tenant, the older half of a
tenant's outputs, idle sessions."""

_LOGGER: Final = logging.getLogger(__name__)


class Eviction:
    """Makes room in a ledger; see `Evictor`.

    If the service is at its ceiling, it evicts in this order: a tenant's findings of decoders that
    no state directory holds; outputs of tenants without open sessions; the older half of the
    requesting tenant's outputs; then sessions idle for longer than `idle_eviction_s`. If a tenant
    is at its own ceiling, the same data is evicted, but only its own. A share is an equal part of
    the ceiling for each tenant that has open sessions or called within `idle_session_s`. A tenant
    that exceeds its share takes nothing from such tenants if they do not exceed theirs.

    Args:
        ledger: the memory ledger.
        sessions: the open sessions.
        pools: outputs.
        plugins: hold further data, which is evicted first.
        lock: the drafter's lock.

    Attributes:
        counts: how often each kind in `EVICTED` has made room.
    """

    def __init__(
        self,
        ledger: Ledger,
        sessions: Sessions,
        pools: Pools,
        plugins: Plugins,
        lock: Lock,
    ) -> None:
        self._ledger = ledger
        self._plugins = plugins
        self._sessions = sessions
        self._pools = pools
        self._lock = lock
        self._is_under_way = False
        self.counts: Counter[str] = Counter()

    def __call__(self, tenant: str, num_bytes: int, limit: str, *, is_locked: bool) -> bool:
        """Evict one thing; return False if nothing more may be evicted."""
        if is_locked:
            return self._evict(tenant, num_bytes, limit)
        with self._lock:
            return self._evict(tenant, num_bytes, limit)

    def _evict(self, tenant: str, num_bytes: int, limit: str) -> bool:
        if self._is_under_way:  # shrinking outputs needs memory for the part that stays
            return False
        self._is_under_way = True
        try:
            if limit == "max_tenant_bytes":
                return num_bytes <= self._ledger.max_tenant_bytes and (
                    self._drop_of_plugins(lambda other: other == tenant)
                    or self._shrink(tenant)
                    or self._end_idle(tenant, lambda other: other == tenant)
                )
            spared = self._spared(tenant, num_bytes)
            return num_bytes <= self._ledger.max_bytes and (
                self._drop_of_plugins(lambda other: other not in spared)
                or self._drop_pool(tenant, spared)
                or self._shrink(tenant)
                or self._end_idle(tenant, lambda other: other not in spared)
            )
        finally:
            self._is_under_way = False

    def _spared(self, tenant: str, num_bytes: int) -> set[str]:
        """Return the tenants whose data may not be evicted for this tenant."""
        active = {
            *self._sessions.tenants,
            *self._pools.used_within(self._sessions.limits.idle_session_s),
        }
        share = self._ledger.max_bytes // len(active | {tenant})
        if self._ledger.of(tenant) + num_bytes <= share:
            return set()
        return {other for other in active - {tenant} if self._ledger.of(other) <= share}

    def _drop_of_plugins(self, is_meant: Callable[[str], bool]) -> bool:
        name = self._plugins.evict_idle(is_meant)
        if name:
            self.counts[name] += 1
        return bool(name)

    def _drop_pool(self, tenant: str, spared: set[str]) -> bool:
        evicted = self._pools.evict_idle({tenant, *spared, *self._sessions.tenants})
        if evicted and not self._pools.is_logged and not self.counts["pools"]:
            _LOGGER.warning(
                "outputs of tenants without open sessions are evicted and lost: there is no "
                "state directory (max_bytes)"
            )
        self.counts["pools"] += evicted
        return evicted

    def _shrink(self, tenant: str) -> bool:
        pool = self._pools.find(tenant)
        shrunk = pool is not None and pool.generations.shrink()
        self.counts["generations"] += shrunk
        return shrunk

    def _end_idle(self, tenant: str, is_meant: Callable[[str], bool]) -> bool:
        ended = self._sessions.end_longest_idle(
            lambda session: is_meant(session.tenant) or session.tenant == tenant
        )
        self.counts["sessions"] += ended
        return ended
