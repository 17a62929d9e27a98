"""Conversion between values and messages: the only module that names message fields.

All other modules use `DraftRequest` and `DraftTree`.
"""

from collections.abc import Generator, Iterable, Mapping, Sequence
from dataclasses import asdict
from itertools import pairwise
from operator import ge, lt
from typing import Any, Final

import numpy as np
from numpy.typing import ArrayLike, NDArray

from retriever.drafter import DraftRequest, Findings, Prediction, SequenceOptions, TokenIds
from retriever.errors import InvalidRequestError, InvalidTreeError
from retriever.limits import MAX_OUTCOMES, check_num_findings, checked_tokens
from retriever.tree import (
    DocumentOccurrence,
    DraftTree,
    Explanation,
    NodeProvenance,
    PredictedPlace,
    Source,
)
from retriever.v1 import retriever_pb2 as pb

DEFAULT_BUDGET_NODES: Final = 32
"""Nodes in the tree of a request without a budget: a draft of 35 us, and about as many as a pass of
a small model on a CPU verifies at a gain."""

_MAX_TOKEN_ID: Final = (1 << 31) - 1
_MOST_NODES: Final = (1 << 32) - 1
_MOST_TIMEOUT_US: Final = (1 << 32) - 1
_CONTEXT_BYTES: Final = 8
_UNSPECIFIED: Final = int(Source.UNSPECIFIED)


def tokens_from_wire(token_ids: Sequence[int]) -> TokenIds:
    """Return int32[n].

    Raises:
        InvalidRequestError: an id is beyond 31 bits.
    """
    array = np.array(token_ids, np.int64)
    _check_bits(array)
    return array.astype(np.int32)


CONVERTED_AT_ONCE: Final = 1 << 12
"""Token ids of a message that are converted in one piece: 0.15 ms, with the interpreter held."""


def converting_tokens(token_ids: Sequence[int]) -> Generator[None, None, TokenIds]:
    """Return int32[n] as `tokens_from_wire` does; yield after each piece.

    Raises:
        InvalidRequestError: an id is beyond 31 bits.
    """
    if len(token_ids) <= CONVERTED_AT_ONCE:
        return tokens_from_wire(token_ids)
    array = yield from _converting(token_ids)
    _check_bits(array)
    return array.view(np.int32)


def _converting(token_ids: Sequence[int]) -> Generator[None, None, NDArray[np.uint32]]:
    array = np.empty(len(token_ids), np.uint32)
    for begin in range(0, len(array), CONVERTED_AT_ONCE):
        end = begin + CONVERTED_AT_ONCE
        array[begin:end] = token_ids[begin:end]
        yield
    return array


def _check_bits(array: NDArray[Any]) -> None:
    if array.size and int(array.max()) > _MAX_TOKEN_ID:
        raise InvalidRequestError(f"token id {int(array.max())} is beyond 31 bits")


def tokens_to_wire(tokens: ArrayLike) -> list[int]:
    """Return token ids as the wire takes them.

    Raises:
        InvalidRequestError: these are not integers in one dimension, or one is negative or beyond
        31 bits.
    """
    token_ids: list[int] = checked_tokens(tokens, None).tolist()
    return token_ids


def opening_message(
    session_id: str, prompt: TokenIds, options: SequenceOptions, fingerprint: str
) -> pb.OpenSessionRequest:
    """Return the message that opens a session; the prompt, int32[n], is already checked.

    Args:
        session_id: the session's name on the wire.
        prompt: of the sequence.
        options: of the sequence, checked; a service takes the tenant from the credentials.
        fingerprint: of the caller's tokenizer; empty if unknown.
    """
    return pb.OpenSessionRequest(
        session_id=session_id,
        prompt=prompt.tolist(),
        forget=not options.remember,
        vocabulary_fingerprint=fingerprint,
        predictions=prediction_messages(options.predictions),
        group=options.group,
        policy_version=options.policy_version,
        oldest_version=options.oldest_version,
    )


def prediction_messages(predictions: Iterable[Prediction]) -> list[pb.Prediction]:
    """Return the wire form of checked predictions."""
    return [pb.Prediction(token_ids=each.tokens.tolist(), label=each.label) for each in predictions]


def addition_message(
    session_id: str, predictions: Iterable[Prediction]
) -> pb.AddPredictionsRequest:
    """Return the message that adds checked predictions to a session."""
    return pb.AddPredictionsRequest(
        session_id=session_id, predictions=prediction_messages(predictions)
    )


def closing_message(
    session_id: str, new_token_ids: Iterable[int], *, remember: bool
) -> pb.CloseSessionRequest:
    """Return the message that closes a session.

    Args:
        session_id: the session's name on the wire.
        new_token_ids: tokens that the service has not been told.
        remember: false to keep nothing of it; overrides the opening.
    """
    return pb.CloseSessionRequest(
        session_id=session_id, new_token_ids=new_token_ids, forget=not remember
    )


def add_step(
    message: pb.DraftStreamRequest,
    request: DraftRequest,
    session_id: str,
    new_token_ids: Sequence[int],
) -> None:
    """Add one sequence's part of a step to a message.

    Args:
        message: of the step.
        request: to add.
        session_id: the session's name on the wire.
        new_token_ids: tokens that the service has not been told; sent in place of the request's
            own.

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
            outcomes=[pb.Outcome(token_ids=tokens_to_wire(each)) for each in request.outcomes],
        )
    except ValueError as error:
        raise InvalidRequestError(f"a step does not fit the wire: {error}") from error


def timeout_to_wire(timeout_s: float) -> int:
    """Return a timeout in microseconds, as a message states it: at least one, for 0 is none."""
    return max(1, int(min(timeout_s * 1e6, _MOST_TIMEOUT_US)))


def budget_in(
    message: pb.DraftRequest | pb.ExplainRequest | pb.SessionStep, default_nodes: int
) -> int:
    """Return the budget of a request, in nodes: the default where it states none; 0 is none."""
    return message.budget_nodes if message.HasField("budget_nodes") else default_nodes


def requests_from_message(
    message: pb.DraftStreamRequest, default_nodes: int = DEFAULT_BUDGET_NODES
) -> list[DraftRequest]:
    """Return the requests of one step; their contents are checked by the drafter.

    Token ids beyond 31 bits become negative, so that the drafter refuses that request alone.

    Args:
        message: of the step.
        default_nodes: budget of a sequence for which none is stated.
    """
    pieces = converting_requests(message, default_nodes)
    while True:
        try:
            next(pieces)
        except StopIteration as done:
            requests: list[DraftRequest] = done.value
            return requests


_REQUESTS_AT_ONCE: Final = 128
"""Requests that are converted in one piece: 0.2 ms."""


def converting_requests(
    message: pb.DraftStreamRequest,
    default_nodes: int,
    long: Mapping[int, NDArray[np.uint32]] | None = None,
) -> Generator[None, None, list[DraftRequest]]:
    """Return the requests as `requests_from_message` does; yield after each piece of work.

    Args:
        message: of a step.
        default_nodes: budget of a sequence for which none is stated.
        long: uint32[n], lists of tokens that are not in the message, by their steps' places.
    """
    requests: list[DraftRequest] = []
    for step in message.steps:
        new_token_ids = step.new_token_ids
        if long and len(requests) in long:
            tokens = long[len(requests)]
        elif len(new_token_ids) > CONVERTED_AT_ONCE:
            tokens = yield from _converting(new_token_ids)
        else:
            tokens = np.array(new_token_ids, np.uint32)
        requests.append(
            DraftRequest(
                step.session_id,
                tokens.view(np.int32),
                step.length,
                budget_in(step, default_nodes),
                step.min_probability,
                _outcomes_of(step),
            )
        )
        if len(requests) % _REQUESTS_AT_ONCE == 0:
            yield
    return requests


def _outcomes_of(step: pb.SessionStep) -> tuple[TokenIds, ...]:
    """Return int32[k] each; those beyond the limit are counted and not converted."""
    if not step.outcomes:
        return ()
    converted = [np.array(each.token_ids, np.uint32) for each in step.outcomes[: MAX_OUTCOMES + 1]]
    return tuple(each.view(np.int32) for each in converted)


def outcome_trees_from(
    response: pb.DraftStreamResponse, requests: Sequence[DraftRequest]
) -> list[list[DraftTree]]:
    """Return the trees for the outcomes of each request, none for a request without any.

    Raises:
        InvalidTreeError: a request has no answer, or there are more trees than were asked for, or
            one is invalid.
    """
    asked = [request for request in requests if request.outcomes]
    answers = response.outcome_trees
    if len(answers) != len(asked):
        raise InvalidTreeError(f"{len(answers)} answers for {len(asked)} sequences asked ahead")
    drafted = iter(answers)
    return [_outcome_trees(next(drafted), each) if each.outcomes else [] for each in requests]


def _outcome_trees(answer: pb.OutcomeTrees, request: DraftRequest) -> list[DraftTree]:
    if len(answer.trees) > len(request.outcomes):
        raise InvalidTreeError(f"{len(answer.trees)} trees for {len(request.outcomes)} outcomes")
    trees = trees_from_messages(answer.trees, len(answer.trees))
    return [tree.prefix(request.budget_nodes) for tree in trees]


def add_trees(response: pb.DraftStreamResponse, trees: Iterable[DraftTree]) -> int:
    """Add trees to an answer; return how many nodes they have."""
    num_nodes = 0
    for tree in trees:
        response.trees.append(tree_to_message(tree))
        num_nodes += len(tree)
    return num_nodes


def tree_to_message(tree: DraftTree) -> pb.DraftTree:
    """Return the wire form of a tree."""
    return pb.DraftTree(
        token_ids=tree.token_ids.tolist(),
        parents=tree.parents.tolist(),
        probabilities=tree.probabilities.tolist(),
        sources=tree.sources.tolist(),
    )


def trees_from_messages(messages: Sequence[pb.DraftTree], num_trees: int) -> list[DraftTree]:
    """Return the trees of a response, all checked at once.

    Raises:
        InvalidTreeError: their number differs, or one of them is invalid.
    """
    if len(messages) != num_trees:
        raise InvalidTreeError(f"{len(messages)} trees for {num_trees} sequences")
    trees = clear_trees(messages)
    if trees is None:
        return [tree_from_message(message) for message in messages]  # raises with the reason
    return trees


def clear_trees(messages: Sequence[pb.DraftTree]) -> list[DraftTree] | None:
    """Return the trees of messages by a fast check; None where the check is not conclusive.

    The result satisfies the rules of `DraftTree.checked`, which decides the other cases: errors,
    and probabilities that rise by a rounding. The trees' arrays share memory; unknown sources
    become unspecified.

    Plain Python is faster than numpy here: trees have a few dozen nodes.
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
    if sources and not 0 <= min(sources) <= max(sources) < len(Source):
        sources = _known_sources(sources)
    whole = DraftTree(
        np.array(token_ids, np.int32),
        np.array(parents, np.int32),
        np.array(probabilities, np.float32),
        np.array(sources, np.uint8),
    )
    return [whole] if len(messages) == 1 else _divided(whole, ends)


def _known_sources(sources: Sequence[int]) -> list[int]:
    known = len(Source)  # sources are numbered without gaps
    return [each if 0 <= each < known else _UNSPECIFIED for each in sources]


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


def tree_from_message(message: pb.DraftTree) -> DraftTree:
    """Return the tree of a message; unknown sources become unspecified.

    Raises:
        InvalidTreeError: the message's lists break a rule of trees.
    """
    return DraftTree.checked(
        np.array(message.token_ids, np.int64),
        np.array(message.parents, np.int64),
        np.array(message.probabilities, np.float32),
        _known_sources(message.sources),
    )


def context_to_message(
    context: ArrayLike,
    budget_nodes: int,
    min_probability: float,
    fingerprint: str,
    predictions: Iterable[Prediction] = (),
) -> pb.DraftRequest:
    """Return the wire form of a bare context.

    Raises:
        InvalidRequestError: a token id is invalid, or a number does not fit the wire.
    """
    try:
        return pb.DraftRequest(
            context=tokens_to_wire(context),
            budget_nodes=budget_nodes,
            min_probability=min_probability,
            vocabulary_fingerprint=fingerprint,
            predictions=prediction_messages(predictions),
        )
    except ValueError as error:
        raise InvalidRequestError(f"a draft does not fit the wire: {error}") from error


def explanation_request(  # noqa: PLR0913, PLR0917  (what a message holds)
    context: ArrayLike,
    budget_nodes: int,
    min_probability: float,
    fingerprint: str,
    max_documents: int,
    predictions: Iterable[Prediction] = (),
) -> pb.ExplainRequest:
    """Return the wire form of a request to explain the draft of a bare context.

    Raises:
        InvalidRequestError: a token id is invalid, or a number does not fit the wire.
    """
    try:
        return pb.ExplainRequest(
            context=tokens_to_wire(context),
            budget_nodes=budget_nodes,
            min_probability=min_probability,
            vocabulary_fingerprint=fingerprint,
            max_documents=max_documents,
            predictions=prediction_messages(predictions),
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
                predictions=[pb.PredictedPlace(**asdict(place)) for place in node.predictions],
            )
            for node in explanation.nodes
        ],
    )


def explanation_from_message(message: pb.ExplainResponse) -> Explanation:
    """Return the explanation of a message.

    Raises:
        InvalidTreeError: the tree is invalid, or its number of nodes differs.
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
            tuple(PredictedPlace(place.label, place.position) for place in node.predictions),
        )
        for node in message.nodes
    ]
    return Explanation(tree, tuple(nodes))


_NODE_BYTES: Final = 5 + 3 + 4 + 1
"""At most, of a node on the wire: token id, parent, probability, source."""

_TREE_BYTES: Final = 32
"""At most, of a tree without its nodes: tags and lengths."""

_LEAST_REQUEST_BYTES: Final = 256
_LEAST_NODES: Final = 16
_OTHERS_BYTES: Final = 32


def padded_budgets(message: pb.DraftStreamRequest, default_nodes: int) -> list[int]:
    """Return the budgets of all trees that a message asks for, for `pad`."""
    return [
        budget_in(step, default_nodes)
        for step in message.steps
        for _ in range(1 + len(step.outcomes))
    ]


def pad(
    response: pb.DraftStreamResponse | pb.DraftResponse | pb.StepResponse, budgets: Iterable[int]
) -> None:
    """Add bytes to a response until its size depends on what was asked alone.

    Every tree counts as if it had all the nodes of the largest budget, rounded up to a power of
    two, so that steps of slightly different budgets look alike. A reply that refuses something
    says why, and may be longer.

    Args:
        response: not padded yet.
        budgets: of its trees, in nodes.
    """
    asked = list(budgets)
    nodes = max(_LEAST_NODES, 1 << (max(asked, default=0) - 1).bit_length())
    size = _OTHERS_BYTES + len(asked) * (_TREE_BYTES + nodes * _NODE_BYTES)
    _fill(response, size)


def pad_request(message: pb.DraftStreamRequest) -> None:
    """Add bytes to a message until its size is a power of two, from 256 bytes.

    Which power that is still tells a long prompt from a short one, and a step of many sequences
    from one of few.
    """
    size = message.ByteSize()
    fitting = max(_LEAST_REQUEST_BYTES, 1 << (size - 1).bit_length())
    _fill(message, fitting if fitting - size != 1 else 2 * fitting)  # no padding takes one byte


def _fill(
    message: pb.DraftStreamRequest | pb.DraftStreamResponse | pb.DraftResponse | pb.StepResponse,
    size: int,
) -> None:
    """Add padding until a message has so many bytes, if it has less."""
    missing = size - message.ByteSize()
    if missing < 2:  # noqa: PLR2004  (the least that a padding takes)
        return
    length = _length_of(missing)
    if length is None:  # where the length itself takes a byte more, one size cannot be met
        length = _length_of(missing - 2)
        message.padding.append(b"")
    if length is not None:
        message.padding.append(bytes(length))


def _length_of(num_bytes: int) -> int | None:
    """Return how long a padding is that takes so many bytes on the wire; None where none does."""
    for length_bytes in range(1, 5):
        length = num_bytes - 1 - length_bytes
        if length >= 0 and max(1, -(-length.bit_length() // 7)) == length_bytes:
            return length
    return None


def check_wire(request: DraftRequest) -> None:
    """Refuse numbers of a request that are invalid or do not fit a message.

    Raises:
        InvalidRequestError: a budget below 0 or beyond 32 bits, or a probability outside 0 to 1.
    """
    if not 0 <= request.budget_nodes <= _MOST_NODES or not 0 <= request.min_probability <= 1:
        raise InvalidRequestError(
            f"a step of {request.budget_nodes} nodes of probability {request.min_probability} "
            "makes no sense: nodes are counted from 0, and probabilities lie between 0 and 1"
        )


def findings_to_message(findings: Findings) -> pb.Findings:
    """Return the wire form of findings."""
    contexts, tokens, log_odds = findings.to_bytes()
    return pb.Findings(contexts=contexts, token_ids=tokens, log_odds=log_odds)


def findings_from_message(message: pb.Findings) -> Findings:
    """Return the findings of a message; `check_findings` looks at their values.

    Raises:
        InvalidRequestError: its parts are not of the same contexts, or these are too many.
    """
    check_num_findings(len(message.contexts) // _CONTEXT_BYTES)
    try:
        return Findings.from_bytes(message.contexts, message.token_ids, message.log_odds)
    except ValueError as error:
        raise InvalidRequestError(f"these are no findings: {error}") from error
