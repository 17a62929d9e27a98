"""What was deleted, and when: what is older is never learned or told again."""

from collections import OrderedDict
from typing import Final

from retriever.scopes import Scope

MAX_DELETIONS: Final = 1 << 16
"""Deletions that are known of; of more, the last ones."""


class Deletions:
    """Times of deletion by scope. Safe to call from any thread."""

    def __init__(self) -> None:
        self._times: OrderedDict[Scope, float] = OrderedDict()

    def add(self, scope: Scope, time_s: float) -> None:
        """Note that what there was at this time, in seconds since 1970, is deleted."""
        self._times[scope] = max(time_s, self._times.get(scope, time_s))
        if len(self._times) > MAX_DELETIONS:
            self._times.popitem(last=False)

    def cover(self, scope: Scope, time_s: float) -> bool:
        """Whether what is of this time was deleted, by itself or with all of the tenant's."""
        times = (self._times.get(each) for each in (scope, Scope(scope.tenant)))
        return any(deleted is not None and time_s <= deleted for deleted in times)
