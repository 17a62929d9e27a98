"""Conversion between values and messages: the only module that names message fields.

All other modules use `DraftRequest` and `DraftTree`.
"""

from collections.abc import Iterable, Sequence
from dataclasses import asdict
from operator import ge, lt
from typing import Final, NamedTuple

import numpy as np
from numpy.typing import ArrayLike

from retriever.drafter import (
    DraftRequest,
    Findings,
    OutputConstraint,
    Prediction,
    SequenceOptions,
    TokenIds,
)
from retriever.errors import InvalidRequestError, InvalidTreeError
from retriever.limits import MAX_OUTCOMES, check_num_findings, check_num_sent, checked_tokens
from retriever.sequences import checked_options
from retriever.tree import (
    NODE_BYTES,
    ROOT,
    BlockTree,
    DocumentOccurrence,
    DraftTree,
    Explanation,
    NodeProvenance,
    PredictedPlace,
    Source,
)
from retriever.v1 import retriever_pb2 as pb

DEFAULT_BUDGET_NODES: Final = 32
"""Tree size, in nodes, for a request without a budget. Such a draft takes 35 us. It is about the
largest that still saves time with a small model on a CPU."""

_IDS: Final = np.dtype("<i4")
_ID_BYTES: Final = 4
_MOST_NODES: Final = (1 << 32) - 1
_MOST_TIMEOUT_US: Final = (1 << 32) - 1
_CONTEXT_BYTES: Final = 8
_UNSPECIFIED: Final = int(Source.UNSPECIFIED)


def tokens_of(numbers: Sequence[int], packed: bytes | memoryview, name: str) -> TokenIds:
    """Return int32[n], the token ids of a message, which were sent as numbers or as bytes.

    Ids beyond 31 bits become negative; the drafter refuses them.

    Args:
        numbers: ids of the field that holds numbers.
        packed: ids of the field that holds bytes.
        name: name of the field that holds numbers.

    Raises:
        InvalidRequestError: both are set, or the bytes are not whole ids.
    """
    if not packed:
        return np.array(numbers, np.uint32).view(np.int32)
    if numbers:
        raise InvalidRequestError(f"{name} is set, and so are its bytes: send one of them")
    if len(packed) % _ID_BYTES:
        raise InvalidRequestError(
            f"the bytes of {name} are {len(packed)}, which is no multiple of {_ID_BYTES}: a token "
            "id takes 4, little-endian"
        )
    return np.frombuffer(packed, _IDS)


class SentIds(NamedTuple):
    """Token ids as they appear in a message.

    Attributes:
        numbers: ids of the field that holds numbers.
        packed: ids of the field that holds bytes.
        name: name of the field that holds numbers.
    """

    numbers: Sequence[int]
    packed: bytes | memoryview
    name: str

    @property
    def num_tokens(self) -> int:
        """The number of ids."""
        return len(self.numbers) + len(self.packed) // _ID_BYTES

    def tokens(self) -> TokenIds:
        """Return int32[n], as `tokens_of` does.

        Raises:
            InvalidRequestError: as for `tokens_of`, or a number is beyond 31 bits.
        """
        tokens = tokens_of(self.numbers, self.packed, self.name)
        if self.numbers and int(tokens.min()) < 0:
            raise InvalidRequestError(f"token id {max(self.numbers)} is beyond 31 bits")
        return tokens


def context_of(message: pb.DraftRequest | pb.ExplainRequest) -> SentIds:
    """Return the context of a draft without a session."""
    return SentIds(message.context, message.context_bytes, "context")


def prompt_of(message: pb.OpenSessionRequest) -> SentIds:
    """Return the prompt of a session that opens."""
    return SentIds(message.prompt, message.prompt_bytes, "prompt")


def new_tokens_of(message: pb.CloseSessionRequest) -> SentIds:
    """Return the tokens that closing a session commits."""
    return SentIds(message.new_token_ids, message.new_token_bytes, "new_token_ids")


def predicted_in(messages: Sequence[pb.Prediction]) -> list[tuple[SentIds, str]]:
    """Return the texts of predictions and their labels.

    Raises:
        InvalidRequestError: there are too many predictions for one message.
    """
    check_num_sent(len(messages))
    return [
        (SentIds(each.token_ids, each.token_bytes, "token_ids"), each.label) for each in messages
    ]


def tokens_to_wire(tokens: ArrayLike) -> bytes:
    """Return token ids as bytes.

    Raises:
        InvalidRequestError: the ids are not integers in one dimension, or an id is negative or
            beyond 31 bits.
    """
    return checked_tokens(tokens, None).astype(_IDS, copy=False).tobytes()


def opening_message(
    session_id: str, prompt: TokenIds, options: SequenceOptions, fingerprint: str
) -> pb.OpenSessionRequest:
    """Return the message that opens a session; the prompt, int32[n], is already checked.

    Args:
        session_id: name of the session on the wire.
        prompt: prompt of the sequence.
        options: checked options of the sequence; a service takes the tenant from the credentials.
        fingerprint: fingerprint of the caller's tokenizer; empty if unknown.
    """
    return pb.OpenSessionRequest(
        session_id=session_id,
        prompt_bytes=prompt.tobytes(),
        forget=not options.remember,
        vocabulary_fingerprint=fingerprint,
        predictions=prediction_messages(options.predictions),
        group=options.group,
        policy_version=options.policy_version,
        oldest_version=options.oldest_version,
        constraint=_constraint_message(options.constraint),
    )


def _constraint_message(constraint: OutputConstraint | None) -> pb.Constraint | None:
    if constraint is None:
        return None
    if constraint.choices:
        return pb.Constraint(choices=pb.Choices(texts=constraint.choices))
    return pb.Constraint(
        json_schema=constraint.json_schema, regular_expression=constraint.regular_expression
    )


def _constraint_in(message: pb.Constraint) -> OutputConstraint:
    kind = message.WhichOneof("kind")
    return OutputConstraint(
        json_schema=message.json_schema if kind == "json_schema" else None,
        regular_expression=message.regular_expression if kind == "regular_expression" else None,
        choices=tuple(message.choices.texts),
    )


def options_in(opening: pb.OpenSessionRequest, tenant: str) -> SequenceOptions:
    """Return the options of a sequence that a message opens, except its predictions.

    Raises:
        InvalidRequestError: see `checked_options`.
    """
    stated = SequenceOptions(
        remember=not opening.forget,
        group=opening.group,
        policy_version=opening.policy_version if opening.HasField("policy_version") else None,
        oldest_version=opening.oldest_version,
        constraint=_constraint_in(opening.constraint) if opening.HasField("constraint") else None,
        tenant=tenant,
    )
    return checked_options(stated, keeps_tenants=True)


def prediction_messages(predictions: Iterable[Prediction]) -> list[pb.Prediction]:
    """Return the wire form of checked predictions."""
    return [
        pb.Prediction(token_bytes=each.tokens.tobytes(), label=each.label) for each in predictions
    ]


def addition_message(
    session_id: str, predictions: Iterable[Prediction]
) -> pb.AddPredictionsRequest:
    """Return the message that adds checked predictions to a session."""
    return pb.AddPredictionsRequest(
        session_id=session_id, predictions=prediction_messages(predictions)
    )


def closing_message(
    session_id: str, new_tokens: bytes, *, remember: bool
) -> pb.CloseSessionRequest:
    """Return the message that closes a session.

    Args:
        session_id: name of the session on the wire.
        new_tokens: ids that the service does not have yet, as bytes.
        remember: false to store nothing of the session; overrides the option of the opening.
    """
    return pb.CloseSessionRequest(
        session_id=session_id, new_token_bytes=new_tokens, forget=not remember
    )


def add_step(
    message: pb.DraftStreamRequest,
    request: DraftRequest,
    session_id: str,
    new_tokens: bytes,
) -> None:
    """Add one sequence's part of a step to a message.

    Args:
        message: message of the step.
        request: request to add.
        session_id: name of the session on the wire.
        new_tokens: ids that the service does not have yet, as bytes; sent instead of the request's
            tokens.

    Raises:
        InvalidRequestError: a number does not fit the wire.
    """
    try:
        message.steps.add(
            session_id=session_id,
            new_token_bytes=new_tokens,
            length=request.length,
            budget_nodes=request.budget_nodes,
            min_probability=request.min_probability,
            outcomes=[pb.Outcome(token_bytes=tokens_to_wire(each)) for each in request.outcomes],
        )
    except ValueError as error:
        raise InvalidRequestError(f"a step does not fit the wire: {error}") from error


def timeout_to_wire(timeout_s: float) -> int:
    """Return a timeout in microseconds for a message: at least 1, because 0 means no timeout."""
    return max(1, int(min(timeout_s * 1e6, _MOST_TIMEOUT_US)))


def budget_in(
    message: pb.DraftRequest | pb.ExplainRequest | pb.SessionStep, default_nodes: int
) -> int:
    """Return the budget of a request, in nodes: the default if it is not set; 0 means no nodes."""
    return message.budget_nodes if message.HasField("budget_nodes") else default_nodes


def requests_of(steps: Iterable[pb.SessionStep], default_nodes: int) -> list[DraftRequest]:
    """Return the requests of some steps; the drafter checks their contents.

    Token ids beyond 31 bits become negative, so that the drafter refuses only that request.

    Args:
        steps: steps of a message.
        default_nodes: budget of a step that sets none, in nodes.

    Raises:
        InvalidRequestError: the bytes of a request are not whole ids.
    """
    return [
        DraftRequest(
            step.session_id,
            tokens_of(step.new_token_ids, step.new_token_bytes, "new_token_ids"),
            step.length,
            budget_in(step, default_nodes),
            step.min_probability,
            _outcomes_of(step) if step.outcomes else (),
        )
        for step in steps
    ]


def _outcomes_of(step: pb.SessionStep) -> tuple[TokenIds, ...]:
    """Return int32[k] for each outcome; outcomes beyond the limit are counted but not converted."""
    return tuple(
        tokens_of(each.token_ids, each.token_bytes, "token_ids")
        for each in step.outcomes[: MAX_OUTCOMES + 1]
    )


def outcome_trees_from(
    response: pb.DraftStreamResponse, requests: Sequence[DraftRequest]
) -> list[list[DraftTree]]:
    """Return the trees for the outcomes of each request; no trees for a request without outcomes.

    Raises:
        InvalidTreeError: a request has no answer, there are more trees than were requested, or a
            tree is invalid.
    """
    asked = [request for request in requests if request.outcomes]
    answers = response.outcome_trees
    if len(answers) != len(asked):
        raise InvalidTreeError(f"{len(answers)} answers for {len(asked)} sequences with outcomes")
    drafted = iter(answers)
    return [_outcome_trees(next(drafted), each) if each.outcomes else [] for each in requests]


def _outcome_trees(answer: pb.OutcomeTrees, request: DraftRequest) -> list[DraftTree]:
    if len(answer.trees) > len(request.outcomes):
        raise InvalidTreeError(f"{len(answer.trees)} trees for {len(request.outcomes)} outcomes")
    trees = trees_from_messages(answer.trees, len(answer.trees))
    return [tree.prefix(request.budget_nodes) for tree in trees]


def add_trees(
    response: pb.DraftStreamResponse, trees: Iterable[DraftTree], form: pb.TreeForm
) -> int:
    """Add trees to a response; return the total number of nodes."""
    num_nodes = 0
    for tree in trees:
        response.trees.append(tree_to_message(tree, form))
        num_nodes += len(tree)
    return num_nodes


PACKED: Final = pb.TreeForm(packed=True)
"""The tree form that our clients request."""

_AS_LISTS: Final = pb.TreeForm()


def tree_to_message(tree: DraftTree, form: pb.TreeForm = _AS_LISTS) -> pb.DraftTree:
    """Return the wire form of a tree."""
    ancestors = _ancestors_of(tree) if form.ancestors else b""
    if form.packed:
        return pb.DraftTree(packed=tree.packed(), ancestors=ancestors)
    return pb.DraftTree(
        token_ids=tree.token_ids.tolist(),
        parents=tree.parents.tolist(),
        probabilities=tree.probabilities.tolist(),
        sources=tree.sources.tolist(),
        ancestors=ancestors,
    )


def num_nodes_of(message: pb.DraftTree) -> int:
    """Return the number of nodes in the tree of a message."""
    return len(message.token_ids) or len(message.packed) // NODE_BYTES


def _ancestors_of(tree: DraftTree) -> bytes:
    """Return the ancestors of each node, itself included, as a bit mask in rows of bytes."""
    rows = np.eye(len(tree), dtype=np.bool_)
    for node, parent in enumerate(tree.parents.tolist()):
        if parent != ROOT:
            rows[node] |= rows[parent]
    return np.packbits(rows, axis=1, bitorder="little").tobytes()


def trees_from_messages(messages: Sequence[pb.DraftTree], num_trees: int) -> list[DraftTree]:
    """Return the trees of a response, checked all together.

    Raises:
        InvalidTreeError: the number of trees is not the number of sequences, or a tree is invalid.
    """
    if len(messages) != num_trees:
        raise InvalidTreeError(f"{len(messages)} trees for {num_trees} sequences")
    trees = clear_trees(messages)
    if trees is None:
        return [tree_from_message(message) for message in messages]  # raises the specific error
    return trees


def clear_trees(messages: Sequence[pb.DraftTree]) -> list[DraftTree] | None:
    """Return the trees of messages by a fast check; None if the check is inconclusive.

    The result satisfies the rules of `DraftTree.checked`, which decides the remaining cases:
    errors, and probabilities that increase by a rounding error. Unknown sources become unspecified.

    Plain Python is faster than numpy here: trees have a few dozen nodes.
    """
    trees: list[DraftTree] = []
    for message in messages:
        tree = _unchecked(message)
        if tree is None or not _is_clear(
            tree.token_ids.tolist(), tree.parents.tolist(), tree.probabilities.tolist()
        ):
            return None
        trees.append(tree)
    return trees


def _unchecked(message: pb.DraftTree) -> DraftTree | None:
    """Return the tree of a message with unchecked nodes; None if the field lengths differ."""
    if message.packed:
        return _unpacked(message.packed)
    size = len(message.token_ids)
    if not size == len(message.parents) == len(message.probabilities) == len(message.sources):
        return None
    sources: list[int] = list(message.sources)
    if sources and not 0 <= min(sources) <= max(sources) < len(Source):
        sources = _known_sources(sources)
    return DraftTree(
        np.array(message.token_ids[:], np.uint32).view(np.int32),
        np.array(message.parents[:], np.int32),
        np.array(message.probabilities[:], np.float32),
        np.array(sources, np.uint8),
    )


def _unpacked(packed: bytes) -> DraftTree | None:
    """Return the tree of packed bytes with unchecked nodes; None if the length is wrong."""
    size, rest = divmod(len(packed), NODE_BYTES)
    if rest:
        return None
    tree = BlockTree(packed, size)
    sources = tree.sources
    if int(sources.max()) < len(Source):
        return tree
    known = np.where(sources < len(Source), sources, np.uint8(_UNSPECIFIED))
    return DraftTree(tree.token_ids, tree.parents, tree.probabilities, known)


def _known_sources(sources: Sequence[int]) -> list[int]:
    known = len(Source)  # sources are numbered without gaps
    return [each if 0 <= each < known else _UNSPECIFIED for each in sources]


def _is_clear(token_ids: list[int], parents: list[int], probabilities: list[float]) -> bool:
    size = len(token_ids)
    return not size or (
        min(parents) >= ROOT
        and all(map(lt, parents, range(size)))
        and min(token_ids) >= 0
        and probabilities[0] <= 1
        and all(map(ge, probabilities, probabilities[1:]))
        and probabilities[-1] >= 0
        and len(set(zip(parents, token_ids, strict=True))) == size
    )


def tree_from_message(message: pb.DraftTree) -> DraftTree:
    """Return the tree of a message; unknown sources become unspecified.

    Raises:
        InvalidTreeError: the lists or bytes of the message violate a rule of trees.
    """
    if message.packed:
        tree = _unpacked(message.packed)
        if tree is None:
            raise InvalidTreeError(f"{len(message.packed)} bytes are no nodes of {NODE_BYTES} each")
        return DraftTree.checked(tree.token_ids, tree.parents, tree.probabilities, tree.sources)
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
    """Return the wire form of a draft request without a session.

    Raises:
        InvalidRequestError: a token id is invalid, or a number does not fit the wire.
    """
    try:
        return pb.DraftRequest(
            context_bytes=tokens_to_wire(context),
            budget_nodes=budget_nodes,
            min_probability=min_probability,
            vocabulary_fingerprint=fingerprint,
            predictions=prediction_messages(predictions),
            tree_form=PACKED,
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
    """Return the wire form of a request to explain a draft without a session.

    Raises:
        InvalidRequestError: a token id is invalid, or a number does not fit the wire.
    """
    try:
        return pb.ExplainRequest(
            context_bytes=tokens_to_wire(context),
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
        InvalidTreeError: the tree is invalid, or the number of explained nodes differs from its
            size.
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
"""Most bytes that a node takes on the wire: token id, parent, probability, source."""

_TREE_BYTES: Final = 32
"""Most bytes that a tree takes in addition to its nodes: tags and lengths."""

_LEAST_REQUEST_BYTES: Final = 256
_LEAST_NODES: Final = 16
_OTHERS_BYTES: Final = 32


def padded_budgets(message: pb.DraftStreamRequest, default_nodes: int) -> list[int]:
    """Return the budgets of all trees that a message requests, as arguments of `pad`."""
    return [
        budget_in(step, default_nodes)
        for step in message.steps
        for _ in range(1 + len(step.outcomes))
    ]


def pad(
    response: pb.DraftStreamResponse | pb.DraftResponse | pb.StepResponse,
    budgets: Iterable[int],
    form: pb.TreeForm,
) -> None:
    """Add bytes to a response until its size depends only on the request.

    Every tree counts as if it had all the nodes of the largest budget, rounded up to a power of
    two. So steps of slightly different budgets look alike. A reply that refuses something says why,
    and may be longer.

    Args:
        response: not padded yet.
        budgets: budgets of its trees, in nodes.
        form: form of its trees.
    """
    asked = list(budgets)
    nodes = max(_LEAST_NODES, 1 << (max(asked, default=0) - 1).bit_length())
    node_bytes = _NODE_BYTES + (-(-nodes // 8) if form.ancestors else 0)
    size = _OTHERS_BYTES + len(asked) * (_TREE_BYTES + nodes * node_bytes)
    _fill(response, size)


def pad_request(message: pb.DraftStreamRequest) -> None:
    """Add bytes to a message until its size is a power of two, from 256 bytes.

    The power of two still distinguishes a long prompt from a short one, and a step of many
    sequences from one of few.
    """
    size = message.ByteSize()
    fitting = max(_LEAST_REQUEST_BYTES, 1 << (size - 1).bit_length())
    _fill(message, fitting if fitting - size != 1 else 2 * fitting)  # no padding takes one byte


def _fill(
    message: pb.DraftStreamRequest | pb.DraftStreamResponse | pb.DraftResponse | pb.StepResponse,
    size: int,
) -> None:
    """Add padding until a message has `size` bytes, if it has fewer."""
    missing = size - message.ByteSize()
    if missing < 2:  # noqa: PLR2004  (the smallest padding)
        return
    length = _length_of(missing)
    if length is None:  # just before the length prefix grows by a byte, one size is unreachable
        length = _length_of(missing - 2)
        message.padding.append(b"")
    if length is not None:
        message.padding.append(bytes(length))


def _length_of(num_bytes: int) -> int | None:
    """Return the length of the padding that takes `num_bytes` on the wire; None if none does."""
    for length_bytes in range(1, 5):
        length = num_bytes - 1 - length_bytes
        if length >= 0 and max(1, -(-length.bit_length() // 7)) == length_bytes:
            return length
    return None


def check_wire(request: DraftRequest) -> None:
    """Refuse numbers of a request that are invalid or do not fit a message.

    Raises:
        InvalidRequestError: a budget is below 0 or beyond 32 bits, or a probability is outside 0 to
            1.
    """
    if not 0 <= request.budget_nodes <= _MOST_NODES or not 0 <= request.min_probability <= 1:
        raise InvalidRequestError(
            f"a step of {request.budget_nodes} nodes of probability {request.min_probability} "
            "is invalid: nodes are counted from 0, and probabilities lie between 0 and 1"
        )


def findings_to_message(findings: Findings) -> pb.Findings:
    """Return the wire form of findings."""
    contexts, tokens, log_odds = findings.to_bytes()
    return pb.Findings(contexts=contexts, token_ids=tokens, log_odds=log_odds)


def findings_from_message(message: pb.Findings) -> Findings:
    """Return the findings of a message; `check_findings` checks their values.

    Raises:
        InvalidRequestError: its fields disagree in the number of contexts, or there are too many
            contexts.
    """
    check_num_findings(len(message.contexts) // _CONTEXT_BYTES)
    try:
        return Findings.from_bytes(message.contexts, message.token_ids, message.log_odds)
    except ValueError as error:
        raise InvalidRequestError(f"these findings are invalid: {error}") from error
