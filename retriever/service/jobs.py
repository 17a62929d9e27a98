"""The work of calls and streams: on the event loop in turns, or in threads of pools.

Short work runs on the loop: a draft takes tens of microseconds, less than passing it to another
thread. Token ids that are sent as numbers are also converted there, in slices, because the
conversion needs the interpreter. Worker pools run long work that does not need the interpreter
(reading contexts, prompts and outputs) and wait for disks.
"""

import asyncio
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any, Final, TypeVar

import numpy as np

from retriever.drafter import Prediction, Saving, SequenceOptions, TokenIds
from retriever.errors import (
    LimitExceededError,
    UnknownSessionError,
)
from retriever.sequences import SessionKey
from retriever.service.allowances import Allowances, work_of_draft
from retriever.service.fair_scheduler import FairScheduler, Slot
from retriever.service.worker_pools import WorkerPool, WorkerPools
from retriever.sessions.draft_counts import TenantUses
from retriever.sessions.drafter_state import PAUSE_S, DrafterState, finish
from retriever.sessions.explaining import explain_prepared
from retriever.sessions.service_face import ServiceFace
from retriever.sessions.session_table import CheckedRequest, Session
from retriever.v1 import retriever_pb2 as pb
from retriever.wire.messages import (
    SentIds,
    context_of,
    explanation_to_message,
    new_tokens_of,
    options_in,
    predicted_in,
    prompt_of,
    tree_to_message,
)

LONG_PROMPT: Final = 1 << 12
"""Contexts and prompts of more tokens than this are read in a worker pool. Reading this many takes
a slice of a tenant's turn."""

_RETRY_S: Final = 0.1
"""Retry delay in a refusal for too many calls; about a hundred calls finish in this time."""

_NUMBERS_AT_ONCE: Final = 1 << 12
"""Token ids sent as numbers that are converted in one piece: 0.2 ms on the loop."""

_Result = TypeVar("_Result")


class Flushing:
    """Flushes a drafter in a worker pool; a flush covers all sessions that ended during the last.

    Args:
        state: state of the drafter to flush.
        disk: worker pool for flushes.
    """

    def __init__(self, state: DrafterState, disk: WorkerPool) -> None:
        self._state = state
        self._disk = disk
        self._task: asyncio.Task[None] | None = None
        self._is_needed = False
        self._waiting: list[asyncio.Future[None]] = []

    def request(self) -> None:
        """Schedule a flush of all sessions that have ended by now."""
        self._is_needed = True
        if self._task is None or self._task.done():
            self._task = asyncio.create_task(self._flush())

    async def flushed(self) -> None:
        """Return once all sessions that have ended by now are flushed."""
        flushed: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.append(flushed)
        self.request()
        await flushed

    async def _flush(self) -> None:
        while self._is_needed:
            self._is_needed = False
            covered, self._waiting = self._waiting, []
            try:
                await self._disk.run("", self._state.flush)
            except Exception as error:
                for each in covered:
                    if not each.done():
                        each.set_exception(error)
                if not covered:
                    raise
            for each in covered:
                if not each.done():
                    each.set_result(None)


_MOST_ENDS: Final = 4096
"""Number of remembered ends of sessions, which take at most a megabyte. It is enough, because calls
are repeated within seconds."""


class RecentEnds:
    """Recently ended sessions with their lengths, because a close may be repeated."""

    def __init__(self) -> None:
        self._ends: OrderedDict[SessionKey, tuple[int, Saving]] = OrderedDict()

    def note(self, key: SessionKey, length: int, saving: Saving) -> None:
        """Record that a session of a given length has ended."""
        self._ends.pop(key, None)
        self._ends[key] = length, saving
        if len(self._ends) > _MOST_ENDS:
            self._ends.popitem(last=False)

    def of(self, key: SessionKey, length: int) -> Saving | None:
        """Return the saving of a session that ended at this length; `None` if there is none."""
        ended_at, saving = self._ends.get(key, (0, None))
        return saving if length and ended_at == length else None

    def forget(self, tenant: str, name: str | None = None) -> None:
        """Forget a tenant's sessions: those with a name, or all."""
        keys = [key for key in self._ends if key.namespace == tenant and name in {None, key.name}]
        for key in keys:
            del self._ends[key]


class Jobs:
    """Does a drafter's work for tenants.

    Args:
        drafter: drafter to work with.

    Attributes:
        drafter: as passed to the constructor.
        uses: usage of tenants.
        turns: turns on the event loop.
        workers: threads for long work.
        allowances: remaining allowances of tenants.
        flushing: flushes the outputs of ended sessions.
        ends: recent ends of sessions, for repeated closes.
    """

    def __init__(self, drafter: ServiceFace) -> None:
        self.drafter = drafter
        self._state = state = drafter.state
        self.uses: TenantUses = state.uses
        self.fair = FairScheduler(self.uses)
        self.workers = WorkerPools(lambda: state.limits.max_tenant_waiting, self.uses)
        self.allowances = Allowances.of_work(lambda: state.limits.max_tenant_work)
        self.flushing = Flushing(state, self.workers.disk)
        self.ends = RecentEnds()
        self._num_calls: Counter[str] = Counter()
        self._lasting: set[asyncio.Task[Any]] = set()

    @contextmanager
    def call(self, tenant: str) -> Iterator[Slot]:
        """Let a call outside of streams take part during the block.

        Raises:
            LimitExceededError: the tenant has too many calls.
        """
        if self._num_calls[tenant] >= self._state.limits.max_tenant_waiting:
            self.uses.of(tenant).refused += 1
            raise LimitExceededError(
                f"{self._num_calls[tenant]} calls of the tenant are active, which is the limit: "
                f"try again in {_RETRY_S} s (max_tenant_waiting)",
                limit="max_tenant_waiting",
                retry_after_s=_RETRY_S,
            )
        self._num_calls[tenant] += 1
        try:
            with self.fair.slot(tenant, is_stream=False) as slot:
                yield slot
        finally:
            self._num_calls[tenant] -= 1
            if not self._num_calls[tenant]:
                del self._num_calls[tenant]

    def take_allowance(self, tenant: str, work: float) -> None:
        """Take work from a tenant's allowance.

        Raises:
            LimitExceededError: the allowance is used up.
        """
        try:
            self.allowances.take(tenant, work)
        except LimitExceededError:
            self.uses.of(tenant).refused += 1
            raise

    async def draft(
        self,
        slot: Slot,
        tenant: str,
        request: pb.DraftRequest,
        budget_nodes: int,
    ) -> pb.DraftTree:
        """Draft for a context without a session.

        Raises:
            RetrieverError: the request is refused.
        """
        context = await self._context(slot, tenant, request, budget_nodes)
        tree = self._state.draft_prepared(context, budget_nodes, request.min_probability)
        use = self.uses.of(tenant)
        use.drafts += 1
        use.nodes += len(tree)
        return tree_to_message(tree, request.tree_form)

    async def explain(
        self,
        slot: Slot,
        tenant: str,
        request: pb.ExplainRequest,
        budget_nodes: int,
    ) -> pb.ExplainResponse:
        """Draft for a context without a session, and return the evidence for each node.

        Raises:
            RetrieverError: the request is refused.
        """
        context = await self._context(slot, tenant, request, budget_nodes)
        slot.leave()
        least, most = request.min_probability, request.max_documents

        def told() -> pb.ExplainResponse:
            explanation = explain_prepared(self._state, context, budget_nodes, least, most)
            return explanation_to_message(explanation)

        return await self.workers.explaining.run(tenant, told)

    async def open_session(
        self,
        slot: Slot,
        opening: pb.OpenSessionRequest,
        tenant: str,
    ) -> Session:
        """Open a session of a tenant, in a turn.

        Raises:
            RetrieverError: the request is refused.
        """
        self.drafter.check_vocabulary(opening.vocabulary_fingerprint, tenant)
        options = options_in(opening, tenant)
        predicted = predicted_in(opening.predictions)
        session = await self._prepared(slot, prompt_of(opening), predicted, options)
        # `begin` runs on the loop, so a call that is cancelled earlier leaves no session.
        self._state.begin(SessionKey(tenant, opening.session_id), session)
        return session

    async def add_predictions(
        self, slot: Slot, addition: pb.AddPredictionsRequest, tenant: str
    ) -> None:
        """Add predictions to a session of a tenant; the turn ends while they are read.

        Raises:
            RetrieverError: the predictions are refused.
        """
        predictions = await self._predictions(slot, predicted_in(addition.predictions))
        key = SessionKey(tenant, addition.session_id)
        slot.leave()
        try:
            add = partial(self._state.add_predictions, key, predictions)
            await self.workers.reading.run(tenant, add)
        finally:
            await slot.take()
        self._read_by(tenant, sum(len(each.tokens) for each in predictions))

    async def end_session(
        self,
        slot: Slot,
        closing: pb.CloseSessionRequest,
        tenant: str,
    ) -> tuple[Saving, asyncio.Task[None] | None]:
        """End a session of a tenant, in a turn; `Flushing` writes its output.

        Returns:
            The save status of its output, which is final after the next flush; and the task that
            learns a long output, None for a short one. The task continues if the caller leaves.

        Raises:
            RetrieverError: the request is refused.
        """
        key, length = SessionKey(tenant, closing.session_id), closing.length
        tokens = await self._tokens(slot, new_tokens_of(closing))
        try:
            saving, pieces = self._state.ending(
                key, tokens, remember=not closing.forget, length=length
            )
        except UnknownSessionError:
            before = self.ends.of(key, length)
            if before is None:
                raise
            return before, None
        self._read_by(tenant, len(tokens))
        if length:
            self.ends.note(key, length, saving)
        if next(pieces, _DONE) is _DONE:
            return saving, None
        return saving, self._last(self._remember(tenant, pieces))

    def commit_long(self, tenant: str, step: CheckedRequest) -> "asyncio.Task[None]":
        """Start to commit the many tokens of a step; this continues if the caller leaves."""
        commit = partial(self.drafter.commit_long, step)
        return self._last(self.workers.reading.run(tenant, commit, can_refuse=False))

    def close(self) -> None:
        """End the threads of the pools after the work in progress."""
        self.workers.close()

    async def _context(
        self,
        slot: Slot,
        tenant: str,
        request: pb.DraftRequest | pb.ExplainRequest,
        budget_nodes: int,
    ) -> Session:
        """Read the context of a draft without a session, in a turn.

        Raises:
            RetrieverError: the request is refused.
        """
        context, predicted = context_of(request), predicted_in(request.predictions)
        num_tokens = context.num_tokens + _num_predicted(predicted)
        self.take_allowance(tenant, work_of_draft(budget_nodes, num_tokens))
        await slot.take()
        options = SequenceOptions(remember=False, tenant=tenant)
        return await self._prepared(slot, context, predicted, options)

    async def _prepared(
        self,
        slot: Slot,
        prompt: SentIds,
        predicted: Sequence[tuple[SentIds, str]],
        options: SequenceOptions,
    ) -> Session:
        """Read a prompt, in a turn; a long one in a worker pool."""
        tenant = options.tenant
        charge = self.drafter.charge_reading(tenant, prompt.num_tokens, _num_predicted(predicted))
        pool = await self._loaded(slot, tenant)
        tokens = await self._tokens(slot, prompt)
        predictions = await self._predictions(slot, predicted)
        if predictions:
            options = replace(options, predictions=tuple(predictions))
        prepare = partial(self._state.prepare, tokens, options, charge)
        num_tokens = len(tokens) + sum(len(each.tokens) for each in predictions)
        if options.constraint is not None:
            num_tokens += LONG_PROMPT  # compiling it may take long
        prepared = await self._read(slot, tenant, num_tokens, prepare)
        del pool  # held the tenant's outputs in memory until here
        self._read_by(tenant, num_tokens)
        return prepared

    async def _predictions(
        self, slot: Slot, predicted: Sequence[tuple[SentIds, str]]
    ) -> list[Prediction]:
        """Convert the predictions of a message, in a turn."""
        return [Prediction(await self._tokens(slot, sent), label) for sent, label in predicted]

    async def _loaded(self, slot: Slot, tenant: str) -> object:
        """Load a tenant's outputs if they are not in memory; the result keeps them there."""
        if self.drafter.is_loaded(tenant):
            return self.drafter.load(tenant)
        slot.leave()
        pool = await self.workers.loading.run(tenant, partial(self.drafter.load, tenant))
        await slot.take()
        return pool

    async def _tokens(self, slot: Slot, sent: SentIds) -> TokenIds:
        """Convert token ids of a message, in a turn; many numbers in pieces."""
        if len(sent.numbers) <= _NUMBERS_AT_ONCE or sent.packed:
            return sent.tokens()
        tokens = np.empty(len(sent.numbers), np.int32)
        for begin in range(0, len(tokens), _NUMBERS_AT_ONCE):
            end = begin + _NUMBERS_AT_ONCE
            tokens[begin:end] = sent._replace(numbers=sent.numbers[begin:end]).tokens()
            await slot.give_way()
        return tokens

    async def _read(
        self, slot: Slot, tenant: str, num_tokens: int, read: Callable[[], _Result]
    ) -> _Result:
        """Read tokens, in a worker pool and outside the turn if there are many."""
        if num_tokens <= LONG_PROMPT:
            return read()
        slot.leave()
        result = await self.workers.reading.run(tenant, read)
        await slot.take()
        return result

    async def _remember(self, tenant: str, pieces: Iterator[None]) -> None:
        remember = partial(finish, pieces, PAUSE_S)
        await self.workers.reading.run(tenant, remember, can_refuse=False)
        self.flushing.request()

    def _last(self, work: Any) -> "asyncio.Task[Any]":
        """Start work that continues if its caller leaves."""
        task = asyncio.get_running_loop().create_task(work)
        self._lasting.add(task)
        task.add_done_callback(self._lasting.discard)
        task.add_done_callback(lambda done: done.cancelled() or done.exception())
        return task

    def _read_by(self, tenant: str, num_tokens: int) -> None:
        self.uses.of(tenant).tokens += num_tokens


_DONE: Final = object()


def _num_predicted(predicted: Sequence[tuple[SentIds, str]]) -> int:
    return sum(sent.num_tokens for sent, _ in predicted)


def tokens_of_opening(opening: pb.OpenSessionRequest) -> int:
    """Return the number of tokens in an opening."""
    return prompt_of(opening).num_tokens + _num_predicted(predicted_in(opening.predictions))


def tokens_of_addition(addition: pb.AddPredictionsRequest) -> int:
    """Return the number of tokens in an addition of predictions."""
    return _num_predicted(predicted_in(addition.predictions))
