"""The service: translates messages, calls the embedded drafter, and decides nothing."""

import asyncio
import signal
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, Final

from grpc import aio

from retriever import wire
from retriever.embedded import EmbeddedDrafter
from retriever.errors import AddressInUseError, RetrieverError
from retriever.v1 import retriever_pb2 as pb
from retriever.v1 import retriever_pb2_grpc as pb_grpc

DEFAULT_BUDGET_NODES: Final = 32
"""Nodes in the tree of a bare context that states no budget."""

_GRACE_S: Final = 2.0
_UNIX: Final = "unix:"
_MAX_PORT: Final = 65535
_SERVER_OPTIONS: Final = (*wire.CHANNEL_OPTIONS, ("grpc.so_reuseport", 0))

_Context = aio.ServicerContext[Any, Any]


class RetrieverServicer(pb_grpc.RetrieverServiceServicer):
    """The calls of the wire contract, on one event loop.

    A draft takes tens of microseconds, which is less than handing it to another thread would.
    The methods are named by the contract.
    """

    def __init__(self, drafter: EmbeddedDrafter) -> None:
        self._drafter = drafter

    async def Draft(self, request: pb.DraftRequest, context: _Context) -> pb.DraftResponse:
        async with _statuses(context):
            self._drafter.check_vocabulary(request.vocabulary_fingerprint)
            tree = self._drafter.draft_context(
                wire.tokens_from_wire(request.context),
                request.budget_nodes or DEFAULT_BUDGET_NODES,
                request.min_probability,
            )
            return pb.DraftResponse(tree=wire.tree_to_message(tree))

    async def Explain(self, request: pb.ExplainRequest, context: _Context) -> pb.ExplainResponse:
        async with _statuses(context):
            self._drafter.check_vocabulary(request.vocabulary_fingerprint)
            # Documents take milliseconds to find, and meanwhile others draft.
            explanation = await asyncio.to_thread(
                self._drafter.explain,
                wire.tokens_from_wire(request.context),
                request.budget_nodes or DEFAULT_BUDGET_NODES,
                request.min_probability,
                max_documents=request.max_documents,
            )
            return wire.explanation_to_message(explanation)

    async def OpenSession(
        self, request: pb.OpenSessionRequest, context: _Context
    ) -> pb.OpenSessionResponse:
        async with _statuses(context):
            self._drafter.check_vocabulary(request.vocabulary_fingerprint)
            self._drafter.open(
                request.session_id,
                wire.tokens_from_wire(request.prompt),
                remember=not request.forget,
            )
            return pb.OpenSessionResponse()

    async def DraftStream(
        self, request_iterator: AsyncIterator[pb.DraftStreamRequest], context: _Context
    ) -> AsyncIterator[pb.DraftStreamResponse]:
        async with _statuses(context):
            async for request in request_iterator:
                trees = self._drafter.draft(wire.requests_from_message(request))
                yield pb.DraftStreamResponse(trees=map(wire.tree_to_message, trees))

    async def CloseSession(
        self, request: pb.CloseSessionRequest, context: _Context
    ) -> pb.CloseSessionResponse:
        async with _statuses(context):
            tokens = wire.tokens_from_wire(request.new_token_ids)
            # Where outputs are kept on disk it is waited for, and meanwhile others draft.
            await asyncio.to_thread(
                self._drafter.close, request.session_id, tokens, remember=not request.forget
            )
            return pb.CloseSessionResponse()

    async def ListIndexes(
        self, request: pb.ListIndexesRequest, context: _Context
    ) -> pb.ListIndexesResponse:
        del request, context
        return pb.ListIndexesResponse(
            indexes=[
                pb.IndexInfo(
                    name=index.path.name,
                    num_tokens=index.num_tokens,
                    num_documents=index.num_documents,
                    vocabulary_size=index.vocabulary.size,
                    vocabulary_fingerprint=index.vocabulary.fingerprint,
                    snapshot=index.number,
                )
                for index in self._drafter.indexes
            ]
        )


@asynccontextmanager
async def _statuses(context: _Context) -> AsyncIterator[None]:
    """End the call with the status of an error that the drafter raises."""
    try:
        yield
    except RetrieverError as error:
        await context.abort(wire.status_of(error), str(error))


async def start(drafter: EmbeddedDrafter, address: str) -> tuple[aio.Server, str]:
    """Start serving.

    Args:
        drafter: what answers; warmed here, so that the first draft waits for no compiler.
        address: `host:port` (port 0: a free one), or `unix:/path`.

    Returns:
        The running server, and the address that it listens on.

    Raises:
        AddressInUseError: the address is taken or cannot be bound.
    """
    _check_address(address)
    drafter.warm()
    server = aio.server(options=_SERVER_OPTIONS)
    pb_grpc.add_RetrieverServiceServicer_to_server(RetrieverServicer(drafter), server)
    try:
        port = server.add_insecure_port(address)
    except RuntimeError as error:
        raise AddressInUseError(
            f"cannot listen on {address}: it is taken or not an address of this machine; "
            "choose another with --address"
        ) from error
    await server.start()
    if address.startswith(_UNIX):
        return server, address
    return server, f"{address.rpartition(':')[0]}:{port}"


async def serve(drafter: EmbeddedDrafter, address: str) -> None:
    """Serve until SIGINT or SIGTERM; calls under way get two seconds to end.

    Raises:
        AddressInUseError: the address is taken or cannot be bound.
    """
    stopped = asyncio.Event()
    for signal_number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(signal_number, stopped.set)
    server, bound = await start(drafter, address)
    print(f"serving on {bound}", flush=True)  # noqa: T201  (says when it is ready, and where)
    await stopped.wait()
    await server.stop(_GRACE_S)


def _check_address(address: str) -> None:
    """Refuse what cannot be bound, and what gRPC would misread: it takes ports modulo 65536."""
    if address.startswith(_UNIX):
        _check_socket_is_free(Path(address.removeprefix(_UNIX)))
        return
    host, _, port = address.rpartition(":")
    if not host or not port.isascii() or not port.isdigit() or int(port) > _MAX_PORT:
        raise AddressInUseError(
            f"cannot listen on {address}: an address is HOST:PORT, with a port from 0 to "
            f"{_MAX_PORT}, or unix:/PATH"
        )
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        socket.create_server((host.strip("[]"), int(port)), family=family).close()
    except OSError as error:
        raise AddressInUseError(
            f"cannot listen on {address}: {error.strerror or error}; choose another --address"
        ) from error


def _check_socket_is_free(path: Path) -> None:
    """Refuse a unix socket that somebody serves on: binding would take it away from them."""
    if not path.parent.is_dir():
        raise AddressInUseError(f"cannot listen on {path}: there is no folder {path.parent}")
    if not path.is_socket():
        return
    with socket.socket(socket.AF_UNIX) as probe:
        try:
            probe.connect(str(path))
        except OSError:
            return  # left over from a server that is gone
    raise AddressInUseError(f"somebody serves on {path} already: choose another --address")
