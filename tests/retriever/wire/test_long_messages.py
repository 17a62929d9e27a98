"""Long lists of token ids are cut out of messages, and come to the same as if parsed."""

import time
from collections.abc import Generator
from typing import Any

import pytest
from google.protobuf.message import DecodeError
from hypothesis import given, strategies as st

from retriever.errors import InvalidRequestError
from retriever.v1 import retriever_pb2 as pb
from retriever.wire.long_messages import (
    LONG_LIST,
    LongMessage,
    converting_list,
    converting_long_tokens,
    name_of,
    opened,
    parsed,
)

LONG = list(range(0, 40_000, 2))


def whole(pieces: Generator[None, None, Any]) -> Any:
    while True:
        try:
            next(pieces)
        except StopIteration as done:
            return done.value


def read(message: Any) -> tuple[Any, dict[tuple[int, ...], list[int]]]:
    kind = type(message)
    content = message.SerializeToString()
    rest, lists = opened(parsed(content, kind.FromString, name_of(kind)))
    return rest, {path: whole(converting_list(each)).tolist() for path, each in lists.items()}


def test_a_long_list_is_cut_out_and_the_rest_is_parsed() -> None:
    message = pb.DraftRequest(context=LONG, budget_nodes=7, vocabulary_fingerprint="ab")
    rest, lists = read(message)
    assert lists == {(): LONG}
    assert rest == pb.DraftRequest(budget_nodes=7, vocabulary_fingerprint="ab")


def test_lists_within_a_streams_message_are_found_by_their_places() -> None:
    message = pb.DraftStreamRequest(
        sequence_number=3,
        steps=[
            pb.SessionStep(session_id="a", new_token_ids=[1, 2], length=2),
            pb.SessionStep(session_id="b", new_token_ids=LONG, length=len(LONG)),
        ],
        openings=[pb.OpenSessionRequest(session_id="c", prompt=LONG[1:], forget=True)],
        closings=[
            pb.CloseSessionRequest(session_id="d"),
            pb.CloseSessionRequest(session_id="e", new_token_ids=LONG[2:], forget=True),
        ],
    )
    rest, lists = read(message)
    assert lists == {(1, 1): LONG, (3, 0): LONG[1:], (4, 1): LONG[2:]}
    for each in (message.steps[1].new_token_ids, message.closings[1].new_token_ids):
        del each[:]
    del message.openings[0].prompt[:]
    assert rest == message


def test_short_messages_and_lists_in_parts_are_parsed_whole() -> None:
    short = pb.DraftRequest(context=[1, 2, 3])
    assert read(short) == (short, {})
    part = pb.DraftRequest(context=LONG).SerializeToString()
    both = parsed(part + part, pb.DraftRequest.FromString, name_of(pb.DraftRequest))
    assert list(both.context) == LONG + LONG
    unpacked = b"\x08\x05" * LONG_LIST
    single = parsed(part + unpacked[:2], pb.DraftRequest.FromString, name_of(pb.DraftRequest))
    assert list(single.context) == [*LONG, 5]


def test_a_message_of_very_many_fields_is_not_walked_through() -> None:
    content = b"\x08\x05" * (4 << 20)
    began = time.perf_counter()
    message = parsed(content, pb.DraftRequest.FromString, name_of(pb.DraftRequest))
    took = time.perf_counter() - began
    began = time.perf_counter()
    assert message == pb.DraftRequest.FromString(content)
    assert took < 3 * (time.perf_counter() - began) + 0.05


@given(st.lists(st.integers(0, (1 << 32) - 1), min_size=1, max_size=300), st.integers(1, 40))
def test_any_numbers_are_converted(numbers: list[int], times: int) -> None:
    content = pb.DraftRequest(context=numbers * times).SerializeToString()
    body = memoryview(content)[len(content) - _body_bytes(content) :]
    assert whole(converting_list(body)).tolist() == numbers * times


def _body_bytes(content: bytes) -> int:
    """Return the length of a message's only field, behind its key and the length."""
    at, length, shift = 1, 0, 0
    while True:
        length |= (content[at] & 127) << shift
        shift += 7
        at += 1
        if content[at - 1] < 128:
            return length


def test_ids_beyond_31_bits_and_bytes_that_are_no_list_are_refused() -> None:
    wide = memoryview(b"\xff\xff\xff\xff\x0f")
    assert whole(converting_list(wide)).tolist() == [(1 << 32) - 1]
    with pytest.raises(InvalidRequestError, match="beyond 31 bits"):
        whole(converting_long_tokens(wide))
    for content in (b"\x01\x80", b"\x80" * (2 * LONG_LIST) + b"\x01"):
        with pytest.raises(InvalidRequestError, match="packed list"):
            whole(converting_list(memoryview(content)))


@given(st.binary(max_size=60), st.integers(0, 60))
def test_damaged_messages_are_parsed_or_refused_as_ever(noise: bytes, at: int) -> None:
    content = pb.DraftStreamRequest(
        openings=[pb.OpenSessionRequest(session_id="a", prompt=LONG)], sequence_number=1
    ).SerializeToString()
    damaged = content[:at] + noise + content[at + len(noise) :]

    def outcome(parse: Any) -> Any:
        try:
            return parse(damaged)
        except DecodeError:
            return None

    ours = outcome(
        lambda each: parsed(each, pb.DraftStreamRequest.FromString, name_of(pb.DraftStreamRequest))
    )
    theirs = outcome(pb.DraftStreamRequest.FromString)
    if isinstance(ours, LongMessage):
        if theirs is not None:
            assert ours.message.sequence_number == theirs.sequence_number
    else:
        assert ours == theirs
