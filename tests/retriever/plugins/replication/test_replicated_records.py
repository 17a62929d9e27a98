"""Records that drafters exchange: exact bytes, and whatever else a stream may hold."""

import struct
import zlib

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from retriever.limits import MAX_NAME_BYTES
from retriever.plugins.replication.options import MAX_RECORD_TOKENS
from retriever.plugins.replication.replicated_records import (
    MAX_RECORD_BYTES,
    Record,
    UnreadableRecordError,
    decode,
    encode,
)
from tests.retriever.token_ids import ids

STREAM = b"stream"
REPLICA = bytes(range(16))
REASONS = {"damaged", "newer", "oversized", "vocabulary"}

names = st.text(max_size=20).filter(lambda name: name.isprintable())
tokens = st.lists(st.integers(0, 2**31 - 1), max_size=40)
times = st.floats(allow_nan=False, allow_infinity=False)


def sealed(content: bytes, version: int = 1, stream: bytes = STREAM) -> bytes:
    return struct.pack("<BI", version, zlib.crc32(content, zlib.crc32(stream))) + content


def content_of(
    name: bytes = b"t", width: int = 2, data: bytes = b"\1\0", time_s: float = 1.5
) -> bytes:
    return REPLICA + struct.pack("<QdH", 7, time_s, len(name)) + name + bytes([width]) + data


def test_a_record_has_these_bytes() -> None:
    record = Record(REPLICA, 7, "t\u00e9", 1.5, ids(1, 0xFFFF))
    expected = [
        *("01", "526ef22b", "000102030405060708090a0b0c0d0e0f", "0700000000000000"),
        *("000000000000f83f", "0300", "74c3a9", "02", "0100ffff"),
    ]
    assert encode(record, STREAM).hex() == "".join(expected)
    wide = encode(Record(REPLICA, 7, "", 1.5, ids(0x1_0000)), STREAM)
    assert wide.hex().endswith("00000400000100")
    with_origin = encode(Record(REPLICA, 7, "", 1.5, ids(1), REPLICA), STREAM)
    assert with_origin.hex().endswith(f"000082{REPLICA.hex()}0100")


@given(names, tokens, times, st.integers(0, 2**64 - 1), st.sampled_from([b"", REPLICA]))
def test_what_was_encoded_is_decoded(
    tenant: str, token_ids: list[int], time_s: float, number: int, origin: bytes
) -> None:
    record = Record(REPLICA, number, tenant, time_s, ids(*token_ids), origin)
    again = decode(encode(record, STREAM), STREAM)
    assert again.tokens.tolist() == token_ids
    assert (again.scope, again.number, again.time_s) == ((tenant, origin), number, time_s)
    with pytest.raises(UnreadableRecordError, match="damaged"):
        decode(encode(record, STREAM), b"another")


@settings(max_examples=1000)
@given(st.binary(max_size=200))
def test_whatever_comes_is_a_record_or_has_a_reason(data: bytes) -> None:
    for tried in (data, sealed(data), sealed(content_of() + data), sealed(content_of(data))):
        try:
            record = decode(tried, STREAM)
        except UnreadableRecordError as error:
            assert str(error) in REASONS  # noqa: PT017  (nothing else may be raised)
        else:
            assert record.tokens.min(initial=0) >= 0


@given(st.data())
def test_a_damaged_record_is_none(data: st.DataObject) -> None:
    origin = data.draw(st.sampled_from([b"", REPLICA]))
    whole = encode(Record(REPLICA, 7, "tenant", 1.5, ids(*range(20)), origin), STREAM)
    at = data.draw(st.integers(0, len(whole) - 1))
    flipped = bytearray(whole)
    flipped[at] ^= data.draw(st.integers(1, 255))
    for damaged in (bytes(flipped), whole[:at], whole + b"\0"):
        with pytest.raises(UnreadableRecordError):
            decode(damaged, STREAM)


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (b"", "damaged"),
        (sealed(content_of(), version=0), "damaged"),
        (sealed(content_of(), version=2), "newer"),
        (sealed(content_of(width=3, data=b"\0\0\0")), "damaged"),
        (sealed(content_of(width=0)), "damaged"),
        (sealed(content_of(width=0x82, data=bytes(15))), "damaged"),
        (sealed(content_of(width=0x80, data=bytes(16))), "damaged"),
        (sealed(content_of(data=b"\0")), "damaged"),
        (sealed(content_of(name=b"\xff")), "damaged"),
        (sealed(content_of(name=b"n" * (MAX_NAME_BYTES + 1))), "damaged"),
        (sealed(content_of(time_s=float("nan"))), "damaged"),
        (sealed(content_of(time_s=float("inf"))), "damaged"),
        (sealed(content_of(width=4, data=b"\xff\xff\xff\xff")), "vocabulary"),
        (sealed(content_of(data=bytes(2 * MAX_RECORD_TOKENS + 2))), "oversized"),
        (bytes(MAX_RECORD_BYTES + 1), "oversized"),
    ],
)
def test_records_are_refused_for_a_reason(data: bytes, reason: str) -> None:
    with pytest.raises(UnreadableRecordError, match=reason):
        decode(data, STREAM)


def test_the_largest_record_is_one() -> None:
    token_ids = np.full(MAX_RECORD_TOKENS, 2**31 - 1, np.int32)
    data = encode(Record(REPLICA, 7, "n" * MAX_NAME_BYTES, 1.5, token_ids, REPLICA), STREAM)
    assert len(data) == MAX_RECORD_BYTES
    assert decode(data, STREAM).tokens.tolist() == token_ids.tolist()
