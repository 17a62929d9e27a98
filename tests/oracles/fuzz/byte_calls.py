"""Bytes in the place of a service's calls, through all that stands around its calls.

An input is a row of calls. A call is a byte that names its method, one for its tenant, two for
the length of its message (little-endian), and the message. Calls of `DraftStream` that follow one
another and are one tenant's are messages of one stream.
"""

import asyncio
import struct
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass, field
from itertools import groupby
from pathlib import Path
from typing import Any, Final, NamedTuple

import grpc
import numpy as np
from google.protobuf.message import DecodeError
from grpc import aio

from indexer.build import BuildOptions, build_from_tokens
from indexer.reader import Index, Vocabulary
from retriever.drafter import SequenceOptions
from retriever.limits import Limits
from retriever.operations.lifecycle import Phase
from retriever.operations.observer import ServiceObserver
from retriever.security.access import TENANT_SCOPES, add_token
from retriever.security.admission import Authenticator
from retriever.sequences import SessionKey
from retriever.service.gate import Gate
from retriever.service.servicer import RetrieverServicer
from retriever.sessions.bindings import Bound
from retriever.sessions.embedded import EmbeddedDrafter
from retriever.sessions.service_face import ServiceFace
from retriever.v1 import retriever_pb2 as pb, retriever_pb2_grpc as pb_grpc
from tests.oracles.fuzz.call_context import (
    DOCUMENT,
    CallContext,
    Details,
    Registered,
    check_response,
)
from tests.oracles.fuzz.fuzzing import SECRETS, SESSION, VICTIM, CrashError, LeakError, integers_in

SERVICE: Final = pb.DESCRIPTOR.services_by_name["RetrieverService"]
METHODS: Final = tuple(method.name for method in SERVICE.methods)
TENANTS: Final = ("a", "b")
PROMPT: Final = tuple(range(12))
"""What the victim's output begins with, and others ask about."""

LIMITS: Final = Limits(
    max_sessions=12,
    max_tenant_sessions=6,
    idle_session_s=1e9,
    max_sequence_tokens=1 << 10,
    max_bytes=1 << 21,
    max_tenant_bytes=1 << 20,
    max_step_nodes=1 << 9,
    max_batch=8,
    generations_tokens=1 << 12,
    max_tenant_deletions=1 << 30,
)
"""Small, so that inputs of a few hundred bytes reach them."""

_HEAD: Final = struct.Struct("<BBH")


class Call(NamedTuple):
    """A call, or a message of a stream.

    Attributes:
        method: by its name.
        tenant: who calls.
        content: in the place of its message.
    """

    method: str
    tenant: str
    content: bytes

    def __bytes__(self) -> bytes:
        head = METHODS.index(self.method), TENANTS.index(self.tenant), len(self.content)
        return _HEAD.pack(*head) + self.content


def calls_in(data: bytes) -> Iterator[Call]:
    """Yield the calls of an input; the last one may be cut."""
    at = 0
    while len(data) - at >= _HEAD.size:
        method, tenant, length = _HEAD.unpack_from(data, at)
        at += _HEAD.size
        content = data[at : at + length]
        at += length
        yield Call(METHODS[method % len(METHODS)], TENANTS[tenant % len(TENANTS)], content)


class Ended(NamedTuple):
    """How a call ended: with responses, and a status."""

    responses: list[Any]
    code: grpc.StatusCode


@dataclass
class CalledService:
    """A service in this process, without a network, with a victim among its tenants.

    Args:
        folder: takes the access file and the victim's index.

    Attributes:
        drafter: what answers.
        headers: of each tenant's calls.
    """

    folder: Path
    drafter: EmbeddedDrafter = field(init=False)
    headers: dict[str, list[tuple[str, str]]] = field(init=False, default_factory=dict)

    def __post_init__(self) -> None:
        access = self.folder / "access.jsonl"
        access.unlink(missing_ok=True)
        for tenant in (*TENANTS, VICTIM):
            token = add_token(access, tenant, TENANT_SCOPES)
            self.headers[tenant] = [("authorization", f"Bearer {token}")]
        self.drafter = _drafter_with_a_victim(self.folder)
        observer = ServiceObserver()
        observer.lifecycle.phase = Phase.READY
        self._gate = Gate(Authenticator(access), observer)
        self._handlers: dict[str, Any] = {}
        registered: Any = Registered(self._handlers)
        servicer: Any = RetrieverServicer(self.drafter)
        self._gate.aside = servicer.aside
        pb_grpc.add_RetrieverServiceServicer_to_server(servicer, registered)
        self._loop = asyncio.new_event_loop()

    def run(self, data: bytes) -> None:
        """Make the calls of an input, and see what they leave.

        Raises:
            LeakError: an answer holds what is the victim's, or the victim's data changed.
            CrashError: a call ended without a status of its own, or left a session behind.
        """
        calls = [call for call in calls_in(data) if not _holds_secrets(call)]
        for (method, tenant), group in groupby(calls, key=lambda call: (call.method, call.tenant)):
            contents = [call.content for call in group]
            if method == "DraftStream":
                self._stream(tenant, contents)
            else:
                for content in contents:
                    self.call(method, [content], self.headers[tenant])
        self.check_victim()
        self._empty()

    def call(self, method: str, contents: list[bytes], headers: list[tuple[str, Any]]) -> Ended:
        """Make a call; return how it ended.

        Raises:
            LeakError, CrashError: see `run`.
        """
        ending = self._ended(method, contents, CallContext(headers))
        return self._loop.run_until_complete(ending)

    def check_victim(self) -> None:
        """See that the victim has what it had.

        Raises:
            LeakError: it has not.
        """
        sessions = dict(self.drafter.state.sessions.items())
        session = sessions.get(SessionKey(VICTIM, SESSION))
        if session is None or len(session.databases.context) != len(PROMPT) + len(SECRETS):
            raise LeakError("the victim's session is not as it was")
        drafted = self.drafter.draft_context(PROMPT, 4, tenant=VICTIM).token_ids.tolist()
        if SECRETS[0] not in drafted:
            raise LeakError("the victim's outputs are gone")

    def close(self) -> None:
        """End it."""
        self.drafter.shut_down()
        self._loop.run_until_complete(self._loop.shutdown_default_executor())
        self._loop.close()

    def _stream(self, tenant: str, contents: list[bytes]) -> None:
        before = len(self.drafter.state.sessions)
        self.call("DraftStream", contents, self.headers[tenant])
        if len(self.drafter.state.sessions) > before:
            raise CrashError("a stream left sessions behind")

    def _empty(self) -> None:
        """End the sessions of all but the victim; what is counted must be what there was."""
        sessions = self.drafter.state.sessions
        if len(sessions) > LIMITS.max_sessions:
            raise CrashError(f"{len(sessions)} sessions are open, beyond the limit")
        others = [item for tenant in TENANTS for item in sessions.of(tenant)]
        ServiceFace(self.drafter.state).discard(others)
        num_tokens = sum(len(session.databases.context) for session in sessions.all())
        if len(sessions) != 1 or num_tokens != len(PROMPT) + len(SECRETS):
            raise CrashError(f"{len(sessions)} sessions of {num_tokens} tokens are left")

    async def _ended(self, method: str, contents: list[bytes], context: CallContext) -> Ended:
        handler = await self._handler(method)
        responses: list[Any] = []
        try:
            if handler.request_streaming:
                async for response in handler.stream_stream(_each(contents), context):
                    check_response(method, response)
                    responses.append(response)
            else:
                responses.append(await handler.unary_unary(contents[0], context))
                check_response(method, responses[-1])
        except aio.AbortError as error:
            context.check(method, error)
        return Ended(responses, context.status)

    async def _handler(self, method: str) -> Any:
        async def innermost(_: Any) -> Any:
            return self._handlers[method]

        details: Any = Details(f"/{SERVICE.full_name}/{method}")
        return await self._gate.intercept_service(innermost, details)


async def _each(contents: list[bytes]) -> AsyncIterator[bytes]:
    for content in contents:
        yield content


def _holds_secrets(call: Call) -> bool:
    """Tell whether a message names the victim's tokens itself."""
    name = next(each.input_type.name for each in SERVICE.methods if each.name == call.method)
    try:
        message = getattr(pb, name).FromString(call.content)
    except DecodeError:
        return False
    return not set(SECRETS).isdisjoint(integers_in(message))


def _drafter_with_a_victim(folder: Path) -> EmbeddedDrafter:
    """Return a drafter; a tenant has outputs, an open session and an index of its own."""
    vocabulary = Vocabulary(SECRETS[-1] + 1, "ab" * 32)
    secret = np.array([*PROMPT, *SECRETS], np.int32)
    path = folder / "index"
    build_from_tokens([(DOCUMENT, secret.tolist())], path, vocabulary, BuildOptions(overwrite=True))
    bound = {VICTIM: Bound([Index.open(path)])}
    drafter = EmbeddedDrafter(vocabulary=vocabulary, limits=LIMITS, bound=bound)
    drafter.warm()
    drafter.remember(secret, tenant=VICTIM)
    drafter.state.begin(
        SessionKey(VICTIM, SESSION), drafter.state.prepare(secret, SequenceOptions(tenant=VICTIM))
    )
    return drafter
