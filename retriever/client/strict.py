"""The strict client: a `Drafter` that asks a service over gRPC, and raises what it refuses."""

import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from queue import SimpleQueue
from threading import Condition, Lock, Thread
from typing import Any, Final, Self

import grpc
from numpy.typing import ArrayLike

from retriever.client.credentials import Credentials, open_channel
from retriever.drafter import DraftRequest
from retriever.errors import DrafterUnavailableError, InvalidTreeError, UnknownSessionError
from retriever.explanation import Explanation
from retriever.limits import DEFAULT_DOCUMENTS, check_session_name
from retriever.tree import DraftTree
from retriever.v1 import retriever_pb2 as pb
from retriever.v1.retriever_pb2_grpc import RetrieverServiceStub
from retriever.wire.messages import (
    CLIENT_OPTIONS,
    context_to_message,
    error_of,
    error_of_status,
    explanation_from_message,
    explanation_request,
    step_to_message,
    tokens_to_wire,
    trees_from_messages,
)


class Watchdog:
    """Calls `on_timeout` once a guarded block has run for longer than `timeout_s` seconds.

    Entering and leaving the block costs about a microsecond: one sleeping thread looks at the
    clock instead of a timer being made each time. It may bark up to a quarter of the timeout late.
    """

    def __init__(self, timeout_s: float, on_timeout: Callable[[], object]) -> None:
        self._timeout_s = timeout_s
        self._on_timeout = on_timeout
        self._entered_at: float | None = None
        self._stopped = False
        self._changed = Condition()
        self._thread = Thread(target=self._watch, name="foredraft-watchdog", daemon=True)
        self._thread.start()

    def __enter__(self) -> Self:
        self._entered_at = time.monotonic()
        return self

    def __exit__(self, *_: object) -> None:
        self._entered_at = None

    def stop(self) -> None:
        """End the thread."""
        with self._changed:
            self._stopped = True
            self._changed.notify()

    def _watch(self) -> None:
        with self._changed:
            while not self._stopped:
                self._changed.wait(self._timeout_s / 4)
                entered_at = self._entered_at
                if entered_at is not None and time.monotonic() - entered_at > self._timeout_s:
                    self._entered_at = None
                    self._on_timeout()


_ABORTED: Final[int] = grpc.StatusCode.ABORTED.value[0]


class Stream:
    """One bidirectional call: a numbered message out, the answer to it in.

    Args:
        stub: of the service.
        timeout_s: longest wait for an answer, in seconds; the call is cancelled then.
    """

    def __init__(self, stub: RetrieverServiceStub, timeout_s: float) -> None:
        self._outbox: SimpleQueue[pb.DraftStreamRequest | None] = SimpleQueue()
        self._number = 0
        self._call = stub.DraftStream(self._messages(), wait_for_ready=False)
        self._watchdog = Watchdog(timeout_s, self._call.cancel)

    def exchange(self, message: pb.DraftStreamRequest) -> pb.DraftStreamResponse:
        """Number a message, send it and await its answer.

        Raises:
            grpc.RpcError: the call has ended, by itself or at the timeout.
            DrafterUnavailableError: what has come answers another message, or tells that one was
                lost: the call cannot go on.
        """
        self._number += 1
        message.sequence_number = self._number
        with self._watchdog:
            self._outbox.put(message)
            response: pb.DraftStreamResponse = next(self._call)
        if response.sequence_number != self._number:
            raise DrafterUnavailableError(
                f"the draft service answered message {response.sequence_number} where "
                f"{self._number} was awaited"
            )
        for status in response.statuses:
            if status.code == _ABORTED and not status.session_id:
                raise DrafterUnavailableError(f"the draft service is out of step: {status.message}")
        return response

    def end(self) -> None:
        """End the call."""
        self._outbox.put(None)
        self._call.cancel()
        self._watchdog.stop()

    def _messages(self) -> Iterator[pb.DraftStreamRequest]:
        while (message := self._outbox.get()) is not None:
            yield message


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


DEFAULT_TIMEOUT_S: Final = 1.0


class RemoteDrafter(Calls):
    """Drafts from a service; a `Drafter`. Connects at the first call.

    Session names are the caller's own: on the wire they carry a random prefix, so that clients
    never meet in a name. Once a step of a session got no answer, the service may or may not have
    noted its tokens: the session is lost, and drafting for it raises `DrafterUnavailableError`
    until it is closed and opened again.

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
        self._stream: Stream | None = None
        self._sessions: set[str] = set()
        self._lost: set[str] = set()
        self._noted: dict[str, list[int]] = {}  # of steps that were refused to other sessions
        self._lock = Lock()

    def open(self, session: str, prompt: ArrayLike, *, remember: bool = True) -> None:
        """Begin a sequence; see `Drafter.open`."""
        check_session_name(session)
        message = pb.OpenSessionRequest(
            session_id=self._prefix + session,
            prompt=tokens_to_wire(prompt),
            forget=not remember,
            vocabulary_fingerprint=self._fingerprint,
        )
        self._call(self._stub.OpenSession, message)
        self._sessions.add(session)

    def draft(self, requests: Sequence[DraftRequest]) -> list[DraftTree]:
        """Commit new tokens and draft for each sequence; see `Drafter.draft`."""
        self._check_sessions(requests)
        new_ids = {request.session: tokens_to_wire(request.new_tokens) for request in requests}
        with self._lock:
            steps = [
                step_to_message(
                    request,
                    self._prefix + request.session,
                    self._untold(request.session, new_ids[request.session]),
                )
                for request in requests
            ]
            try:
                response = self._exchange(pb.DraftStreamRequest(steps=steps))
                self._note(response, new_ids)
                return self._trees(response.trees, len(requests))
            except DrafterUnavailableError:
                self._lost.update(new_ids)
                raise

    def close(
        self, session: str, new_tokens: ArrayLike | None = None, *, remember: bool = True
    ) -> None:
        """End a sequence; see `Drafter.close`. A lost session is closed without a complaint.

        Args:
            session: the name that it was opened with.
            new_tokens: integers[n], tokens committed since its last request.
            remember: false to keep nothing of it, whatever it was opened with.
        """
        self._check_open(session)
        ids = [] if new_tokens is None else tokens_to_wire(new_tokens)
        self._sessions.discard(session)
        with suppress(DrafterUnavailableError):
            ids = self._untold(session, ids)
        lost = session in self._lost
        self._lost.discard(session)
        self._noted.pop(session, None)
        message = pb.CloseSessionRequest(
            session_id=self._prefix + session,
            new_token_ids=[] if lost else ids,
            forget=not remember,
        )
        try:
            self._call(self._stub.CloseSession, message)
        except (DrafterUnavailableError, UnknownSessionError):
            if not lost:
                raise

    def delete_session_data(self, session: str) -> None:
        """Have the service forget what sessions of a name, opened by this client, generated.

        Raises:
            DrafterUnavailableError: no answer in time; it may have been done or not.
        """
        message = pb.DeleteSessionDataRequest(session_id=self._prefix + session)
        self._call(self._stub.DeleteSessionData, message)
        self._sessions.discard(session)
        self._lost.discard(session)
        self._noted.pop(session, None)

    def shut_down(self) -> None:
        """Close the connection. Sessions that are open stay so on the service."""
        with self._lock:
            self._end_stream()
        self._channel.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.shut_down()

    def _check_open(self, session: str) -> None:
        if session not in self._sessions:
            raise UnknownSessionError(f"no session {session!r} is open: open it first")

    def _check_sessions(self, requests: Sequence[DraftRequest]) -> None:
        for request in requests:
            self._check_open(request.session)
            if request.session in self._lost:
                raise DrafterUnavailableError(
                    f"session {request.session!r} was lost when a step got no answer"
                )

    def _untold(self, session: str, new_ids: list[int]) -> list[int]:
        """Return those of a session's new tokens that the service has not noted already.

        Raises:
            DrafterUnavailableError: it has noted others.
        """
        noted = self._noted.get(session, [])
        if new_ids[: len(noted)] != noted:
            self._lost.add(session)
            raise DrafterUnavailableError(
                f"session {session!r} was lost: its service noted tokens that were taken back"
            )
        return new_ids[len(noted) :]

    def _note(self, response: pb.DraftStreamResponse, new_ids: dict[str, list[int]]) -> None:
        """Raise what a step is refused with; to its other sessions it has been noted.

        Raises:
            RetrieverError: the first refusal.
        """
        refused = {status.session_id.removeprefix(self._prefix) for status in response.statuses}
        for session, ids in new_ids.items():
            if not refused:
                self._noted.pop(session, None)
            elif session not in refused and "" not in refused:
                self._noted[session] = ids
        for status in response.statuses:
            raise error_of_status(status)

    def _exchange(self, message: pb.DraftStreamRequest) -> pb.DraftStreamResponse:
        """Send one step and await its answer; a stream that failed is begun anew next time."""
        if self._stream is None:
            self._stream = Stream(self._stub, self._timeout_s)
        try:
            return self._stream.exchange(message)
        except grpc.RpcError as error:
            self._end_stream()
            raise error_of(error) from error
        except DrafterUnavailableError:
            self._end_stream()
            raise

    def _end_stream(self) -> None:
        if self._stream is not None:
            self._stream.end()
            self._stream = None
