"""One stream of drafts: messages in order, sessions, and refusals."""

import asyncio
import math
import time
from collections import Counter, deque
from collections.abc import Iterable, Sequence
from typing import Final
from weakref import WeakValueDictionary

from retriever.drafter import DraftRequest, SaveStatus, Saving
from retriever.errors import (
    InvalidRequestError,
    LimitExceededError,
    OutOfSequenceError,
    RetrieverError,
)
from retriever.operations.lifecycle import Lifecycle
from retriever.sequences import SessionKey, check_batch
from retriever.service.allowances import work_of_steps, work_of_tokens
from retriever.service.fair_scheduler import Slot
from retriever.service.jobs import (
    Jobs,
    tokens_of_addition,
    tokens_of_opening,
)
from retriever.sessions.session_table import CheckedRequest, Session
from retriever.v1 import retriever_pb2 as pb
from retriever.wire.messages import (
    DEFAULT_BUDGET_NODES,
    add_trees,
    new_tokens_of,
    requests_of,
    tree_to_message,
)
from retriever.wire.statuses import late_status, session_status

_REQUESTS_AT_ONCE: Final = 128  # requests converted at once: a quarter of a millisecond
_COMMITS_AT_ONCE: Final = 32  # commits between two checks of the clock
_DRAFTS_AT_ONCE, _NODES_AT_ONCE = 8, 256  # most per kernel call: about two turns of the loop

_MESSAGE_S: Final = 0.0002  # gRPC's time on the loop to receive and answer a message
_SEQUENCE_S: Final = 60e-6
"""Expected time of a sequence of a step, in seconds. It decides how many short steps fit in a
tenant's turn."""

_MOST_LASTING: Final = 4
"""Most long outputs of a stream that are learned while the stream continues; each holds its tokens
in memory."""


MOST_FAIL_OPENS: Final = 1 << 20
"""Most missed drafts counted for one message and reason.

A client misses fewer between two messages, so this bounds false reports.
"""


def bounded_fail_opens(told: Iterable[pb.FailOpenCount]) -> Counter[int]:
    """Return a client's report of missed drafts by reason, with bounded counts.

    At most `MOST_FAIL_OPENS` count for each reason; unknown reasons count as unspecified.
    """
    known = set(pb.FailOpenReason.values())
    counts: Counter[int] = Counter()
    for each in told:
        reason = each.reason if each.reason in known else pb.FAIL_OPEN_REASON_UNSPECIFIED
        counts[reason] = min(counts[reason] + each.count, MOST_FAIL_OPENS)
    return counts


def without_drafts(message: pb.DraftStreamRequest) -> pb.DraftStreamResponse:
    """Answer a message with empty trees while there is no drafter; nothing is recorded.

    The message's sessions are unknown later, as after a restart, and clients open them again.
    """
    response = pb.DraftStreamResponse(
        sequence_number=message.sequence_number, trees=(pb.DraftTree() for _ in message.steps)
    )
    response.outcome_trees.extend(
        pb.DraftStreamResponse().outcome_trees.add() for step in message.steps if step.outcomes
    )
    return response


class DraftStream:
    """Answers the messages of one stream; see `DraftStream` of the wire contract.

    Args:
        jobs: does the work; shared by all streams and calls.
        tenant: tenant of the stream; the stream cannot reach other tenants' sessions.
        slot: slot of the stream in the fair scheduler.
        lifecycle: phase of the service; sessions are not opened while it drains.
        answered: number of messages that `without_drafts` answered.
    """

    def __init__(
        self,
        jobs: Jobs,
        tenant: str,
        slot: Slot,
        lifecycle: Lifecycle | None = None,
        *,
        answered: int = 0,
    ) -> None:
        self._jobs = jobs
        self._drafter = jobs.drafter
        self._state = self._drafter.state
        self._tenant = tenant
        self._slot = slot
        self._lifecycle = lifecycle or Lifecycle()
        self._default_nodes = min(DEFAULT_BUDGET_NODES, self._state.limits.max_budget_nodes)
        self._lasting: deque[asyncio.Task[None]] = deque()
        self._number = answered
        self._last = pb.DraftStreamResponse(sequence_number=answered)
        # Weak, so that a session that ends elsewhere leaves memory immediately.
        self._owned: WeakValueDictionary[SessionKey, Session] = WeakValueDictionary()
        self._unsaved: list[Saving] = []  # saving states of outputs that are not written yet

    async def answer(self, message: pb.DraftStreamRequest) -> pb.DraftStreamResponse:
        """Return the response to a message.

        Raises:
            InvalidRequestError: the message has no number.
        """
        read_at_s = time.monotonic()
        num_drafts = sum(1 + len(step.outcomes) for step in message.steps)
        await self._slot.take((1 + num_drafts) * _SEQUENCE_S, _MESSAGE_S)
        try:
            return await self._answer(message, read_at_s)
        finally:
            self._slot.leave()

    async def _answer(
        self, message: pb.DraftStreamRequest, read_at_s: float
    ) -> pb.DraftStreamResponse:
        number = message.sequence_number
        if not number:
            raise InvalidRequestError(
                "messages of a stream are numbered from 1 up by one: set sequence_number"
            )
        if number == self._number:
            return self._last
        if number != self._number + 1:
            return _out_of_order(number, self._number + 1)
        # Set only after the work: if the stream ends earlier, `close` ends all its sessions.
        self._last = await self._work(message, read_at_s)
        self._number = number
        return self._last

    def close(self) -> None:
        """End the open sessions of this stream, without storing their outputs."""
        self._drafter.discard(self._owned.items())
        self._owned.clear()

    async def _work(
        self, message: pb.DraftStreamRequest, read_at_s: float
    ) -> pb.DraftStreamResponse:
        response = pb.DraftStreamResponse(
            sequence_number=message.sequence_number, is_draining=self._lifecycle.is_draining
        )
        if message.fail_opens:
            self._state.draft_counts.failed_open(bounded_fail_opens(message.fail_opens))
        try:
            requests = await self._requests(message.steps)
            check_batch(requests, self._state.limits)
            self._check_counts(message)
            self._take_allowance(message, requests)
        except RetrieverError as error:
            _refuse(response, "", error)
            return response
        for opening in message.openings:
            await self._open(opening, response)
        for addition in message.predictions:
            await self._expect(addition, response)
        began_s = time.perf_counter()
        deadline_s = read_at_s + message.timeout_us / 1e6 if message.timeout_us else None
        form = message.tree_form
        if not self._step(requests, response, deadline_s, form):
            steps = await self._commit(requests, response)
            await self._draft(steps, response, deadline_s, form)
            await self._draft_ahead(requests, steps, response, deadline_s, form)
        if requests:
            self._state.count_step(len(requests), time.perf_counter() - began_s)
        for closing in message.closings:
            await self._close(closing, response)
        response.num_not_kept = self._count_not_kept()
        return response

    async def _requests(self, steps: Sequence[pb.SessionStep]) -> list[DraftRequest]:
        """Convert the steps of a message in parts, and yield the turn between them."""
        requests: list[DraftRequest] = []
        for first in range(0, len(steps), _REQUESTS_AT_ONCE):
            requests += requests_of(steps[first : first + _REQUESTS_AT_ONCE], self._default_nodes)
            await self._slot.give_way()
        return requests

    def _take_allowance(
        self, message: pb.DraftStreamRequest, requests: Sequence[DraftRequest]
    ) -> None:
        if not self._jobs.allowances.is_limited:
            return
        others = [
            *map(tokens_of_opening, message.openings),
            *map(tokens_of_addition, message.predictions),
            *(new_tokens_of(each).num_tokens for each in message.closings),
        ]
        work = work_of_steps(requests) + sum(map(work_of_tokens, others))
        self._jobs.take_allowance(self._tenant, work)

    def _count_not_kept(self) -> int:
        """Return the number of outputs that the disk refused since the last response."""
        if not self._unsaved:
            return 0
        refused = sum(saving.status is SaveStatus.DISK_REFUSED for saving in self._unsaved)
        self._unsaved = [saving for saving in self._unsaved if saving.status is SaveStatus.MEMORY]
        return refused

    def _check_counts(self, message: pb.DraftStreamRequest) -> None:
        most = self._state.limits.max_batch
        counts = len(message.openings), len(message.predictions), len(message.closings)
        if max(counts) > most:
            raise LimitExceededError(
                f"a message of {counts[0]} openings, {counts[1]} sessions with predictions and "
                f"{counts[2]} closings is beyond the limit of {most} each (max_batch)",
                limit="max_batch",
            )

    async def _open(
        self,
        opening: pb.OpenSessionRequest,
        response: pb.DraftStreamResponse,
    ) -> None:
        try:
            self._lifecycle.check_opening()
            session = await self._jobs.open_session(self._slot, opening, self._tenant)
        except RetrieverError as error:
            _refuse(response, opening.session_id, error)
        else:
            self._owned[SessionKey(self._tenant, opening.session_id)] = session

    async def _expect(
        self,
        addition: pb.AddPredictionsRequest,
        response: pb.DraftStreamResponse,
    ) -> None:
        try:
            await self._jobs.add_predictions(self._slot, addition, self._tenant)
        except RetrieverError as error:
            _refuse(response, addition.session_id, error)

    def _step(
        self,
        requests: Sequence[DraftRequest],
        response: pb.DraftStreamResponse,
        deadline_s: float | None,
        form: pb.TreeForm,
    ) -> bool:
        """Commit and draft in one kernel call, if the step is small and plain enough.

        Returns:
            Whether this was done; if not, the step has had no effect.
        """
        is_piece = (
            len(requests) <= _DRAFTS_AT_ONCE
            and sum(each.num_nodes for each in requests) <= _NODES_AT_ONCE
        )
        is_plain = not any(each.outcomes for each in requests)
        is_late = deadline_s is not None and time.monotonic() > deadline_s
        if not is_piece or not is_plain or is_late:
            return False
        trees = self._drafter.step_each(requests, self._tenant)
        if trees is None:
            return False
        use = self._jobs.uses.of(self._tenant)
        use.tokens += sum(len(each.new_tokens) for each in requests)
        use.drafts += len(trees)
        use.nodes += add_trees(response, trees, form)
        return True

    async def _commit(
        self, requests: Sequence[DraftRequest], response: pb.DraftStreamResponse
    ) -> list[CheckedRequest | None]:
        steps: list[CheckedRequest | None] = []
        not_opened = {status.session_id for status in response.statuses}
        use = self._jobs.uses.of(self._tenant)
        for first in range(0, len(requests), _COMMITS_AT_ONCE):
            part = requests[first : first + _COMMITS_AT_ONCE]
            committed = await self._committed(part)
            for request, step in zip(part, committed, strict=True):
                use.tokens += len(request.new_tokens)
                if not isinstance(step, RetrieverError):
                    steps.append(step)
                    continue
                steps.append(None)
                if request.session not in not_opened:  # already refused
                    _refuse(response, request.session, step)
            await self._slot.give_way()
        return steps

    async def _committed(
        self, requests: Sequence[DraftRequest]
    ) -> list[CheckedRequest | RetrieverError]:
        """Commit new tokens; large commits run in a worker pool, outside the turn."""
        committed = self._drafter.commit_each(requests, self._tenant)
        long = {
            at: self._jobs.commit_long(self._tenant, step)
            for at, step in enumerate(committed)
            if not isinstance(step, RetrieverError) and step.session.is_committing
        }
        if not long:
            return committed
        self._slot.leave()
        await asyncio.wait(long.values())
        await self._slot.take()
        for at, done in long.items():
            error = done.exception()
            if isinstance(error, RetrieverError):
                committed[at] = error.with_traceback(None)  # its frames hold the session
            elif error is not None:
                raise error
        return committed

    async def _draft(
        self,
        steps: Sequence[CheckedRequest | None],
        response: pb.DraftStreamResponse,
        deadline_s: float | None,
        form: pb.TreeForm,
    ) -> None:
        """Add a tree for each step until the client's timeout has passed."""
        use, at = self._jobs.uses.of(self._tenant), 0
        while at < len(steps):
            if deadline_s is not None and time.monotonic() > deadline_s:
                response.trees.extend(pb.DraftTree() for _ in steps[at:])
                _refuse_late(response, len(steps) - at)
                return
            part = steps[at : at + _size_of_part(steps, at)]
            use.drafts += sum(step is not None for step in part)
            use.nodes += add_trees(response, self._drafter.draft_each(part), form)
            at += len(part)
            if self._slot.is_over:
                await self._slot.give_way()

    async def _draft_ahead(
        self,
        requests: Sequence[DraftRequest],
        steps: Sequence[CheckedRequest | None],
        response: pb.DraftStreamResponse,
        deadline_s: float | None,
        form: pb.TreeForm,
    ) -> None:
        """Add trees for outcomes, as many as the client's timeout allows."""
        use = self._jobs.uses.of(self._tenant)
        until_s = math.inf if deadline_s is None else deadline_s
        for request, step in zip(requests, steps, strict=True):
            if not request.outcomes:
                continue
            answer = response.outcome_trees.add()
            for tree in self._state.drafting_ahead(step, until_s) if step is not None else ():
                answer.trees.append(tree_to_message(tree, form))
                use.drafts += 1
                use.nodes += len(tree)
                if self._slot.is_over:
                    await self._slot.give_way()

    async def _close(
        self,
        closing: pb.CloseSessionRequest,
        response: pb.DraftStreamResponse,
    ) -> None:
        try:
            saving, lasting = await self._jobs.end_session(self._slot, closing, self._tenant)
        except RetrieverError as error:
            _refuse(response, closing.session_id, error)
            return
        self._owned.pop(SessionKey(self._tenant, closing.session_id), None)
        if self._state.pools.is_logged:
            self._unsaved.append(saving)
        if lasting is None:
            self._jobs.flushing.request()
            await self._slot.give_way()
            return
        self._lasting.append(lasting)
        if len(self._lasting) > _MOST_LASTING:
            self._slot.leave()
            await asyncio.shield(self._lasting.popleft())
            await self._slot.take()


def _refuse(response: pb.DraftStreamResponse, name: str, error: RetrieverError) -> None:
    response.statuses.append(session_status(name, error))


def _size_of_part(steps: Sequence[CheckedRequest | None], at: int) -> int:
    """Return the number of steps, at least one, to draft for in the next kernel call."""
    size = num_nodes = 0
    for step in steps[at : at + _DRAFTS_AT_ONCE]:
        num_nodes += 0 if step is None else step.request.num_nodes
        if size and num_nodes > _NODES_AT_ONCE:
            break
        size += 1
    return size


def _refuse_late(response: pb.DraftStreamResponse, num_missing: int) -> None:
    text = f"{num_missing} drafts were not made: timeout_us had passed"
    response.statuses.append(late_status(text))


def _out_of_order(number: int, awaited: int) -> pb.DraftStreamResponse:
    response = pb.DraftStreamResponse(sequence_number=number)
    what = "is stale" if number < awaited else "came too early: an earlier one was lost"
    error = OutOfSequenceError(f"message {number} {what}; message {awaited} is expected")
    _refuse(response, "", error)
    return response
