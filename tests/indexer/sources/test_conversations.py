import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from indexer.sources.conversations import (
    Exchange,
    Shape,
    Turn,
    conversation_of,
    exchanges_of,
    messages_of,
    plain_text,
    prompts_of,
    turns_of,
)

ASKED = Turn("user", "How far is Łódź?")
ANSWERED = Turn("assistant", "130 km 🙂")
MESSAGES = [
    {"role": "user", "content": ASKED.text},
    {"role": "assistant", "content": ANSWERED.text},
]
SHAREGPT = [{"from": "human", "value": ASKED.text}, {"from": "gpt", "value": ANSWERED.text}]
CHOICE = {"choices": [{"index": 0, "message": MESSAGES[1]}]}


def read(record: object) -> tuple[Shape, list[tuple[str, str]], list[str]]:
    found = conversation_of(record)
    assert found is not None
    return found.shape, [(turn.role, turn.text) for turn in found.turns], list(found.left_out)


@pytest.mark.parametrize(
    ("record", "shape"),
    [
        ({"messages": MESSAGES, "id": 7, "tools": None}, Shape.MESSAGES),
        ({"messages": json.dumps(MESSAGES)}, Shape.MESSAGES),
        ({"messages": MESSAGES[:1], "response": ANSWERED.text}, Shape.MESSAGES),
        ({"messages": MESSAGES[:1], **CHOICE}, Shape.MESSAGES),
        ({"conversations": SHAREGPT}, Shape.SHAREGPT),
        ({"conversations": json.dumps(SHAREGPT), "id": "x"}, Shape.SHAREGPT),
        ({"prompt": ASKED.text, "output": ANSWERED.text}, Shape.PROMPT),
        ({"prompt": ASKED.text, "completion": ANSWERED.text}, Shape.PROMPT),
        ({"prompt": ASKED.text, "response": ANSWERED.text}, Shape.PROMPT),
        ({"prompt": MESSAGES[:1], "completion": MESSAGES[1:]}, Shape.PROMPT),
        ({"input": ASKED.text, "output": ANSWERED.text}, Shape.PROMPT),
        ({"instruction": ASKED.text, "input": "", "output": ANSWERED.text}, Shape.INSTRUCTION),
        ({"question": ASKED.text, "answer": ANSWERED.text}, Shape.QUESTION),
        ({"request": {"messages": MESSAGES[:1]}, "response": CHOICE}, Shape.SERVER_LOG),
        (
            {"request": {"prompt": ASKED.text}, "response": {"choices": [{"text": "130 km 🙂"}]}},
            Shape.SERVER_LOG,
        ),
        (
            {
                "request": json.dumps({"body": {"messages": MESSAGES[:1]}}),
                "response": json.dumps({"status_code": 200, "body": CHOICE}),
            },
            Shape.SERVER_LOG,
        ),
    ],
)
def test_every_shape_gives_the_same_turns(record: dict[str, Any], shape: Shape) -> None:
    said = [("user", ASKED.text), ("assistant", ANSWERED.text)]
    assert read(record) == (shape, said, [])


@pytest.mark.parametrize(
    "record",
    [
        {"text": "a text"},
        {"id": 1, "body": "a text"},
        {"messages": "no list"},
        {"prompt": 3, "output": "x"},
        {"input": "without an output"},
        {"request": "GET /", "response": "ok"},
        [1, 2],
        "text",
        None,
    ],
)
def test_what_is_no_conversation_is_not_recognised(record: object) -> None:
    assert conversation_of(record) is None


def test_the_field_names_a_list_of_turns_under_another_key() -> None:
    record = {"chosen": MESSAGES, "prompt": "other"}
    found = conversation_of(record, "chosen")
    assert found is not None
    assert (found.shape, found.turns) == (Shape.MESSAGES, (ASKED, ANSWERED))


def test_system_prompts_and_inputs_are_turns_and_parts() -> None:
    record = {"system": "Be brief.", "instruction": "Add.", "input": "1 and 2", "output": "3"}
    assert read(record)[1] == [
        ("system", "Be brief."),
        ("user", "Add.\n\n1 and 2"),
        ("assistant", "3"),
    ]
    assert read({"system": "no", "messages": [{"role": "system", "content": "own"}]})[1] == [
        ("system", "own")
    ]


def test_tool_calls_are_text_and_their_arguments_stay_as_written() -> None:
    calls = [
        {"type": "function", "function": {"name": "look_up", "arguments": '{"city":"Łódź"}'}},
        {"function": {"name": "now", "arguments": None}},
        {"function": {"name": "now"}},
        {"function": {"name": "add", "arguments": {"a": 1}}},
        {"function": {"name": "say", "arguments": "{cut"}},
        {"function": {"arguments": "{}"}},
        "no call",
    ]
    _, turns, left_out = read(
        {"messages": [{"role": "assistant", "content": None, "tool_calls": calls}]}
    )
    assert turns[0][1].splitlines() == [
        '{"name": "look_up", "arguments": {"city":"Łódź"}}',
        '{"name": "now", "arguments": {}}',
        '{"name": "now", "arguments": {}}',
        '{"name": "add", "arguments": {"a": 1}}',
        '{"name": "say", "arguments": "{cut"}',
    ]
    assert left_out == ["tool call without a name"] * 2


def test_images_are_said_and_texts_beside_them_stay() -> None:
    content = [
        {"type": "text", "text": "What is"},
        {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}},
        {"type": "input_audio", "input_audio": {}},
        "this?",
        {"type": "text", "text": None},
    ]
    _, turns, left_out = read({"messages": [{"role": "user", "content": content}]})
    assert turns == [("user", "What is\nthis?")]
    assert left_out[:2] == ["image", "audio"]


def test_nested_contents_are_read_and_bottomless_ones_left_out() -> None:
    nested: Any = {"parts": [{"text": {"value": "deep"}}]}
    assert read({"messages": [{"role": "user", "content": nested}]})[1] == [("user", "deep")]
    for _ in range(400):
        nested = [nested]
    _, turns, left_out = read({"messages": [{"role": "user", "content": nested}]})
    assert turns == []
    assert left_out == ["content that is nested too deeply", "empty turn"]


def test_turns_that_cannot_be_used_are_named() -> None:
    items: list[Any] = [
        {"role": "narrator", "content": "Meanwhile"},
        {"content": "whose?"},
        {"role": "user", "content": ""},
        {"role": "user", "content": None},
        "a text",
        None,
    ]
    _, turns, left_out = read({"messages": items})
    assert turns == []
    assert left_out == [
        "turn of unknown role 'narrator'",
        "turn without role",
        "empty turn",
        "empty turn",
        "turn that is no object",
        "turn that is no object",
    ]


def test_an_empty_conversation_has_no_turns() -> None:
    assert read({"messages": []}) == (Shape.MESSAGES, [], [])


def test_roles_of_other_tools_are_translated() -> None:
    names = ["system", "Human", "gpt", "function_call", "observation", "model", "developer"]
    record = {"conversations": [{"from": name, "value": "x"} for name in names]}
    roles = [role for role, _ in read(record)[1]]
    assert roles == ["system", "user", "assistant", "assistant", "tool", "assistant", "system"]


def test_reasoning_stands_before_the_answer() -> None:
    turn = {"role": "assistant", "reasoning_content": "130?", "content": "130"}
    assert read({"messages": [turn]})[1] == [("assistant", "130?\n130")]


def test_answers_that_are_json_stay_as_they_are() -> None:
    for answer in ('{"content": "x"}', "[1, 2]", '{"error": 1}'):
        assert read({"prompt": "[3]", "response": answer})[1] == [
            ("user", "[3]"),
            ("assistant", answer),
        ]


@pytest.mark.parametrize("response", [None, {"error": {"code": 500}}, {"choices": []}])
def test_a_request_without_an_answer_has_no_assistant_turn(response: object) -> None:
    record = {"request": {"messages": MESSAGES[:1]}, "response": response}
    _, turns, left_out = read(record)
    assert turns == [("user", ASKED.text)]
    assert left_out == ["response without an answer"]


def test_further_choices_are_named() -> None:
    record = {"request": {"prompt": "x"}, "response": {"choices": [{"text": "y"}, {"text": "z"}]}}
    assert read(record)[1:] == ([("user", "x"), ("assistant", "y")], ["further choice"])


def test_exchanges_are_all_answers_with_all_before_them() -> None:
    record = {"messages": [*MESSAGES, {"role": "user", "content": "And back?"}, MESSAGES[1]]}
    found = conversation_of(record)
    assert found is not None
    assert list(exchanges_of(found)) == [
        Exchange(found.turns[:1], ANSWERED.text),
        Exchange(found.turns[:3], ANSWERED.text),
    ]
    assert list(turns_of(found, "assistant")) == [(2, ANSWERED.text), (4, ANSWERED.text)]
    assert list(prompts_of(found)) == [found.turns[:1], found.turns[:3]]
    assert messages_of(found.turns[:2]) == MESSAGES
    assert plain_text(found.turns[:2]) == f"{ASKED.text}\n\n{ANSWERED.text}"


def test_a_prompt_is_what_the_model_was_given_answered_or_not() -> None:
    said = [("system", "a"), ("user", "b"), ("user", "c"), ("assistant", "d"), ("user", "e")]
    messages = [{"role": r, "content": c} for r, c in said]
    found = conversation_of({"messages": messages})
    assert found is not None
    assert list(prompts_of(found)) == [found.turns[:3], found.turns]
    for alone in (MESSAGES[1:], messages[:1], []):
        unasked = conversation_of({"messages": alone})
        assert unasked is not None
        assert list(prompts_of(unasked)) == []


@pytest.mark.parametrize(
    "more",
    [{"request": {"messages": None}, "response": CHOICE}, {"response": ANSWERED.text}, CHOICE],
)
def test_answers_that_a_server_was_sent_are_no_outputs(more: dict[str, Any]) -> None:
    """Every request repeats the conversation so far: it would foretell itself."""
    asked = {"messages": [*MESSAGES, {"role": "user", "content": "And back?"}]}
    record = {**more, "request": asked} if "request" in more else {**asked, **more}
    found = conversation_of(record)
    assert found is not None
    assert list(exchanges_of(found)) == [Exchange(found.turns[:3], ANSWERED.text)]
    assert list(prompts_of(found)) == [found.turns[:3]]
    assert len(list(turns_of(found, "assistant"))) == 2


KEYS = (
    *("messages", "conversations", "prompt", "input", "output", "request", "response", "body"),
    *("choices", "message", "role", "from", "content", "value", "text", "type"),
    *("tool_calls", "function", "name", "arguments"),
)
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=5),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(KEYS),
            inner,
            max_size=4,
        )
    ),
    max_leaves=30,
)


@given(JSON)
def test_any_record_gives_valid_turns_or_none(record: Any) -> None:
    found = conversation_of(record)
    for turn in found.turns if found else ():
        assert turn.role in {"system", "user", "assistant", "tool"}
        assert turn.text.strip()
