"""Explanations of drafts, and requests for them, as messages."""

from dataclasses import asdict

from numpy.typing import ArrayLike

from retriever.errors import InvalidRequestError, InvalidTreeError
from retriever.explanation import DocumentOccurrence, Explanation, NodeProvenance
from retriever.v1 import retriever_pb2 as pb
from retriever.wire import tokens_to_wire, tree_from_message, tree_to_message


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
