"""Conversations as tools write them: each shape gives the same prompts and answers."""

import json
import random
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings, strategies as st

from indexer.sources.chats.conversations import Exchange, conversation_of, exchanges_of
from indexer.sources.chats.sessions import sessions
from indexer.sources.recordings import RecordingTally, read_records

Message = dict[str, Any]
Pair = tuple[tuple[tuple[str, str], ...], str]


def user(text: str) -> Message:
    return {"role": "user", "content": text}


def assistant(text: str) -> Message:
    return {"role": "assistant", "content": text}


ASKED, SAID = "When do boats leave?", "The harbour opens at six."
CHAT = [user(ASKED), assistant(SAID)]
CALLED = '{"name": "timetable", "arguments": {"place": "harbour"}}'
LANGCHAIN = ["langchain", "schema", "messages"]


def lc(kind: str, text: str) -> Message:
    return {"lc": 1, "type": "constructor", "id": [*LANGCHAIN, kind], "kwargs": {"content": text}}


def otlp(**attributes: Any) -> list[Message]:
    """Attributes as OTLP's JSON has them."""
    return [
        {"key": key.replace("__", "."), "value": {"stringValue": value}}
        for key, value in attributes.items()
    ]


def node(number: int, role: str, text: str, parent: str | None, *children: str) -> Message:
    message = {"author": {"role": role}, "content": {"content_type": "text", "parts": [text]}}
    return {"id": str(number), "message": message, "parent": parent, "children": list(children)}


ONE: dict[str, Any] = {
    "OpenTelemetry": {
        "name": "chat m",
        "attributes": {
            "gen_ai.operation.name": "chat",
            "gen_ai.input.messages": json.dumps(
                [{"role": "user", "parts": [{"type": "text", "content": ASKED}]}]
            ),
            "gen_ai.output.messages": json.dumps(
                [{"role": "assistant", "parts": [{"type": "text", "content": SAID}]}]
            ),
        },
    },
    "OTLP": {
        "attributes": otlp(
            gen_ai__prompt__0__role="user",
            gen_ai__prompt__0__content=ASKED,
            gen_ai__completion__0__role="assistant",
            gen_ai__completion__0__content=SAID,
        )
    },
    "events of a span": {
        "events": [
            {"name": "gen_ai.user.message", "attributes": {"content": ASKED}},
            {"name": "gen_ai.choice", "attributes": {"message": json.dumps(assistant(SAID))}},
        ]
    },
    "Phoenix": {
        "attributes": {
            "openinference.span.kind": "LLM",
            "llm.input_messages.0.message.role": "user",
            "llm.input_messages.0.message.content": ASKED,
            "llm.output_messages.0.message.role": "assistant",
            "llm.output_messages.0.message.content": SAID,
        }
    },
    "LangSmith": {
        "run_type": "llm",
        "inputs": {"messages": [[lc("HumanMessage", ASKED)]]},
        "outputs": {"generations": [[{"text": SAID, "message": lc("AIMessage", SAID)}]]},
    },
    "Langfuse": {"type": "GENERATION", "input": [user(ASKED)], "output": assistant(SAID)},
    "Helicone": {
        "request_body": {"messages": [user(ASKED)]},
        "response_body": {"choices": [{"message": assistant(SAID)}]},
    },
    "Bedrock's log": {
        "modelId": "m",
        "input": {"inputBodyJson": {"messages": [user(ASKED)]}},
        "output": {"outputBodyJson": {"content": [{"type": "text", "text": SAID}]}},
    },
    "Bedrock": {
        "messages": [{"role": "user", "content": [{"text": ASKED}]}],
        "output": {"message": {"role": "assistant", "content": [{"text": SAID}]}},
    },
    "SGLang's log": {"event": "request.finished", "obj": {"text": ASKED}, "out": {"text": SAID}},
    "llama.cpp's server": {"prompt": ASKED, "content": SAID, "tokens_predicted": 9},
    "lm-eval": {"arguments": {"gen_args_0": {"arg_0": ASKED}}, "resps": [[SAID]], "doc_id": 0},
    "AlpacaEval": {"instruction": ASKED, "output": SAID, "generator": "m"},
    "OpenAI batch": {
        "custom_id": "1",
        "request": {"body": {"messages": [user(ASKED)]}},
        "response": {"body": {"choices": [{"message": assistant(SAID)}]}},
    },
    "Vertex": {
        "request": {"contents": [{"role": "user", "parts": [{"text": ASKED}]}]},
        "response": {"candidates": [{"content": {"role": "model", "parts": [{"text": SAID}]}}]},
    },
    "Gemini": {
        "contents": [
            {"role": "user", "parts": [{"text": ASKED}]},
            {"role": "model", "parts": [{"text": SAID}]},
        ]
    },
    "Anthropic": {
        "request": {"messages": [user(ASKED)], "max_tokens": 9},
        "response": {"role": "assistant", "content": [{"type": "text", "text": SAID}]},
    },
    "AI SDK": {
        "messages": [
            {"role": "user", "parts": [{"type": "text", "text": ASKED}]},
            {"role": "assistant", "parts": [{"type": "text", "text": SAID}]},
        ]
    },
    "ShareGPT": {
        "conversations": [{"from": "human", "value": ASKED}, {"from": "gpt", "value": SAID}]
    },
    "Alpaca": {"instruction": "When do boats", "input": "leave?", "output": SAID},
    "DPO": {"prompt": ASKED, "chosen": SAID, "rejected": "No."},
    "DPO of messages": {"chosen": CHAT, "rejected": [user(ASKED), assistant("No.")]},
    "DPO of ShareGPT": {
        "conversations": [{"from": "human", "value": ASKED}],
        "chosen": {"from": "gpt", "value": SAID},
        "rejected": {"from": "gpt", "value": "No."},
    },
    "KTO": {"prompt": [user(ASKED)], "completion": [assistant(SAID)], "label": True},
    "SWE-agent": {"trajectory": [{"action": "ls", "observation": "a"}], "history": CHAT},
    "OpenHands": {"instance_id": "1", "history": CHAT, "metrics": {}},
    "Inspect": {"id": 1, "input": ASKED, "messages": CHAT, "output": {"completion": SAID}},
    "Claude's export": {
        "uuid": "1",
        "chat_messages": [
            {"sender": "human", "text": ASKED, "content": [{"type": "text", "text": ASKED}]},
            {"sender": "assistant", "text": SAID, "content": [{"type": "text", "text": SAID}]},
        ],
    },
    "ChatGPT's export": {
        "mapping": {
            "0": {"id": "0", "message": None, "parent": None, "children": ["1"]},
            "1": node(1, "user", ASKED, "0", "2", "3"),
            "2": node(2, "assistant", "No.", "1"),
            "3": node(3, "assistant", SAID, "1"),
        },
        "current_node": "3",
    },
}
"""By the tool that writes it, a record of one question and its answer."""


def pairs_of(records: Iterable[Any]) -> Iterator[Pair]:
    for _, record in sessions((str(number), each) for number, each in enumerate(records)):
        found = conversation_of(record)
        for each in exchanges_of(found) if found is not None else ():
            yield _pair(each)


def _pair(exchange: Exchange) -> Pair:
    return tuple((turn.role, turn.text) for turn in exchange.prompt), exchange.output


@pytest.mark.parametrize("tool", ONE)
def test_each_tools_record_is_a_question_and_its_answer(tool: str) -> None:
    ((prompt, output),) = pairs_of([ONE[tool]])
    asked = "When do boats\n\nleave?" if tool == "Alpaca" else ASKED
    assert (prompt, output) == ((("user", asked),), SAID)


@pytest.mark.parametrize(
    "record",
    [
        {"type": "SPAN", "input": "x", "output": {"documents": ["y"]}},
        {"run_type": "retriever", "inputs": {"query": "x"}, "outputs": {"documents": []}},
        {"attributes": {"openinference.span.kind": "TOOL"}},
    ],
)
def test_spans_of_no_model_hold_no_answer_and_say_so(record: Message) -> None:
    found = conversation_of(record)
    assert found is not None
    assert (found.turns, found.left_out) == ((), ("span of no model",))


CALLS: dict[str, list[Message]] = {
    "OpenAI": [
        {
            "role": "assistant",
            "content": None,
            "tool_calls": [
                {"function": {"name": "timetable", "arguments": '{"place": "harbour"}'}}
            ],
        },
        {"role": "tool", "content": "6:00"},
    ],
    "Inspect": [
        {
            "role": "assistant",
            "content": "",
            "tool_calls": [{"function": "timetable", "arguments": {"place": "harbour"}}],
        },
        {"role": "tool", "content": "6:00"},
    ],
    "Anthropic": [
        {
            "role": "assistant",
            "content": [{"type": "tool_use", "name": "timetable", "input": {"place": "harbour"}}],
        },
        {"role": "user", "content": [{"type": "tool_result", "content": "6:00"}]},
    ],
    "AI SDK's core": [
        {
            "role": "assistant",
            "content": [
                {"type": "tool-call", "toolName": "timetable", "input": {"place": "harbour"}}
            ],
        },
        {
            "role": "tool",
            "content": [{"type": "tool-result", "output": {"type": "text", "value": "6:00"}}],
        },
    ],
    "AI SDK": [
        {
            "role": "assistant",
            "parts": [
                {"type": "tool-timetable", "input": {"place": "harbour"}, "output": "6:00"},
            ],
        }
    ],
    "Gemini": [
        {
            "role": "model",
            "parts": [{"functionCall": {"name": "timetable", "args": {"place": "harbour"}}}],
        },
        {
            "role": "function",
            "parts": [{"functionResponse": {"name": "timetable", "response": {"text": "6:00"}}}],
        },
    ],
    "Bedrock": [
        {
            "role": "assistant",
            "content": [{"toolUse": {"name": "timetable", "input": {"place": "harbour"}}}],
        },
        {"role": "user", "content": [{"toolResult": {"content": [{"text": "6:00"}]}}]},
    ],
}


@pytest.mark.parametrize("dialect", CALLS)
def test_a_call_is_written_by_the_model_and_its_result_is_not(dialect: str) -> None:
    record = {"messages": [user(ASKED), *CALLS[dialect], assistant(SAID)]}
    asked = ("user", ASKED)
    assert list(pairs_of([record])) == [
        ((asked,), CALLED),
        ((asked, ("assistant", CALLED), ("tool", "6:00")), SAID),
    ]


def test_one_message_a_line_is_a_conversation_by_its_session() -> None:
    lines = [
        {"type": "summary", "summary": "x"},
        {"type": "user", "sessionId": "a", "message": user(ASKED)},
        {
            "type": "assistant",
            "sessionId": "a",
            "message": {"id": "1", "content": [{"type": "text", "text": "Wait."}]},
        },
        {
            "type": "assistant",
            "sessionId": "a",
            "message": {"id": "1", "content": [{"type": "text", "text": SAID}]},
        },
        {"type": "file-history-snapshot", "messageId": "1"},
        {"type": "user", "sessionId": "b", "message": user("And you?")},
        {"type": "assistant", "sessionId": "b", "message": assistant("Well.")},
    ]
    assert list(pairs_of(lines)) == [
        ((("user", ASKED),), f"Wait.\n{SAID}"),
        ((("user", "And you?"),), "Well."),
    ]
    codex = [
        {"type": "session_meta", "payload": {"id": "1"}},
        *(
            {"type": "response_item", "payload": {"type": "message", "role": role, "content": text}}
            for role, text in (("user", ASKED), ("assistant", SAID))
        ),
    ]
    assert list(pairs_of(codex)) == [((("user", ASKED),), SAID)]
    turns = [{"role": "system", "content": "Be brief."}, *CHAT]
    assert (
        list(pairs_of([*turns, *turns])) == [((("system", "Be brief."), ("user", ASKED)), SAID)] * 2
    )


WRITERS: dict[str, Callable[[list[Message]], Any]] = {
    "messages": lambda turns: {"messages": turns},
    "ShareGPT": lambda turns: {
        "conversations": [
            {"from": "human" if each["role"] == "user" else "gpt", "value": each["content"]}
            for each in turns
        ]
    },
    "Gemini": lambda turns: {
        "contents": [
            {
                "role": "user" if each["role"] == "user" else "model",
                "parts": [{"text": each["content"]}],
            }
            for each in turns
        ]
    },
    "request": lambda turns: {
        "request": {"messages": turns[:-1]},
        "response": {"choices": [{"message": turns[-1]}]},
    },
    "Langfuse": lambda turns: {"type": "GENERATION", "input": turns[:-1], "output": turns[-1]},
    "prompt": lambda turns: {"prompt": turns[:-1], "completion": [turns[-1]]},
    "preference": lambda turns: {"chosen": turns, "rejected": [assistant("No.")]},
    "history": lambda turns: {"history": turns},
    "export": lambda turns: {
        "chat_messages": [
            {
                "sender": "human" if each["role"] == "user" else "assistant",
                "text": each["content"],
            }
            for each in turns
        ]
    },
}
WHOLE = {"messages", "ShareGPT", "Gemini", "history", "export"}
"""Shapes in which every answer is one; in the others the last alone was written then."""

TEXTS = st.text(st.characters(codec="utf-8", exclude_categories=("C", "Z")), min_size=1)


@settings(max_examples=60, deadline=None)
@given(
    said=st.lists(st.tuples(TEXTS, TEXTS), min_size=1, max_size=5),
    shape=st.sampled_from(sorted(WRITERS)),
    seed=st.integers(0, 9),
    cumulative=st.booleans(),
)
def test_a_conversation_is_the_same_pairs_in_every_shape_and_order(
    said: list[tuple[str, str]], shape: str, seed: int, *, cumulative: bool
) -> None:
    turns = [turn for asked, answer in said for turn in (user(asked), assistant(answer))]
    expected = {
        (tuple((each["role"], each["content"]) for each in turns[:at]), turns[at]["content"])
        for at in range(1, len(turns), 2)
    }
    ends = range(2, len(turns) + 1, 2)
    if not cumulative and shape in WHOLE:
        ends = range(len(turns), len(turns) + 1)
    records = [WRITERS[shape](turns[:end]) for end in ends]
    random.Random(seed).shuffle(records)
    assert set(pairs_of(records)) == expected


def test_what_a_log_repeats_is_told(tmp_path: Path) -> None:
    path = tmp_path / "log.jsonl"
    path.write_text(json.dumps({"messages": CHAT, "deep": [[[[[1]]]]]}) + "\n")
    tally = RecordingTally()
    assert [name for name, _ in read_records(path, tally)] == [f"{path}:1"]


ODD = {"data": {"q": "When?", "a": "At nine.", "rows": [{"text": "one"}, {"text": "two"}]}}


@pytest.mark.parametrize(
    ("field", "pairs"),
    [
        ("data.a", [((), "At nine.")]),
        ("data.rows[].text", [((), "one"), ((), "two")]),
        ("{prompt: data.q, output: data.a}", [("When?", "At nine.")]),
        (
            "[{role: 'user', content: data.q}, {role: 'ai', content: data.a}]",
            [("When?", "At nine.")],
        ),
        ("{prompt: data.q, response: data.rows[].text}", [("When?", "one"), ("When?", "two")]),
    ],
)
def test_a_shape_of_ones_own_is_a_line(field: str, pairs: list[tuple[Any, str]]) -> None:
    found = conversation_of(ODD, field)
    assert found is not None
    assert [
        (each.prompt[0].text if each.prompt else (), each.output) for each in exchanges_of(found)
    ] == pairs


@pytest.mark.parametrize("field", ["data.none", "data", "nothing", "sum(data.q)", "data.rows"])
def test_a_field_that_names_nothing_of_use_leaves_the_known_shapes(field: str) -> None:
    assert conversation_of(ODD, field) is None
    known = {"prompt": "When?", "output": "At nine.", **ODD}
    found = conversation_of(known, field)
    assert found is not None
    assert found.turns[-1].text == "At nine."


def test_the_only_turns_in_a_record_are_found_wherever_they_are() -> None:
    turns = [{"role": "user", "content": "When?"}, {"role": "assistant", "content": "At nine."}]
    nested: Any = {"turns of it": turns, "id": 3}
    for key in "abcd":
        nested = {key: nested, "other": ["x"]}
    found = conversation_of(nested)
    assert found is not None
    assert [each.output for each in exchanges_of(found)] == ["At nine."]
    assert conversation_of({"a": {"first": turns}, "b": {"second": turns}}) is None
    assert conversation_of({"build": {"input": "src", "output": "dist"}}) is None
    for _ in range(9):
        nested = {"deeper": nested}
    assert conversation_of(nested) is None


ODD_VALUES: tuple[Any, ...] = (None, 3, True, "", "text", "[{", [], ["x"], {}, {"type": []}, [[]])


def spoiled(value: Any, draw: random.Random) -> Any:
    """Return a value in which something, somewhere, is of another type."""
    if draw.random() < 0.2 or not isinstance(value, list | dict) or not value:
        return draw.choice(ODD_VALUES)
    if isinstance(value, list):
        place = draw.randrange(len(value))
        return [spoiled(each, draw) if n == place else each for n, each in enumerate(value)]
    chosen = draw.choice([*value])
    return {key: spoiled(each, draw) if key == chosen else each for key, each in value.items()}


@pytest.mark.parametrize("tool", [*ONE, *CALLS])
def test_no_value_of_another_type_is_more_than_left_out(tool: str) -> None:
    draw = random.Random(tool)
    whole: list[Any] = [ONE[tool]] if tool in ONE else CALLS[tool]
    for _ in range(60):
        records = [("x", spoiled(each, draw)) for each in whole]
        for _, record in sessions(records, draw.choice(["", "text", "output[].text"])):
            found = conversation_of(record)
            assert found is None or all(each.output for each in exchanges_of(found))
