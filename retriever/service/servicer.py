"""The gRPC servicer: translates messages and calls the embedded drafter.

Deletions run one at a time, with a rate limit for each tenant: each rewrites the log, during which
other tenants' outputs wait, so that endless deletions would block all closes.
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
from retriever.service.draft_stream import (
    DraftStream,
    Flushing,
    Turns,
    client_of,
    end_session,
    open_session,
)
from retriever.sessions.embedded import EmbeddedDrafter
from retriever.v1 import retriever_pb2 as pb
from retriever.v1 import retriever_pb2_grpc as pb_grpc
from retriever.wire.messages import (
    explanation_to_message,
    pad,
    tokens_from_wire,
    tree_to_message,
)
from retriever.wire.statuses import status_of


def tenant_of(context: Any) -> str:
    """Return the tenant of a call; "" where callers are not authenticated.

    Call it again for every message of a stream: revoked credentials end the stream.

    Args:
        context: of the call, as passed to the servicer.

    Raises:
        AccessRefusedError: the caller's credentials were revoked or have expired.
    """
    caller = getattr(context, "caller", None)
    return "" if caller is None else str(caller.tenant)


_MINUTE_S: Final = 60.0
_MAX_WAITING: Final = 256  # bounds memory: each waiting deletion holds a call
_MANY: Final = 1024  # entries before those with a full allowance are dropped: bounds memory


class Deleting:
    """Admits one deletion at a time, at a limited rate for each tenant.

    Args:
        per_minute: deletions of one tenant: a burst, refilled over a minute.
        clock: seconds, monotonic.
    """

    def __init__(self, per_minute: int, clock: Callable[[], float] = time.monotonic) -> None:
        self._period_s = _MINUTE_S / per_minute
        self._clock = clock
        self._full_again_s: dict[str, float] = {}
        self._turn = asyncio.Lock()
        self._num_waiting = 0

    @asynccontextmanager
    async def turn(self, tenant: str) -> AsyncIterator[None]:
        """Wait for the turn of a tenant's deletion, which ends with the block.

        Raises:
            LimitExceededError: the tenant is over its rate, or too many wait; the message says when
            to retry.
        """
        self.count(tenant)
        if self._num_waiting >= _MAX_WAITING:
            raise LimitExceededError("too many deletions wait: try again in 1 s", retry_after_s=1.0)
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
                f"again in {math.ceil(wait_s)} s (max_tenant_deletions)",
                limit="max_tenant_deletions",
                retry_after_s=wait_s,
            )
        if len(self._full_again_s) >= _MANY:
            self._forget(now_s)
        self._full_again_s[tenant] = full_s

    def _forget(self, now_s: float) -> None:
        """Drop the entries of tenants with a full allowance."""
        self._full_again_s = {
            tenant: full_s for tenant, full_s in self._full_again_s.items() if full_s > now_s
        }


DEFAULT_BUDGET_NODES: Final = 32
"""Nodes in the tree of a bare context without a budget."""

_FAILED: Final = "the service could not do this: its log says why; ask again, or its operator"
_LOGGER: Final = logging.getLogger(__name__)

_Context = aio.ServicerContext[Any, Any]


class RetrieverServicer(pb_grpc.RetrieverServiceServicer):
    """The calls of the wire contract, on one event loop.

    A draft takes tens of microseconds, less than passing it to another thread.
    Method names are the contract's.

    Args:
        drafter: what drafts; None if `answer_with` sets it before the first call.
        pad_replies: whether drafts are padded to hide their size.
    """

    def __init__(
        self, drafter: EmbeddedDrafter | None = None, *, pad_replies: bool = False
    ) -> None:
        self._pad_replies = pad_replies
        self._turns = Turns()
        if drafter is not None:
            self.answer_with(drafter)

    def answer_with(self, drafter: EmbeddedDrafter) -> None:
        """Set the drafter; no call may come before."""
        self._drafter = drafter
        self._flushing = Flushing(drafter)
        self._deleting = Deleting(drafter.limits.max_tenant_deletions)

    async def Draft(self, request: pb.DraftRequest, context: _Context) -> pb.DraftResponse:
        async with _statuses(context):
            self._drafter.check_vocabulary(request.vocabulary_fingerprint, tenant_of(context))
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
            self._drafter.check_vocabulary(request.vocabulary_fingerprint, tenant_of(context))
            # In another thread: finding documents takes milliseconds.
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
            tenant, client = tenant_of(context), client_of(request)
            if client is not None:
                self._drafter.admit_client(tenant, client)
            await open_session(self._drafter, request, tenant, client)
            return pb.OpenSessionResponse()

    async def DraftStream(
        self, request_iterator: AsyncIterator[pb.DraftStreamRequest], context: _Context
    ) -> AsyncIterator[pb.DraftStreamResponse]:
        stream = DraftStream(self._drafter, tenant_of(context), self._turns, self._flushing)
        # One message at a time: gRPC's flow control holds the others.
        async with _statuses(context):
            with self._turns.taking_part(), closing(stream):
                async for message in request_iterator:
                    tenant_of(context)  # raises once credentials are revoked
                    response = await stream.answer(message)
                    if self._pad_replies and not response.padding:
                        pad(response, [step.budget_nodes for step in message.steps])
                    yield response

    async def CloseSession(
        self, request: pb.CloseSessionRequest, context: _Context
    ) -> pb.CloseSessionResponse:
        async with _statuses(context):
            fate = end_session(self._drafter, request, tenant_of(context))
            # In another thread: it may wait for the disk.
            await asyncio.to_thread(self._drafter.flush)
            return pb.CloseSessionResponse(keeping=f"KEEPING_{fate.keeping.name}")

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
    """End the call with the status of the drafter's error.

    Errors that are not the caller's are only logged: they name files.
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
    """Return the wire form of an index's description."""
    return pb.IndexInfo(
        name=index.path.name,
        num_tokens=index.num_tokens,
        num_documents=index.num_documents,
        vocabulary_size=index.vocabulary.size,
        vocabulary_fingerprint=index.vocabulary.fingerprint,
        snapshot=index.number,
    )
