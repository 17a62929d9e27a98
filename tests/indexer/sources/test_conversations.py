import json
from typing import Any

import pytest
from hypothesis import given, strategies as st

from indexer.sources.chats.conversations import (
    Exchange,
    Turn,
    conversation_of,
    exchanges_of,
    messages_of,
    plain_text,
    prompts_of,
    turns_of,
)
from indexer.sources.chats.shapes import Shape

ASKED = Turn("user", "How far is Łódź?")
ANSWERED = Turn("assistant", "130 km 🙂")
MESSAGES = [
    {"role": "user", "content": ASKED.text},
    {"role": "assistant", "content": ANSWERED.text},
]
SHAREGPT = [{"from": "human", "value": ASKED.text}, {"from": "gpt", "value": ANSWERED.text}]
CHOICE = {"choices": [{"index": 0, "message": MESSAGES[1]}]}
TEXT_PART = {"type": "output_text", "text": ANSWERED.text, "annotations": []}
ITEM = {"type": "message", "role": "assistant", "id": "m", "content": [TEXT_PART]}
RESPONSE = {"object": "response", "instructions": None, "output": [ITEM], "error": None}
BLOCK = {"type": "text", "text": ANSWERED.text, "citations": None}
MESSAGE = {"type": "message", "role": "assistant", "content": [BLOCK], "stop_reason": "end_turn"}


def read(record: object) -> tuple[str, list[tuple[str, str]], list[str]]:
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
        ({"request": {"model": "m", "input": ASKED.text}, "response": RESPONSE}, Shape.SERVER_LOG),
        (
            {
                "request": {
                    "model": "m",
                    "input": [
                        {"role": "user", "content": [{"type": "input_text", "text": ASKED.text}]}
                    ],
                },
                "response": {"status_code": 200, "body": RESPONSE},
            },
            Shape.SERVER_LOG,
        ),
        ({"input": MESSAGES[:1], **RESPONSE}, Shape.PROMPT),
        (
            {"request": {"model": "m", "messages": MESSAGES[:1]}, "response": MESSAGE},
            Shape.SERVER_LOG,
        ),
        ({"params": {"messages": MESSAGES[:1]}, "result": {"message": MESSAGE}}, Shape.SERVER_LOG),
        (
            {
                "custom_id": "1",
                "url": "/v1/chat/completions",
                "body": {"messages": MESSAGES[:1]},
                "response": {"status_code": 200, "body": CHOICE},
                "error": None,
            },
            Shape.SERVER_LOG,
        ),
        (
            {"request": {"messages": MESSAGES[:1]}, "response": {"message": MESSAGES[1]}},
            Shape.SERVER_LOG,
        ),
        (
            {"request": {"prompt": ASKED.text}, "response": {"response": ANSWERED.text}},
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
        {"id": "1", "object": "chat.completion", **CHOICE},
        {"custom_id": "1", "response": {"status_code": 200, "body": CHOICE}, "error": None},
        {"custom_id": "1", "result": {"type": "succeeded", "message": MESSAGE}},
        RESPONSE,
        MESSAGE,
        {"response": {"choices": [{"index": 0, "delta": {"content": ANSWERED.text}}]}},
    ],
)
def test_responses_alone_are_answers_without_prompts(record: dict[str, Any]) -> None:
    assert read(record) == (Shape.RESPONSE, [("assistant", ANSWERED.text)], [])
    found = conversation_of(record)
    assert found is not None
    assert list(exchanges_of(found)) == [Exchange((), ANSWERED.text)]
    assert list(prompts_of(found)) == []


def test_requests_alone_are_prompts_without_answers() -> None:
    for record in (
        {"custom_id": "1", "method": "POST", "body": {"messages": MESSAGES[:1]}},
        {"custom_id": "1", "method": "POST", "body": {"model": "m", "input": ASKED.text}},
        {"custom_id": "1", "params": {"messages": MESSAGES[:1], "max_tokens": 9}},
    ):
        shape, turns, _ = read(record)
        assert (shape, turns) == (Shape.SERVER_LOG, [("user", ASKED.text)])
        found = conversation_of(record)
        assert found is not None
        assert list(prompts_of(found)) == [(ASKED,)]


def test_a_request_of_a_batch_that_failed_has_no_answer() -> None:
    failed = {"custom_id": "1", "response": {"status_code": 429, "body": {"error": {}}}}
    assert read(failed) == (Shape.RESPONSE, [], ["response without an answer"])


def test_items_of_responses_are_turns_and_what_a_model_wrote_as_one_is_one_turn() -> None:
    thought = {"type": "reasoning", "content": [{"type": "reasoning_text", "text": "Far?"}]}
    hidden = {"type": "reasoning", "summary": [{"type": "summary_text", "text": "x"}]}
    call = {"type": "function_call", "call_id": "1", "name": "far", "arguments": "{}"}
    returned = {"type": "function_call_output", "call_id": "1", "output": "130"}
    items = [*MESSAGES[:1], thought, call, returned, hidden, {"type": "web_search_call"}]
    record = {
        "request": {"model": "m", "instructions": "Be brief.", "input": items},
        "response": {"output": [{"type": "reasoning", "summary": []}, thought, ITEM, call]},
    }
    written = '{"name": "far", "arguments": {}}'
    assert read(record)[1:] == (
        [
            ("system", "Be brief."),
            ("user", ASKED.text),
            ("assistant", f"Far?\n{written}"),
            ("tool", "130"),
            ("assistant", f"Far?\n{ANSWERED.text}\n{written}"),
        ],
        ["reasoning that is only summarised", "web_search_call"],
    )
    found = conversation_of(record)
    assert found is not None
    assert len(list(exchanges_of(found))) == 1


def test_results_of_tools_in_a_users_content_are_a_tools_turn() -> None:
    use = {"type": "tool_use", "id": "1", "name": "far", "input": {"to": "Łódź"}}
    image = {"type": "image", "source": {}}
    result = {"type": "tool_result", "tool_use_id": "1", "content": [BLOCK, image]}
    record = {
        "request": {
            "system": [{"type": "text", "text": "Be brief.", "cache_control": None}],
            "messages": [
                *MESSAGES[:1],
                {"role": "assistant", "content": [{"type": "thinking", "thinking": "Far?"}, use]},
                {"role": "user", "content": [result]},
                {"role": "assistant", "content": [use]},
                {"role": "user", "content": [result, {"type": "text", "text": "And back?"}]},
            ],
        },
        "response": MESSAGE,
    }
    called = '{"name": "far", "arguments": {"to": "Łódź"}}'
    assert read(record)[1:] == (
        [
            ("system", "Be brief."),
            ("user", ASKED.text),
            ("assistant", f"Far?\n{called}"),
            ("tool", ANSWERED.text),
            ("assistant", called),
            ("tool", ANSWERED.text),
            ("user", "And back?"),
            ("assistant", ANSWERED.text),
        ],
        ["image", "image"],
    )


@pytest.mark.parametrize(
    "record",
    [
        {"role": "user", "content": "one turn a line"},
        {"object": "response", "output": []},
        {"output": "a text"},
        {"output": ["a text"]},
        {"response": "a text"},
        {"body": {"name": "a"}, "custom": 1},
        {"choices": ["a", "b"]},
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
        "turn that is not an object",
        "turn that is not an object",
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


@pytest.mark.parametrize(
    "record",
    [
        {"request": {"prompt": "x"}, "response": {"choices": [{"text": "y"}, {"text": "z"}]}},
        *({"prompt": "x", key: ["y", "z"]} for key in ("response", "output", "completion")),
        {"question": "x", "answer": ["y", "z"]},
        {"resps": [["y", "z"]], "arguments": [["x", {}]]},
        {
            "contents": [{"role": "user", "parts": [{"text": "x"}]}],
            "candidates": [{"content": {"role": "model", "parts": [{"text": t}]}} for t in "yz"],
        },
    ],
)
def test_several_answers_to_one_prompt_are_samples_of_it(record: dict[str, Any]) -> None:
    found = conversation_of(record)
    assert found is not None
    assert list(exchanges_of(found)) == [
        Exchange((Turn("user", "x"),), "y", 2),
        Exchange((Turn("user", "x"),), "z", 2),
    ]
    assert found.left_out == ()
    assert list(prompts_of(found)) == [(Turn("user", "x"),)]


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
    *("choices", "message", "role", "from", "content", "value", "text", "type", "custom_id"),
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
