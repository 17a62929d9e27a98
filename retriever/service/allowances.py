"""What a tenant may ask for: work is counted before it is done, and refilled by the second.

A unit of work is a node of a tree, about a microsecond. A token bucket for each tenant holds a
second's allowance. What goes beyond it is done, so that no request is too large for ever, and paid
back by refusals until it is refilled.
"""

import math
import time
from collections.abc import Callable, Iterable
from typing import Final

from retriever.drafter import DraftRequest
from retriever.errors import LimitExceededError

UNITS_PER_SEQUENCE: Final = 16
"""Of a step: its look-up, commit and messages take some 20 microseconds besides its nodes."""

TOKENS_PER_UNIT: Final = 8
"""Tokens that are read in a microsecond, conversion and tables included."""

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
    """The work that tenants may still ask for.

    Args:
        per_second: units of one tenant; infinity for no limit.
        clock: seconds, rising.
    """

    def __init__(self, per_second: float, clock: Callable[[], float] = time.monotonic) -> None:
        self.is_limited = math.isfinite(per_second)
        self._per_second = per_second
        self._clock = clock
        self._full_again_s: dict[str, float] = {}

    def take(self, tenant: str, work: float) -> None:
        """Take units from a tenant's allowance.

        Raises:
            LimitExceededError: it is used up; the error says how long to wait. Nothing is taken.
        """
        if not self.is_limited:
            return
        now_s = self._clock()
        full_s = max(now_s, self._full_again_s.get(tenant, now_s))
        wait_s = full_s - now_s - 1.0
        if wait_s >= 0:
            retry_s = max(wait_s, 0.001)
            raise LimitExceededError(
                f"the tenant's work is beyond {self._per_second:g} units a second: try again in "
                f"{retry_s:.3f} s (max_tenant_work)",
                limit="max_tenant_work",
                retry_after_s=retry_s,
            )
        if len(self._full_again_s) >= _MANY:
            self._full_again_s = {
                name: at_s for name, at_s in self._full_again_s.items() if at_s > now_s
            }
        self._full_again_s[tenant] = full_s + work / self._per_second
