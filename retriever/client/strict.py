"""The strict client: a `Drafter` over gRPC that raises every refusal of the service."""

import math
import os
import uuid
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from queue import Empty, SimpleQueue
from threading import Lock, Thread
from typing import Any, Final, Self

import grpc
from numpy.typing import ArrayLike

from retriever.client.credentials import Credentials, open_channel
from retriever.client.streams import ORPHANS, LinkStream
from retriever.drafter import (
    DEFAULT,
    DraftRequest,
    Findings,
    FoundPage,
    OfOneProcess,
    Prediction,
    SequenceOptions,
    without_outcomes,
)
from retriever.errors import (
    DrafterUnavailableError,
    InvalidRequestError,
    InvalidTreeError,
    RetrieverError,
    UnknownSessionError,
)
from retriever.limits import (
    DEFAULT_DOCUMENTS,
    check_findings,
    check_session_name,
    checked_tokens,
    shown,
)
from retriever.sequences import OpenSessions, checked_options, checked_predictions
from retriever.tree import DraftTree, Explanation
from retriever.v1 import retriever_pb2 as pb
from retriever.v1.retriever_pb2_grpc import RetrieverServiceStub
from retriever.wire.channels import CLIENT_OPTIONS
from retriever.wire.messages import (
    PACKED,
    add_step,
    addition_message,
    closing_message,
    context_to_message,
    explanation_from_message,
    explanation_request,
    findings_from_message,
    findings_to_message,
    opening_message,
    outcome_trees_from,
    timeout_to_wire,
    tokens_to_wire,
    trees_from_messages,
)
from retriever.wire.server_info import ServerInfo
from retriever.wire.statuses import error_of, error_of_status, is_late

_ABORTED: Final[int] = grpc.StatusCode.ABORTED.value[0]


class Exchange:
    """One stream on which every message waits for its answer.

    Args:
        channel: channel to the service.
        timeout_s: longest wait for an answer, in seconds.
    """

    def __init__(self, channel: grpc.Channel, timeout_s: float) -> None:
        self._timeout_s = timeout_s
        self._number = 0
        self._answers: SimpleQueue[pb.DraftStreamResponse | grpc.RpcError | None] = SimpleQueue()
        self._stream = LinkStream(channel, self._answers.put)
        Thread(target=self._read, name="foredraft-stream", daemon=True).start()

    def ask(self, message: pb.DraftStreamRequest) -> pb.DraftStreamResponse:
        """Number a message, send it and await its answer.

        Raises:
            DrafterUnavailableError: there was no answer in time, the stream has ended, or a message
                was answered out of order. Then the stream is broken.
            RetrieverError: the error that ended the stream.
        """
        self._number += 1
        message.sequence_number = self._number
        self._stream.send(message)
        try:
            answer = self._answers.get(timeout=self._timeout_s)
        except Empty:
            raise DrafterUnavailableError(
                f"the draft service gave no answer within {self._timeout_s} s"
            ) from None
        if answer is None:
            raise DrafterUnavailableError("the draft service ended the stream")
        if isinstance(answer, grpc.RpcError):
            raise error_of(answer) from answer
        if answer.sequence_number != self._number:
            raise DrafterUnavailableError(
                f"the draft service answered message {answer.sequence_number} where "
                f"{self._number} was expected"
            )
        for status in answer.statuses:
            if status.code == _ABORTED and not status.session_id:
                raise DrafterUnavailableError(f"the draft service is out of step: {status.message}")
        return answer

    def end(self) -> None:
        """End the stream."""
        self._stream.end()

    def _read(self) -> None:
        try:
            self._stream.read()
        except grpc.RpcError as error:
            self._answers.put(error)
        else:
            self._answers.put(None)


@dataclass(frozen=True, slots=True)
class IndexInfo:
    """An index of a service; see `IndexInfo` of the wire contract."""

    name: str
    num_tokens: int
    num_documents: int
    vocabulary_size: int
    vocabulary_fingerprint: str
    snapshot: int = 0


class Calls(OfOneProcess):
    """Unary calls to one service; connects at the first call.

    Args:
        address: `host:port`, or `unix:/path`.
        timeout_s: longest wait for any answer, in seconds.
        vocabulary_fingerprint: fingerprint of the caller's tokenizer; a service for another
            tokenizer refuses.
        credentials: credentials to send and to verify the server with; None for a service that
            needs none.

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
        self._credentials = credentials
        self._connect()

    def _connect(self) -> None:
        self._pid = os.getpid()
        files = self._credentials.stamp() if self._credentials is not None else ()
        self._channel = open_channel(self._address, self._credentials, CLIENT_OPTIONS)
        self._files = files
        self._calls = RetrieverServiceStub(self._channel)

    def _follow_files(self) -> bool:
        """Reconnect if certificate files have changed; return whether they have."""
        if self._credentials is None or self._credentials.stamp() == self._files:
            return False
        before = self._channel
        self._connect()
        before.close()
        return True

    def _follow_fork(self) -> None:
        """Reconnect after a fork, because gRPC's threads stayed in the parent process."""
        if self._pid != os.getpid():
            self._leave_to_parent()
            self._connect()

    def _leave_to_parent(self) -> None:
        ORPHANS.append(self._channel)

    def draft_context(
        self,
        context: ArrayLike,
        budget_nodes: int,
        min_probability: float = 0.0,
        *,
        predictions: Sequence[Prediction] = (),
    ) -> DraftTree:
        """Draft for a context without a session.

        Args:
            context: integers[n], token ids, oldest first.
            budget_nodes: most nodes of the tree.
            min_probability: nodes less probable than this are left out.
            predictions: texts expected to follow; see `SequenceOptions`.

        Raises:
            InvalidRequestError: the context or the budget is invalid.
            DrafterUnavailableError: there was no answer in time.
        """
        expected = checked_predictions(predictions)
        message = context_to_message(
            context, budget_nodes, min_probability, self._fingerprint, expected
        )
        return self._trees([self._call("Draft", message).tree], 1)[0]

    def explain(
        self,
        context: ArrayLike,
        budget_nodes: int,
        min_probability: float = 0.0,
        *,
        max_documents: int = DEFAULT_DOCUMENTS,
        predictions: Sequence[Prediction] = (),
    ) -> Explanation:
        """Draft for a context as `draft_context` does, and return the evidence for each node.

        Args:
            context: integers[n], token ids, oldest first.
            budget_nodes: most nodes of the tree.
            min_probability: nodes less probable than this are left out.
            max_documents: most documents to name for each node.
            predictions: texts expected to follow.

        Raises:
            InvalidRequestError: the context or a number is invalid.
            DrafterUnavailableError: there was no answer in time.
        """
        message = explanation_request(
            context,
            budget_nodes,
            min_probability,
            self._fingerprint,
            max_documents,
            checked_predictions(predictions),
        )
        response = self._call("Explain", message)
        try:
            return explanation_from_message(response)
        except InvalidTreeError as error:
            raise DrafterUnavailableError(f"{self._address} sent no tree: {error}") from error

    def share_findings(self, model: str, findings: Findings) -> None:
        """Store the tokens that a model found likely; see `FindingsStore.share_findings`.

        Raises:
            InvalidRequestError: the findings are invalid.
            NotPossibleError: the service stores no findings.
            DrafterUnavailableError: there was no answer in time.
        """
        message = pb.ShareFindingsRequest(
            model_fingerprint=model,
            findings=findings_to_message(findings),
            vocabulary_fingerprint=self._fingerprint,
        )
        self._call("ShareFindings", message)

    def fetch_findings(self, model: str, before: int = 0) -> FoundPage:
        """Return a page of a model's findings from the tenant's decoders; see `FindingsStore`.

        Raises:
            NotPossibleError: the service stores no findings.
            DrafterUnavailableError: there was no answer in time, or the answer has no valid
                findings.
        """
        message = pb.FetchFindingsRequest(
            model_fingerprint=model, before=before, vocabulary_fingerprint=self._fingerprint
        )
        response = self._call("FetchFindings", message)
        try:
            findings = findings_from_message(response.findings)
            check_findings(findings.contexts, findings.tokens, findings.log_odds, None)
        except InvalidRequestError as error:
            raise DrafterUnavailableError(f"{self._address} sent no findings: {error}") from error
        return FoundPage(findings, response.before)

    def delete_tenant_data(self) -> None:
        """Delete all data of the credentials' tenant on the service.

        Raises:
            DrafterUnavailableError: there was no answer in time. The data may or may not be
                deleted.
        """
        self._call("DeleteTenantData", pb.DeleteTenantDataRequest())

    def list_indexes(self) -> list[IndexInfo]:
        """Return the indexes that the service drafts from."""
        response = self._call("ListIndexes", pb.ListIndexesRequest())
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

    def server_info(self) -> ServerInfo:
        """Return the version, phase, limits and vocabulary of the service, even while it starts."""
        response = self._call("GetServerInfo", pb.GetServerInfoRequest())
        return ServerInfo.from_message(response)

    def _trees(self, messages: Sequence[pb.DraftTree], num_trees: int) -> list[DraftTree]:
        """Return the trees of an answer, or raise `DrafterUnavailableError`."""
        try:
            return trees_from_messages(messages, num_trees)
        except InvalidTreeError as error:
            raise DrafterUnavailableError(f"{self._address} sent no trees: {error}") from error

    def _outcome_trees(
        self, response: pb.DraftStreamResponse, requests: Sequence[DraftRequest]
    ) -> list[list[DraftTree]]:
        """Return the trees for outcomes of an answer, or raise `DrafterUnavailableError`."""
        try:
            return outcome_trees_from(response, requests)
        except InvalidTreeError as error:
            raise DrafterUnavailableError(f"{self._address} sent no trees: {error}") from error

    def _call(self, name: str, message: Any) -> Any:
        """Make a call by name; repeat it if certificates were rotated since connecting."""
        self._follow_fork()
        try:
            return getattr(self._calls, name)(message, timeout=self._timeout_s)
        except grpc.RpcError as error:
            if error.code() is grpc.StatusCode.UNAVAILABLE and self._follow_files():
                return self._call(name, message)
            raise error_of(error, self._address) from error


DEFAULT_TIMEOUT_S: Final = 1.0


@dataclass(slots=True)
class _Told:
    """State of a session at a service, which may differ from what the caller committed.

    Attributes:
        noted: token ids, as bytes, that the service recorded in a step that it refused for other
            sessions.
        is_lost: whether a step was not answered, so that the service's state is unknown.
    """

    noted: bytes = b""
    is_lost: bool = False

    def unsent(self, session: str, new_tokens: bytes) -> bytes:
        """Return the new tokens of a session that the service has not recorded, as bytes.

        Raises:
            DrafterUnavailableError: the service has recorded other tokens.
        """
        if not new_tokens.startswith(self.noted):
            self.is_lost = True
            raise DrafterUnavailableError(
                f"session {shown(session)} was lost: its service has tokens that were taken back"
            )
        return new_tokens[len(self.noted) :]


class RemoteDrafter(Calls):
    """Drafts from a service; a `Drafter`. Connects at the first call.

    On the wire, session names have a random prefix so that names of different clients never
    collide. If a step is not answered, the service may or may not have recorded its tokens. The
    session is then lost: drafting for it raises `DrafterUnavailableError` until it is closed and
    opened again. After a fork the child process reconnects, and sessions that the parent opened are
    lost there.

    Args:
        address: `host:port`, or `unix:/path`.
        timeout_s: longest wait for any answer, in seconds.
        vocabulary_fingerprint: fingerprint of the caller's tokenizer; a service for another
            tokenizer refuses.
        credentials: credentials to send and to verify the server with; None for a service that
            needs none.

    Raises:
        CredentialsError: a file of the credentials cannot be used.
    """

    def __init__(
        self,
        address: str,
        *,
        timeout_s: float = DEFAULT_TIMEOUT_S,
        vocabulary_fingerprint: str = "",
        credentials: Credentials | None = None,
    ) -> None:
        super().__init__(
            address,
            timeout_s=timeout_s,
            vocabulary_fingerprint=vocabulary_fingerprint,
            credentials=credentials,
        )
        self._prefix = f"{uuid.uuid4().hex}/"
        self._exchange: Exchange | None = None
        self._sessions: OpenSessions[str, _Told] = OpenSessions()
        self._lock = Lock()

    def open(
        self,
        session: str,
        prompt: ArrayLike,
        options: SequenceOptions = DEFAULT,
    ) -> None:
        """Begin a sequence; see `Drafter.open`."""
        self._follow_fork()
        check_session_name(session)
        message = opening_message(
            self._prefix + session,
            checked_tokens(prompt, None),
            checked_options(options),
            self._fingerprint,
        )
        self._call("OpenSession", message)
        self._forget(session)  # the service ends sessions after a long idle time
        self._sessions.add(session, _Told())

    def add_predictions(self, session: str, predictions: Sequence[Prediction]) -> None:
        """Add predictions of a sequence; see `EmbeddedDrafter.add_predictions`.

        Raises:
            DrafterUnavailableError: there was no answer in time, or the session was lost.
        """
        self._follow_fork()
        self._usable(session)
        message = addition_message(self._prefix + session, checked_predictions(predictions))
        self._call("AddPredictions", message)

    def draft(self, requests: Sequence[DraftRequest]) -> list[DraftTree]:
        """Commit new tokens and draft for each sequence; see `Drafter.draft`."""
        return self._drafted(pb.DraftStreamRequest(tree_form=PACKED), without_outcomes(requests))[0]

    def draft_ahead(
        self, requests: Sequence[DraftRequest], timeout_s: float = math.inf
    ) -> list[list[DraftTree]]:
        """Commit new tokens and draft for possible outcomes; see `AheadDrafter.draft_ahead`."""
        timeout_us = timeout_to_wire(min(timeout_s, self._timeout_s))
        return self._drafted(
            pb.DraftStreamRequest(timeout_us=timeout_us, tree_form=PACKED), requests
        )[1]

    def close(
        self, session: str, new_tokens: ArrayLike | None = None, *, remember: bool = True
    ) -> None:
        """End a sequence; see `Drafter.close`. Closing a lost session raises nothing.

        Args:
            session: name that it was opened with.
            new_tokens: integers[n], tokens committed since its last request.
            remember: false to store nothing of the sequence; overrides the value given to `open`.
        """
        ids = b"" if new_tokens is None else tokens_to_wire(new_tokens)
        self._follow_fork()
        told = self._sessions.remove(session)
        with suppress(DrafterUnavailableError):
            ids = told.unsent(session, ids)
        message = closing_message(
            self._prefix + session, b"" if told.is_lost else ids, remember=remember
        )
        try:
            self._call("CloseSession", message)
        except (DrafterUnavailableError, UnknownSessionError):
            if not told.is_lost:
                raise

    def delete_session_data(self, session: str) -> None:
        """Delete the service's generations of this client's sessions with this name.

        Raises:
            DrafterUnavailableError: there was no answer in time. The data may or may not be
                deleted.
        """
        self._follow_fork()
        message = pb.DeleteSessionDataRequest(session_id=self._prefix + session)
        self._call("DeleteSessionData", message)
        self._forget(session)

    def shut_down(self) -> None:
        """Close the connection. Open sessions stay open on the service."""
        with self._lock:
            self._end_stream()
        self._channel.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.shut_down()

    def _drafted(
        self, message: pb.DraftStreamRequest, requests: Sequence[DraftRequest]
    ) -> tuple[list[DraftTree], list[list[DraftTree]]]:
        """Send a step; return its trees and the trees for the outcomes of each sequence."""
        self._follow_fork()
        told = [self._usable(request.session) for request in requests]
        new_ids = [tokens_to_wire(request.new_tokens) for request in requests]
        with self._lock:
            for request, known, ids in zip(requests, told, new_ids, strict=True):
                session = request.session
                add_step(message, request, self._prefix + session, known.unsent(session, ids))
            try:
                response = self._ask(message)
                self._note(response, message, told, new_ids)
                trees = self._trees(response.trees, len(requests))
                return trees, self._outcome_trees(response, requests)
            except DrafterUnavailableError:
                for known in told:
                    known.is_lost = True
                raise

    def _leave_to_parent(self) -> None:
        super()._leave_to_parent()
        ORPHANS.append(self._exchange)
        self._exchange, self._lock = None, Lock()
        self._prefix = f"{uuid.uuid4().hex}/"
        for told in self._sessions.values():
            told.is_lost = True

    def _forget(self, session: str) -> None:
        if session in self._sessions:
            self._sessions.remove(session)

    def _usable(self, session: str) -> "_Told":
        told = self._sessions.get(session)
        if told.is_lost:
            raise DrafterUnavailableError(
                f"session {shown(session)} was lost: a step was not answered, or this process was "
                "forked after it was opened"
            )
        return told

    @staticmethod
    def _note(
        response: pb.DraftStreamResponse,
        message: pb.DraftStreamRequest,
        told: Sequence["_Told"],
        new_ids: Sequence[bytes],
    ) -> None:
        """Record the accepted sessions of a step, then raise its first refusal.

        Raises:
            RetrieverError: the first refusal.
        """
        refused = {each.session_id for each in response.statuses if not is_late(each)}
        for step, known, ids in zip(message.steps, told, new_ids, strict=True):
            if not refused:
                known.noted = b""
            elif step.session_id not in refused and "" not in refused:
                known.noted = ids
        for status in response.statuses:
            if not is_late(status):  # only drafts ahead have a timeout; their tokens were recorded
                raise error_of_status(status)

    def _ask(self, message: pb.DraftStreamRequest) -> pb.DraftStreamResponse:
        """Send one step and await its answer; after a failure the next step opens a new stream."""
        if self._exchange is None:
            self._follow_files()
            self._exchange = Exchange(self._channel, self._timeout_s)
        try:
            return self._exchange.ask(message)
        except RetrieverError:
            self._end_stream()
            raise

    def _end_stream(self) -> None:
        if self._exchange is not None:
            self._exchange.end()
            self._exchange = None
