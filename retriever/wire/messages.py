"""Between values and wire messages, and between errors and gRPC statuses: the one place."""

import re
from collections.abc import Sequence
from dataclasses import asdict
from itertools import pairwise
from operator import ge, lt
from typing import Final
from urllib.parse import unquote

import grpc
import numpy as np
from numpy.typing import ArrayLike

from retriever import errors
from retriever.drafter import DraftRequest, TokenIds
from retriever.errors import InvalidRequestError, InvalidTreeError
from retriever.explanation import DocumentOccurrence, Explanation, NodeProvenance
from retriever.limits import MAX_MESSAGE_BYTES, Limits, checked_tokens
from retriever.tree import DraftTree, Source
from retriever.v1 import retriever_pb2 as pb

_MAX_TOKEN_ID: Final = (1 << 31) - 1
_HIGHEST_SOURCE: Final = int(max(Source))
_UNSPECIFIED: Final = int(Source.UNSPECIFIED)


def clear_trees(messages: Sequence[pb.DraftTree]) -> list[DraftTree] | None:
    """Return the trees of messages, None where it is not clear that each is one.

    What is clear is a tree by the rules of `DraftTree.checked`; where probabilities rise by a
    rounding, or anything is wrong, that has to decide. The arrays of the trees share memory, and
    sources that this version does not know are unspecified.

    Trees have a few dozen nodes: over so few, Python is done before numpy has begun.
    """
    token_ids: list[int] = []
    parents: list[int] = []
    probabilities: list[float] = []
    sources: list[int] = []
    ends = [0]
    for message in messages:
        tokens, above, falling = message.token_ids[:], message.parents[:], message.probabilities[:]
        if len(message.sources) != len(tokens) or not _is_clear(tokens, above, falling):
            return None
        token_ids += tokens
        parents += above
        probabilities += falling
        sources += message.sources
        ends.append(len(token_ids))
    if sources and not 0 <= min(sources) <= max(sources) <= _HIGHEST_SOURCE:
        sources = [each if 0 <= each <= _HIGHEST_SOURCE else _UNSPECIFIED for each in sources]
    whole = DraftTree(
        np.array(token_ids, np.int32),
        np.array(parents, np.int32),
        np.array(probabilities, np.float32),
        np.array(sources, np.uint8),
    )
    return [whole] if len(messages) == 1 else _divided(whole, ends)


def _is_clear(token_ids: list[int], parents: list[int], probabilities: list[float]) -> bool:
    size = len(token_ids)
    if not size == len(parents) == len(probabilities):
        return False
    return not size or (
        min(parents) >= -1
        and all(map(lt, parents, range(size)))
        and max(token_ids) <= _MAX_TOKEN_ID
        and probabilities[0] <= 1
        and all(map(ge, probabilities, probabilities[1:]))
        and probabilities[-1] >= 0
        and len(set(zip(parents, token_ids, strict=True))) == size
    )


def _divided(whole: DraftTree, ends: Sequence[int]) -> list[DraftTree]:
    return [
        DraftTree(
            whole.token_ids[begin:end],
            whole.parents[begin:end],
            whole.probabilities[begin:end],
            whole.sources[begin:end],
        )
        for begin, end in pairwise(ends)
    ]


# What gRPC's details hold, and what that means for whoever connects; the first that fits.
_ADVICE: Final = {
    "certificate has expired": "the service's certificate has expired: have it renewed, or look at "
    "this machine's clock",
    "certificate is not yet valid": "the service's certificate is not valid yet: look at both "
    "machines' clocks",
    "CERTIFICATE_VERIFY_FAILED": "the service's certificate is not signed by an authority that is "
    "trusted here: give the right one as `ca`",
    "Hostname Verification Check failed": "the service's certificate is for another host name: "
    "connect by a name in it, or give that name as `server_name`",
    "WRONG_VERSION_NUMBER": "the service does not encrypt: connect without TLS, or start it with "
    "--certificate",
    "Socket closed": "the service closed the connection: it may want TLS (give `ca`), or a client "
    "certificate that its authority signed and that has not expired (give `certificate` and `key`)",
    "Permission denied": "this user may not open the service's socket: run as the same user",
}
_NEVER_CONNECTED: Final = "failed to connect"


def advice(details: str) -> str:
    """Return why a connection did not come about; empty where the details do not say.

    Args:
        details: of the status that gRPC gave.
    """
    if _NEVER_CONNECTED not in details:
        return ""
    return next((text for sign, text in _ADVICE.items() if sign in details), "")


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


def add_step(
    message: pb.DraftStreamRequest,
    request: DraftRequest,
    session_id: str,
    new_token_ids: Sequence[int],
) -> None:
    """Add one sequence's part of a step to a message.

    Args:
        message: of the step.
        request: what is asked.
        session_id: the session's name on the wire.
        new_token_ids: what the service has not been told of the sequence, in the place of the
            request's own.

    Raises:
        InvalidRequestError: a number does not fit the wire.
    """
    try:
        message.steps.add(
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


def explanation_request(
    context: ArrayLike,
    budget_nodes: int,
    min_probability: float,
    fingerprint: str,
    max_documents: int,
) -> pb.ExplainRequest:
    """Return the wire form of a bare context whose draft is to be explained.

    Raises:
        InvalidRequestError: these are no token ids, or a number does not fit the wire.
    """
    try:
        return pb.ExplainRequest(
            context=tokens_to_wire(context),
            budget_nodes=budget_nodes,
            min_probability=min_probability,
            vocabulary_fingerprint=fingerprint,
            max_documents=max_documents,
        )
    except ValueError as error:
        raise InvalidRequestError(f"a draft does not fit the wire: {error}") from error


def explanation_to_message(explanation: Explanation) -> pb.ExplainResponse:
    """Return the wire form of an explanation."""
    return pb.ExplainResponse(
        tree=tree_to_message(explanation.tree),
        nodes=[
            pb.NodeProvenance(
                match_length=node.match_length,
                count=node.count,
                context_positions=node.context_positions,
                documents=[pb.DocumentOccurrence(**asdict(place)) for place in node.documents],
            )
            for node in explanation.nodes
        ],
    )


def explanation_from_message(message: pb.ExplainResponse) -> Explanation:
    """Return the explanation of a message.

    Raises:
        InvalidTreeError: there is no tree, or it has another number of nodes.
    """
    tree = tree_from_message(message.tree)
    if len(tree) != len(message.nodes):
        raise InvalidTreeError(f"{len(tree)} nodes and {len(message.nodes)} explanations")
    nodes = [
        NodeProvenance(
            node.match_length,
            node.count,
            tuple(node.context_positions),
            tuple(
                DocumentOccurrence(place.index, place.name, place.licence, place.position)
                for place in node.documents
            ),
        )
        for node in message.nodes
    ]
    return Explanation(tree, tuple(nodes))
