"""Idle sessions make room for others, within what each tenant may have."""

import numpy as np
import pytest

from retriever.drafter import SequenceOptions
from retriever.errors import LimitExceededError
from retriever.limits import Limits
from retriever.plugins.admin.administration import Administration, SessionFilter
from retriever.sequences import SessionKey
from retriever.sessions.embedded import EmbeddedDrafter


class Timed:
    """A drafter whose sessions are as old as a test says."""

    def __init__(self, **limits: int) -> None:
        self.now_s = 0.0
        self.drafter = EmbeddedDrafter(
            limits=Limits(idle_eviction_s=60.0, **limits), clock=lambda: self.now_s
        )

    def begin(self, tenant: str, name: str) -> None:
        prepared = self.drafter.state.prepare(np.arange(3), SequenceOptions(tenant=tenant))
        self.drafter.state.begin(SessionKey(tenant, name), prepared)

    @property
    def names(self) -> list[str]:
        (listed,) = Administration(self.drafter.state).sessions(SessionFilter())
        return [f"{each.tenant}{each.session_id}" for each in listed]


def test_idle_sessions_of_a_tenant_make_room_before_it_is_refused() -> None:
    timed = Timed(max_tenant_sessions=2)
    for tenant, name in ("b1", "a1", "a2"):
        timed.begin(tenant, name)
    timed.now_s = 59.0
    with pytest.raises(LimitExceededError, match="max_tenant_sessions") as refused:
        timed.begin("a", "3")
    assert refused.value.retry_after_s == 5.0
    timed.now_s = 61.0
    timed.begin("a", "3")
    assert timed.names == ["b1", "a2", "a3"]  # no other tenant's, however idle


def test_idle_sessions_make_room_but_for_those_within_a_tenants_share() -> None:
    timed = Timed(max_sessions=4)
    for tenant, name in ("a1", "b1", "b2", "b3"):
        timed.begin(tenant, name)
    timed.now_s = 61.0
    timed.begin("b", "4")
    assert timed.names == ["a1", "b2", "b3", "b4"]
    timed.begin("c", "1")
    assert timed.names == ["b2", "b3", "b4", "c1"]  # it had nothing: the longest idle one goes
