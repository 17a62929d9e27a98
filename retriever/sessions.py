"""The sessions of a drafter: what is kept of each sequence that is being decoded."""

import time
from collections.abc import Callable
from dataclasses import dataclass
from itertools import islice

from retriever.databases import Corpus, Databases
from retriever.drafter import TokenIds
from retriever.errors import LimitExceededError, SessionExistsError, UnknownSessionError
from retriever.limits import Limits
from retriever.pools import Pool
from retriever.tree import DraftTree


@dataclass(slots=True)
class Session:
    """One sequence.

    Attributes:
        databases: what it is drafted from.
        prompt_length: tokens that it was opened with.
        remember: whether its output may serve later sequences.
        last_used_s: when it was last asked for.
        drafted: its last draft, of which nobody knows yet what will become; None before the first.
    """

    databases: Databases
    prompt_length: int
    remember: bool
    last_used_s: float = 0.0
    drafted: DraftTree | None = None


class Sessions:
    """Sessions by name, the longest idle first. Callers hold a lock.

    Args:
        limits: how many there may be, and when an idle one may end to make room.
        clock: seconds, rising.
    """

    def __init__(self, limits: Limits, clock: Callable[[], float] = time.monotonic) -> None:
        self._limits = limits
        self._clock = clock
        self._by_name: dict[str, Session] = {}

    def __len__(self) -> int:
        return len(self._by_name)

    def add(self, name: str, session: Session) -> None:
        """Begin a session.

        Raises:
            SessionExistsError: the name is taken.
            LimitExceededError: there are as many as there may be, and none is idle.
        """
        if name in self._by_name:
            raise SessionExistsError(f"session {name!r} is open already")
        if len(self._by_name) >= self._limits.max_sessions and not self._end_idle():
            raise LimitExceededError(
                f"{len(self._by_name)} sessions are open, which is the limit (max_sessions)"
            )
        session.last_used_s = self._clock()
        self._by_name[name] = session

    def get(self, name: str) -> Session:
        """Return a session, which is then the last to be idle.

        Raises:
            UnknownSessionError: there is none of this name.
        """
        session = self.remove(name)
        session.last_used_s = self._clock()
        self._by_name[name] = session
        return session

    def remove(self, name: str) -> Session:
        """End a session and return it.

        Raises:
            UnknownSessionError: there is none of this name.
        """
        session = self._by_name.pop(name, None)
        if session is None:
            raise UnknownSessionError(f"no session {name!r} is open: open it first")
        return session

    def all(self) -> list[Session]:
        """Return the sessions that are open."""
        return list(self._by_name.values())

    def forget(self, pool: Pool) -> None:
        """Let no open session of a tenant be learned from, or remembered when it ends."""
        for session in self._by_name.values():
            if session.databases.pool is pool:
                session.remember = session.databases.learns = False

    def last_tokens(self, max_sessions: int, num_tokens: int) -> list[TokenIds]:
        """Return copies of the last tokens, int32[n] each, of the sessions that were used last."""
        latest = islice(reversed(self._by_name.values()), max_sessions)
        return [session.databases.context.last(num_tokens).copy() for session in latest]

    def turn_to(self, corpus: Corpus) -> None:
        """Draft all sessions from this corpus from now on: idle ones keep no other one open."""
        for session in self._by_name.values():
            session.databases.turn_to(corpus)

    def _end_idle(self) -> bool:
        """End the session that has been idle longest, if that is long enough."""
        name, session = next(iter(self._by_name.items()))
        if self._clock() - session.last_used_s < self._limits.idle_session_s:
            return False
        del self._by_name[name]
        return True
