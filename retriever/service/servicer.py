"""What answers: translates messages, calls the embedded drafter, and decides nothing.

Deletions take turns, and each tenant has so many in a minute: the log is written anew for each.
Meanwhile outputs of others wait to be kept, so that a tenant that deletes without end would hold up
all that close sessions.
"""

import asyncio
import logging
import math
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, closing
from typing import Any, Final

import grpc
from grpc import aio

from indexer.reader import Index
from retriever.errors import LimitExceededError, RetrieverError
from retriever.operations.logs import log_event
from retriever.sequences import SessionKey
from retriever.service.draft_stream import DraftStream, Flushing, Turns, end_session, open_session
from retriever.sessions.embedded import EmbeddedDrafter
from retriever.v1 import retriever_pb2 as pb
from retriever.v1 import retriever_pb2_grpc as pb_grpc
from retriever.wire.messages import explanation_to_message, pad, tokens_from_wire, tree_to_message
from retriever.wire.statuses import status_of


def tenant_of(context: Any) -> str:
    """Return the tenant that a call acts for; "" where callers are not asked who they are.

    To be asked again with every message of a stream: credentials that were withdrawn meanwhile
    let nobody go on.

    Args:
        context: the call's, as the servicer got it.

    Raises:
        AccessRefusedError: the caller's credentials were withdrawn or have expired.
    """
    caller = getattr(context, "caller", None)
    return "" if caller is None else str(caller.tenant)


_MINUTE_S: Final = 60.0
_MAX_WAITING: Final = 256
_MANY: Final = 1024


class Deleting:
    """Lets one deletion at a time begin, and of a tenant at most so many in a minute.

    Args:
        per_minute: of one tenant: at once, and again as the minute passes.
        clock: seconds, rising.
    """

    def __init__(self, per_minute: int, clock: Callable[[], float] = time.monotonic) -> None:
        self._period_s = _MINUTE_S / per_minute
        self._clock = clock
        self._full_again_s: dict[str, float] = {}
        self._turn = asyncio.Lock()
        self._num_waiting = 0

    @asynccontextmanager
    async def turn(self, tenant: str) -> AsyncIterator[None]:
        """Wait for the turn of a tenant's deletion, which is over when the block ends.

        Raises:
            LimitExceededError: the tenant has had as many as it may have, or too many wait; the
                text says when to come again.
        """
        self.count(tenant)
        if self._num_waiting >= _MAX_WAITING:
            raise LimitExceededError("too many deletions wait: try again in 1 s")
        self._num_waiting += 1
        try:
            async with self._turn:
                yield
        finally:
            self._num_waiting -= 1

    def count(self, tenant: str) -> None:
        """Count a deletion, or refuse it, as `turn` does."""
        now_s = self._clock()
        full_s = max(now_s, self._full_again_s.get(tenant, now_s)) + self._period_s
        wait_s = full_s - now_s - _MINUTE_S
        if wait_s > self._period_s / 1e6:  # rounding
            raise LimitExceededError(
                f"a tenant deletes at most {round(_MINUTE_S / self._period_s)} times a minute: try "
                f"again in {math.ceil(wait_s)} s (max_tenant_deletions)"
            )
        if len(self._full_again_s) >= _MANY:
            self._forget(now_s)
        self._full_again_s[tenant] = full_s

    def _forget(self, now_s: float) -> None:
        """Forget the tenants that have all of their minute again."""
        self._full_again_s = {
            tenant: full_s for tenant, full_s in self._full_again_s.items() if full_s > now_s
        }


DEFAULT_BUDGET_NODES: Final = 32
"""Nodes in the tree of a bare context that states no budget."""

_FAILED: Final = "the service could not do this: its log says why; ask again, or its operator"
_LOGGER: Final = logging.getLogger(__name__)

_Context = aio.ServicerContext[Any, Any]


class RetrieverServicer(pb_grpc.RetrieverServiceServicer):
    """The calls of the wire contract, on one event loop.

    A draft takes tens of microseconds, which is less than handing it to another thread would.
    The methods are named by the contract.

    Args:
        drafter: what drafts; None where `answer_with` will give it before the first call.
        pad_replies: whether drafts are padded, so that their sizes tell nothing of them.
    """

    def __init__(
        self, drafter: EmbeddedDrafter | None = None, *, pad_replies: bool = False
    ) -> None:
        self._pad_replies = pad_replies
        self._turns = Turns()
        if drafter is not None:
            self.answer_with(drafter)

    def answer_with(self, drafter: EmbeddedDrafter) -> None:
        """Draft with this from now on; until then no call may come."""
        self._drafter = drafter
        self._flushing = Flushing(drafter)
        self._deleting = Deleting(drafter.limits.max_tenant_deletions)

    async def Draft(self, request: pb.DraftRequest, context: _Context) -> pb.DraftResponse:
        async with _statuses(context):
            self._drafter.check_vocabulary(request.vocabulary_fingerprint)
            budget_nodes = request.budget_nodes or DEFAULT_BUDGET_NODES
            tree = self._drafter.draft_context(
                tokens_from_wire(request.context),
                budget_nodes,
                request.min_probability,
                tenant=tenant_of(context),
            )
            response = pb.DraftResponse(tree=tree_to_message(tree))
            if self._pad_replies:
                pad(response, [budget_nodes])
            return response

    async def Explain(self, request: pb.ExplainRequest, context: _Context) -> pb.ExplainResponse:
        async with _statuses(context):
            self._drafter.check_vocabulary(request.vocabulary_fingerprint)
            # Documents take milliseconds to find, and meanwhile others draft.
            explanation = await asyncio.to_thread(
                self._drafter.explain,
                tokens_from_wire(request.context),
                request.budget_nodes or DEFAULT_BUDGET_NODES,
                request.min_probability,
                max_documents=request.max_documents,
                tenant=tenant_of(context),
            )
            return explanation_to_message(explanation)

    async def OpenSession(
        self, request: pb.OpenSessionRequest, context: _Context
    ) -> pb.OpenSessionResponse:
        async with _statuses(context):
            await open_session(self._drafter, request, tenant_of(context))
            return pb.OpenSessionResponse()

    async def DraftStream(
        self, request_iterator: AsyncIterator[pb.DraftStreamRequest], context: _Context
    ) -> AsyncIterator[pb.DraftStreamResponse]:
        stream = DraftStream(self._drafter, tenant_of(context), self._turns, self._flushing)
        # One message at a time: what else was sent waits where gRPC's flow control holds it.
        async with _statuses(context):
            with self._turns.taking_part(), closing(stream):
                async for message in request_iterator:
                    tenant_of(context)  # while credentials last
                    response = await stream.answer(message)
                    if self._pad_replies and not response.padding:
                        pad(response, [step.budget_nodes for step in message.steps])
                    yield response

    async def CloseSession(
        self, request: pb.CloseSessionRequest, context: _Context
    ) -> pb.CloseSessionResponse:
        async with _statuses(context):
            end_session(self._drafter, request, tenant_of(context))
            # Where outputs are kept on disk it is waited for, and meanwhile others draft.
            await asyncio.to_thread(self._drafter.flush)
            return pb.CloseSessionResponse()

    async def DeleteSessionData(
        self, request: pb.DeleteSessionDataRequest, context: _Context
    ) -> pb.DeleteSessionDataResponse:
        async with _statuses(context):
            tenant = tenant_of(context)
            key = SessionKey(tenant, request.session_id)
            async with self._deleting.turn(tenant):
                await asyncio.to_thread(self._drafter.delete_session, key, tenant=tenant)
            return pb.DeleteSessionDataResponse()

    async def DeleteTenantData(
        self, request: pb.DeleteTenantDataRequest, context: _Context
    ) -> pb.DeleteTenantDataResponse:
        del request
        async with _statuses(context):
            tenant = tenant_of(context)
            async with self._deleting.turn(tenant):
                await asyncio.to_thread(self._drafter.delete_tenant, tenant)
            return pb.DeleteTenantDataResponse()

    async def ListIndexes(
        self, request: pb.ListIndexesRequest, context: _Context
    ) -> pb.ListIndexesResponse:
        del request
        async with _statuses(context):
            indexes = self._drafter.indexes_of(tenant_of(context))
            return pb.ListIndexesResponse(indexes=map(_described, indexes))


@asynccontextmanager
async def _statuses(context: _Context) -> AsyncIterator[None]:
    """End the call with the status of an error that the drafter raises.

    The log has what is not the caller's mistake: it names files, which are no caller's business.
    """
    try:
        yield
    except RetrieverError as error:
        status = status_of(error)
        if status is not grpc.StatusCode.INTERNAL:
            await context.abort(status, str(error))
        log_event(_LOGGER, logging.ERROR, "failed", str(error))
        await context.abort(status, _FAILED)


def _described(index: Index) -> pb.IndexInfo:
    """Return the wire form of what is told of an index."""
    return pb.IndexInfo(
        name=index.path.name,
        num_tokens=index.num_tokens,
        num_documents=index.num_documents,
        vocabulary_size=index.vocabulary.size,
        vocabulary_fingerprint=index.vocabulary.fingerprint,
        snapshot=index.number,
    )
