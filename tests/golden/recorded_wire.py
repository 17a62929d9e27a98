"""The bytes between every kind of client and a real service, in scripted conversations.

A proxy between them notes each message of a call, with its bytes and as text, and each refusal. A
script goes on once its last message is answered, so that what is noted has one order. What is
random or depends on time is replaced in the parsed message, by its kind or by how many such values
came before, and the message is serialized again; `is_canonical` tells whether it came as protobuf
serializes it, and then other bytes are those of the wire. Where a record is for every machine,
probabilities are 1.
"""

import re
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from queue import SimpleQueue
from typing import Any, Final, TypeVar

import grpc
import numpy as np
from google.protobuf.message import DecodeError, Message
from google.protobuf.message_factory import GetMessageClass
from google.protobuf.text_format import MessageToString
from google.rpc.status_pb2 import Status

from indexer.build import build_from_tokens
from indexer.reader import Vocabulary
from retriever.client.asynchronous import AsyncResilientDrafter, remote_async_channel
from retriever.client.credentials import Credentials
from retriever.client.resilient import ResilientDrafter
from retriever.client.streams import remote_channel
from retriever.client.strict import RemoteDrafter
from retriever.drafter import (
    NUM_FOUND,
    DraftRequest,
    Findings,
    Prediction,
    SequenceOptions,
    TokenIds,
)
from retriever.errors import RetrieverError
from retriever.limits import Limits
from retriever.operations.observer import ServiceObserver
from retriever.operations.resolving import resolve
from retriever.operations.service_report import Service
from retriever.operations.settings import Settings
from retriever.plugins.admin.admin_servicer import Administered
from retriever.plugins.admin.admin_serving import AdminPlane
from retriever.plugins.admin.administrator import administering
from retriever.plugins.admin.audit import AuditLog
from retriever.plugins.admin.live_settings import LiveSettings
from retriever.security.access import Scope as AccessScope, add_token
from retriever.security.protection import NO_PROTECTION, Protection, ProtectionFiles
from retriever.service.serving import start
from retriever.sessions.embedded import EmbeddedDrafter
from retriever.v1 import admin_pb2, retriever_pb2, retriever_pb2 as pb
from tests.golden.record import Step, exact
from tests.golden.sections import Scope
from tests.retriever.security.in_process import on_loop

VOCABULARY: Final = Vocabulary(50, "ab" * 32)
PHRASES: Final = [[(7 * p + 3 * t * t + p * t) % 50 for t in range(12)] for p in range(15)]
PROMPT: Final = [*PHRASES[3], *PHRASES[8], *PHRASES[3][:5]]
LIMITS: Final = Limits(max_bytes=1 << 30, max_tenant_bytes=1 << 29, max_sequence_tokens=4096)
"""Stated where the default would depend on the machine's memory."""

MODEL: Final = "cd" * 32
LONG_S: Final = 30.0
"""A step may take so long on a busy machine, and no draft is left out for its time."""

STREAM: Final = "DraftStream"
_Entered = TypeVar("_Entered")


def steps(scope: Scope) -> Iterator[Step]:
    """Yield what each conversation says; see above."""
    scratch = scope.scratch.resolve()
    index = _built(scratch / "corpus", range(40))
    for name, converse in CONVERSATIONS.items():
        with ExitStack() as stack:
            stage = Stage(scratch / name, index, stack)
            converse(stage)
        for place, tape in stage.tapes.items():
            stable = Stable(str(scratch), is_of_this_machine=not scope.is_portable)
            for at, (what, value) in enumerate(map(stable.row, tape)):
                yield exact("/".join(filter(None, ["wire", name, place, f"{at:02} {what}"])), value)


def _built(path: Path, numbers: Sequence[int]) -> Path:
    documents = [
        (f"document-{n}", [t for k in range(6) for t in PHRASES[(n + k * (n % 7 + 1)) % 15]])
        for n in numbers
    ]
    build_from_tokens(documents, path, VOCABULARY)
    return path


@dataclass(frozen=True, slots=True)
class Noted:
    """A message of a call, or how it was refused.

    Attributes:
        direction: `sent` by the client, `answered` or `refused`.
        method: its full name.
        content: the bytes of a message; the details of a status.
        more: of the first message of a call, its metadata; of a refusal, its code and its text.
    """

    direction: str
    method: str
    content: bytes
    more: dict[str, Any] = field(default_factory=dict)


class Proxy(grpc.GenericRpcHandler):
    """Notes and forwards the calls to one service.

    Args:
        target: the address of the service.

    Attributes:
        tape: what was noted.
    """

    def __init__(self, target: str) -> None:
        self.tape: list[Noted] = []
        self._channel = grpc.insecure_channel(target, [("grpc.use_local_subchannel_pool", 1)])
        self._calls: set[Any] = set()
        self._is_cut = False

    @contextmanager
    def serving(self) -> Iterator[str]:
        """Serve during the block; give the address."""
        server = grpc.server(ThreadPoolExecutor(16), handlers=[self])
        port = server.add_insecure_port("127.0.0.1:0")
        server.start()
        try:
            yield f"127.0.0.1:{port}"
        finally:
            server.stop(LONG_S).wait()  # no call is left
            self._channel.close()

    def service(self, handler_call_details: Any) -> Any:
        """See gRPC's interface: to the wire, a call of one message is a stream of one."""
        return grpc.stream_stream_rpc_method_handler(
            partial(self._forward, handler_call_details.method)
        )

    def cut(self) -> None:
        """End the streams, and let nothing through."""
        self._is_cut = True
        for call in list(self._calls):
            call.cancel()

    def mend(self) -> None:
        """Let calls through again."""
        self._is_cut = False

    def _forward(self, method: str, requests: Iterator[bytes], context: Any) -> Iterator[bytes]:
        if self._is_cut:
            context.abort(grpc.StatusCode.UNAVAILABLE, "the line is cut")
        sent = tuple(pair for pair in context.invocation_metadata() if pair[0] != "user-agent")
        stream: Any = self._channel.stream_stream(method)
        call = stream(self._noted(method, requests, context), metadata=sent)
        self._calls.add(call)
        context.add_callback(call.cancel)
        try:
            for content in call:
                self.tape.append(Noted("answered", method, content))
                yield content
        except grpc.RpcError as error:
            if self._is_cut:
                context.abort(grpc.StatusCode.UNAVAILABLE, "the line is cut")
            self._refuse(method, error, context)
        finally:
            self._calls.discard(call)

    def _noted(self, method: str, requests: Iterator[bytes], context: Any) -> Iterator[bytes]:
        """Note what is sent until the client ends the call, or leaves."""
        metadata = dict(context.invocation_metadata())
        has_deadline = context.time_remaining() < 1e6
        more = {"metadata": metadata, "deadline": has_deadline}
        with suppress(grpc.RpcError):
            for content in requests:
                self.tape.append(Noted("sent", method, content, more))
                more = {}
                yield content

    def _refuse(self, method: str, error: Any, context: Any) -> None:
        """Note and forward a refusal, if the client did not end the call itself."""
        if error.code() is grpc.StatusCode.CANCELLED:
            return
        trailing = dict(error.trailing_metadata())
        details = trailing.get("grpc-status-details-bin", b"")
        told = {"code": error.code().name, "message": error.details(), "trailing": sorted(trailing)}
        self.tape.append(Noted("refused", method, details, told))
        context.set_trailing_metadata(error.trailing_metadata())
        context.abort(error.code(), error.details())


_RANDOM: Final = re.compile(
    r"(?<![\w-])(?:[0-9a-f]{32}(?=/)|[\w-]{16}(?=/\d))|(?<=fdt_)[0-9a-f]{16}_\S+"
)
_TIMES: Final = frozenset(
    {
        "AttachedIndex.published_s",
        "GetUseResponse.since_s",
        "SessionInfo.idle_s",
        "SnapshotStateResponse.seconds",
        "UseInfo.work_s",
    }
)
_TEN_S: Final = 10_000_000


class Stable:
    """Replaces what differs between runs, and what differs between machines.

    Args:
        scratch: the folder of this run.
        is_of_this_machine: false to replace what other machines compute otherwise.
    """

    def __init__(self, scratch: str, *, is_of_this_machine: bool) -> None:
        self._scratch = scratch
        self._is_of_this_machine = is_of_this_machine
        self._seen: dict[Any, int] = {}

    def row(self, noted: Noted) -> tuple[str, dict[str, Any]]:
        """Return the name and the value of a step."""
        _, service, method = noted.method.split("/")
        value = {key: self._plain(each) for key, each in noted.more.items()}
        name = f"{noted.direction} {method}"
        if noted.direction == "refused":
            kind: type[Message] = Status
        else:
            file = admin_pb2 if "Admin" in service else retriever_pb2
            described = file.DESCRIPTOR.services_by_name[service.rpartition(".")[2]]
            call = described.methods_by_name[method]
            kind = GetMessageClass(
                call.input_type if noted.direction == "sent" else call.output_type
            )
        try:
            message = kind.FromString(noted.content)
        except DecodeError:
            return name, value | {"text": "not a message", "bytes": noted.content.hex()}
        is_canonical = _is_canonical(noted.content, message)
        self._settle(message)
        value["text"] = MessageToString(message, as_one_line=True)
        value["bytes"] = message.SerializeToString(deterministic=True).hex()
        return name, value | {"is_canonical": is_canonical}

    def _settle(self, message: Message) -> None:
        """Replace fields of a message, and of those in it."""
        for described, value in message.ListFields():
            name = f"{message.DESCRIPTOR.name}.{described.name}"
            if isinstance(value, Message):
                self._settle(value)
            elif isinstance(value, Sequence) and not isinstance(value, str | bytes):
                self._settle_each(name, value)
            elif not isinstance(value, Mapping):
                setattr(message, described.name, self._settled(name, value))

    def _settle_each(self, name: str, values: Any) -> None:
        if isinstance(values[0], Message):
            for each in values:
                self._settle(each)
        elif name == "DraftTree.probabilities" and not self._is_of_this_machine:
            values[:] = [1.0] * len(values)

    def _settled(self, name: str, value: Any) -> Any:
        if name in _TIMES:
            return 1.0
        if name == "SnapshotStateResponse.num_bytes" and not self._is_of_this_machine:
            return 1  # in pages of the system's size
        if name == "GetServerInfoResponse.version":
            return "version"
        if name == "DraftStreamRequest.timeout_us":
            return -(-value // _TEN_S) * _TEN_S
        return self._plain(value)

    def _plain(self, value: Any) -> Any:
        """Replace folders and random names in texts, and versions in metadata."""
        if isinstance(value, Mapping):
            return {key: key if key == "user-agent" else self._plain(value[key]) for key in value}
        if not isinstance(value, str):
            return value
        text = value.replace(self._scratch, "/scratch")
        return _RANDOM.sub(lambda found: f"random-{self._number(found[0])}", text)

    def _number(self, value: Any) -> int:
        return self._seen.setdefault(value, len(self._seen) + 1)


def _is_canonical(content: bytes, message: Message) -> bool:
    """Return whether bytes are what protobuf makes of their message, maps in any order."""
    again = message.SerializeToString(deterministic=True)
    if isinstance(message, pb.GetServerInfoResponse):
        return sorted(content) == sorted(again)
    return content == again


@dataclass(frozen=True, slots=True)
class Served:
    """A service, and the proxy before it."""

    drafter: EmbeddedDrafter
    observer: ServiceObserver
    proxy: Proxy
    address: str


@dataclass(frozen=True, slots=True)
class Stage:
    """What a conversation is made of.

    Attributes:
        folder: for its files; does not exist at first.
        index: of the corpus.
        stack: ends clients before services.
        tapes: what was said, by server; the empty name where there is one.
    """

    folder: Path
    index: Path
    stack: ExitStack
    tapes: dict[str, list[Noted]] = field(default_factory=dict)

    def enter(self, client: AbstractContextManager[_Entered]) -> _Entered:
        """Use a client until the end."""
        return self.stack.enter_context(client)

    def serve(
        self,
        place: str = "",
        indexes: Sequence[Path] | None = None,
        protection: Protection = NO_PROTECTION,
        *,
        state: Path | None = None,
        pad_replies: bool = False,
    ) -> Served:
        """Start a service on an index, behind a proxy."""
        drafter = EmbeddedDrafter.open_indexes(indexes or [self.index], limits=LIMITS, state=state)
        self.stack.callback(drafter.shut_down)
        drafter.warm()  # compiling may take longer than the loop is waited for
        observer = ServiceObserver()
        server, address = on_loop(
            start(drafter, "127.0.0.1:0", observer, protection, pad_replies=pad_replies)
        )
        self.stack.callback(lambda: on_loop(server.stop(0)))
        proxy, address = self.between(place, address)
        return Served(drafter, observer, proxy, address)

    def between(self, place: str, address: str) -> tuple[Proxy, str]:
        """Start a proxy before an address; return it and its own address."""
        proxy = Proxy(address)
        self.tapes[place] = proxy.tape
        return proxy, self.enter(proxy.serving())


def _ids(tokens: Sequence[int]) -> TokenIds:
    return np.array(tokens, np.int32)


def _request(
    session: str, new: Sequence[int], length: int, budget: int = 8, outcomes: Sequence[Any] = ()
) -> DraftRequest:
    return DraftRequest(session, _ids(new), length, budget, 0.01, tuple(map(_ids, outcomes)))


def _findings() -> Findings:
    tokens = np.arange(2 * NUM_FOUND, dtype=np.int32).reshape(2, NUM_FOUND)
    return Findings(np.array([3, 5]), tokens, (tokens / 4).astype(np.float32))


def _call(channel: grpc.Channel, service: str, method: str, request: Message | bytes) -> None:
    """Call, and leave the answer to the proxy."""
    content = request if isinstance(request, bytes) else request.SerializeToString()
    call: Any = channel.unary_stream(f"/retriever.v1.{service}/{method}")
    with suppress(grpc.RpcError):
        list(call(content, timeout=LONG_S))


EXPECTED: Final = [pb.Prediction(token_ids=PHRASES[5], label="the file")]
NO_MESSAGE: Final = b"\x0a\xff"
OPENING: Final = pb.OpenSessionRequest(
    session_id="s",
    prompt=PROMPT,
    vocabulary_fingerprint="ab" * 32,
    predictions=EXPECTED,
    group="samples",
    policy_version=4,
    oldest_version=2,
)
FOUND: Final = pb.Findings(contexts=b"\3" + bytes(7), token_ids=bytes(32), log_odds=bytes(32))
ADDING: Final = pb.AddPredictionsRequest(session_id="s", predictions=EXPECTED)
CLOSING: Final = pb.CloseSessionRequest(session_id="s", new_token_ids=PHRASES[3][5:])


def _calling(name: str, new: Sequence[int], length: int) -> pb.StepRequest:
    step = pb.SessionStep(session_id=name, new_token_ids=new, length=length, budget_nodes=4)
    return pb.StepRequest(step=step)


CALLS: Final[Sequence[tuple[str, Message | bytes]]] = [
    ("GetServerInfo", pb.GetServerInfoRequest()),
    ("ListIndexes", pb.ListIndexesRequest()),
    ("Draft", pb.DraftRequest()),
    ("Draft", pb.DraftRequest(context=PROMPT, min_probability=0.05)),
    ("Draft", pb.DraftRequest(context=PROMPT, budget_nodes=4, predictions=EXPECTED)),
    ("Draft", pb.DraftRequest(context=PROMPT, budget_nodes=0)),
    ("Draft", pb.DraftRequest(context=[1, 50])),
    ("Draft", pb.DraftRequest(context=[1 << 31])),
    ("Draft", pb.DraftRequest(context=[1], budget_nodes=257)),
    ("Draft", pb.DraftRequest(context=[1], min_probability=2)),
    ("Draft", pb.DraftRequest(context=[1], vocabulary_fingerprint="cd" * 32)),
    ("Draft", pb.DraftRequest(context=[1] * 4097)),
    ("Explain", pb.ExplainRequest(context=PROMPT, budget_nodes=4, max_documents=2)),
    ("Explain", pb.ExplainRequest(context=PROMPT[:9], budget_nodes=4, predictions=EXPECTED)),
    ("Explain", pb.ExplainRequest(context=PROMPT, max_documents=65)),
    ("OpenSession", OPENING),
    ("OpenSession", OPENING),
    ("OpenSession", pb.OpenSessionRequest(prompt=[1])),
    ("OpenSession", pb.OpenSessionRequest(session_id="é" * 129)),
    ("OpenSession", pb.OpenSessionRequest(session_id="t", prompt=[50])),
    ("OpenSession", pb.OpenSessionRequest(session_id="t", oldest_version=1)),
    ("OpenSession", pb.OpenSessionRequest(session_id="t", group="g" * 257)),
    ("OpenSession", pb.OpenSessionRequest(session_id="t", predictions=[pb.Prediction(label="x")])),
    ("OpenSession", pb.OpenSessionRequest(session_id="t")),
    ("AddPredictions", ADDING),
    ("AddPredictions", pb.AddPredictionsRequest(session_id="none", predictions=EXPECTED)),
    ("AddPredictions", pb.AddPredictionsRequest(session_id="s", predictions=65 * EXPECTED)),
    ("Step", pb.StepRequest()),
    ("Step", _calling("s", PHRASES[3][:5], len(PROMPT) + 5)),
    ("Step", _calling("s", PHRASES[3][:5], len(PROMPT) + 5)),
    ("Step", _calling("none", [], 0)),
    ("CloseSession", pb.CloseSessionRequest(session_id="s", new_token_ids=[50])),
    ("CloseSession", pb.CloseSessionRequest(session_id="s", length=1)),
    ("CloseSession", CLOSING),
    ("CloseSession", CLOSING),
    ("ShareFindings", pb.ShareFindingsRequest(model_fingerprint=MODEL, findings=FOUND)),
    ("ShareFindings", pb.ShareFindingsRequest(model_fingerprint="none", findings=FOUND)),
    ("ShareFindings", pb.ShareFindingsRequest(findings=pb.Findings(contexts=bytes(7)))),
    ("FetchFindings", pb.FetchFindingsRequest(model_fingerprint=MODEL)),
    ("FetchFindings", pb.FetchFindingsRequest(model_fingerprint="ef" * 32, before=1)),
    ("DeleteSessionData", pb.DeleteSessionDataRequest(session_id="s")),
    ("DeleteSessionData", pb.DeleteSessionDataRequest()),
    ("DeleteTenantData", pb.DeleteTenantDataRequest()),
    *(
        (method.name, NO_MESSAGE)
        for method in pb.DESCRIPTOR.services_by_name["RetrieverService"].methods
    ),
]


def _calls(stage: Stage) -> None:
    """Every call alone, and what of it is refused."""
    with grpc.insecure_channel(stage.serve().address) as channel:
        for method, request in CALLS:
            _call(channel, "RetrieverService", method, request)


def _step(name: str, new: Sequence[int], length: int, **fields: Any) -> pb.SessionStep:
    return pb.SessionStep(session_id=name, new_token_ids=new, length=length, **fields)


_N: Final = len(PROMPT)
OTHER: Final = pb.OpenSessionRequest(session_id="t", prompt=PROMPT[:20], forget=True)
OUTCOMES: Final = [pb.Outcome(token_ids=PHRASES[3][5:7]), pb.Outcome(token_ids=[1])]
STREAMED: Final[Sequence[pb.DraftStreamRequest]] = [
    pb.DraftStreamRequest(
        sequence_number=1,
        openings=[OPENING, OTHER, OTHER, pb.OpenSessionRequest()],
        steps=[_step("s", [], _N), _step("t", [], 20, budget_nodes=4)],
    ),
    pb.DraftStreamRequest(
        sequence_number=2,
        fail_opens=[pb.FailOpenCount(reason=pb.FAIL_OPEN_REASON_BUSY, count=3)],
        steps=[
            _step("s", PHRASES[3][5:7], _N + 3),
            _step("t", [50], 21),
            _step("none", [1], 1),
        ],
    ),
    pb.DraftStreamRequest(
        sequence_number=3, steps=[_step("s", PHRASES[3][5:6], _N + 1, budget_nodes=257)]
    ),
    pb.DraftStreamRequest(
        sequence_number=4,
        predictions=[ADDING, pb.AddPredictionsRequest(session_id="none")],
        steps=[
            _step("s", PHRASES[3][5:6], _N + 1, budget_nodes=4, outcomes=OUTCOMES),
            _step("t", [], 20, budget_nodes=0),
        ],
    ),
    pb.DraftStreamRequest(sequence_number=4),
    pb.DraftStreamRequest(sequence_number=9),
    pb.DraftStreamRequest(
        sequence_number=5,
        steps=[_step("t", [1], 21, outcomes=[pb.Outcome()])],
        closings=[CLOSING, CLOSING],
        padding=[bytes(3)],
    ),
    pb.DraftStreamRequest(),
]


def _streamed(stage: Stage) -> None:
    """One stream, message by message, until one without a number ends it."""
    outbox: SimpleQueue[bytes | None] = SimpleQueue()
    with grpc.insecure_channel(stage.serve().address) as channel:
        call: Any = channel.stream_stream(f"/retriever.v1.RetrieverService/{STREAM}")
        answers = call(iter(outbox.get, None))
        with suppress(grpc.RpcError, StopIteration):
            for message in STREAMED:
                outbox.put(message.SerializeToString())
                next(answers)
        outbox.put(None)


PREDICTIONS: Final = [
    Prediction(_ids(PHRASES[n]), label) for n, label in ((5, "the file"), (6, ""))
]
OPTIONS: Final = SequenceOptions(group="samples", policy_version=4)


def _decode(client: Any, settle: Callable[[], None] = lambda: None) -> None:
    """Decode two sequences.

    Args:
        client: of any kind that is not awaited.
        settle: waits until all that the client has sent is answered; not all clients do.
    """
    client.open("s", PROMPT, replace(OPTIONS, predictions=tuple(PREDICTIONS[:1])))
    forgotten = SequenceOptions(remember=False, policy_version=5, oldest_version=3)
    client.open("t", PROMPT[:20], forgotten)
    client.draft([_request("s", [], _N)])
    client.draft([_request("s", PHRASES[3][5:7], _N + 2), _request("t", PROMPT[20:23], 23, 4)])
    client.add_predictions("s", PREDICTIONS)
    client.draft([_request("s", [9], _N + 3, 4)])
    if hasattr(client, "draft_ahead"):
        outcomes = [PHRASES[6][:2], [1]]
        client.draft_ahead([_request("s", [], _N + 3, 4, outcomes)], LONG_S)
        client.draft_ahead([_request("t", [], 23, 4, outcomes), _request("s", [1], _N + 4, 4)])
    with suppress(RetrieverError):
        client.draft([_request("t", [7], 24, 300)])
    for name, new in (("s", PHRASES[6][:2]), ("t", [])):
        settle()
        client.close(name, _ids(new))


def _strict(stage: Stage) -> None:
    """The strict client: the same, then steps of which a part is refused, and its other calls."""
    client = stage.enter(
        RemoteDrafter(
            stage.serve().address,
            timeout_s=LONG_S,
            vocabulary_fingerprint="ab" * 32,
        )
    )
    _decode(client)
    client.open("s", PROMPT)
    client.open("t", PROMPT)
    for wrong in (_request("s", [50], _N + 1), _request("s", [1], 9), _request("t", [1], _N + 2)):
        with suppress(RetrieverError):
            client.draft([wrong, _request("t", [4], _N + 1)])
    client.close("t", _ids([4, 5]), remember=False)
    _strict_calls(client)


def _strict_calls(client: RemoteDrafter) -> None:
    """The strict client's calls without a session."""
    client.draft_context(PROMPT, 4, 0.05, predictions=PREDICTIONS)
    client.explain(PROMPT, 4, 0.05, max_documents=1, predictions=PREDICTIONS)
    client.share_findings(MODEL, _findings())
    client.fetch_findings(MODEL)
    client.list_indexes()
    client.server_info()
    client.open("again", [])
    client.delete_session_data("again")
    client.delete_tenant_data()


def _resilient(stage: Stage) -> None:
    """The client that never fails."""
    named: dict[str, Any] = {"vocabulary_fingerprint": "ab" * 32}
    client = _ready(stage, stage.serve().address, **named)
    _decode(client, partial(_settle, client))


def _padded(stage: Stage) -> None:
    """The same with messages of few sizes, both ways."""
    client = _ready(stage, stage.serve(pad_replies=True).address, pad_requests=True)
    _decode(client, partial(_settle, client))


PATIENT: Final[dict[str, Any]] = {
    "deadline_s": LONG_S,
    "lost_after_s": 2 * LONG_S,
    "local": False,
}


def _ready(stage: Stage, addresses: str | list[str], **options: Any) -> ResilientDrafter:
    client = stage.enter(ResilientDrafter(addresses, **PATIENT, **options))
    assert client.wait(LONG_S)
    return client


def _settle(client: ResilientDrafter) -> None:
    """Wait until a client is connected, and all that it has sent is answered."""
    conversations = client._planner.conversations.values()
    _until(lambda: client.wait(0) and not any(each.oldest_unanswered_s() for each in conversations))


def _awaited(stage: Stage) -> None:
    """The asynchronous client says the same."""
    served = stage.serve()
    shown = Credentials(token=f"fdt_{'0' * 16}_{'A' * 43}")

    async def decode() -> None:
        async with AsyncResilientDrafter(
            "name",
            **PATIENT,
            open_channel=lambda _: remote_async_channel(served.address, shown),
        ) as client:
            assert await client.wait(LONG_S)
            await client.open("s", PROMPT, OPTIONS)
            await client.draft([_request("s", [], _N)])
            await client.add_predictions("s", PREDICTIONS)
            await client.draft_ahead([_request("s", [9], _N + 1, 4, [PHRASES[6][:2], [1]])])
            await client.draft([_request("s", PHRASES[6][:2], _N + 3)])
            await client.close("s", _ids([PHRASES[6][2]]))

    on_loop(decode())


def _reconnecting(stage: Stage) -> None:
    """What a server that was away is told: outputs, sequences and drafts that were missed."""
    served = stage.serve()
    client = _ready(stage, served.address)
    for name in ("s", "t"):
        client.open(name, PROMPT[:20])
        client.draft([_request(name, [], 20, 4)])
    served.proxy.cut()
    _until(lambda: not client.wait(0) and not len(served.drafter.state.sessions))
    client.draft([_request("s", PROMPT[20:22], 22, 4), _request("t", [1], 21, 4)])
    client.close("s", _ids(PROMPT[22:24]))
    served.proxy.mend()
    _settle(client)
    client.draft([_request("t", [2], 22, 4)])


def _draining(stage: Stage) -> None:
    """Sessions leave a replica that is about to end, and others begin at the other one."""
    served = {name: stage.serve(name) for name in ("a", "b")}
    client = _ready(
        stage,
        list(served),
        open_channel=lambda name: remote_channel(served[name].address, None),
    )
    names = [f"session {n}" for n in range(8)]
    for name in names:
        client.open(name, PROMPT[:20])
    left, *_ = (name for name in names if client.server_of(name) == "a")
    other, *_ = (name for name in names if client.server_of(name) == "b")
    client.draft([_request(name, [], 20, 4) for name in (left, other)])
    on_loop(served["a"].observer.lifecycle.drain(lambda: True, 0))
    client.draft([_request(name, [1], 21, 4) for name in (left, other)])
    client.draft([_request(name, [2], 22, 4) for name in (left, other)])
    _settle(client)  # the server that was left is told to close what has moved
    client.close(left, _ids([3]))
    _settle(client)
    with RemoteDrafter(served["a"].address, timeout_s=LONG_S) as late, suppress(RetrieverError):
        late.server_info()
        late.open("late", PROMPT)


def _sharded(stage: Stage) -> None:
    """One drafter of two services, each with a part of the corpus."""
    parts = {"even": range(0, 40, 2), "odd": range(1, 40, 2)}
    addresses = [
        stage.serve(name, [_built(stage.folder / name, numbers)]).address
        for name, numbers in parts.items()
    ]
    client = _ready(stage, addresses, are_parts=True)
    _decode(client, lambda: _settle(client))


ADMINISTERED: Final[Sequence[tuple[str, Message | bytes]]] = [
    ("ListSessions", admin_pb2.ListSessionsRequest()),
    (
        "ListSessions",
        admin_pb2.ListSessionsRequest(filter=admin_pb2.SessionFilter(tenant="acme")),
    ),
    ("ListTenants", admin_pb2.ListTenantsRequest()),
    ("GetUse", admin_pb2.GetUseRequest()),
    ("GetUse", admin_pb2.GetUseRequest(tenant="nobody")),
    ("ListAttachedIndexes", admin_pb2.ListAttachedIndexesRequest()),
    ("AttachIndex", admin_pb2.AttachIndexRequest(path="/absent")),
    ("DetachIndex", admin_pb2.DetachIndexRequest(path="/absent")),
    ("EndSessions", admin_pb2.EndSessionsRequest()),
    ("EndSessions", admin_pb2.EndSessionsRequest(filter=admin_pb2.SessionFilter(session_id="s"))),
    ("EndSessions", admin_pb2.EndSessionsRequest(all=True, forget=True)),
    ("EvictTenant", admin_pb2.EvictTenantRequest(tenant="acme")),
    ("GetSettings", admin_pb2.GetSettingsRequest()),
    ("ReloadSettings", admin_pb2.ReloadSettingsRequest(check_only=True)),
    ("ReloadSettings", admin_pb2.ReloadSettingsRequest()),
    ("SnapshotState", admin_pb2.SnapshotStateRequest(name="copy")),
    ("SnapshotState", admin_pb2.SnapshotStateRequest(name="../copy")),
    ("SnapshotState", NO_MESSAGE),
    ("Drain", admin_pb2.DrainRequest()),
]


def _administered(stage: Stage) -> None:
    """The calls of operators; `Drain` of a service that drains, which ends no process."""
    stage.folder.mkdir()
    served = stage.serve("drafts", state=stage.folder / "state")
    resolved = partial(resolve, Settings, {}, {})
    administered = Administered(
        Service(served.drafter, served.observer, time.time()),
        LiveSettings(resolved(), resolved),
        AuditLog(stage.folder / "audit.jsonl"),
        stage.folder / "copies",
    )
    plane = AdminPlane(
        f"unix:{stage.folder}/admin", administered, NO_PROTECTION, has_access=False
    ).serving()
    _, address = stage.between("", on_loop(plane.__aenter__()))
    stage.stack.callback(lambda: on_loop(plane.__aexit__(None, None, None)))
    served.drafter.open("s", PROMPT)
    served.drafter.open("t", PROMPT[:20], SequenceOptions(tenant="acme", remember=False))
    served.drafter.draft([_request("s", [1, 2], _N + 2)])
    other = _built(stage.folder / "more", range(3))
    with grpc.insecure_channel(address) as channel:
        call = partial(_call, channel, "AdminService")
        call("AttachIndex", admin_pb2.AttachIndexRequest(path=str(other), tenant="acme"))
        call("DetachIndex", admin_pb2.DetachIndexRequest(path=str(other), tenant="acme"))
        on_loop(served.observer.lifecycle.drain(lambda: True, 0))
        for method, request in ADMINISTERED:
            call(method, request)
    with administering(address) as calls:
        list(calls.ListTenants(admin_pb2.ListTenantsRequest()))


def _guarded(stage: Stage) -> None:
    """Callers whose token is good, good for less, unknown, or missing."""
    stage.folder.mkdir()
    access = stage.folder / "access"
    tokens = [
        add_token(access, "acme", [AccessScope.DRAFT, AccessScope.DELETE]),
        add_token(access, "acme", [AccessScope.DRAFT]),
        f"fdt_{'0' * 16}_{'A' * 43}",
        "no token of ours",
    ]
    served = stage.serve(protection=Protection.of(ProtectionFiles(access=access)))
    for credentials in [*(Credentials(token=token) for token in tokens), None]:
        with RemoteDrafter(served.address, timeout_s=LONG_S, credentials=credentials) as client:
            for call in (client.server_info, client.delete_tenant_data):
                with suppress(RetrieverError):
                    call()
            with suppress(RetrieverError):
                client.open("s", PROMPT)
                client.draft([_request("s", [], _N, 4)])


def _until(is_so: Callable[[], bool]) -> None:
    until_s = time.monotonic() + 2 * LONG_S
    while not is_so():
        assert time.monotonic() < until_s
        time.sleep(0.005)


CONVERSATIONS: Final[Mapping[str, Callable[[Stage], None]]] = {
    "calls": _calls,
    "stream": _streamed,
    "strict": _strict,
    "resilient": _resilient,
    "padded": _padded,
    "async": _awaited,
    "reconnecting": _reconnecting,
    "draining": _draining,
    "sharded": _sharded,
    "admin": _administered,
    "credentials": _guarded,
}
