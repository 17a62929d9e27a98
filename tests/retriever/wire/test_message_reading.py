"""From bytes to a message: too many numbers, fields of earlier contracts, token ids as bytes."""

from collections.abc import Callable

import numpy as np
import pytest
from google.protobuf.message import DecodeError, Message
from google.protobuf.unknown_fields import UnknownFieldSet
from hypothesis import given, settings, strategies as st

from retriever.errors import InvalidRequestError, LimitExceededError, RetrieverError
from retriever.v1 import admin_pb2, retriever_pb2 as pb
from retriever.wire.messages import prompt_of, tokens_of
from retriever.wire.reading import MOST_NUMBERS, read

MANY = list(range(MOST_NUMBERS))


def varint(number: int) -> bytes:
    out = bytearray()
    while number > 127:
        out.append(number & 127 | 128)
        number >>= 7
    return bytes([*out, number])


def opening(prompt: list[int]) -> pb.OpenSessionRequest:
    return pb.OpenSessionRequest(session_id="s", prompt=prompt)


MESSAGES: list[Callable[[list[int]], Message]] = [
    lambda numbers: pb.DraftRequest(context=numbers),
    lambda numbers: pb.ExplainRequest(context=numbers),
    opening,
    lambda numbers: pb.OpenSessionRequest(predictions=[pb.Prediction(token_ids=numbers)]),
    lambda numbers: pb.AddPredictionsRequest(predictions=[pb.Prediction(token_ids=numbers)]),
    lambda numbers: pb.CloseSessionRequest(new_token_ids=numbers),
    lambda numbers: pb.StepRequest(step=pb.SessionStep(new_token_ids=numbers)),
    lambda numbers: pb.StepRequest(
        step=pb.SessionStep(
            outcomes=[pb.Outcome(token_ids=each) for each in (numbers[:9000], numbers[9000:])]
        )
    ),
    lambda numbers: pb.DraftStreamRequest(openings=[opening(numbers)]),
    lambda numbers: pb.DraftStreamRequest(
        steps=[pb.SessionStep(new_token_ids=numbers[:40000])],
        closings=[pb.CloseSessionRequest(new_token_ids=numbers[40000:])],
    ),
]


@pytest.mark.parametrize("message", MESSAGES)
def test_more_numbers_than_a_message_may_hold_are_refused(
    message: Callable[[list[int]], Message],
) -> None:
    most = message(MANY)
    assert read(most.SerializeToString(), type(most)) == most
    beyond = message([*MANY, 5])
    with pytest.raises(LimitExceededError, match=r"as numbers.*send bytes, 4 for each"):
        read(beyond.SerializeToString(), type(beyond))


def test_numbers_that_are_not_packed_count_as_well() -> None:
    one_by_one = b"".join(b"\x08" + varint(number) for number in range(5000))
    content = b"\x1d" + bytes(4) + one_by_one
    assert len(read(content, pb.DraftRequest).context) == 5000  # a short message
    with pytest.raises(LimitExceededError, match="more than 4096 parts"):
        read(one_by_one * 14, pb.DraftRequest)


def test_a_million_ids_as_bytes_are_read() -> None:
    tokens = np.arange(1 << 20, dtype=np.int32)
    message = pb.DraftStreamRequest(
        openings=[pb.OpenSessionRequest(prompt_bytes=tokens.tobytes())],
        steps=[pb.SessionStep(new_token_bytes=tokens.tobytes())],
    )
    found = read(message.SerializeToString(), pb.DraftStreamRequest)
    assert tokens_of((), found.openings[0].prompt_bytes, "prompt").tolist() == tokens.tolist()


@pytest.mark.parametrize(
    ("message", "field"),
    [
        (pb.OpenSessionRequest, 5),
        (pb.DraftStreamRequest, 8),
        (admin_pb2.SessionFilter, 2),
    ],
)
def test_a_field_of_an_earlier_contract_is_refused(message: type[Message], field: int) -> None:
    of_before = varint(field << 3 | 2) + b"\x03\x0a\x01a"  # a client's name
    with pytest.raises(InvalidRequestError, match=r"foredraft proto --output DIR"):
        read(of_before, message)
    later = varint(900 << 3) + b"\x01"  # a client of a later contract is not refused
    assert UnknownFieldSet(read(later, message))


def test_so_it_is_within_another_message() -> None:
    of_before = b"\x2a\x03\x0a\x01a"
    with pytest.raises(InvalidRequestError, match="OpenSessionRequest"):
        read(b"\x1a" + varint(len(of_before)) + of_before, pb.DraftStreamRequest)
    with pytest.raises(InvalidRequestError, match="SessionFilter"):
        read(b"\x0a\x03\x12\x01a", admin_pb2.ListSessionsRequest)


@settings(max_examples=300, deadline=None)
@given(st.data())
def test_damaged_messages_are_refused_or_read_as_by_protobuf(data: st.DataObject) -> None:
    step = pb.SessionStep(session_id="s", new_token_ids=range(30000), new_token_bytes=bytes(70000))
    content = bytearray(
        pb.DraftStreamRequest(
            sequence_number=4, steps=[step], openings=[opening(list(range(900)))], padding=[b"12"]
        ).SerializeToString()
    )
    for _ in range(data.draw(st.integers(1, 4))):
        content[data.draw(st.integers(0, len(content) - 1))] = data.draw(st.integers(0, 255))
    if data.draw(st.booleans()):
        del content[data.draw(st.integers(0, len(content) - 1)) :]
    try:
        expected: Message | None = pb.DraftStreamRequest.FromString(bytes(content))
    except DecodeError:
        expected = None
    try:
        found = read(bytes(content), pb.DraftStreamRequest)
    except RetrieverError as error:
        refusal: str | None = str(error)
    else:
        refusal = None
        assert found == expected
    if refusal is not None and expected is not None:
        assert "numbers" in refusal or "no longer in use" in refusal


@pytest.mark.parametrize("size", [0, 1, 5, 3000])
def test_ids_are_the_same_as_numbers_and_as_bytes(size: int) -> None:
    tokens = np.random.default_rng(size).integers(0, 1 << 31, size, np.int64)
    as_numbers = tokens_of(tokens.tolist(), b"", "prompt")
    as_bytes = tokens_of((), tokens.astype("<i4").tobytes(), "prompt")
    assert as_numbers.dtype == as_bytes.dtype == np.int32
    assert as_numbers.tolist() == as_bytes.tolist() == tokens.tolist()


def test_both_forms_at_once_and_parts_of_ids_are_refused() -> None:
    with pytest.raises(InvalidRequestError, match="send one of them"):
        tokens_of([1], b"\1\0\0\0", "prompt")
    with pytest.raises(InvalidRequestError, match="no multiple of 4"):
        tokens_of([], b"\1\0\0", "prompt")
    assert tokens_of([(1 << 32) - 1], b"", "prompt").tolist() == [-1]  # the drafter refuses it


@pytest.mark.parametrize("session", ["s", "ab", "abc", "abcd"])  # the bytes begin anywhere
def test_long_ids_are_read_where_they_were_received(session: str) -> None:
    ids = np.arange(MOST_NUMBERS, dtype="<i4")
    sent = pb.OpenSessionRequest(session_id=session, prompt_bytes=ids.tobytes(), group="g")
    content = sent.SerializeToString()
    message = read(content, pb.OpenSessionRequest)
    assert (message.session_id, message.group, list(message.prompt)) == (session, "g", [])
    assert message.prompt_bytes.obj is content
    assert prompt_of(message).num_tokens == MOST_NUMBERS
    assert np.array_equal(prompt_of(message).tokens(), ids)


@pytest.mark.parametrize("others", [[b"\1\0\0\0"], [b""], [bytes(4 * MOST_NUMBERS), b"\2\0\0\0"]])
@pytest.mark.parametrize("is_first", [True, False])
def test_of_a_field_that_stands_there_twice_the_last_one_counts(
    others: list[bytes],
    is_first: bool,  # noqa: FBT001
) -> None:
    long = [np.arange(MOST_NUMBERS, dtype="<i4").tobytes()]
    parts = long + others if is_first else others + long
    content = b"".join(
        pb.DraftRequest(context_bytes=each).SerializeToString()
        if each
        else bytes([pb.DraftRequest.DESCRIPTOR.fields_by_name["context_bytes"].number << 3 | 2, 0])
        for each in parts
    )
    expected = pb.DraftRequest.FromString(content).context_bytes
    assert bytes(read(content, pb.DraftRequest).context_bytes) == expected


def test_what_follows_long_ids_must_be_a_message_too() -> None:
    content = pb.DraftRequest(context_bytes=bytes(4 * MOST_NUMBERS)).SerializeToString()
    for end in (b"\x0f", b"\x0a\xff", b"\xff" * 11):
        with pytest.raises(InvalidRequestError, match="not a message"):
            read(content + end, pb.DraftRequest)
