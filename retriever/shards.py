"""One server of several: asked in a thread of its own, so that nobody has to wait for it."""

import math
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from logging import getLogger
from typing import Any, Final

from retriever.agreement import Agreement
from retriever.client import RemoteDrafter
from retriever.errors import (
    DrafterUnavailableError,
    InvalidRequestError,
    LimitExceededError,
    OutOfSequenceError,
    RetrieverError,
    UnknownSessionError,
    VocabularyMismatchError,
)
from retriever.tracking import TrackedSequence, TrackedStep
from retriever.tree import DraftTree

_log = getLogger(__name__)

FIRST_PAUSE_S: Final = 0.1
"""A server that failed is left alone for so long, and twice as long after each further failure."""

LAST_PAUSE_S: Final = 5.0
"""But no longer than this."""

Trees = list[DraftTree | None]
"""One for each sequence of a step; None where the server cannot keep the sequence."""

Connect = Callable[[str, str], RemoteDrafter]
"""Makes a client of a server, given its address and the fingerprint that it must agree with."""


@dataclass(frozen=True, slots=True)
class ShardState:
    """How a shard does.

    Attributes:
        address: of its server.
        is_up: whether it could be reached when it was last asked.
        missed: steps that were drafted for without it, because it was late or down.
        failures: times that it failed at what it was asked, or could not be reached.
    """

    address: str
    is_up: bool
    missed: int
    failures: int


class Shard:
    """A server, what it knows of each sequence, and the thread that talks to it.

    What is asked is done in order. A server that fails loses its sessions and is left alone for
    a while; the next thing asked then connects anew, and opens with all its tokens what it needs.

    Args:
        address: of the server.
        connect: makes a client.
        agreement: what its vocabulary is held against.

    Attributes:
        missed: steps that were drafted for without it; counted by who asks.
        refusal: why its vocabulary cannot be used; None where it can.
    """

    def __init__(self, address: str, connect: Connect, agreement: Agreement) -> None:
        self._address = address
        self._connect = connect
        self._agreement = agreement
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="foredraft-shard")
        self._remote: RemoteDrafter | None = None
        self._old: RemoteDrafter | None = None  # an earlier connection, with its sessions
        self._stale: list[str] = []
        self._known: dict[str, int] = {}  # how many tokens the server has of each session
        self._step: Future[Trees] | None = None
        self._is_up = True
        self._retry_at_s = -math.inf
        self._pause_s = FIRST_PAUSE_S
        self._failures = 0
        self.missed = 0
        self.refusal: VocabularyMismatchError | None = None

    @property
    def state(self) -> ShardState:
        """How it does."""
        return ShardState(self._address, self._is_up, self.missed, self._failures)

    def open(self, session: str, sequence: TrackedSequence) -> Future[bool] | None:
        """Open a session; None where the answer is not worth waiting for."""
        is_awaited = self._is_up and not self._is_late()
        job = self._submit(self._open, session, sequence)
        return job if is_awaited else None

    def draft(self, steps: Sequence[TrackedStep]) -> Future[Trees] | None:
        """Draft for a step; None where the answer is not worth waiting for.

        While an earlier step has no answer, this one is left out; its tokens travel with the next.
        """
        if self._is_late():
            return None
        is_awaited = self._is_up
        self._step = self._submit(self._draft, steps)
        return self._step if is_awaited else None

    def close(self, session: str, sequence: TrackedSequence) -> Future[bool] | None:
        """Close a session; None where the answer is not worth waiting for."""
        is_awaited = self._is_up and not self._is_late()
        job = self._submit(self._close, session, sequence)
        return job if is_awaited else None

    def restart(self) -> None:
        """Begin anew: all sessions are opened again when they are next drafted for."""
        self._thread.submit(self._disconnect)

    def shut_down(self) -> None:
        """Disconnect once all that was asked is done."""
        self._thread.submit(self._disconnect)
        self._thread.submit(self._drop_old)
        self._thread.shutdown()

    def _is_late(self) -> bool:
        return self._step is not None and not self._step.done()

    def _is_paused(self) -> bool:
        return not self._is_up and time.monotonic() < self._retry_at_s

    def _submit(self, job: Callable[..., Any], *arguments: Any) -> Future[Any] | None:
        return None if self._is_paused() else self._thread.submit(self._attempt, job, *arguments)

    # What follows runs in the shard's thread.

    def _attempt(self, job: Callable[..., Any], *arguments: Any) -> Any:
        """Do what was asked; a server that fails at it is left alone for a while."""
        if self._is_paused():
            raise DrafterUnavailableError(f"shard {self._address} is down")
        try:
            result = job(*arguments)
        except VocabularyMismatchError as error:
            self.refusal = error
            self._fail(error)
            raise
        except RetrieverError as error:
            if isinstance(error, InvalidRequestError) and not isinstance(error, OutOfSequenceError):
                raise type(error)(f"shard {self._address}: {error}") from error
            self._fail(error)
            raise DrafterUnavailableError(f"shard {self._address}: {error}") from error
        self._pause_s = FIRST_PAUSE_S
        return result

    def _fail(self, error: RetrieverError) -> None:
        if self._is_up:
            _log.warning("drafts go on without shard %s: %s", self._address, error)
        self._failures += 1
        self._disconnect()
        self._retry_at_s = time.monotonic() + self._pause_s
        self._pause_s = min(2 * self._pause_s, LAST_PAUSE_S)
        self._is_up = False

    def _disconnect(self) -> None:
        """Let go of the connection; once there is another, its sessions are ended over it."""
        self._drop_old()
        self._old, self._remote = self._remote, None
        self._stale = list(self._known)
        self._known.clear()

    def _drop_old(self) -> None:
        old, self._old = self._old, None
        if old is not None:
            old.shut_down()

    def _end_stale(self) -> None:
        """End sessions that a server which was slow still has; they will have been opened anew."""
        if self._old is None:
            return
        with suppress(RetrieverError):  # what cannot be ended ends when it has been idle
            for session in self._stale:
                with suppress(UnknownSessionError):
                    self._old.close(session, remember=False)
        self._drop_old()

    def _connected(self) -> RemoteDrafter:
        if self._remote is None:
            self._remote = self._connect(self._address, self._agreement.fingerprint)
            for index in self._remote.list_indexes():
                self._agreement.check(self._address, index.vocabulary_fingerprint)
            self._is_up, self.refusal = True, None
            self._end_stale()
        return self._remote

    def _open(self, session: str, sequence: TrackedSequence) -> bool:
        self._connected().open(session, sequence.prompt, remember=sequence.remember)
        self._known[session] = len(sequence.prompt)
        return True

    def _draft(self, steps: Sequence[TrackedStep]) -> Trees:
        remote = self._connected()
        places = [at for at, step in enumerate(steps) if self._is_open(step)]
        asked = [steps[at].since(self._known[steps[at].request.session]) for at in places]
        trees: Trees = [None] * len(steps)
        for at, request, tree in zip(places, asked, remote.draft(asked), strict=True):
            self._known[request.session] = request.length
            trees[at] = tree
        return trees

    def _is_open(self, step: TrackedStep) -> bool:
        """Open a session that the server does not know; False where it has no room for it."""
        session = step.request.session
        if session not in self._known:
            try:
                self._open(session, step.sequence)
            except LimitExceededError:
                self._failures += 1
        return session in self._known

    def _close(self, session: str, sequence: TrackedSequence) -> bool:
        if session not in self._known:
            if not sequence.remember or len(sequence) == len(sequence.prompt):
                return True
            self._open(session, sequence)  # so that it learns what it has missed
        known = self._known.pop(session)
        self._connected().close(session, sequence.output(known, len(sequence)))
        return True
