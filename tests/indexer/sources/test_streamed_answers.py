"""Answers that a log keeps in pieces are the same as the whole ones."""

import json
from typing import Any

import pytest
from hypothesis import given, strategies as st

from indexer.sources.chats.conversations import conversation_of
from indexer.sources.chats.shapes import Shape
from indexer.sources.chats.streamed_answers import is_chunk, whole_answer

TEXT = "130 km 🙂\n\ndata: no event"
CALL = '{"name": "far", "arguments": {"to": "Łódź"}}'


def deltas(*pieces: dict[str, Any], **more: Any) -> list[dict[str, Any]]:
    chunk = {"id": "c", "object": "chat.completion.chunk", **more}
    return [{**chunk, "choices": [{"index": 0, "delta": piece}]} for piece in pieces]


def events(chunks: list[Any], line_end: str = "\n", *, named: bool = False) -> str:
    """Return chunks as a server sends them."""
    said = ""
    for chunk in chunks:
        name = f"event: {chunk['type']}{line_end}" if named else ""
        said += f"{name}data: {json.dumps(chunk)}{line_end * 2}"
    return said if named else f"{said}data: [DONE]{line_end * 2}"


def answer(response: Any) -> tuple[str, list[str]]:
    """Return the text of the one answer in a log, and what was left out."""
    record = {"request": {"messages": [{"role": "user", "content": "?"}]}, "response": response}
    found = conversation_of(record)
    assert found is not None
    assert found.shape == Shape.SERVER_LOG
    said = [turn for turn in found.turns if turn.role == "assistant"]
    assert len(said) <= 1
    return said[0].text if said else "", list(found.left_out)


CHAT = deltas(
    {"role": "assistant", "content": None, "reasoning_content": "Far"},
    {"reasoning_content": "?"},
    *({"content": letter} for letter in TEXT),
    {"tool_calls": [{"index": 0, "id": "1", "function": {"name": "far", "arguments": ""}}]},
    {"tool_calls": [{"index": 0, "function": {"arguments": '{"to": '}}]},
    {"tool_calls": [{"index": 0, "function": {"arguments": '"Łódź"}'}}]},
    {},
)
USAGE = {"object": "chat.completion.chunk", "choices": [], "usage": {"total_tokens": 9}}
WHOLE_CHAT = f"Far?\n{TEXT}\n{CALL}"

BLOCKS: list[dict[str, Any]] = [
    {"type": "message_start", "message": {"role": "assistant", "content": []}},
    {"type": "ping"},
    {"type": "content_block_start", "index": 0, "content_block": {"type": "thinking"}},
    {"type": "content_block_delta", "index": 0, "delta": {"thinking": "Far"}},
    {"type": "content_block_delta", "index": 0, "delta": {"thinking": "?"}},
    {"type": "content_block_delta", "index": 0, "delta": {"signature": "x"}},
    {"type": "content_block_start", "index": 1, "content_block": {"type": "text", "text": ""}},
    *({"type": "content_block_delta", "index": 1, "delta": {"text": letter}} for letter in TEXT),
    {"type": "content_block_stop", "index": 1},
    {
        "type": "content_block_start",
        "index": 2,
        "content_block": {"type": "tool_use", "name": "far", "input": {}},
    },
    {"type": "content_block_delta", "index": 2, "delta": {"partial_json": '{"to": '}},
    {"type": "content_block_delta", "index": 2, "delta": {"partial_json": '"Łódź"}'}},
    {"type": "message_delta", "delta": {"stop_reason": "tool_use"}},
    {"type": "message_stop"},
]

ITEMS: list[dict[str, Any]] = [
    {"type": "reasoning", "content": [{"type": "reasoning_text", "text": "Far?"}], "summary": []},
    {
        "type": "message",
        "role": "assistant",
        "content": [{"type": "output_text", "text": TEXT, "annotations": []}],
    },
    {"type": "function_call", "call_id": "1", "name": "far", "arguments": '{"to": "Łódź"}'},
]
RESPONSE = {"object": "response", "output": ITEMS, "usage": None}
SEMANTIC: list[dict[str, Any]] = [
    {"type": "response.created", "response": {"output": []}},
    {"type": "response.output_item.added", "output_index": 0, "item": {"type": "reasoning"}},
    {"type": "response.output_item.done", "output_index": 0, "item": ITEMS[0]},
    *(
        {"type": "response.output_text.delta", "output_index": 1, "delta": letter}
        for letter in TEXT
    ),
    {"type": "response.output_item.done", "output_index": 1, "item": ITEMS[1]},
    {"type": "response.output_item.done", "output_index": 2, "item": ITEMS[2]},
    {"type": "response.completed", "response": RESPONSE},
]


@pytest.mark.parametrize(
    "response",
    [
        [*CHAT, USAGE],
        events([*CHAT, USAGE]),
        events(CHAT, "\r\n"),
        ": keep-alive\n\n" + events(CHAT),
        "\n".join(f"data: {json.dumps(chunk)}" for chunk in CHAT),
        [f"data: {json.dumps(chunk)}\n\n" for chunk in CHAT],
        {"status_code": 200, "body": events(CHAT)},
        BLOCKS,
        events(BLOCKS, named=True),
        [{"event": each["type"], "data": json.dumps(each)} for each in BLOCKS],
        RESPONSE,
        SEMANTIC,
        events(SEMANTIC, named=True),
        SEMANTIC[:-1],
    ],
)
def test_answers_in_pieces_are_put_together(response: Any) -> None:
    assert answer(response) == (WHOLE_CHAT, [])


def test_several_choices_are_put_together_each_by_itself() -> None:
    chunks = [
        {"choices": [{"index": index, "delta": {"content": f"{index}{letter}"}}]}
        for letter in "ab"
        for index in (1, 0)
    ]
    assert answer(chunks) == ("0a0b", [])
    found = conversation_of({"request": {"prompt": "x"}, "response": chunks})
    assert found is not None
    assert found.samples == ("1a1b",)


def test_completions_of_text_and_calls_without_numbers_are_put_together() -> None:
    texts = [{"choices": [{"text": letter, "index": 0}]} for letter in "abc"]
    assert answer(texts) == ("abc", [])
    pieces = [
        {"name": "a", "arguments": "{}"},
        {"name": "b", "arguments": '{"x"'},
        {"arguments": ":1}"},
    ]
    chunks = deltas(*({"tool_calls": [{"function": piece}]} for piece in pieces))
    called = '{"name": "a", "arguments": {}}\n{"name": "b", "arguments": {"x":1}}'
    assert answer(chunks) == (called, [])
    older = deltas({"function_call": pieces[1]}, {"function_call": pieces[2]})
    assert answer(older) == ('{"name": "b", "arguments": {"x":1}}', [])
    parts = deltas({"content": [{"type": "text", "text": "a"}]}, {"content": "b"})
    assert answer(parts) == ("ab", [])


def test_a_stream_that_broke_off_is_kept_as_far_as_it_came_and_said() -> None:
    whole = events(deltas({"content": "a"}, {"content": "b"}))
    assert answer(whole[: whole.index('"b"')]) == ("a", ["piece of a stream that is not JSON"])
    unfinished = [e for e in SEMANTIC if e["type"] != "response.completed"][2:6]
    assert answer(unfinished) == ("Far?\n130", [])
    assert answer(BLOCKS[:8]) == ("Far?\n1", [])
    assert answer(events(BLOCKS[:1], named=True))[0] == ""


@pytest.mark.parametrize(
    "text", ["data: 5 apples", 'data: {"a": 1}', ": no", "event: birthday", "data: {", ""]
)
def test_answers_that_only_begin_like_events_stay_texts(text: str) -> None:
    assert whole_answer(text) == (text, 0)
    found = conversation_of({"prompt": "?", "response": text or "x"})
    assert found is not None
    assert found.turns[1].text == (text or "x")


def test_a_chunk_by_itself_is_no_conversation() -> None:
    for chunk in (CHAT[0], SEMANTIC[0], BLOCKS[3]):
        assert is_chunk(chunk)
        assert conversation_of(chunk) is None
    others: list[Any] = [{"messages": []}, {"type": "function_call"}, {"choices": [{"text": "a"}]}]
    for record in [*others, []]:
        assert not is_chunk(record)


KEYS = ("choices", "delta", "type", "index", "text", "content", "tool_calls", "function", "data")
VALUES = st.recursive(
    st.none()
    | st.integers()
    | st.sampled_from(["response.completed", "content_block_delta", "data: {}", "message_start"]),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(KEYS), inner, max_size=4)
    ),
    max_leaves=20,
)


@given(st.lists(VALUES, max_size=4) | VALUES)
def test_any_value_is_put_together_or_left_as_it_is(value: Any) -> None:
    _, num_damaged = whole_answer(value)
    assert num_damaged >= 0
    conversation_of({"request": {"prompt": "x"}, "response": value})
