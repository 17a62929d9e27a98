"""Rate limits of tenants: work and deletions are counted before they are done.

A token bucket for each tenant holds the units that it may use in a second or a minute. A request
for more is still done, so that no request is ever too large. Further requests are refused until the
bucket has refilled. A unit of work is a node of a tree, about a microsecond.
"""

import math
import time
from collections.abc import Callable, Iterable
from typing import Final, Self

from retriever.drafter import DraftRequest
from retriever.errors import LimitExceededError

UNITS_PER_SEQUENCE: Final = 16
"""Units per sequence of a step: look-up, commit and messages take about 20 microseconds, without
the nodes."""

TOKENS_PER_UNIT: Final = 8
"""Number of tokens read per microsecond, including conversion and tables."""

_MINUTE_S: Final = 60.0
_ROUNDING_S: Final = 1e-6
_MANY: Final = 1024
"""Most tenants in memory; above this, tenants with a full allowance are dropped."""


def work_of_tokens(num_tokens: int) -> float:
    """Return the units of work to read tokens."""
    return num_tokens / TOKENS_PER_UNIT


def work_of_draft(budget_nodes: int, num_tokens: int) -> float:
    """Return the units of work to read tokens and draft."""
    return UNITS_PER_SEQUENCE + budget_nodes + num_tokens / TOKENS_PER_UNIT


def work_of_steps(requests: Iterable[DraftRequest]) -> float:
    """Return the units of work of a step's requests, including a draft for each outcome."""
    return sum(
        work_of_draft(each.budget_nodes, len(each.new_tokens))
        + sum(work_of_draft(each.budget_nodes, len(outcome)) for outcome in each.outcomes)
        for each in requests
    )


class Allowances:
    """The remaining allowances of tenants.

    Args:
        rates: returns the current limits: the units per second of one tenant (infinity for no
            limit), and the debt in seconds up to which a new request is accepted.
        limit: name of the setting of the limit.
        beyond: message for a tenant that is over its limit.
        clock: returns monotonic seconds.
    """

    def __init__(
        self,
        rates: Callable[[], tuple[float, float]],
        limit: str,
        beyond: str,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._rates = rates
        self._limit = limit
        self._beyond = beyond
        self._clock = clock
        self._full_again_s: dict[str, float] = {}

    @classmethod
    def of_work(
        cls, per_second: Callable[[], float], clock: Callable[[], float] = time.monotonic
    ) -> Self:
        """Return the allowances of work, in units."""
        beyond = "the tenant asks for more work per second than it may"
        return cls(lambda: (per_second(), 1.0), "max_tenant_work", beyond, clock)

    @classmethod
    def of_deletions(
        cls, per_minute: Callable[[], int], clock: Callable[[], float] = time.monotonic
    ) -> Self:
        """Return the allowances of deletions."""

        def rates() -> tuple[float, float]:
            period_s = _MINUTE_S / per_minute()
            return 1 / period_s, _MINUTE_S - period_s

        beyond = "the tenant deletes more often per minute than it may"
        return cls(rates, "max_tenant_deletions", beyond, clock)

    @property
    def is_limited(self) -> bool:
        """Whether there is a limit now."""
        return math.isfinite(self._rates()[0])

    def take(self, tenant: str, units: float = 1.0) -> None:
        """Take units from a tenant's allowance.

        Raises:
            LimitExceededError: the allowance is used up; the error says how long to wait. Nothing
                is taken.
        """
        per_second, held_s = self._rates()
        if not math.isfinite(per_second):
            return
        now_s = self._clock()
        full_s = max(now_s, self._full_again_s.get(tenant, now_s))
        wait_s = full_s - now_s - held_s
        if wait_s > _ROUNDING_S:
            raise LimitExceededError(
                f"{self._beyond}: try again in {wait_s:.3g} s ({self._limit})",
                limit=self._limit,
                retry_after_s=wait_s,
            )
        if len(self._full_again_s) >= _MANY:
            self._full_again_s = {
                name: at_s for name, at_s in self._full_again_s.items() if at_s > now_s
            }
        self._full_again_s[tenant] = full_s + units / per_second
