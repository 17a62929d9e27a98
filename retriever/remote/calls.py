"""Calls of a service that need no session: bare contexts, deletion, what it serves."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import grpc
from numpy.typing import ArrayLike

from retriever.errors import DrafterUnavailableError, InvalidTreeError
from retriever.explanation import Explanation
from retriever.explanation_messages import explanation_from_message, explanation_request
from retriever.limits import DEFAULT_DOCUMENTS
from retriever.remote.credentials import Credentials, open_channel
from retriever.tree import DraftTree
from retriever.v1 import retriever_pb2 as pb
from retriever.v1.retriever_pb2_grpc import RetrieverServiceStub
from retriever.wire import CLIENT_OPTIONS, context_to_message, error_of, trees_from_messages


@dataclass(frozen=True, slots=True)
class IndexInfo:
    """An index that a service drafts from; see `IndexInfo` of the wire contract."""

    name: str
    num_tokens: int
    num_documents: int
    vocabulary_size: int
    vocabulary_fingerprint: str
    snapshot: int = 0


class Calls:
    """One service, asked by single calls. Connects at the first of them.

    Args:
        address: `host:port`, or `unix:/path`.
        timeout_s: longest wait for any answer, in seconds.
        vocabulary_fingerprint: of the tokenizer at hand; a service for another one refuses.
        credentials: what to show, and whom to trust; None for a service that asks for nothing.

    Raises:
        CredentialsError: a file of the credentials cannot be used.
    """

    def __init__(
        self,
        address: str,
        *,
        timeout_s: float,
        vocabulary_fingerprint: str,
        credentials: Credentials | None,
    ) -> None:
        self._address = address
        self._timeout_s = timeout_s
        self._fingerprint = vocabulary_fingerprint
        self._channel = open_channel(address, credentials, CLIENT_OPTIONS)
        self._stub = RetrieverServiceStub(self._channel)

    def draft_context(
        self, context: ArrayLike, budget_nodes: int, min_probability: float = 0.0
    ) -> DraftTree:
        """Draft for a bare context, without a session.

        Args:
            context: integers[n], token ids, oldest first.
            budget_nodes: most nodes of the tree.
            min_probability: nodes less probable than this are left out.

        Raises:
            InvalidRequestError: the context or the budget cannot be.
            DrafterUnavailableError: no answer in time.
        """
        if budget_nodes == 0:
            return DraftTree.empty()  # on the wire 0 stands for the service's default
        message = context_to_message(context, budget_nodes, min_probability, self._fingerprint)
        return self._trees([self._call(self._stub.Draft, message).tree], 1)[0]

    def explain(
        self,
        context: ArrayLike,
        budget_nodes: int,
        min_probability: float = 0.0,
        *,
        max_documents: int = DEFAULT_DOCUMENTS,
    ) -> Explanation:
        """Draft for a bare context as `draft_context` does, and tell what spoke for each node.

        Args:
            context: integers[n], token ids, oldest first.
            budget_nodes: most nodes of the tree.
            min_probability: nodes less probable than this are left out.
            max_documents: most documents to name for each node.

        Raises:
            InvalidRequestError: the context or a number cannot be.
            DrafterUnavailableError: no answer in time.
        """
        if budget_nodes == 0:
            return Explanation(DraftTree.empty(), ())
        message = explanation_request(
            context, budget_nodes, min_probability, self._fingerprint, max_documents
        )
        response = self._call(self._stub.Explain, message)
        try:
            return explanation_from_message(response)
        except InvalidTreeError as error:
            raise DrafterUnavailableError(f"{self._address} sent no tree: {error}") from error

    def delete_tenant_data(self) -> None:
        """Have the service forget all that it keeps of the tenant that the credentials are for.

        Raises:
            DrafterUnavailableError: no answer in time; it may have been done or not.
        """
        self._call(self._stub.DeleteTenantData, pb.DeleteTenantDataRequest())

    def list_indexes(self) -> list[IndexInfo]:
        """Return the indexes that the service drafts from."""
        response = self._call(self._stub.ListIndexes, pb.ListIndexesRequest())
        return [
            IndexInfo(
                index.name,
                index.num_tokens,
                index.num_documents,
                index.vocabulary_size,
                index.vocabulary_fingerprint,
                index.snapshot,
            )
            for index in response.indexes
        ]

    def _trees(self, messages: Sequence[pb.DraftTree], num_trees: int) -> list[DraftTree]:
        """Return the trees of an answer, or say that the service cannot be drafted with."""
        try:
            return trees_from_messages(messages, num_trees)
        except InvalidTreeError as error:
            raise DrafterUnavailableError(f"{self._address} sent no trees: {error}") from error

    def _call(self, method: Any, message: Any) -> Any:
        try:
            return method(message, timeout=self._timeout_s)
        except grpc.RpcError as error:
            raise error_of(error) from error
