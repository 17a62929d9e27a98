"""Bytes for what reads bytes from others: replies of servers, headers, records of Redis and logs.

Each reader is given an input and must read it, or refuse it with the error that it names; what it
has read must be valid by rules that are written down here once more.
"""

import struct
import zlib
from collections.abc import Callable, Sequence
from functools import cache
from itertools import pairwise
from pathlib import Path
from threading import Event, Lock
from typing import Any, Final

import grpc
import numpy as np
from google.protobuf.message import DecodeError

from retriever.client.conversation import Conversation, SequenceStep
from retriever.drafter import DraftRequest
from retriever.errors import CredentialsError, InvalidTreeError
from retriever.limits import Limits
from retriever.log import log_store as log_records
from retriever.log.pools import Pools
from retriever.plugins.replication import replicated_records as records
from retriever.plugins.replication.consumer import Consumer, RecordLearner
from retriever.plugins.replication.redis_streams import StreamEntry
from retriever.plugins.replication.replication_state import Deletions, Position, ReplicationCounts
from retriever.predict.generations import Output, Scope
from retriever.predict.weights import from_bytes
from retriever.security.access import read_access
from retriever.security.admission import token_in
from retriever.security.certificates import certified
from retriever.sequences import TokenSequence
from retriever.tree import DraftTree
from retriever.v1 import retriever_pb2 as pb
from retriever.wire.messages import explanation_from_message
from tests.oracles.fuzz.byte_calls import PROMPT, CalledService
from tests.oracles.fuzz.fuzzing import VICTIM, CrashError, LeakError

_BUDGET: Final = 16
_HIGHEST: Final = (1 << 31) - 1
_OUTPUTS: Final = b"foredraft:{ab}:outputs"
_DELETIONS: Final = b"foredraft:{ab}:deletions"


def read_reply(data: bytes) -> None:
    """Give a client what a server answers: the tree of each session, or why it has none."""
    try:
        response = pb.DraftStreamResponse.FromString(data)
    except DecodeError:
        return
    conversation = Conversation("nowhere", "")
    conversation.begin()
    steps = [_step(name) for name in ("s", "t")]
    message, _ = conversation.ask(steps, 0.0, 1.0)
    for number, status in enumerate(response.statuses):
        if status.session_id and number < len(message.steps):
            status.session_id = message.steps[number].session_id
    response.sequence_number = message.sequence_number
    answer = conversation.settle(response)
    for tree in answer.trees.values():
        _check_tree(tree, _BUDGET)
    told = answer.trees.keys() | answer.reasons.keys()
    if not answer.is_broken and told != {"s", "t"}:
        raise CrashError(f"nothing is known of some sessions, of {told} alone")
    conversation.ask(steps, 1.0, 2.0)
    conversation.rest(1.0)


def read_explanation(data: bytes) -> None:
    """Give a client what a server explains."""
    try:
        explanation = explanation_from_message(pb.ExplainResponse.FromString(data))
    except (DecodeError, InvalidTreeError):
        return
    _check_tree(explanation.tree, _HIGHEST)


def read_header(data: bytes, service: CalledService) -> None:
    """Send a service a header that is not a token: it must refuse the call."""
    keys = ("authorization", "authorization-bin", "x-tenant")
    header = (keys[data[:1][0] % len(keys)] if data else "x", data[1:])
    for value in (header[1], header[1].decode("latin-1")):
        ended = service.call("Draft", [_drafting()], [(header[0], value)])
        if ended.code is not grpc.StatusCode.UNAUTHENTICATED or ended.responses:
            raise LeakError(f"{header} lets in: {ended.code}")
    token_in([header])


def read_credentials(data: bytes, folder: Path) -> None:
    """Read a certificate, and an access file."""
    certified(data)
    path = folder / "read.jsonl"
    path.touch(0o600)
    path.write_bytes(data)
    try:
        access = read_access(path)
    except CredentialsError as error:
        if not str(error).isprintable():
            raise CrashError(f"this cannot be shown: {error!s}") from error
        return
    if access.grant_of_token(data.decode(errors="replace")) is not None:
        raise LeakError("a file is a token")


def read_record(data: bytes) -> None:
    """Read what Redis holds: alone, and as a drafter that learns from it."""
    seal = struct.pack("<BI", 1, zlib.crc32(_OUTPUTS + data))
    for content in (data, seal + data):
        try:
            record = records.decode(content, _OUTPUTS)
        except records.UnreadableRecordError:
            continue
        again = records.decode(records.encode(record, _OUTPUTS), _OUTPUTS)
        if again.scope != record.scope or not np.array_equal(again.tokens, record.tokens):
            raise CrashError("a record is another one once it is written again")
        if record.tokens.size and record.tokens.min() < 0:
            raise CrashError("a record holds a token below 0")
    _consume([seal + data, data, seal + data[::-1]])


def read_log(data: bytes) -> None:
    """Read what a log holds: keys, sealed values, outputs, weights and notes."""
    key, value = data[:20], data[20:]
    if len(key) > 8:
        log_records.number_of(key)
    log_records.unseal(key, value)
    time_s, num_tokens = log_records.measure_output(value)
    log_records.origin_of(value)
    if num_tokens < 0 or not isinstance(time_s, float):
        raise CrashError("an output has fewer than no tokens")
    output = log_records.decode_output(data)
    if output is not None and log_records.decode_output(log_records.encode_output(output)) is None:
        raise CrashError("an output cannot be read once it is written again")
    if not np.isfinite(from_bytes(data)["evidence"]).all():
        raise CrashError("weights are not finite")
    Position.resume(data).to_bytes()


def readers(service: Callable[[], CalledService], folder: Path) -> dict[str, Callable[..., None]]:
    """Return what to give inputs to, by name; the service is made where one needs it."""
    made = cache(service)
    return {
        "calls": lambda data: made().run(data),
        "headers": lambda data: read_header(data, made()),
        "replies": read_reply,
        "explanations": read_explanation,
        "credentials": lambda data: read_credentials(data, folder),
        "records": read_record,
        "log": read_log,
    }


def _step(name: str) -> SequenceStep:
    sequence = TokenSequence(np.array(PROMPT, np.int32))
    sequence.extend(np.array([3], np.int32))
    new = np.array([3], np.int32)
    return SequenceStep(DraftRequest(name, new, len(sequence), _BUDGET), sequence)


def _drafting() -> bytes:
    return pb.DraftRequest(context=PROMPT, budget_nodes=4).SerializeToString()


def _check_tree(tree: DraftTree, most: int) -> None:
    """See that this is a tree, by its definition."""
    above = [1.0, *tree.probabilities.tolist()]
    children = list(zip(tree.parents.tolist(), tree.token_ids.tolist(), strict=True))
    is_tree = (
        len(tree.token_ids) <= most
        and all(-1 <= parent < node for node, (parent, _) in enumerate(children))
        and all(0 <= token <= _HIGHEST for _, token in children)
        and len(set(children)) == len(children)
        and all(0 <= after <= before + 2e-6 for before, after in pairwise(above))
    )
    if not is_tree:
        raise CrashError(f"a client took {tree} for a tree")


class _Pages:
    """Streams of a Redis server that hold what is given, once."""

    outputs, deletions = _OUTPUTS, _DELETIONS

    def __init__(self, contents: Sequence[bytes]) -> None:
        self._entries = [StreamEntry(f"{n}-0", each) for n, each in enumerate(contents, 1)]

    def read(self, *_: Any) -> tuple[list[StreamEntry], list[StreamEntry]]:
        return self._entries, self._entries

    def backwards(self) -> list[StreamEntry]:
        return self._entries[::-1]

    def forwards(self, _: bytes) -> list[list[StreamEntry]]:
        return [self._entries]

    def last_id(self, _: bytes) -> str:
        return self._entries[-1].entry_id

    def remove_outputs(self, entry_ids: Sequence[str]) -> None:
        """Remove nothing."""

    def remove_deletions(self, entry_ids: Sequence[str]) -> None:
        """Remove nothing."""


class _NoWait(Event):
    def wait(self, timeout: float | None = None) -> bool:
        return timeout is None


def _consume(contents: Sequence[bytes]) -> None:
    """Learn from a stream of these records, and see that a tenant has only what names it."""
    limits = Limits(max_tenants=4, generations_tokens=1 << 8)
    pools = Pools(limits, None)
    kept = pools.get(VICTIM)
    kept.generations.extend([Output(np.arange(20, dtype=np.int32), 0.0)])
    deletions, position, counts = Deletions(), Position(), ReplicationCounts()
    forgotten: list[Scope] = []
    learner = RecordLearner(
        pools,
        Lock(),
        limits=limits,
        deletions=deletions,
        position=position,
        forget=forgotten.append,
        counts=counts,
    )
    streams: Any = _Pages(contents)
    Consumer(streams, learner, position, counts, _NoWait()).turn()
    named = any(VICTIM.encode() in each for each in contents)
    if not named and (forgotten and VICTIM in {scope.tenant for scope in forgotten}):
        raise LeakError("a record that does not name a tenant deletes its outputs")
    if not named and kept.generations.num_tokens != 21:
        raise LeakError("a record that does not name a tenant is learned by it")
    if len(pools) > limits.max_tenants:
        raise CrashError("records take more tenants than there is room for")
