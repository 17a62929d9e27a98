"""Between values and wire messages, and between errors and gRPC statuses: the one place."""

import re
from collections.abc import Sequence
from typing import Final
from urllib.parse import unquote

import grpc
import numpy as np
from numpy.typing import ArrayLike

from retriever import errors
from retriever.drafter import DraftRequest, TokenIds
from retriever.forests import clear_trees
from retriever.limits import MAX_MESSAGE_BYTES, Limits, checked_tokens
from retriever.remote.handshakes import advice
from retriever.tree import DraftTree, Source
from retriever.v1 import retriever_pb2 as pb

CHANNEL_OPTIONS: Final = (
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
)

_KEEPALIVE: Final = (
    # A peer that is gone without a word is noticed within 15 s, and its sessions end.
    ("grpc.keepalive_time_ms", 10_000),
    ("grpc.keepalive_timeout_ms", 5_000),
    ("grpc.http2.ping_timeout_ms", 5_000),  # by itself gRPC waits a minute
)

CLIENT_OPTIONS: Final = (
    *CHANNEL_OPTIONS,
    *_KEEPALIVE,
    # A client that takes the place of another must not wait until gRPC lets it connect again.
    ("grpc.use_local_subchannel_pool", 1),
)

_SOURCES: Final = frozenset(map(int, Source))
_MAX_TOKEN_ID: Final = (1 << 31) - 1

# The most particular error first: a status is that of the first class that fits.
_STATUS_OF_ERROR: Final[tuple[tuple[type[errors.RetrieverError], grpc.StatusCode], ...]] = (
    (errors.OutOfSequenceError, grpc.StatusCode.ABORTED),
    (errors.VocabularyMismatchError, grpc.StatusCode.FAILED_PRECONDITION),
    (errors.LimitExceededError, grpc.StatusCode.RESOURCE_EXHAUSTED),
    (errors.InvalidRequestError, grpc.StatusCode.INVALID_ARGUMENT),
    (errors.UnknownSessionError, grpc.StatusCode.NOT_FOUND),
    (errors.SessionExistsError, grpc.StatusCode.ALREADY_EXISTS),
    (errors.NotPermittedError, grpc.StatusCode.PERMISSION_DENIED),
    (errors.AccessRefusedError, grpc.StatusCode.UNAUTHENTICATED),
)
_UNREACHED: Final = re.compile(
    r"(?:failed to connect .*(?:ipv[46]:|(?=unix:))|errors resolving )(?P<place>\S+): "
    r".*: (?P<reason>[^:\]]+)\]?$",
    re.DOTALL,
)
"""How gRPC says that nobody listens at an address, or that there is none."""

_ERROR_OF_STATUS: Final = {status: error for error, status in _STATUS_OF_ERROR}
_ERROR_OF_CODE: Final = {status.value[0]: error for error, status in _STATUS_OF_ERROR}


def server_options(limits: Limits) -> tuple[tuple[str, int], ...]:
    """Return the options of a server's channels."""
    return (
        ("grpc.max_receive_message_length", limits.max_message_bytes),
        ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
        *_KEEPALIVE,
        ("grpc.http2.min_ping_interval_without_data_ms", 5_000),
        ("grpc.http2.min_recv_ping_interval_without_data_ms", 5_000),
        ("grpc.so_reuseport", 0),
    )


def status_of(error: errors.RetrieverError) -> grpc.StatusCode:
    """Return the status that tells a client of an error."""
    for kind, status in _STATUS_OF_ERROR:
        if isinstance(error, kind):
            return status
    return grpc.StatusCode.INTERNAL


def error_of(error: grpc.RpcError) -> errors.RetrieverError:
    """Return the error that a failed call stands for; what is not named is unavailability."""
    code, details = error.code(), error.details() or ""
    kind = _ERROR_OF_STATUS.get(code)
    if kind is not None:
        return kind(details)
    if reason := advice(details):
        return errors.DrafterUnavailableError(reason)
    if code is grpc.StatusCode.UNAVAILABLE and (refused := _UNREACHED.search(details)):
        return errors.DrafterUnavailableError(
            f"no draft service answers at {unquote(refused['place'])} ({refused['reason']}): "
            "is `python -m retriever serve` running there?"
        )
    return errors.DrafterUnavailableError(f"the draft service answered {code.name}: {details}")


def error_of_status(status: pb.SessionStatus) -> errors.RetrieverError:
    """Return the error that a refusal in a response stands for."""
    kind = _ERROR_OF_CODE.get(status.code, errors.DrafterUnavailableError)
    return kind(status.message)


def tree_to_message(tree: DraftTree) -> pb.DraftTree:
    """Return the wire form of a tree."""
    return pb.DraftTree(
        token_ids=tree.token_ids.tolist(),
        parents=tree.parents.tolist(),
        probabilities=tree.probabilities.tolist(),
        sources=tree.sources.tolist(),
    )


def tree_from_message(message: pb.DraftTree) -> DraftTree:
    """Return the tree of a message; sources that this version does not know are unspecified.

    Raises:
        InvalidTreeError: the message's lists are no tree.
    """
    return DraftTree.checked(
        np.array(message.token_ids, np.int64),
        np.array(message.parents, np.int64),
        np.array(message.probabilities, np.float32),
        [
            source if source in _SOURCES else int(Source.UNSPECIFIED)
            for source in map(int, message.sources)
        ],
    )


def trees_from_messages(messages: Sequence[pb.DraftTree], num_trees: int) -> list[DraftTree]:
    """Return the trees of a response, all checked at once.

    Raises:
        InvalidTreeError: they are not as many, or one of them is no tree.
    """
    if len(messages) != num_trees:
        raise errors.InvalidTreeError(f"{len(messages)} trees for {num_trees} sequences")
    trees = clear_trees(messages)
    if trees is None:
        return [tree_from_message(message) for message in messages]  # says what is wrong
    return trees


def request_to_step(request: DraftRequest, session_id: str) -> pb.SessionStep:
    """Return the wire form of a request that was checked before."""
    return pb.SessionStep(
        session_id=session_id,
        new_token_ids=request.new_tokens.tolist(),
        length=request.length,
        budget_nodes=request.budget_nodes,
        min_probability=request.min_probability,
    )


def step_to_message(
    request: DraftRequest, session_id: str, new_token_ids: Sequence[int]
) -> pb.SessionStep:
    """Return the wire form of one sequence's part of a step.

    Args:
        request: what is asked.
        session_id: the session's name on the wire.
        new_token_ids: what the service has not been told of the request's tokens.

    Raises:
        InvalidRequestError: a number does not fit the wire.
    """
    try:
        return pb.SessionStep(
            session_id=session_id,
            new_token_ids=new_token_ids,
            length=request.length,
            budget_nodes=request.budget_nodes,
            min_probability=request.min_probability,
        )
    except ValueError as error:
        raise errors.InvalidRequestError(f"a step does not fit the wire: {error}") from error


def context_to_message(
    context: ArrayLike, budget_nodes: int, min_probability: float, fingerprint: str
) -> pb.DraftRequest:
    """Return the wire form of a bare context.

    Raises:
        InvalidRequestError: these are no token ids, or a number does not fit the wire.
    """
    try:
        return pb.DraftRequest(
            context=tokens_to_wire(context),
            budget_nodes=budget_nodes,
            min_probability=min_probability,
            vocabulary_fingerprint=fingerprint,
        )
    except ValueError as error:
        raise errors.InvalidRequestError(f"a draft does not fit the wire: {error}") from error


def requests_from_message(message: pb.DraftStreamRequest) -> list[DraftRequest]:
    """Return the requests of one step; their contents are checked by the drafter.

    Token ids beyond 31 bits come out negative, so that the drafter refuses them to their session.
    """
    return [
        DraftRequest(
            step.session_id,
            np.array(step.new_token_ids, np.uint32).view(np.int32),
            step.length,
            step.budget_nodes,
            step.min_probability,
        )
        for step in message.steps
    ]


def tokens_from_wire(token_ids: Sequence[int]) -> TokenIds:
    """Return int32[n].

    Raises:
        InvalidRequestError: an id is beyond 31 bits.
    """
    array = np.array(token_ids, np.int64)
    if array.size and int(array.max()) > _MAX_TOKEN_ID:
        raise errors.InvalidRequestError(f"token id {int(array.max())} is beyond 31 bits")
    return array.astype(np.int32)


def tokens_to_wire(tokens: ArrayLike) -> list[int]:
    """Return token ids as the wire takes them.

    Raises:
        InvalidRequestError: these are no token ids, or one is negative or beyond 31 bits.
    """
    token_ids: list[int] = checked_tokens(tokens, None).tolist()
    return token_ids
