"""Deletions take turns, and each tenant has so many in a minute: the log is written anew for each.

Meanwhile outputs of others wait to be kept, so that a tenant that deletes without end would hold up
all that close sessions.
"""

import asyncio
import math
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Final

from retriever.errors import LimitExceededError

_MINUTE_S: Final = 60.0
_MAX_WAITING: Final = 256
_MANY: Final = 1024


class Deleting:
    """Lets one deletion at a time begin, and of a tenant at most so many in a minute.

    Args:
        per_minute: of one tenant: at once, and again as the minute passes.
        clock: seconds, rising.
    """

    def __init__(self, per_minute: int, clock: Callable[[], float] = time.monotonic) -> None:
        self._period_s = _MINUTE_S / per_minute
        self._clock = clock
        self._full_again_s: dict[str, float] = {}
        self._turn = asyncio.Lock()
        self._num_waiting = 0

    @asynccontextmanager
    async def turn(self, tenant: str) -> AsyncIterator[None]:
        """Wait for the turn of a tenant's deletion, which is over when the block ends.

        Raises:
            LimitExceededError: the tenant has had as many as it may have, or too many wait; the
                text says when to come again.
        """
        self.count(tenant)
        if self._num_waiting >= _MAX_WAITING:
            raise LimitExceededError("too many deletions wait: try again in 1 s")
        self._num_waiting += 1
        try:
            async with self._turn:
                yield
        finally:
            self._num_waiting -= 1

    def count(self, tenant: str) -> None:
        """Count a deletion, or refuse it, as `turn` does."""
        now_s = self._clock()
        full_s = max(now_s, self._full_again_s.get(tenant, now_s)) + self._period_s
        wait_s = full_s - now_s - _MINUTE_S
        if wait_s > self._period_s / 1e6:  # rounding
            raise LimitExceededError(
                f"a tenant deletes at most {round(_MINUTE_S / self._period_s)} times a minute: try "
                f"again in {math.ceil(wait_s)} s (max_tenant_deletions)"
            )
        if len(self._full_again_s) >= _MANY:
            self._forget(now_s)
        self._full_again_s[tenant] = full_s

    def _forget(self, now_s: float) -> None:
        """Forget the tenants that have all of their minute again."""
        self._full_again_s = {
            tenant: full_s for tenant, full_s in self._full_again_s.items() if full_s > now_s
        }
