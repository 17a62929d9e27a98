"""The sessions of a drafter: the state of each sequence that is being decoded."""

import time
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import NamedTuple

from retriever.drafter import DEFAULT, DraftRequest, SequenceOptions, TokenIds
from retriever.errors import LimitExceededError
from retriever.limits import RETRY_S, Limits
from retriever.predict.databases import Databases
from retriever.predict.pool import Pool
from retriever.predict.searched_corpus import Corpus
from retriever.sequences import OpenSessions, SessionKey


@dataclass(slots=True, eq=False, weakref_slot=True)
class Session:
    """One sequence.

    Attributes:
        databases: the databases that it is drafted from.
        prompt_length: number of tokens in the prompt.
        remember: whether its output joins the generations.
        last_used_s: time of the last request.
        is_open: whether it has not ended.
        is_committing: whether a long commit is running; meanwhile other requests are refused.
        options: the options that it was opened with, without the predictions.
    """

    databases: Databases
    prompt_length: int
    remember: bool
    last_used_s: float = 0.0
    is_open: bool = True
    is_committing: bool = False
    options: SequenceOptions = DEFAULT

    @property
    def tenant(self) -> str:
        """The tenant of the sequence."""
        return self.databases.pool.tenant


class CheckedRequest(NamedTuple):
    """A request that passed the checks against its session.

    Attributes:
        session: session of the sequence.
        new_tokens: int32[n], inside the vocabulary.
        request: the request as received.
        outcomes: int32[k] each, inside the vocabulary.
    """

    session: Session
    new_tokens: TokenIds
    request: DraftRequest
    outcomes: Sequence[TokenIds] = ()


class Sessions:
    """Sessions by name, the longest idle first. Not thread-safe: callers hold a lock.

    Args:
        limits: limits of the number of sessions and tokens, and of the idle time.
        clock: a monotonic clock in seconds.
    """

    def __init__(self, limits: Limits, clock: Callable[[], float] = time.monotonic) -> None:
        self._limits = limits
        self._clock = clock
        self._open: OpenSessions[SessionKey, Session] = OpenSessions()
        self._tenant_sessions: Counter[str] = Counter()

    def __len__(self) -> int:
        return len(self._open)

    @property
    def tenants(self) -> Collection[str]:
        """The tenants with open sessions."""
        return self._tenant_sessions.keys()

    def add(self, key: SessionKey, session: Session) -> None:
        """Start a session.

        Raises:
            SessionExistsError: the name is taken.
            LimitExceededError: the number of sessions is at its limit, and no session is idle.
        """
        self._open.check_free(key)
        self.end_idle()
        self._make_place(session.tenant)
        session.last_used_s = self._clock()
        self._open.add(key, session)
        self._tenant_sessions[session.tenant] += 1

    def get(self, key: SessionKey) -> Session:
        """Return a session, and mark it as the most recently used.

        Raises:
            UnknownSessionError: no session has this name.
        """
        by_name = self._open.by_name
        session = by_name.get(key)
        if session is None:
            return self._open.get(key)
        by_name.move_to_end(key)
        session.last_used_s = self._clock()
        return session

    @property
    def limits(self) -> Limits:
        """The limits in force."""
        return self._limits

    @limits.setter
    def limits(self, limits: Limits) -> None:
        self._limits = limits

    def idle_s(self, session: Session) -> float:
        """Return the time since a session's last request, in seconds."""
        return self._clock() - session.last_used_s

    def end_longest_idle(self, is_meant: Callable[[Session], bool]) -> bool:
        """End the longest idle matching session if it exceeds `idle_eviction_s`; return whether."""
        for key, session in self._open.items():
            if self.idle_s(session) <= self._limits.idle_eviction_s:
                return False
            if is_meant(session):
                self.remove(key)
                return True
        return False

    def remove(self, key: SessionKey) -> Session:
        """End a session and return it.

        Raises:
            UnknownSessionError: no session has this name.
        """
        session = self._open.remove(key)
        session.is_open = False
        session.databases.leave()
        tenant = session.tenant
        self._tenant_sessions[tenant] -= 1
        if not self._tenant_sessions[tenant]:
            del self._tenant_sessions[tenant]
        return session

    def discard(self, ended: Iterable[tuple[SessionKey, Session]]) -> int:
        """End the given sessions that are still open; return how many. Newer sessions stay."""
        gone = [key for key, session in ended if self._open.find(key) is session]
        for key in gone:
            self.remove(key)
        return len(gone)

    def end_idle(self) -> int:
        """End sessions idle for longer than `idle_session_s`; return how many."""
        idle_since_s = self._clock() - self._limits.idle_session_s
        num_ended = 0
        while self._open:
            longest_idle = next(iter(self._open))
            if self._open.get(longest_idle).last_used_s > idle_since_s:
                break
            self.remove(longest_idle)
            num_ended += 1
        return num_ended

    def all(self) -> list[Session]:
        """Return the open sessions."""
        return self._open.values()

    def items(self) -> list[tuple[SessionKey, Session]]:
        """Return the open sessions with their names."""
        return self._open.items()

    def of(self, tenant: str) -> list[tuple[SessionKey, Session]]:
        """Return a tenant's open sessions."""
        return [item for item in self._open.items() if item[1].tenant == tenant]

    def wipe(self, ended: Iterable[tuple[SessionKey, Session]]) -> None:
        """End the given sessions that are still open, and overwrite their tokens."""
        for key, session in ended:
            if self._open.find(key) is session:
                self.remove(key).databases.clear()

    def forget(self, pool: Pool) -> None:
        """Exclude a tenant's open sessions from learning and from the generations."""
        for session in self._open.values():
            if session.databases.pool is pool:
                session.remember = session.databases.learns = False
                session.databases.lane.restrict()

    def last_tokens(self, max_sessions: int, num_tokens: int) -> list[TokenIds]:
        """Return copies of the last tokens, int32[n] each, of the most recently used sessions."""
        latest = islice(reversed(self._open.values()), max_sessions)
        return [session.databases.context.last(num_tokens).copy() for session in latest]

    def set_corpus(self, corpus: Corpus, older: Corpus, tenant: str | None = None) -> None:
        """Move sessions, or those of a tenant, from an older corpus to this one.

        The older corpus can then be closed.
        """
        for session in self._open.values():
            if session.databases.corpus is older and tenant in {None, session.tenant}:
                session.databases.set_corpus(corpus)

    def _make_place(self, tenant: str) -> None:
        """End the longest idle session if there is no place for another.

        At the tenant's limit, this is one of its own sessions. At the service's limit, it can be
        any tenant's. But if this tenant has reached its share, sessions of tenants that do not
        exceed theirs are spared. A share is an equal part of `max_sessions` for each tenant with
        open sessions.

        Raises:
            LimitExceededError: no such session is idle for longer than `idle_eviction_s`.
        """
        limits, of_tenant = self._limits, self._tenant_sessions[tenant]
        if of_tenant >= limits.max_tenant_sessions:
            self._end_one(
                tenant,
                self.of(tenant),
                f"{of_tenant} sessions of the tenant are open, which is the limit "
                "(max_tenant_sessions)",
                "max_tenant_sessions",
            )
        elif len(self._open) >= limits.max_sessions:
            self._end_one(
                tenant,
                self._open.items(),
                f"there is no room for one more session: at most {limits.max_sessions} are open, "
                "of all tenants together (max_sessions)",
                "max_sessions",
            )

    def _end_one(
        self,
        tenant: str,
        candidates: Sequence[tuple[SessionKey, Session]],
        refusal: str,
        limit: str,
    ) -> None:
        counts = self._tenant_sessions
        share = self._limits.max_sessions // len(
            {*(name for name in counts if counts[name]), tenant}
        )
        idle_enough_s = self._limits.idle_eviction_s
        for key, session in candidates:  # the longest idle first
            is_spared = counts[tenant] >= share >= counts[session.tenant]
            if session.tenant != tenant and is_spared:
                continue
            if self.idle_s(session) <= idle_enough_s:
                break
            self.remove(key)
            return
        # The real waiting time would reveal other tenants' sessions, so it is a constant.
        raise LimitExceededError(refusal, limit=limit, retry_after_s=RETRY_S)
