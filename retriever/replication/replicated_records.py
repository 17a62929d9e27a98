"""What one drafter tells the others, what was deleted, and how far each has read.

Records in the streams: what one drafter tells the others. A record is, little-endian:

| bytes | what |
|---|---|
| 1 | format version, u8: 1 |
| 4 | CRC-32 of the stream's key and of all that follows |
| 16 | the drafter that wrote it |
| 8 | number, u64: rises with every record of a drafter |
| 8 | time in seconds since 1970, f64: when the output ended, or was deleted |
| 2 | length of the tenant's name in bytes, u16, at most 256 |
| | the name, UTF-8 |
| 1 | bytes of a token, u8: 2 or 4, and 128 more where an origin follows |
| 16 | the origin that the output is deleted by; of a deletion, the one that is deleted |
| | the tokens; none in a record that tells of a deletion |
"""

import json
import math
import secrets
import struct
import time
import zlib
from collections import OrderedDict, deque
from dataclasses import dataclass, field
from typing import Any, Final, Self

import numpy as np

from retriever.drafter import TokenIds
from retriever.errors import RetrieverError
from retriever.limits import MAX_NAME_BYTES
from retriever.predict.generations import Scope
from retriever.replication.options import MAX_RECORD_TOKENS

REPLICA_BYTES: Final = 16
_VERSION: Final = 1
_START: Final = struct.Struct("<BI")
_HEAD: Final = struct.Struct(f"<{REPLICA_BYTES}sQdH")
_WIDTHS: Final = (2, 4)
_HAS_ORIGIN: Final = 0x80
_ORIGIN_BYTES: Final = 16
_MAX_U16: Final = 0xFFFF
_MAX_I32: Final = 0x7FFF_FFFF
_FIXED_BYTES: Final = _START.size + _HEAD.size + 1
MAX_RECORD_BYTES: Final = (
    _FIXED_BYTES + MAX_NAME_BYTES + _ORIGIN_BYTES + MAX_RECORD_TOKENS * _WIDTHS[-1]
)


class UnreadableRecordError(RetrieverError):
    """A record is not one that this version writes; its message is the reason, in one word."""


@dataclass(frozen=True, slots=True)
class Record:
    """An output, or the deletion of a tenant's outputs.

    Attributes:
        replica: the drafter that wrote it, `REPLICA_BYTES` bytes.
        number: rises with every output of that drafter.
        tenant: whose it is.
        time_s: when the output ended, or was deleted, in seconds since 1970.
        tokens: int32[n], 1 to `MAX_RECORD_TOKENS` ids; none of a deletion.
        origin: what the output is deleted by, 16 bytes, or none; none in a deletion of all that
            the tenant has.
    """

    replica: bytes
    number: int
    tenant: str
    time_s: float
    tokens: TokenIds
    origin: bytes = b""

    @property
    def scope(self) -> Scope:
        """What it is deleted with; of a deletion, what is deleted."""
        return Scope(self.tenant, self.origin)


def encode(record: Record, stream: bytes) -> bytes:
    """Return the bytes of a record for the stream with this key."""
    width = _WIDTHS[0] if int(record.tokens.max(initial=0)) <= _MAX_U16 else _WIDTHS[1]
    name = record.tenant.encode()
    head = _HEAD.pack(record.replica, record.number, record.time_s, len(name))
    form = bytes([width | (_HAS_ORIGIN if record.origin else 0)]) + record.origin
    content = head + name + form + record.tokens.astype(f"<u{width}").tobytes()
    return _START.pack(_VERSION, _checksum(content, stream)) + content


def decode(data: bytes, stream: bytes) -> Record:
    """Return the record that was encoded for the stream with this key.

    Raises:
        UnreadableRecordError: there is none; whatever the bytes are, nothing else is raised.
    """
    if len(data) > MAX_RECORD_BYTES:
        raise UnreadableRecordError("oversized")
    if not data or data[0] > _VERSION:
        raise UnreadableRecordError("newer" if data else "damaged")
    if len(data) < _FIXED_BYTES:
        raise UnreadableRecordError("damaged")
    version, checksum = _START.unpack_from(data)
    content = data[_START.size :]
    if version != _VERSION or checksum != _checksum(content, stream):
        raise UnreadableRecordError("damaged")
    return _parse(content)


def _parse(content: bytes) -> Record:
    replica, number, time_s, name_length = _HEAD.unpack_from(content)
    at = _HEAD.size + name_length
    if name_length > MAX_NAME_BYTES or at >= len(content) or not math.isfinite(time_s):
        raise UnreadableRecordError("damaged")
    try:
        tenant = content[_HEAD.size : at].decode()
    except UnicodeDecodeError as error:
        raise UnreadableRecordError("damaged") from error
    begin = at + 1 + _ORIGIN_BYTES * bool(content[at] & _HAS_ORIGIN)
    if begin > len(content):
        raise UnreadableRecordError("damaged")
    tokens = _tokens(content[at] & ~_HAS_ORIGIN, content[begin:])
    return Record(replica, number, tenant, time_s, tokens, content[at + 1 : begin])


def _tokens(width: int, data: bytes) -> TokenIds:
    if width not in _WIDTHS or len(data) % width:
        raise UnreadableRecordError("damaged")
    if len(data) > MAX_RECORD_TOKENS * width:
        raise UnreadableRecordError("oversized")
    tokens = np.frombuffer(data, f"<u{width}")
    if int(tokens.max(initial=0)) > _MAX_I32:
        raise UnreadableRecordError("vocabulary")
    return tokens.astype(np.int32)


def _checksum(content: bytes, stream: bytes) -> int:
    return zlib.crc32(content, zlib.crc32(stream))


SKIPPED: Final = (
    "own",
    "repeated",
    "deleted",
    "expired",
    "no-room",
    "damaged",
    "newer",
    "oversized",
    "foreign",
    "vocabulary",
)
"""Why records are not remembered; see `WarmthCounts.skipped`."""


@dataclass(slots=True)
class WarmthCounts:
    """Counts since the start; `connected`, `queued` and `unsent_deletions` are as of now.

    Attributes:
        published: records that the server took.
        dropped: records that were not sent, because too many waited.
        learned: records of other drafters that were remembered.
        learned_tokens: tokens in them.
        deletions: of tenants and sessions, because another drafter was told to.
        skipped: records that were not remembered, by reason: `own`, `repeated`, `deleted` (after
            they were made), `expired`, `no-room` (beyond `max_tenants`, without
            a state directory), `damaged`, `newer` (of a later version), `oversized`, `foreign`
            (none of ours), `vocabulary` (ids outside of it).
        failures: how often the server was away, or refused.
        connected: whether it answered when it was last asked.
        queued: records that wait to be published.
        unsent_deletions: those that the server does not know of yet.
    """

    published: int = 0
    dropped: int = 0
    learned: int = 0
    learned_tokens: int = 0
    deletions: int = 0
    skipped: dict[str, int] = field(default_factory=dict)
    failures: int = 0
    connected: bool = False
    queued: int = 0
    unsent_deletions: int = 0

    def skip(self, reason: str) -> None:
        """Count a record that was not remembered."""
        self.skipped[reason] = self.skipped.get(reason, 0) + 1


MAX_TENANT_DELETIONS: Final = 1 << 12
"""Deletions of sessions that are known of each tenant; of more, the last ones."""

MAX_DELETIONS: Final = 1 << 20
"""Those of all tenants together; beyond it, whoever has most loses its oldest."""


class Deletions:
    """Times of deletion by scope. Safe to call from any thread."""

    def __init__(self) -> None:
        self._tenants: dict[str, float] = {}
        self._sessions: dict[str, OrderedDict[bytes, float]] = {}
        self._num_sessions = 0

    def __len__(self) -> int:
        return len(self._tenants) + self._num_sessions

    def add(self, scope: Scope, time_s: float) -> None:
        """Note that what there was at this time, in seconds since 1970, is deleted.

        A tenant that deletes many sessions pushes out its own deletions, and never another's.
        """
        if not scope.origin:
            self._tenants[scope.tenant] = max(time_s, self._tenants.get(scope.tenant, time_s))
            return
        of_tenant = self._sessions.setdefault(scope.tenant, OrderedDict())
        self._num_sessions += scope.origin not in of_tenant
        of_tenant[scope.origin] = max(time_s, of_tenant.get(scope.origin, time_s))
        if len(of_tenant) > MAX_TENANT_DELETIONS:
            self._drop(of_tenant)
        elif self._num_sessions > MAX_DELETIONS:
            self._drop(max(self._sessions.copy().values(), key=len))

    def cover(self, scope: Scope, time_s: float) -> bool:
        """Whether what is of this time was deleted, by itself or with all of the tenant's."""
        of_tenant = self._sessions.get(scope.tenant)
        of_session = None if of_tenant is None else of_tenant.get(scope.origin)
        times = (self._tenants.get(scope.tenant), of_session)
        return any(deleted is not None and time_s <= deleted for deleted in times)

    def _drop(self, of_tenant: OrderedDict[bytes, float]) -> None:
        of_tenant.popitem(last=False)
        self._num_sessions -= 1


class Surplus:
    """Tells which entries of a stream of deletions are more than a tenant's share."""

    def __init__(self) -> None:
        self._entries: dict[str, deque[str]] = {}

    def add(self, scope: Scope, entry_id: str) -> list[str]:
        """Note an entry, in the order of the stream; return the ids of those to be removed."""
        entries = self._entries.setdefault(scope.tenant, deque())
        entries.append(entry_id)
        return [entries.popleft() for _ in range(len(entries) - MAX_TENANT_DELETIONS)]


BEGINNING: Final = "0-0"
"""The offset that everything in a stream comes after."""

_MAX_REPLICAS: Final = 1024
_EPOCH_BITS: Final = 32


@dataclass(slots=True)
class Position:
    """What a drafter must know to go on where it was.

    Attributes:
        replica: who it is.
        epoch: of its life as a process, above all before; the upper half of its records' numbers.
        outputs: id of the last entry read of the stream of outputs; None before it has read any.
        deletions: the same of the stream of deletions.
        numbers: highest number read of each other drafter.
        unsent: times of deletions that the server does not know of yet.
    """

    replica: bytes = field(default_factory=lambda: secrets.token_bytes(REPLICA_BYTES))
    epoch: int = 0
    outputs: str | None = None
    deletions: str | None = None
    numbers: dict[bytes, int] = field(default_factory=dict)
    unsent: dict[Scope, float] = field(default_factory=dict)

    @classmethod
    def resume(cls, kept: bytes | None) -> Self:
        """Return the position of a life after the one that kept these bytes, or of a first one."""
        position = cls()
        if kept is not None:
            try:
                position = cls._from_json(json.loads(kept))
            except (ValueError, TypeError, KeyError, AttributeError):
                position = cls()  # of another version: a new drafter, which reads all
        position.epoch = max(position.epoch + 1, int(time.time()))
        return position

    def to_bytes(self) -> bytes:
        """Return what `resume` reads."""
        values = {
            "replica": self.replica.hex(),
            "epoch": self.epoch,
            "outputs": self.outputs,
            "deletions": self.deletions,
            # Copied at once, for other threads change them.
            "numbers": {replica.hex(): number for replica, number in dict(self.numbers).items()},
            "unsent": [
                [tenant, origin.hex(), time_s]
                for (tenant, origin), time_s in dict(self.unsent).items()
            ],
        }
        return json.dumps(values).encode()

    @property
    def first_number(self) -> int:
        """Of this life's records, above those of all lives before."""
        return self.epoch << _EPOCH_BITS

    def is_new(self, replica: bytes, number: int) -> bool:
        """Whether a record was not read before; from now on it was."""
        known = self.numbers.pop(replica, -1)
        self.numbers[replica] = max(known, number)  # now the last one
        if len(self.numbers) > _MAX_REPLICAS:
            del self.numbers[next(iter(self.numbers))]
        return number > known

    @classmethod
    def _from_json(cls, values: Any) -> Self:
        numbers = {bytes.fromhex(key): int(value) for key, value in values["numbers"].items()}
        return cls(
            bytes.fromhex(values["replica"]),
            int(values["epoch"]),
            values["outputs"],
            values["deletions"],
            numbers,
            {
                Scope(str(tenant), bytes.fromhex(origin)): float(time_s)
                for tenant, origin, time_s in values["unsent"]
            },
        )
