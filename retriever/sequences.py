"""Sequences of a drafter: how they begin and end, and how what they generated is remembered."""

from collections.abc import Iterable
from threading import Lock
from typing import Final

import numpy as np
from numpy.typing import ArrayLike

from retriever.limits import Limits, check_length, check_session_name
from retriever.pool import Pool
from retriever.pools import Pools
from retriever.sessions import Session, SessionKey, Sessions
from retriever.sources import Sources
from retriever.steps import Steps
from retriever.warmth.sharing import NoWarmth

_NO_TOKENS: Final = np.empty(0, np.int32)


class Sequences:
    """Begins and ends the sessions of a drafter. Safe to call from any thread.

    Args:
        sessions: those that are open.
        steps: what commits to them.
        sources: what they are drafted from.
        pools: where outputs are remembered.
        warmth: where they are shared.
        lock: held while any of them is used.
        limits: what is accepted at most.
    """

    def __init__(  # noqa: PLR0913  (what a drafter consists of)
        self,
        sessions: Sessions,
        steps: Steps,
        sources: Sources,
        pools: Pools,
        warmth: NoWarmth,
        *,
        lock: Lock,
        limits: Limits,
    ) -> None:
        self._sessions = sessions
        self._steps = steps
        self._sources = sources
        self._pools = pools
        self._warmth = warmth
        self._lock = lock
        self._limits = limits

    def prepare(self, prompt: ArrayLike, *, remember: bool, tenant: str) -> Session:
        """Return a session for `begin`."""
        databases = self._sources.databases(prompt, tenant, remember=remember)
        return Session(databases, len(databases.context), remember)

    def begin(self, key: SessionKey, prepared: Session) -> None:
        """Open a session under a name that no open one has."""
        check_session_name(key.name)
        with self._lock:
            self._sessions.add(key, prepared)

    def end(self, key: SessionKey, new_tokens: ArrayLike | None, *, remember: bool) -> None:
        """Commit the last tokens of a session, end it, and remember what it generated."""
        tokens = _NO_TOKENS if new_tokens is None else self._sources.checked(new_tokens)
        with self._lock:
            ended = self._sessions.get(key)
            check_length(len(ended.databases.context) + len(tokens), self._limits)
            self._sessions.remove(key)  # before it grows by tokens that were not charged
            self._steps.commit(ended, tokens)
            if remember:
                self._remember_session(key, ended)

    def remember_open(self) -> int:
        """Remember what open sessions generated so far, and nothing more of them; count them."""
        with self._lock:
            remembered = [each for each in self._sessions.items() if each[1].remember]
            for key, session in remembered:
                self._remember_session(key, session)
                session.remember = False
        return len(remembered)

    def discard(self, ended: Iterable[tuple[SessionKey, Session]]) -> int:
        """End sessions, if they are open still, and keep nothing of them; return how many."""
        with self._lock:
            return self._sessions.discard(ended)

    def end_idle(self) -> int:
        """End the sessions that have been idle for too long; return how many."""
        with self._lock:
            return self._sessions.end_idle()

    def remember(self, output: ArrayLike, pool: Pool) -> None:
        """Remember the output of a sequence that was generated elsewhere."""
        tokens = self._sources.checked(output)
        with self._lock:
            self._warmth.hold(self._pools.remember(pool, tokens))

    def flush(self) -> None:
        """Keep on disk what was remembered, and then share it."""
        held = self._warmth.held()
        self._pools.commit()
        for entry in held:
            self._warmth.offer(entry)

    def _remember_session(self, key: SessionKey, ended: Session) -> None:
        """Remember what a session has generated, if it may be; the caller holds the lock."""
        if ended.remember:
            context = ended.databases.context
            output = context.last(len(context) - ended.prompt_length)
            self._warmth.hold(self._pools.remember(ended.databases.pool, output, key.name))
