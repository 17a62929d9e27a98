"""The client: a `Drafter` that asks a draft service over gRPC."""

import uuid
from collections.abc import Sequence
from contextlib import suppress
from threading import Lock
from typing import Final, Self

import grpc
from numpy.typing import ArrayLike

from retriever.drafter import DraftRequest
from retriever.errors import DrafterUnavailableError, UnknownSessionError
from retriever.limits import check_session_name
from retriever.remote.calls import Calls, IndexInfo
from retriever.remote.credentials import Credentials
from retriever.streams import Stream
from retriever.tree import DraftTree
from retriever.v1 import retriever_pb2 as pb
from retriever.wire import error_of, error_of_status, step_to_message, tokens_to_wire

__all__ = ["DEFAULT_TIMEOUT_S", "IndexInfo", "RemoteDrafter"]

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
