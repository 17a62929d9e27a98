"""Records of the log of generations: keys, values and their checksums.

Every value begins with the CRC-32 (u32, little-endian) of its key and of the rest of the value.

| key | rest of the value |
|---|---|
| `format` | format version, u8 |
| `fingerprint` | fingerprint of the tokenizer, UTF-8; empty while it is not known |
| `note` | how far other drafters' outputs were learned, opaque |
| `o`, length of the tenant's name (u16, big-endian), name, number (u64, big-endian) | an output |
| `s`, length of the tenant's name (u16, big-endian), name | statistics, opaque |

An output is its time in seconds since 1970 (f64), the bytes of a token (u8: 2 or 4, and 128 more
where an origin follows), the origin that it is deleted by (16 bytes) and its tokens (u16 or u32),
little-endian. A tenant's outputs are numbered upwards, the oldest goes first.
"""

import struct
import zlib
from typing import Final

import numpy as np

from retriever.generations import Output

FORMAT_VERSION: Final = 1
FORMAT_KEY: Final = b"format"
FINGERPRINT_KEY: Final = b"fingerprint"
NOTE_KEY: Final = b"note"

OUTPUTS: Final = b"o"
"""What the keys of all outputs begin with."""

_STATISTICS: Final = b"s"
_CHECKSUM: Final = struct.Struct("<I")
_NAME_LENGTH: Final = struct.Struct(">H")
_NUMBER: Final = struct.Struct(">Q")
_OUTPUT_HEAD: Final = struct.Struct("<dB")
_WIDTHS: Final = (2, 4)
_HAS_ORIGIN: Final = 0x80
_ORIGIN_BYTES: Final = 16
_MAX_U16: Final = 0xFFFF


def output_prefix(tenant: str) -> bytes:
    """Return what the keys of a tenant's outputs begin with, and no other tenant's."""
    return OUTPUTS + _named(tenant)


def output_key(prefix: bytes, number: int) -> bytes:
    """Return the key of a tenant's output."""
    return prefix + _NUMBER.pack(number)


def number_of(key: bytes) -> int:
    """Return the number of an output from its key."""
    number: int = _NUMBER.unpack_from(key, len(key) - _NUMBER.size)[0]
    return number


def tenant_prefix_of(key: bytes) -> bytes:
    """Return the part of an output's key that names its tenant."""
    return key[: -_NUMBER.size]


def statistics_key(tenant: str) -> bytes:
    """Return the key of a tenant's statistics."""
    return _STATISTICS + _named(tenant)


def seal(key: bytes, content: bytes) -> bytes:
    """Return a value with its checksum."""
    return _CHECKSUM.pack(zlib.crc32(content, zlib.crc32(key))) + content


def unseal(key: bytes, value: bytes) -> bytes | None:
    """Return what was sealed, or None where key or value are not as they were written."""
    content = value[_CHECKSUM.size :]
    if len(value) < _CHECKSUM.size:
        return None
    (checksum,) = _CHECKSUM.unpack_from(value)
    return content if checksum == zlib.crc32(content, zlib.crc32(key)) else None


def encode_output(output: Output) -> bytes:
    """Return the content of an output."""
    width = _WIDTHS[0] if int(output.tokens.max(initial=0)) <= _MAX_U16 else _WIDTHS[1]
    head = _OUTPUT_HEAD.pack(output.time_s, width | (_HAS_ORIGIN if output.origin else 0))
    return head + output.origin + output.tokens.astype(f"<u{width}").tobytes()


def decode_output(content: bytes) -> Output | None:
    """Return an output from its content; None where this version writes no such thing."""
    head = _head(content)
    if head is None:
        return None
    time_s, width, begin = head
    if width not in _WIDTHS or len(content) < begin or (len(content) - begin) % width:
        return None
    tokens = np.frombuffer(content, f"<u{width}", offset=begin)
    return Output(tokens.astype(np.int32), time_s, content[_OUTPUT_HEAD.size : begin])


def measure_output(value: bytes) -> tuple[float, int]:
    """Return an output's time and number of tokens from a sealed value, which may be damaged."""
    head = _head(value[_CHECKSUM.size :])
    if head is None:
        return 0.0, 0
    time_s, width, begin = head
    return time_s, max(0, len(value) - _CHECKSUM.size - begin) // max(1, width)


def origin_of(value: bytes) -> bytes:
    """Return an output's origin from a sealed value; empty where it has none."""
    content = value[_CHECKSUM.size :]
    head = _head(content)
    return b"" if head is None else content[_OUTPUT_HEAD.size : head[2]]


def _head(content: bytes) -> tuple[float, int, int] | None:
    """Return an output's time, the bytes of its tokens, and where these begin."""
    if len(content) < _OUTPUT_HEAD.size:
        return None
    time_s, width = _OUTPUT_HEAD.unpack_from(content)
    has_origin = bool(width & _HAS_ORIGIN)
    return time_s, width & ~_HAS_ORIGIN, _OUTPUT_HEAD.size + _ORIGIN_BYTES * has_origin


def _named(tenant: str) -> bytes:
    name = tenant.encode()
    return _NAME_LENGTH.pack(len(name)) + name
