"""One stream of drafts: messages in order, sessions, and refusals."""

import asyncio
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Final
from weakref import WeakValueDictionary

import grpc

from retriever.drafter import DraftRequest
from retriever.errors import InvalidRequestError, LimitExceededError, RetrieverError
from retriever.predict.pool import Fate, Keeping
from retriever.sequences import SessionKey, check_batch
from retriever.sessions.client_lives import Client
from retriever.sessions.embedded import EmbeddedDrafter
from retriever.sessions.session_table import CheckedRequest, Session
from retriever.v1 import retriever_pb2 as pb
from retriever.wire.messages import requests_from_message, tokens_from_wire, tree_to_message
from retriever.wire.statuses import status_of


class Flushing:
    """Flushes a drafter in another thread; one flush covers all sessions ended during the last."""

    def __init__(self, drafter: EmbeddedDrafter) -> None:
        self._drafter = drafter
        self._task: asyncio.Task[None] | None = None
        self._is_needed = False

    def request(self) -> None:
        """Schedule a flush of all sessions that have ended by now."""
        self._is_needed = True
        if self._task is None or self._task.done():
            self._task = asyncio.create_task(self._flush())

    async def _flush(self) -> None:
        while self._is_needed:
            self._is_needed = False
            await asyncio.to_thread(self._drafter.flush)


SLICE_S: Final = 0.00025
"""Work after which a stream yields to others, in seconds; a draft takes a fifth of it."""


class Turns:
    """Schedules streams fairly: turns in the order in which streams became ready.

    That is the order of the event loop's queue. Of the streams that yield within long steps, one
    continues in each iteration of the loop, so that short steps run in between.
    """

    def __init__(self) -> None:
        self._num_streams = 0
        self._giving_way = asyncio.Lock()  # the longest waiter gets it

    @contextmanager
    def taking_part(self) -> Iterator[None]:
        """Count a stream during the block."""
        self._num_streams += 1
        try:
            yield
        finally:
            self._num_streams -= 1

    async def begin(self) -> None:
        """Yield to all streams that became ready before; a single stream does not wait."""
        if self._num_streams > 1:
            await asyncio.sleep(0)

    async def give_way(self, began_s: float) -> float:
        """Yield to other streams if the slice that began at `began_s` is over.

        Returns:
            Start of the current slice, by `time.monotonic`.
        """
        now_s = time.monotonic()
        if now_s - began_s < SLICE_S:
            return began_s
        async with self._giving_way:
            await asyncio.sleep(0)
        return time.monotonic()


LONG_PROMPT: Final = 1 << 12
"""Longer prompts are read in another thread, so that other streams can draft."""

_COMMITS_AT_ONCE: Final = 32  # commits between two looks at the clock


MOST_FAIL_OPENS: Final = 1 << 20
"""Most missed drafts counted for one message and reason.

More than a client misses between two messages; bounds false reports.
"""


def bounded_fail_opens(told: Iterable[pb.FailOpenCount]) -> Counter[int]:
    """Return a client's report of missed drafts by reason, bounded.

    At most `MOST_FAIL_OPENS` count for each reason; unknown reasons count as unspecified.
    """
    known = set(pb.FailOpenReason.values())
    counts: Counter[int] = Counter()
    for each in told:
        reason = each.reason if each.reason in known else pb.FAIL_OPEN_REASON_UNSPECIFIED
        counts[reason] = min(counts[reason] + each.count, MOST_FAIL_OPENS)
    return counts


class DraftStream:
    """Answers the messages of one stream; see `DraftStream` of the wire contract.

    Args:
        drafter: what drafts.
        tenant: of the stream, which reaches no other tenant's sessions.
        turns: shared with the other streams.
        flushing: flushes the outputs of ended sessions.
    """

    def __init__(
        self, drafter: EmbeddedDrafter, tenant: str, turns: Turns, flushing: Flushing
    ) -> None:
        self._drafter = drafter
        self._tenant = tenant
        self._turns = turns
        self._flushing = flushing
        self._number = 0
        self._last = pb.DraftStreamResponse()
        # Weak: a session that ends otherwise leaves memory at once.
        self._owned: WeakValueDictionary[SessionKey, Session] = WeakValueDictionary()
        self._client: Client | None = None
        self._fates: list[Fate] = []  # of outputs that are still to be written

    async def answer(self, message: pb.DraftStreamRequest) -> pb.DraftStreamResponse:
        """Return the response to a message.

        Raises:
            InvalidRequestError: the message has no number.
            StaleClientError: a later incarnation of the stream's client has called.
        """
        read_at_s = time.monotonic()
        if not self._number:
            self._client = client_of(message)
        if self._client is not None:
            self._drafter.admit_client(self._tenant, self._client)
        await self._turns.begin()
        number = message.sequence_number
        if not number:
            raise InvalidRequestError(
                "a message of a stream states its number, from 1 up by one: set sequence_number"
            )
        if number == self._number:
            return self._last
        if number != self._number + 1:
            return _out_of_order(number, self._number + 1)
        # Only after the work: if the stream ends before, `close` ends all its sessions.
        self._last = await self._work(message, read_at_s)
        self._number = number
        return self._last

    def close(self) -> None:
        """End the open sessions of this stream; nothing is kept."""
        self._drafter.discard(self._owned.items())
        self._owned.clear()

    async def _work(
        self, message: pb.DraftStreamRequest, read_at_s: float
    ) -> pb.DraftStreamResponse:
        response = pb.DraftStreamResponse(sequence_number=message.sequence_number)
        if message.fail_opens:
            self._drafter.draft_counts.failed_open(bounded_fail_opens(message.fail_opens))
        try:
            requests = requests_from_message(message)
            check_batch(requests, self._drafter.limits)
            self._check_counts(message)
        except RetrieverError as error:
            _refuse(response, "", error)
            return response
        for opening in message.openings:
            await self._open(opening, response)
        began_s = time.perf_counter()
        steps = await self._commit(requests, response)
        deadline_s = read_at_s + message.timeout_us / 1e6 if message.timeout_us else None
        await self._draft(steps, response, deadline_s)
        if steps:
            self._drafter.count_step(len(steps), time.perf_counter() - began_s)
        for closing in message.closings:
            self._close(closing, response)
        response.num_not_kept = self._count_not_kept()
        return response

    def _count_not_kept(self) -> int:
        """Count the outputs that the disk has refused since the last response."""
        refused = sum(fate.keeping is Keeping.DISK_REFUSED for fate in self._fates)
        self._fates = [fate for fate in self._fates if fate.keeping is Keeping.MEMORY]
        return refused

    def _check_counts(self, message: pb.DraftStreamRequest) -> None:
        most = self._drafter.limits.max_batch
        if max(len(message.openings), len(message.closings)) > most:
            raise LimitExceededError(
                f"a message of {len(message.openings)} openings and {len(message.closings)} "
                f"closings is beyond the limit of {most} each (max_batch)",
                limit="max_batch",
            )

    async def _open(self, opening: pb.OpenSessionRequest, response: pb.DraftStreamResponse) -> None:
        try:
            session = await open_session(self._drafter, opening, self._tenant, self._client)
        except RetrieverError as error:
            _refuse(response, opening.session_id, error)
        else:
            self._owned[SessionKey(self._tenant, opening.session_id)] = session

    async def _commit(
        self, requests: Sequence[DraftRequest], response: pb.DraftStreamResponse
    ) -> list[CheckedRequest | None]:
        steps: list[CheckedRequest | None] = []
        not_opened = {status.session_id for status in response.statuses}
        began_s = time.monotonic()
        for first in range(0, len(requests), _COMMITS_AT_ONCE):
            part = requests[first : first + _COMMITS_AT_ONCE]
            committed = self._drafter.commit_each(part, self._tenant)
            for request, step in zip(part, committed, strict=True):
                if not isinstance(step, RetrieverError):
                    steps.append(step)
                    continue
                steps.append(None)
                if request.session not in not_opened:  # its refusal is in the response already
                    _refuse(response, request.session, step)
            began_s = await self._turns.give_way(began_s)
        return steps

    async def _draft(
        self,
        steps: Sequence[CheckedRequest | None],
        response: pb.DraftStreamResponse,
        deadline_s: float | None,
    ) -> None:
        """Add a tree for each step until the client's timeout has passed."""
        began_s = time.monotonic()
        for at, step in enumerate(steps):
            if deadline_s is not None and time.monotonic() > deadline_s:
                response.trees.extend(pb.DraftTree() for _ in steps[at:])
                _refuse_late(response, len(steps) - at)
                return
            if step is None:
                response.trees.add()
                continue
            (tree,) = self._drafter.draft_each([step])
            response.trees.append(tree_to_message(tree))
            began_s = await self._turns.give_way(began_s)

    def _close(self, closing: pb.CloseSessionRequest, response: pb.DraftStreamResponse) -> None:
        try:
            fate = end_session(self._drafter, closing, self._tenant)
        except RetrieverError as error:
            _refuse(response, closing.session_id, error)
        else:
            self._owned.pop(SessionKey(self._tenant, closing.session_id), None)
            if self._drafter.is_logged:
                self._fates.append(fate)
            self._flushing.request()


async def open_session(
    drafter: EmbeddedDrafter,
    opening: pb.OpenSessionRequest,
    tenant: str,
    client: Client | None = None,
) -> Session:
    """Open a session of a tenant, and of a client if it has one.

    Raises:
        RetrieverError: it is refused.
    """
    drafter.check_vocabulary(opening.vocabulary_fingerprint, tenant)
    reading = drafter.charge_reading(tenant, len(opening.prompt))  # while it waits, too
    if len(opening.prompt) > LONG_PROMPT or not drafter.is_loaded(tenant):
        # `begin` runs in this thread: a call cancelled before leaves no session.
        session = await asyncio.to_thread(_prepare, drafter, opening, tenant)
    else:
        session = _prepare(drafter, opening, tenant)
    del reading
    session.client = client
    drafter.begin(SessionKey(tenant, opening.session_id), session)
    return session


def client_of(message: pb.OpenSessionRequest | pb.DraftStreamRequest) -> Client | None:
    """Return the client that a message names; None if it names none."""
    if not message.HasField("client"):
        return None
    return Client(message.client.name, message.client.incarnation)


def end_session(drafter: EmbeddedDrafter, closing: pb.CloseSessionRequest, tenant: str) -> Fate:
    """End a session of a tenant; `EmbeddedDrafter.flush` writes its output, whose fate it returns.

    Raises:
        RetrieverError: it is refused.
    """
    key = SessionKey(tenant, closing.session_id)
    return drafter.end(key, tokens_from_wire(closing.new_token_ids), remember=not closing.forget)


def _prepare(drafter: EmbeddedDrafter, opening: pb.OpenSessionRequest, tenant: str) -> Session:
    prompt = tokens_from_wire(opening.prompt)
    return drafter.prepare(prompt, remember=not opening.forget, tenant=tenant)


def _refuse(response: pb.DraftStreamResponse, name: str, error: RetrieverError) -> None:
    code: int = status_of(error).value[0]
    response.statuses.add(session_id=name, code=code, message=str(error))


def _refuse_late(response: pb.DraftStreamResponse, num_missing: int) -> None:
    code: int = grpc.StatusCode.DEADLINE_EXCEEDED.value[0]
    text = f"{num_missing} drafts were not made: timeout_us had passed"
    response.statuses.add(code=code, message=text)


def _out_of_order(number: int, awaited: int) -> pb.DraftStreamResponse:
    response = pb.DraftStreamResponse(sequence_number=number)
    what = "is stale" if number < awaited else "came too early: an earlier one was lost"
    response.statuses.add(
        code=grpc.StatusCode.ABORTED.value[0],
        message=f"message {number} {what}; message {awaited} is awaited",
    )
    return response
