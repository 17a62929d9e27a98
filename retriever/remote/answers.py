"""What a response on a stream brings to those that wait for it."""

from collections.abc import Sequence
from logging import getLogger
from typing import NamedTuple

from retriever.drafter import DraftRequest
from retriever.errors import InvalidTreeError
from retriever.remote.fail_opens import FailOpen
from retriever.tree import DraftTree
from retriever.v1 import retriever_pb2 as pb
from retriever.wire import trees_from_messages

_log = getLogger(__name__)


class Answer(NamedTuple):
    """What a response brings.

    Attributes:
        trees: by session.
        reasons: why others got none, by session.
        is_broken: whether the stream cannot go on.
    """

    trees: dict[str, DraftTree]
    reasons: dict[str, FailOpen]
    is_broken: bool = False


def answer_with_trees(
    response: pb.DraftStreamResponse,
    requests: Sequence[DraftRequest],
    reasons: dict[str, FailOpen],
    address: str,
) -> Answer:
    """Return what a response brings that has a tree for each request.

    Args:
        response: to be checked.
        requests: what it answers, in order.
        reasons: why some of them are refused, by session.
        address: of the server, for the log.
    """
    try:
        trees = trees_from_messages(response.trees, len(requests))
    except InvalidTreeError as error:
        _log.warning("draft service %s sent no trees: %s", address, error)
        invalid = {request.session: FailOpen.INVALID for request in requests}
        return Answer({}, invalid | reasons)
    got = {
        request.session: tree.prefix(request.budget_nodes)
        for request, tree in zip(requests, trees, strict=True)
        if request.session not in reasons
    }
    return Answer(got, reasons)
