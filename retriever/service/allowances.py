"""What a tenant may ask for: work, and deletions, are counted before they are done.

A token bucket for each tenant holds what it may ask for in a second, or a minute. What goes beyond
it is done, so that no request is too large for ever, and paid back by refusals until it is
refilled. A unit of work is a node of a tree, about a microsecond.
"""

import math
import time
from collections.abc import Callable, Iterable
from typing import Final, Self

from retriever.drafter import DraftRequest
from retriever.errors import LimitExceededError

UNITS_PER_SEQUENCE: Final = 16
"""Of a step: its look-up, commit and messages take some 20 microseconds besides its nodes."""

TOKENS_PER_UNIT: Final = 8
"""Tokens that are read in a microsecond, conversion and tables included."""

_MINUTE_S: Final = 60.0
_ROUNDING_S: Final = 1e-6
_MANY: Final = 1024
"""Tenants before those with a full allowance are dropped: bounds memory."""


def work_of_tokens(num_tokens: int) -> float:
    """Return the units of reading tokens."""
    return num_tokens / TOKENS_PER_UNIT


def work_of_draft(budget_nodes: int, num_tokens: int) -> float:
    """Return the units of reading tokens and drafting."""
    return UNITS_PER_SEQUENCE + budget_nodes + num_tokens / TOKENS_PER_UNIT


def work_of_steps(requests: Iterable[DraftRequest]) -> float:
    """Return the units of a step's requests: those of a draft for each outcome, too."""
    return sum(
        work_of_draft(each.budget_nodes, len(each.new_tokens))
        + sum(work_of_draft(each.budget_nodes, len(outcome)) for outcome in each.outcomes)
        for each in requests
    )


class Allowances:
    """What tenants may still ask for.

    Args:
        rates: returns what is allowed now: units of one tenant a second, infinity for no limit,
            and how many seconds' units may have been taken for another to begin.
        limit: the setting that says so.
        beyond: what a tenant is told that has no more.
        clock: seconds, rising.
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
        """Return those of work, in units."""
        beyond = "the tenant asks for more work in a second than it may"
        return cls(lambda: (per_second(), 1.0), "max_tenant_work", beyond, clock)

    @classmethod
    def of_deletions(
        cls, per_minute: Callable[[], int], clock: Callable[[], float] = time.monotonic
    ) -> Self:
        """Return those of deletions."""

        def rates() -> tuple[float, float]:
            period_s = _MINUTE_S / per_minute()
            return 1 / period_s, _MINUTE_S - period_s

        beyond = "the tenant deletes more often in a minute than it may"
        return cls(rates, "max_tenant_deletions", beyond, clock)

    @property
    def is_limited(self) -> bool:
        """Whether anything may be refused now."""
        return math.isfinite(self._rates()[0])

    def take(self, tenant: str, units: float = 1.0) -> None:
        """Take units from a tenant's allowance.

        Raises:
            LimitExceededError: it is used up; the error says how long to wait. Nothing is taken.
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
