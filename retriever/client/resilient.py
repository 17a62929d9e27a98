"""A client that never makes decoding fail: it continues without servers that are down or late."""

import math
import os
import time
from collections.abc import Callable, Generator, Sequence
from functools import partial
from queue import Empty, SimpleQueue
from threading import Lock, Thread
from typing import Any, ClassVar, Final, NamedTuple, Self, TypeVar

from numpy.typing import ArrayLike

from retriever.client.conversation import FailOpens
from retriever.client.credentials import Credentials
from retriever.client.planner import Plan, Planner
from retriever.client.streams import (
    LOST_AFTER_S,
    ORPHANS,
    Link,
    LinkEvent,
    StreamTable,
    remote_channel,
)
from retriever.drafter import (
    DEFAULT,
    Drafter,
    DraftRequest,
    OfOneProcess,
    Prediction,
    SequenceOptions,
    without_outcomes,
)
from retriever.tree import DraftTree

SHARE: Final = 0.25
"""Longest wait of a step, as a share of the engine's time between two drafts. It bounds the
slowdown by a late server."""

SHORTEST_S: Final = 0.005  # below this, one scheduling delay costs the draft
LONGEST_S: Final = 0.02  # longest delay of a step by a late server

LONGEST_AHEAD_S: Final = 0.2
"""Longest wait for drafts ahead, in seconds. Passes of large models take less time. A longer pass
does not need drafts that come later than this."""

_Result = TypeVar("_Result")

_INERTIA: Final = 0.9  # averages over about ten steps
_IDLE_S: Final = 2.0  # longer gaps are the engine's pauses, not steps


class Pace:
    """The deadline of steps: a given time, or a share of the engine's own time per step.

    Args:
        deadline_s: longest wait, in seconds; None for `SHARE` of the measured time between drafts,
            within `SHORTEST_S` and `LONGEST_S`.
    """

    def __init__(self, deadline_s: float | None) -> None:
        self._fixed_s = deadline_s
        self._between_s: float | None = None
        self._ended_s: float | None = None

    @property
    def deadline_s(self) -> float:
        """Current longest wait of a step, in seconds."""
        if self._fixed_s is not None:
            return self._fixed_s
        between_s = self._between_s or 0.0
        return min(max(SHARE * between_s, SHORTEST_S), LONGEST_S)

    def begin(self, now_s: float) -> float:
        """Note the start of a step; return the time until which the step may wait."""
        if self._ended_s is not None and now_s - self._ended_s < _IDLE_S:
            between_s = now_s - self._ended_s
            before_s = between_s if self._between_s is None else self._between_s
            self._between_s = _INERTIA * before_s + (1 - _INERTIA) * between_s
        return now_s + self.deadline_s

    def ahead(self, now_s: float, timeout_s: float) -> float:
        """Return the time until which to await drafts ahead, while the engine continues."""
        return now_s + max(min(timeout_s, LONGEST_AHEAD_S), self.deadline_s)

    def end(self, now_s: float) -> None:
        """Note that the engine continues."""
        self._ended_s = now_s


class Wait(NamedTuple):
    """A wait for messages from servers.

    Attributes:
        is_done: returns whether the wait is over.
        until_s: end of the wait, in seconds of `time.monotonic`.
    """

    is_done: Callable[[], bool]
    until_s: float


Waits = Generator[Wait, None, _Result]
"""The work of a client, a generator that yields its waits for servers; the caller blocks or
awaits."""


class FailOpenClient(OfOneProcess):
    """The shared part of the synchronous and the asynchronous fail-open client.

    Methods whose names end in -ing hold the common work; each client waits in its own way.

    Args: see `ResilientDrafter`.
    """

    _remote_channel: ClassVar[Callable[..., Any]] = staticmethod(remote_channel)

    def __init__(  # noqa: PLR0913  (all but the addresses are given by name)
        self,
        addresses: str | Sequence[str],
        *,
        deadline_s: float | None = None,
        local: Drafter | bool = True,
        are_parts: bool = False,
        lost_after_s: float = LOST_AFTER_S,
        vocabulary_fingerprint: str = "",
        credentials: Credentials | None = None,
        pad_requests: bool = False,
        open_channel: Callable[[str], Any] | None = None,
    ) -> None:
        listed = [addresses] if isinstance(addresses, str) else addresses
        self._planner = Planner(
            listed, vocabulary_fingerprint, local, are_parts=are_parts, pads=pad_requests
        )
        self._pace = Pace(deadline_s)
        if credentials is not None:
            credentials.check(listed)
        self._open_channel = open_channel or partial(self._remote_channel, credentials=credentials)
        self._lost_after_s = lost_after_s
        self._begin_in_process()

    @property
    def fail_opens(self) -> FailOpens:
        """Number of sequence steps without a server's draft, by reason."""
        return self._planner.fail_opens

    @property
    def deadline_s(self) -> float:
        """Current longest wait of a step, in seconds."""
        return self._pace.deadline_s

    def is_up(self, address: str) -> bool:
        """Return whether the stream to a server is up."""
        return self._planner.conversations[address].is_up

    def has_answered(self, address: str) -> bool:
        """Return whether a server has answered all messages, by the responses read so far.

        `wait` reads responses that have arrived. While an answer is past its deadline, the server
        gets no new request.
        """
        return self._planner.conversations[address].oldest_unanswered_s() is None

    def server_of(self, session: str) -> str:
        """Return the address of a session's server; of several that hold parts, the first.

        Raises:
            UnknownSessionError: the session is not open.
        """
        return self._planner.server_of(session)

    def _begin_in_process(self) -> None:
        """Start without connections; also used after a fork."""
        self._streams = StreamTable(self._planner, self._lost_after_s)

    def _connecting(self, until_s: float) -> Waits[bool]:
        """Wait until every server is connected; return whether all are."""
        conversations = self._planner.conversations.values()
        yield Wait(lambda: all(each.is_up for each in conversations), until_s)
        self._streams.tell_rest()
        return all(each.is_up for each in conversations)

    def _drafting(
        self, requests: Sequence[DraftRequest], deadline_s: float
    ) -> Waits[list[DraftTree]]:
        """Do a step; return its trees."""
        trees = yield from self._asking(requests, deadline_s, self._planner.finish)
        self._pace.end(time.monotonic())
        return trees

    def _drafting_ahead(
        self, requests: Sequence[DraftRequest], deadline_s: float
    ) -> Waits[list[list[DraftTree]]]:
        """Do a step with drafts for its outcomes; return their trees."""
        return (yield from self._asking(requests, deadline_s, self._planner.finish_ahead))

    def _asking(
        self,
        requests: Sequence[DraftRequest],
        deadline_s: float,
        finish: Callable[[Plan], _Result],
    ) -> Waits[_Result]:
        """Send a step, and finish it once it is answered or its deadline has passed."""
        self._streams.give_up_lost()
        plan = self._planner.plan(requests, time.monotonic(), deadline_s)
        try:
            self._streams.ask(plan)
            yield Wait(plan.is_done, deadline_s)
        finally:  # even if the step is cancelled
            result = finish(plan)
        self._streams.tell_rest()
        return result

    def _ending(self, until_s: float) -> Waits[None]:
        """Send pending closes and outputs."""
        conversations = self._planner.conversations.values()

        def is_answered() -> bool:
            return all(each.oldest_unanswered_s() is None for each in conversations)

        self._streams.tell_rest()
        while not is_answered() and time.monotonic() < until_s:
            yield Wait(is_answered, until_s)
            self._streams.tell_rest()


class ResilientDrafter(FailOpenClient):
    """Drafts from one or more services and never fails because of them; a `Drafter`.

    A step waits until its deadline at most. If a server is late, paused, restarted, full, down or
    for another tokenizer, the sequence continues with a local draft and the reason is counted. One
    thread per server connects at the first call, and reconnects with exponential back-off. It then
    reopens sessions with all their tokens, and sends the outputs of sequences that ended in the
    meantime.

    Several servers are replicas by default. Rendezvous hashing spreads sessions over them. If the
    server of a session is down, drains, or has no room, the session moves to the next one and stays
    there; see `docs/explanation/scale.md`. With `are_parts`, each server holds a part of a corpus
    instead: every step goes to all of them, and the drafts that arrive in time are merged. If a
    server is late or down, only its evidence is missing. Thread-safe, also after a fork.

    Args:
        addresses: one address, or several; `host:port` or `unix:/path`.
        deadline_s: longest wait of a step, in seconds; None for a quarter of the engine's measured
            step time, within 5 to 20 ms.
        local: drafter to use if a server does not draft; True for a `LocalDrafter`, False for no
            local drafts. Called from one thread at a time.
        are_parts: whether each server holds a part of a corpus. All must have the same vocabulary.
        lost_after_s: time without an answer after which a stream is given up, in seconds.
        vocabulary_fingerprint: fingerprint of the caller's tokenizer; a service for another one is
            not used.
        credentials: credentials to send and to verify the server with; None for services that need
            none.
        pad_requests: whether to pad messages to hide the size of sequences; see
            `docs/explanation/security.md`.
        open_channel: opens a channel to an address, instead of the default, which uses the
            credentials.

    Raises:
        CredentialsError: a file of the credentials cannot be used.
        InvalidRequestError: there is no address, or a duplicate.
    """

    def _begin_in_process(self) -> None:
        super()._begin_in_process()
        self._pid, self._lock = os.getpid(), Lock()
        self._events: SimpleQueue[LinkEvent] = SimpleQueue()
        self._links: list[Link] = []

    def wait(self, timeout_s: float) -> bool:
        """Wait until every server is connected; return whether all are."""
        self._start()
        return self._do(self._connecting(time.monotonic() + timeout_s))

    def open(
        self,
        session: str,
        prompt: ArrayLike,
        options: SequenceOptions = DEFAULT,
    ) -> None:
        """Begin a sequence; see `Drafter.open`.

        Servers learn of the sequence with its first step.
        """
        self._start()
        with self._lock:
            self._planner.open(session, prompt, options)

    def add_predictions(self, session: str, predictions: Sequence[Prediction]) -> None:
        """Add predictions of a sequence; see `EmbeddedDrafter.add_predictions`.

        The server gets them with the next step, and again whenever the session is reopened.
        """
        self._start()
        with self._lock:
            self._planner.add_predictions(session, predictions)

    def draft(self, requests: Sequence[DraftRequest]) -> list[DraftTree]:
        """Commit new tokens and draft for each sequence; see `Drafter.draft`.

        Only faulty requests raise an error; an unreachable server never does.
        """
        self._start()
        deadline_s = self._pace.begin(time.monotonic())
        return self._do(self._drafting(without_outcomes(requests), deadline_s))

    def draft_ahead(
        self, requests: Sequence[DraftRequest], timeout_s: float = math.inf
    ) -> list[list[DraftTree]]:
        """Commit new tokens and draft for possible outcomes; see `AheadDrafter.draft_ahead`.

        Waits for `timeout_s`, but at least a step's deadline and at most `LONGEST_AHEAD_S`. A
        server that is late or down drafts for no outcome.
        """
        self._start()
        deadline_s = self._pace.ahead(time.monotonic(), timeout_s)
        return self._do(self._drafting_ahead(requests, deadline_s))

    def close(
        self, session: str, new_tokens: ArrayLike | None = None, *, remember: bool = True
    ) -> None:
        """End a sequence; see `Drafter.close`. The server gets the close with the next message.

        Args:
            session: name that it was opened with.
            new_tokens: integers[n], tokens committed since its last request.
            remember: false to store nothing of the sequence; overrides the value given to `open`.
        """
        self._start()
        with self._lock:
            self._planner.close(session, new_tokens, remember=remember)
            self._take_all()
            self._streams.tell_rest()

    def shut_down(self, timeout_s: float = 1.0) -> None:
        """Send pending closes and outputs, and disconnect.

        Args:
            timeout_s: longest wait for the servers, in seconds.
        """
        self._start()
        self._do(self._ending(time.monotonic() + timeout_s))
        for link in self._links:
            link.shut_down()
        for link in self._links:
            link.join(timeout_s)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.shut_down()

    def _start(self) -> None:
        """Connect at the first call in this process."""
        if self._pid != os.getpid():
            ORPHANS.extend([self._links, self._streams, self._events])
            self._begin_in_process()
            for conversation in self._planner.conversations.values():
                conversation.lose()
        if not self._links:
            with self._lock:
                self._links = self._links or [
                    Link(address, self._open_channel, self._planner.vocabulary, self._report)
                    for address in self._planner.conversations
                ]

    def _do(self, work: Waits[_Result]) -> _Result:
        """Do work, and process link events during its waits."""
        with self._lock:
            self._take_all()
            while True:
                try:
                    is_done, until_s = next(work)
                except StopIteration as done:
                    result: _Result = done.value
                    return result
                while not is_done() and self._take_next(until_s):
                    pass

    def _report(self, event: LinkEvent) -> None:
        """Record a link event; called in the threads of links."""
        self._events.put(event)
        if event.stream is not None:  # not here: it may wait for a step, which waits for responses
            Thread(target=self._catch_up, name="foredraft-catch-up", daemon=True).start()

    def _catch_up(self) -> None:
        """Send pending closes and outputs to a server that is up again."""
        with self._lock:
            self._take_all()
            self._streams.tell_rest()

    def _take_all(self) -> None:
        """Process received events, and give up streams without answers."""
        while not self._events.empty() and self._take_next(0.0):
            pass
        self._streams.give_up_lost()

    def _take_next(self, until_s: float) -> bool:
        """Process the next link event; return whether there was one in time."""
        left_s = until_s - time.monotonic()
        try:
            event = self._events.get(block=left_s > 0, timeout=max(left_s, 0))
        except Empty:
            return False
        self._streams.note(event)
        return True
