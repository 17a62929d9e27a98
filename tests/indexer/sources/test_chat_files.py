"""Files of chat data as other tools write them, each indexed as expected."""

import gzip
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from indexer.sources.chats.conversations import exchanges_of
from indexer.sources.recordings import RecordingTally, read_records
from tests.indexer.sources.source_reading import json_lines, read_all, texts

ANSWER = "Łódź lies 130 km from Warsaw 🙂."
CALL = '{"name": "distance", "arguments": {"to": "Łódź", "via": null}}'
Write = Callable[[Path], Any]


def user(text: Any, **more: Any) -> dict[str, Any]:
    return {"role": "user", "content": text, **more}


def model(text: Any, **more: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": text, **more}


def turns(*texts_: str) -> list[dict[str, str]]:
    names = ("human", "gpt")
    return [{"from": names[n % 2], "value": text} for n, text in enumerate(texts_)]


def fine_tuning(path: Path) -> None:
    system = {"role": "system", "content": "Be brief.", "name": None}
    first = {"messages": [system, user("How far?"), model(ANSWER, weight=1)], "tools": None}
    second = {"messages": [user("a"), model("b", weight=0), user("c"), model("d")], "seed": 1.5}
    path.write_text(json_lines(first, second), encoding="utf-8")


def tools_and_images(path: Path) -> None:
    image = {"type": "image_url", "image_url": {"url": "data:image/png;base64,iVBOR"}}
    function = {"name": "distance", "arguments": '{"to": "Łódź", "via": null}'}
    messages = [
        user([{"type": "text", "text": "Where is this?"}, image]),
        model(None, tool_calls=[{"id": "1", "type": "function", "function": function}]),
        {"role": "tool", "tool_call_id": "1", "content": "130"},
        model([{"type": "text", "text": ANSWER}], refusal=None, audio=None),
        {"role": "narrator", "content": "The end."},
    ]
    path.write_text(json.dumps({"id": "c-1", "messages": messages}, ensure_ascii=False) + "\n")


def sharegpt(path: Path) -> None:
    records = [
        {"id": "x_0", "system": "", "conversations": turns("How far?", ANSWER, "", "As I said.")},
        {"id": "x_1", "conversations": []},
        {"id": "x_2", "conversations": turns("And?", "Nothing."), "model": None},
    ]
    path.write_text(json.dumps(records, indent=2))


def sharegpt_tools(path: Path) -> None:
    items = [
        {"from": "system", "value": "You have tools."},
        {"from": "human", "value": "How far?"},
        {"from": "function_call", "value": CALL},
        {"from": "observation", "value": '{"km": 130}'},
        {"from": "gpt", "value": ANSWER},
    ]
    path.write_text(json_lines({"conversations": items, "tools": "[]"}), encoding="utf-8")


def alpaca(path: Path) -> None:
    records = [
        {"instruction": "Add.", "input": "1 and 2", "output": "3", "history": []},
        {"instruction": "Say it.", "input": "", "output": ANSWER, "system": ""},
        {"instruction": "Fail.", "input": None, "output": None},
    ]
    path.write_text(json.dumps(records, ensure_ascii=False), encoding="utf-8")


def completions(path: Path) -> None:
    lines = [{"prompt": "1+2=", "completion": " 3"}, {"prompt": "x", "completion": ANSWER}]
    path.write_bytes(gzip.compress(json_lines(*lines, '{"prompt": "cut').encode()))


def spreadsheet(path: Path) -> None:
    rows = f'id;prompt;response;rated\r\n1;"a; ""b""";"one\r\ntwo";\r\n2;How far?;{ANSWER};5\r\n'
    path.write_bytes(rows.encode("utf-8-sig"))


def questions(path: Path) -> None:
    rows = {
        "id": ["q.1", "q.2"],
        "system_prompt": ["", "Think."],
        "question": ["How far?", "Why?"],
        "response": [ANSWER, None],
    }
    pq.write_table(pa.table(rows), path)


def chat_table(path: Path) -> None:
    messages = [[user("How far?"), model(ANSWER)], [user("a"), model("b"), user("c"), model(None)]]
    rows = {"prompt_id": ["1", "2"], "prompt": ["How far?", "a"], "messages": messages}
    pq.write_table(pa.table(rows), path)


def server_log(path: Path) -> None:
    request = {"model": "m", "messages": [user("How far?")], "stream": False, "stop": None}
    choice = {"index": 0, "finish_reason": "stop", "logprobs": None, "message": model(ANSWER)}
    response = {"id": "chatcmpl-1", "choices": [choice], "usage": {"total_tokens": 9}}
    older = {"request": {"prompt": "1+2="}, "response": {"choices": [{"text": " 3"}]}}
    failed = {"request": request, "response": {"error": {"code": 503}}, "time": 1.5}
    whole = {"time": "2026-11-22T10:00:00Z", "request": request, "response": response}
    path.write_text(json_lines(whole, '{"time": "2026-11-22T10:00:01Z", "req', failed, older))


def batch_log(path: Path) -> None:
    request = {"method": "POST", "url": "/v1/chat/completions", "body": {"messages": [user("?")]}}
    body = {"choices": [{"message": model(ANSWER)}, {"message": model("other")}]}
    answered = {"status_code": 200, "request_id": None, "body": body}
    row = {"request": json.dumps(request), "response": json.dumps(answered)}
    path.write_text("\ufeff" + json_lines(row), encoding="utf-8")


def streamed_log(path: Path) -> None:
    def chunks(*deltas: dict[str, Any]) -> list[dict[str, Any]]:
        common = {"id": "chatcmpl-1", "object": "chat.completion.chunk", "model": "m"}
        return [{**common, "choices": [{"index": 0, "delta": each}]} for each in deltas]

    pieces = [{"content": letter, "role": "assistant"} for letter in ANSWER]
    parts = ['{"to": ', '"Łódź", ', '"via": null}']
    names: list[dict[str, Any]] = [
        {"name": "distance", "arguments": ""},
        *({"arguments": p} for p in parts),
    ]
    calls = [{"tool_calls": [{"index": 0, "function": each}]} for each in names]
    events = "".join(f"data: {json.dumps(each)}\r\n\r\n" for each in chunks(*pieces, {}))
    usage = {"choices": [], "usage": {"total_tokens": 9}}
    request = {"model": "m", "messages": [user("How far?")], "stream": True}
    rows: list[dict[str, Any]] = [
        {"request": request, "response": [*chunks(*pieces), usage]},
        {"request": request, "response": f"{events}data: [DONE]\r\n\r\n"},
        {"request": request, "response": chunks({"role": "assistant", "content": None}, *calls)},
        {"request": request, "response": events[: events.index('"\\u00f3"')]},
    ]
    path.write_text(json_lines(*rows, '{"request": {"mod'))


def responses_log(path: Path) -> None:
    text: dict[str, Any] = {
        "type": "output_text",
        "text": ANSWER,
        "annotations": [],
        "logprobs": None,
    }
    arguments = CALL.partition('"arguments": ')[2][:-1]
    call = {"type": "function_call", "call_id": "c", "name": "distance", "arguments": arguments}
    returned = {"type": "function_call_output", "call_id": "c", "output": "130"}
    answer = {"type": "message", "role": "assistant", "status": "completed", "content": [text]}

    def response(*items: dict[str, Any]) -> dict[str, Any]:
        return {"id": "resp_1", "object": "response", "error": None, "output": items}

    asked = [{"role": "user", "content": [{"type": "input_text", "text": "How far?"}]}]
    rows = [
        {"request": {"model": "m", "input": "How far?"}, "response": response(call)},
        {
            "request": {
                "model": "m",
                "instructions": "Be brief.",
                "input": [*asked, call, returned],
            },
            "response": response({"type": "reasoning", "summary": []}, answer),
        },
        response(answer),
    ]
    path.write_text(json.dumps(rows))


def batch_output(path: Path) -> None:
    body = {"object": "chat.completion", "choices": [{"index": 0, "message": model(ANSWER)}]}
    rows = [
        {
            "id": f"batch_req_{number}",
            "custom_id": f"request-{number}",
            "response": {"status_code": 200, "request_id": "r", "body": each},
            "error": None,
        }
        for number, each in enumerate((body, {"error": {"message": "overloaded"}}))
    ]
    path.write_text(json_lines(*rows))


def messages_log(path: Path) -> None:
    use = {"type": "tool_use", "id": "t", "name": "distance", "input": {"to": "Łódź", "via": None}}
    image = {"type": "image", "source": {"type": "base64", "data": "iVBOR"}}
    result = {"type": "tool_result", "tool_use_id": "t", "content": [image]}
    request = {"model": "m", "system": "Be brief.", "max_tokens": 9, "messages": [user("How far?")]}
    again = {**request, "messages": [user("How far?"), model([use]), user([result])]}
    answered = {"type": "message", **model([{"type": "text", "text": ANSWER}])}
    rows = [
        {"request": request, "response": {**answered, "content": [use], "stop_reason": "tool_use"}},
        {"request": again, "response": {**answered, "stop_reason": "end_turn"}},
    ]
    path.write_text(json_lines(*rows))


def export(path: Path) -> None:
    parts = {"content_type": "text", "parts": [ANSWER, {"text": {"value": "Far."}}]}
    records = {"version": 2, "data": [{"title": None, "messages": [user("?"), model(parts)]}]}
    path.write_text(json.dumps(records, indent=1, ensure_ascii=False), encoding="utf-16")


FILES: list[tuple[str, Write, dict[str, str], str, dict[str, int]]] = [
    (
        "fine-tuning.jsonl",
        fine_tuning,
        {"1#3": ANSWER, "2#2": "b", "2#4": "d"},
        "OpenAI messages, 3 assistant turns of 2 conversations",
        {},
    ),
    (
        "tools.jsonl",
        tools_and_images,
        {"1#2": CALL, "1#4": ANSWER},
        (
            "OpenAI messages, 2 assistant turns of 1 conversation; left out: 1 x image, "
            "1 x turn of unknown role 'narrator'"
        ),
        {},
    ),
    (
        "sharegpt.json",
        sharegpt,
        {"0#2": ANSWER, "0#3": "As I said.", "2#2": "Nothing."},
        "ShareGPT conversations, 3 assistant turns of 3 conversations; left out: 1 x empty turn",
        {"empty conversation": 1},
    ),
    (
        "sharegpt-tools.jsonl",
        sharegpt_tools,
        {"1#3": CALL, "1#5": ANSWER},
        "ShareGPT conversations, 2 assistant turns of 1 conversation",
        {},
    ),
    (
        "alpaca.json",
        alpaca,
        {"0#2": "3", "1#2": ANSWER},
        "instructions and outputs, 2 assistant turns of 3 conversations",
        {"no assistant turn": 1},
    ),
    (
        "completions.jsonl.gz",
        completions,
        {"1#2": " 3", "2#2": ANSWER},
        "prompts and outputs, 2 assistant turns of 2 conversations",
        {"not JSON": 1},
    ),
    (
        "spreadsheet.csv",
        spreadsheet,
        {"0#2": "one\r\ntwo", "1#2": ANSWER},
        "prompts and outputs, 2 assistant turns of 2 conversations",
        {},
    ),
    (
        "questions.parquet",
        questions,
        {"0#2": ANSWER},
        "questions and answers, 1 assistant turn of 2 conversations",
        {"no assistant turn": 1},
    ),
    (
        "chat.parquet",
        chat_table,
        {"0#2": ANSWER, "1#2": "b"},
        "OpenAI messages, 2 assistant turns of 2 conversations; left out: 1 x empty turn",
        {},
    ),
    (
        "server.jsonl",
        server_log,
        {"1#2": ANSWER, "4#2": " 3"},
        (
            "requests and responses of a server, 2 assistant turns of 3 conversations; "
            "left out: 1 x response without an answer"
        ),
        {"not JSON": 1, "no assistant turn": 1},
    ),
    (
        "batch.jsonl",
        batch_log,
        {"1#2": ANSWER, "1#3": "other"},
        "requests and responses of a server, 2 assistant turns of 1 conversation",
        {},
    ),
    (
        "streamed.jsonl",
        streamed_log,
        {"1#2": ANSWER, "2#2": ANSWER, "3#2": CALL, "4#2": "Ł"},
        (
            "requests and responses of a server, 4 assistant turns of 4 conversations; "
            "left out: 1 x piece of a stream that is not JSON"
        ),
        {"not JSON": 1},
    ),
    (
        "batch-output.jsonl",
        batch_output,
        {"1#1": ANSWER},
        (
            "responses of a server, 1 assistant turn of 2 conversations; "
            "left out: 1 x response without an answer"
        ),
        {"empty conversation": 1},
    ),
    (
        "anthropic.jsonl",
        messages_log,
        {"1#3": CALL, "2#3": CALL, "2#4": ANSWER},
        (
            "requests and responses of a server, 3 assistant turns of 2 conversations; "
            "left out: 1 x image, 1 x empty turn"
        ),
        {},
    ),
    (
        "export.json",
        export,
        {"0#2": f"{ANSWER}\nFar."},
        "OpenAI messages, 1 assistant turn of 1 conversation",
        {},
    ),
]


@pytest.mark.parametrize(
    ("name", "write", "expected", "said", "dropped"), FILES, ids=[row[0] for row in FILES]
)
def test_a_file_is_indexed_as_expected(  # noqa: PLR0913, PLR0917
    tmp_path: Path,
    name: str,
    write: Write,
    expected: dict[str, str],
    said: str,
    dropped: dict[str, int],
) -> None:
    path = tmp_path / name
    write(path)
    documents, tally = read_all(path)
    assert texts(documents) == {f"{path}:{place}": text for place, text in expected.items()}
    assert [f"{path}: {said}"] == tally.describe_conversations()
    assert tally.skipped == dropped
    assert tally.num_dropped == sum(dropped.values())

    counted = RecordingTally()
    for _, record in read_records(path, counted):
        counted.take(record, path, "outputs", exchanges_of)
    (conversations,) = tally.conversations.values()
    (recorded,) = counted.conversations.values()
    assert recorded.num_conversations == conversations.num_conversations
    assert recorded.left_out == conversations.left_out
    assert counted.skipped == {r: n for r, n in dropped.items() if r == "not JSON"}


def test_a_log_of_responses_says_its_requests_and_responses_apart(tmp_path: Path) -> None:
    path = tmp_path / "responses.json"
    responses_log(path)
    documents, tally = read_all(path)
    expected = {"0#2": CALL, "1#3": CALL, "1#5": ANSWER, "2#1": ANSWER}
    assert texts(documents) == {f"{path}:{place}": text for place, text in expected.items()}
    assert tally.describe_conversations() == [
        f"{path}: requests and responses of a server, 3 assistant turns of 2 conversations",
        f"{path}: responses of a server, 1 assistant turn of 1 conversation",
    ]


def test_lists_of_turns_are_conversations_by_themselves(tmp_path: Path) -> None:
    lines, nested = tmp_path / "lists.jsonl", tmp_path / "lists.json"
    lists = [[user("?"), model(ANSWER)], turns("?", "b")]
    lines.write_text(json_lines(*lists))
    nested.write_text(json.dumps(lists, indent=1))
    assert list(texts(read_all(lines)[0]).values()) == [ANSWER, "b"]
    assert list(texts(read_all(nested)[0]).values()) == [ANSWER, "b"]


def test_tables_hold_turns_as_lists_of_objects_or_as_json(tmp_path: Path) -> None:
    said = [user("How far?"), model(ANSWER)]
    table, sheet = tmp_path / "chat.parquet", tmp_path / "chat.csv"
    pq.write_table(pa.table({"id": [1, 2], "messages": [said, None]}), table)
    quoted = json.dumps(said).replace('"', '""')
    sheet.write_text(f'id,messages\r\n1,"{quoted}"\r\n', encoding="utf-8-sig")
    documents, tally = read_all(table)
    assert texts(documents) == {f"{table}:0#2": ANSWER}
    assert tally.skipped == {"empty conversation": 1}
    assert texts(read_all(sheet)[0]) == {f"{sheet}:0#2": ANSWER}


def test_a_folder_of_them_is_read_as_they_are(tmp_path: Path) -> None:
    for name, write, *_ in FILES:
        write(tmp_path / name)
    (tmp_path / "package.json").write_text('{"name": "a", "messages_per_s": 3}')
    documents, tally = read_all(tmp_path)
    wanted = {f"{tmp_path}/{name}:{place}" for name, _, places, *_ in FILES for place in places}
    assert {document.name for document in documents} == {*wanted, f"{tmp_path}/package.json"}
    assert len(tally.describe_conversations()) == 11
    assert tally.describe_conversations()[-1] == "and 5 more such files"


def test_the_field_of_a_table_may_hold_turns(tmp_path: Path) -> None:
    path = tmp_path / "preferences.parquet"
    pairs = {name: [[user("?"), model(name)]] for name in ("chosen", "rejected")}
    pq.write_table(pa.table({"prompt": ["?"], **pairs}), path)
    documents, _ = read_all(path, field="chosen")
    assert texts(documents) == {f"{path}:0#2": "chosen"}


def test_users_turns_and_whole_conversations_are_documents_on_request(tmp_path: Path) -> None:
    path = tmp_path / "chat.jsonl"
    fine_tuning(path)
    users, _ = read_all(path, turns="user")
    assert list(texts(users).values()) == ["How far?", "a", "c"]
    whole, _ = read_all(path, turns="all")
    assert texts(whole) == {
        f"{path}:1": f"Be brief.\n\nHow far?\n\n{ANSWER}",
        f"{path}:2": "a\n\nb\n\nc\n\nd",
    }
