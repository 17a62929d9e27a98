"""The binary form of records in the streams.

A record is, little-endian:

| bytes | what |
|---|---|
| 1 | format version, u8: 1 |
| 4 | CRC-32 of the stream's key and everything that follows |
| 16 | the drafter that wrote it |
| 8 | number, u64: increases with every record of a drafter |
| 8 | time in seconds since 1970, f64: when the output ended, or was deleted |
| 2 | length of the tenant's name in bytes, u16, at most 256 |
| | the name, UTF-8 |
| 1 | bytes per token, u8: 2 or 4, plus 128 if an origin follows |
| 16 | the origin by which the output is deleted; for a deletion, the deleted origin |
| | the tokens; none in a deletion |
"""

import math
import struct
import zlib
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from retriever.errors import RetrieverError
from retriever.limits import MAX_NAME_BYTES
from retriever.plugins.replication.options import MAX_RECORD_TOKENS
from retriever.predict.generations import Scope

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
    """A record has an unknown form; the message is a one-word reason."""


@dataclass(frozen=True, slots=True)
class Record:
    """An output, or the deletion of a tenant's outputs.

    Attributes:
        replica: the drafter that wrote it, `REPLICA_BYTES` bytes.
        number: increases with every output of that drafter.
        tenant: tenant of the output.
        time_s: when the output ended, or was deleted, in seconds since 1970.
        tokens: int32[n], 1 to `MAX_RECORD_TOKENS` ids; none in a deletion.
        origin: key by which the output is deleted, 16 bytes, or empty; empty in a deletion of all
            of the tenant's data.
    """

    replica: bytes
    number: int
    tenant: str
    time_s: float
    tokens: NDArray[np.int32]
    origin: bytes = b""

    @property
    def scope(self) -> Scope:
        """The scope whose deletion covers the output; for a deletion, the deleted scope."""
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
        UnreadableRecordError: the bytes are not a record; no other error is raised for any bytes.
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


def _tokens(width: int, data: bytes) -> NDArray[np.int32]:
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
