"""The gRPC servicer: translates messages and calls the embedded drafter.

Deletions run one at a time, with a rate limit for each tenant. Each deletion rewrites the log while
other tenants' outputs wait, so endless deletions would block all closes.
"""

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager, closing
from dataclasses import asdict, replace
from functools import partial
from typing import Final, TypeVar

from indexer.reader import Index
from retriever.errors import InvalidRequestError, LimitExceededError
from retriever.limits import MAX_FINDINGS, check_draft
from retriever.operations.lifecycle import Lifecycle
from retriever.operations.service_report import installed_version
from retriever.sequences import SessionKey
from retriever.service.allowances import Allowances, work_of_tokens
from retriever.service.draft_stream import DraftStream, without_drafts
from retriever.service.gate import Call
from retriever.service.jobs import Jobs, tokens_of_addition, tokens_of_opening
from retriever.service.open_streams import OpenStreams
from retriever.sessions.embedded import EmbeddedDrafter
from retriever.sessions.service_face import ServiceFace
from retriever.v1 import retriever_pb2 as pb
from retriever.wire.messages import (
    DEFAULT_BUDGET_NODES,
    budget_in,
    findings_from_message,
    findings_to_message,
    pad,
    padded_budgets,
    timeout_to_wire,
)
from retriever.wire.server_info import ServerInfo
from retriever.wire.statuses import error_of_status, is_late

_Result = TypeVar("_Result")

_MAX_WAITING: Final = 256  # bounds memory: each waiting deletion holds a call


class Deleting:
    """Admits one deletion at a time, at a limited rate for each tenant.

    Args:
        per_minute: returns how many deletions one tenant may make in a burst, refilled over a
            minute.
        clock: returns monotonic seconds.
    """

    def __init__(
        self, per_minute: Callable[[], int], clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._allowances = Allowances.of_deletions(per_minute, clock)
        self._turn = asyncio.Lock()
        self._num_waiting = 0

    @asynccontextmanager
    async def turn(self, tenant: str) -> AsyncIterator[None]:
        """Wait for the turn of a tenant's deletion; the turn ends with the block.

        Raises:
            LimitExceededError: the tenant is over its rate, or too many deletions wait; the message
                says when to retry.
        """
        self._allowances.take(tenant)
        if self._num_waiting >= _MAX_WAITING:
            raise LimitExceededError("too many deletions wait: try again in 1 s", retry_after_s=1.0)
        self._num_waiting += 1
        try:
            async with self._turn:
                yield
        finally:
            self._num_waiting -= 1


class RetrieverServicer:
    """The calls of the wire contract, on one event loop.

    A draft takes tens of microseconds, less than passing it to another thread. Method names are
    those of the contract; the gate turns their errors into statuses.

    Args:
        drafter: drafter to use; None if `answer_with` sets it before the first call.
        pad_replies: whether drafts are padded to hide their size.
        lifecycle: phase of the service.
        models: names of the models that the service drafts for.

    Attributes:
        streams: the open streams.
    """

    def __init__(
        self,
        drafter: EmbeddedDrafter | None = None,
        *,
        pad_replies: bool = False,
        lifecycle: Lifecycle | None = None,
        models: Sequence[str] = (),
    ) -> None:
        self._pad_replies = pad_replies
        self._lifecycle = lifecycle or Lifecycle()
        self._info = ServerInfo(installed_version(), models=tuple(models))
        self.streams = OpenStreams()
        self._known: EmbeddedDrafter | None = None
        if drafter is not None:
            self.answer_with(drafter)

    def answer_with(self, drafter: EmbeddedDrafter) -> None:
        """Set the drafter; must be called before the first call arrives."""
        self._known = drafter
        self._drafter = ServiceFace(drafter.state)
        self._default_nodes = min(DEFAULT_BUDGET_NODES, drafter.limits.max_budget_nodes)
        self._jobs = Jobs(self._drafter)
        self._deleting = Deleting(lambda: drafter.limits.max_tenant_deletions)

    async def aside(self, tenant: str, work: Callable[[], _Result]) -> _Result:
        """Run long work for a tenant in a thread, in turn with other tenants."""
        if self._known is None:
            return work()
        return await self._jobs.workers.reading.run(tenant, work, can_refuse=False)

    def is_busy(self) -> bool:
        """Return whether long messages are being processed."""
        return self._jobs.workers.reading.num_tenants > 0

    def close(self) -> None:
        """End the threads that work for calls, after the work in progress."""
        self._jobs.close()

    async def Draft(self, request: pb.DraftRequest, call: Call) -> pb.DraftResponse:
        if self._lifecycle.is_compiling:
            return pb.DraftResponse(tree=pb.DraftTree())
        tenant = call.tenant
        self._drafter.check_vocabulary(request.vocabulary_fingerprint, tenant)
        budget_nodes = budget_in(request, self._default_nodes)
        check_draft(budget_nodes, request.min_probability, self._drafter.state.limits)
        with self._jobs.call(tenant) as slot:
            tree = await self._jobs.draft(slot, tenant, request, budget_nodes)
        response = pb.DraftResponse(tree=tree)
        if self._pad_replies:
            pad(response, [budget_nodes], request.tree_form)
        return response

    async def Explain(self, request: pb.ExplainRequest, call: Call) -> pb.ExplainResponse:
        tenant = call.tenant
        self._drafter.check_vocabulary(request.vocabulary_fingerprint, tenant)
        budget_nodes = budget_in(request, self._default_nodes)
        check_draft(budget_nodes, request.min_probability, self._drafter.state.limits)
        with self._jobs.call(tenant) as slot:
            return await self._jobs.explain(slot, tenant, request, budget_nodes)

    async def OpenSession(
        self, request: pb.OpenSessionRequest, call: Call
    ) -> pb.OpenSessionResponse:
        tenant = call.tenant
        if self._jobs.allowances.is_limited:
            self._jobs.take_allowance(tenant, work_of_tokens(tokens_of_opening(request)))
        with self._jobs.call(tenant) as slot:
            await slot.take()
            await self._jobs.open_session(slot, request, tenant)
        return pb.OpenSessionResponse()

    async def AddPredictions(
        self, request: pb.AddPredictionsRequest, call: Call
    ) -> pb.AddPredictionsResponse:
        tenant = call.tenant
        if self._jobs.allowances.is_limited:
            self._jobs.take_allowance(tenant, work_of_tokens(tokens_of_addition(request)))
        with self._jobs.call(tenant) as slot:
            await slot.take()
            await self._jobs.add_predictions(slot, request, tenant)
        return pb.AddPredictionsResponse()

    async def Step(self, request: pb.StepRequest, call: Call) -> pb.StepResponse:
        if self._lifecycle.is_compiling:
            return pb.StepResponse(tree=pb.DraftTree())
        tenant = call.tenant
        if not request.HasField("step"):
            raise InvalidRequestError("a call of Step has a step: set it")
        message = pb.DraftStreamRequest(
            steps=[request.step],
            sequence_number=1,
            timeout_us=_left_of(call),
            tree_form=request.tree_form,
        )
        with (
            self._jobs.call(tenant) as slot,
            closing(DraftStream(self._jobs, tenant, slot, self._lifecycle)) as stream,
        ):
            answer = await stream.answer(message)
        refused = [each for each in answer.statuses if not is_late(each)]
        if refused:
            raise error_of_status(refused[0])
        response = pb.StepResponse(tree=answer.trees[0], is_draining=answer.is_draining)
        for each in answer.outcome_trees:
            response.outcome_trees.extend(each.trees)
        if self._pad_replies:
            pad(response, padded_budgets(message, self._default_nodes), message.tree_form)
        return response

    async def DraftStream(
        self, contents: AsyncIterator[bytes], call: Call
    ) -> AsyncIterator[pb.DraftStreamResponse]:
        # One message at a time: gRPC's flow control holds the others.
        tenant, answered = call.tenant, 0
        messages = self.streams.until_end(contents)
        while self._lifecycle.is_compiling:
            content = await anext(messages, None)
            if content is None:
                return
            early = await call.read(content)
            yield without_drafts(early)
            answered = early.sequence_number
        with (
            self._jobs.fair.slot(tenant, is_stream=True) as slot,
            closing(
                DraftStream(self._jobs, tenant, slot, self._lifecycle, answered=answered)
            ) as stream,
        ):
            async for content in messages:
                message = await call.read(content)
                del content  # megabytes
                response = await stream.answer(message)
                if self._pad_replies and not response.padding:
                    pad(
                        response,
                        padded_budgets(message, self._default_nodes),
                        message.tree_form,
                    )
                del message  # free the message: the next one may come late
                yield response

    async def CloseSession(
        self, request: pb.CloseSessionRequest, call: Call
    ) -> pb.CloseSessionResponse:
        tenant = call.tenant
        with self._jobs.call(tenant) as slot:
            await slot.take()
            saving, lasting = await self._jobs.end_session(slot, request, tenant)
            slot.leave()
            if lasting is not None:
                await asyncio.shield(lasting)
            await self._jobs.flushing.flushed()
        return pb.CloseSessionResponse(save_status=f"SAVE_STATUS_{saving.status.name}")

    async def ShareFindings(
        self, request: pb.ShareFindingsRequest, call: Call
    ) -> pb.ShareFindingsResponse:
        tenant = call.tenant
        self._drafter.check_vocabulary(request.vocabulary_fingerprint, tenant)
        findings = findings_from_message(request.findings)
        self._jobs.take_allowance(tenant, work_of_tokens(len(findings)))
        share = partial(
            self._drafter.state.share_findings,
            request.model_fingerprint.lower(),
            findings,
            tenant=tenant,
        )
        await self._jobs.workers.disk.run(tenant, share)
        return pb.ShareFindingsResponse()

    async def FetchFindings(
        self, request: pb.FetchFindingsRequest, call: Call
    ) -> pb.FetchFindingsResponse:
        tenant = call.tenant
        self._drafter.check_vocabulary(request.vocabulary_fingerprint, tenant)
        self._jobs.take_allowance(tenant, work_of_tokens(MAX_FINDINGS))
        fetch = partial(
            self._drafter.state.fetch_findings,
            request.model_fingerprint.lower(),
            request.before,
            tenant=tenant,
        )
        page = await self._jobs.workers.disk.run(tenant, fetch)
        return pb.FetchFindingsResponse(
            findings=findings_to_message(page.findings), before=page.before
        )

    async def DeleteSessionData(
        self, request: pb.DeleteSessionDataRequest, call: Call
    ) -> pb.DeleteSessionDataResponse:
        tenant = call.tenant
        key = SessionKey(tenant, request.session_id)
        async with self._deleting.turn(tenant):
            self._jobs.ends.forget(tenant, key.name)
            delete = partial(self._drafter.state.delete, tenant, key)
            await self._jobs.workers.disk.run(tenant, delete)
        return pb.DeleteSessionDataResponse()

    async def DeleteTenantData(
        self, request: pb.DeleteTenantDataRequest, call: Call
    ) -> pb.DeleteTenantDataResponse:
        del request
        tenant = call.tenant
        async with self._deleting.turn(tenant):
            self._jobs.ends.forget(tenant)
            delete = partial(self._drafter.state.delete, tenant)
            await self._jobs.workers.disk.run(tenant, delete)
        return pb.DeleteTenantDataResponse()

    async def ListIndexes(
        self, request: pb.ListIndexesRequest, call: Call
    ) -> pb.ListIndexesResponse:
        del request
        indexes = self._drafter.indexes_of(call.tenant)
        return pb.ListIndexesResponse(indexes=map(_described, indexes))

    async def GetServerInfo(
        self, request: pb.GetServerInfoRequest, call: Call
    ) -> pb.GetServerInfoResponse:
        del request, call
        info = replace(self._info, phase=self._lifecycle.phase.value)
        if self._known is not None:
            limits = asdict(self._known.limits)  # the current limits, which can change
            info = replace(
                info,
                limits={name: float(limit) for name, limit in limits.items()},
                default_budget_nodes=self._default_nodes,
            )
            if (known := self._known.vocabulary) is not None:
                info = replace(
                    info, vocabulary_fingerprint=known.fingerprint, vocabulary_size=known.size
                )
        return info.to_message()


def _left_of(call: Call) -> int:
    """Return the microseconds until the deadline of a call; 0 without a deadline."""
    left_s = call.left_s
    return 0 if left_s is None else timeout_to_wire(max(left_s, 0.0))


def _described(index: Index) -> pb.IndexInfo:
    """Return the wire form of an index's description."""
    return pb.IndexInfo(
        name=index.path.name,
        num_tokens=index.num_tokens,
        num_documents=index.num_documents,
        vocabulary_size=index.vocabulary.size,
        vocabulary_fingerprint=index.vocabulary.fingerprint,
        snapshot=index.number,
    )
