"""Which tenants were deleted, and when: what is older is never learned or told again."""

from collections import OrderedDict
from typing import Final

MAX_DELETIONS: Final = 1 << 16
"""Deleted tenants that are known of; of more, those that were deleted last."""


class Deletions:
    """Times of deletion by tenant. Safe to call from any thread."""

    def __init__(self) -> None:
        self._times: OrderedDict[str, float] = OrderedDict()

    def add(self, tenant: str, time_s: float) -> None:
        """Note that what a tenant had at this time, in seconds since 1970, is deleted."""
        self._times[tenant] = max(time_s, self._times.get(tenant, time_s))
        if len(self._times) > MAX_DELETIONS:
            self._times.popitem(last=False)

    def cover(self, tenant: str, time_s: float) -> bool:
        """Whether what is of this time was deleted."""
        deleted = self._times.get(tenant)
        return deleted is not None and time_s <= deleted
