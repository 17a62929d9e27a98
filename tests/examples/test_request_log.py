"""What a server was asked and answered, as lines that the indexer reads."""

import asyncio
import fcntl
import json
import logging
import subprocess
import sys
import textwrap
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from examples.nightly import request_log
from examples.nightly.request_log import RequestLog, append
from indexer.sources.chats.conversations import conversation_of, turns_of
from indexer.sources.chats.shapes import Shape
from tests.examples.asgi import CHAT, Saying, asked, chat_chunks, events

ROOT = Path(__file__).parents[2]
QUESTION = {"role": "user", "content": "Wie weit ist es nach Köln? 🚂"}
ANSWER = "Ungefähr 90 km, oder 2 · 45 🙂."
CALLS = [
    {"name": "route", "arguments": '{"from": "Aachen", "to": "Köln"}'},
    {"name": "weather", "arguments": "{}"},
]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "logs"


def request_body(**more: Any) -> dict[str, Any]:
    return {"model": "m", "messages": [QUESTION], **more}


def answer_body(message: Any) -> bytes:
    choice = {"index": 0, "message": message, "finish_reason": "stop"}
    return json.dumps({"object": "chat.completion", "choices": [choice]}).encode()


def logged(folder: Path) -> list[dict[str, Any]]:
    """The records of all days."""
    lines = [line for path in sorted(folder.glob("*")) for line in path.read_bytes().splitlines()]
    return [json.loads(line) for line in lines]


def recorded(folder: Path, app: Any, body: Any, path: str = CHAT) -> list[dict[str, Any]]:
    """Ask an application once, and return what is in the log then."""
    log = RequestLog(app, folder)
    asked(log, body, path)
    log.close()
    return logged(folder)


def assistant(record: Any) -> list[str]:
    """What the indexer takes of a record."""
    conversation = conversation_of(record)
    assert conversation is not None
    assert conversation.shape == Shape.SERVER_LOG
    return [text for _, text in turns_of(conversation, "assistant")]


def test_an_answer_is_kept_with_its_request(folder: Path) -> None:
    body = answer_body({"role": "assistant", "content": ANSWER})
    app = Saying([body[:7], body[7:]])
    log = RequestLog(app, folder)
    before = datetime.now(UTC)
    assert asked(log, request_body()) == body
    log.close()
    assert json.loads(app.asked[0]) == request_body()
    (record,) = logged(folder)
    assert record.keys() == {"time", "request", "response"}
    assert record["request"] == request_body()
    assert record["response"] == json.loads(body)
    assert before.timestamp() - 1 < datetime.fromisoformat(record["time"]).timestamp()
    assert assistant(record) == [ANSWER]


def test_a_log_is_its_owners_alone_and_holds_no_credentials(folder: Path) -> None:
    recorded(folder, Saying([answer_body({"content": "a"})]), request_body())
    (path,) = folder.iterdir()
    assert path.name == f"{datetime.now(UTC):%Y-%m-%d}.jsonl"
    assert (folder.stat().st_mode & 0o777, path.stat().st_mode & 0o777) == (0o700, 0o600)
    assert "secret-of-a-user" not in path.read_text()


@pytest.mark.parametrize("size", [1, 7, 10_000])
def test_a_stream_is_kept_as_the_answer_that_it_makes(folder: Path, size: int) -> None:
    def called(*calls: Any) -> Any:
        return {"tool_calls": list(calls)}

    deltas = [
        {"role": "assistant", "content": ""},
        {"reasoning_content": "It is "},
        {"reasoning_content": "near."},
        {"content": ANSWER[:5]},
        {"content": ANSWER[5:], "tool_calls": None},
        called({"index": 0, "id": "a", "type": "function", "function": {"name": "route"}}),
        called({"index": 0, "function": {"arguments": CALLS[0]["arguments"][:9]}}),
        called(
            {"index": 1, "id": "b", "type": "function", "function": CALLS[1]},
            {"index": 0, "type": "function", "function": {"arguments": '"Aachen", "to": "Köln"}'}},
        ),
    ]
    stream = events(*chat_chunks(*deltas))
    app = Saying([stream[at : at + size] for at in range(0, len(stream), size)])
    (record,) = recorded(folder, app, request_body(stream=True))
    whole = {
        "role": "assistant",
        "reasoning_content": "It is near.",
        "content": ANSWER,
        "tool_calls": [
            {"index": 0, "id": "a", "type": "function", "function": CALLS[0]},
            {"index": 1, "id": "b", "type": "function", "function": CALLS[1]},
        ],
    }
    choice = {"index": 0, "message": whole, "finish_reason": "stop"}
    response = {"id": "c1", "object": "chat.completion", "model": "m", "choices": [choice]}
    assert record["response"] == response
    assert assistant(record) == assistant({"request": request_body(), "response": response})


def test_choices_and_texts_of_a_stream_are_kept_apart(folder: Path) -> None:
    chunks = [
        {"object": "text_completion", "choices": [{"index": index, "text": text}]}
        for index, text in ((1, "x"), (0, "a"), (1, "y"), (0, "b"))
    ]
    usage: dict[str, Any] = {"choices": [], "usage": {"total_tokens": 9}}
    stream = events(*chunks, usage, {"error": {"message": "none"}}).replace(b"\n", b"\r\n")
    app, body = Saying([stream]), {"prompt": "p", "stream": True}
    (record,) = recorded(folder, app, body, "/v1/completions")
    response = record["response"]
    assert [choice["text"] for choice in response["choices"]] == ["ab", "xy"]
    assert response["usage"] == usage["usage"]
    assert assistant(record) == ["ab"]


def test_a_stream_of_responses_is_kept_by_its_last_event(folder: Path) -> None:
    response = {"object": "response", "output": [{"type": "message", "content": ANSWER}]}
    pieces = [
        {"type": "response.created", "response": {"output": []}},
        {"type": "response.output_text.delta", "delta": ANSWER},
        {"type": "response.completed", "response": response},
    ]
    body = {"input": "q", "stream": True}
    (record,) = recorded(folder, Saying([events(*pieces)]), body, "/v1/responses")
    assert record["response"] == response
    cut = Saying([events(*pieces[:2])], breaks_off=True)
    with pytest.raises(asyncio.CancelledError):
        recorded(folder, cut, body, "/v1/responses")
    assert len(logged(folder)) == 1


def test_a_stream_that_was_given_up_is_kept_as_far_as_it_came(folder: Path) -> None:
    stream = events(*chat_chunks({"content": "as far "}, {"content": "as it came"}))
    cut = stream.index(b"it came")
    for pieces in ([stream[:cut]], [b""]):
        log = RequestLog(Saying(pieces, breaks_off=True), folder)
        with pytest.raises(asyncio.CancelledError):
            asked(log, request_body(stream=True))
        log.close()
    (record,) = logged(folder)
    assert record["is_aborted"] is True
    assert assistant(record) == ["as far "]


def test_an_answer_without_stream_that_was_given_up_is_left_out(folder: Path) -> None:
    log = RequestLog(Saying([answer_body({})[:20]], breaks_off=True), folder)
    with pytest.raises(asyncio.CancelledError):
        asked(log, request_body())
    log.close()
    assert not folder.exists()


@pytest.mark.parametrize(
    ("status", "path"),
    [(400, CHAT), (500, CHAT), (200, "/v1/models"), (200, "/v1/embeddings"), (200, "/metrics")],
)
def test_errors_and_other_requests_are_not_kept(folder: Path, status: int, path: str) -> None:
    app = Saying([b'{"choices": []}'], status=status)
    assert recorded(folder, app, request_body(), path) == []


def test_what_is_no_request_passes(folder: Path) -> None:
    seen: list[Any] = []

    async def send(message: Any) -> None:
        seen.append(message["type"])

    log = RequestLog(Saying([]), folder)
    for kind in ("lifespan", "websocket"):
        asyncio.run(log({"type": kind}, None, send))  # type: ignore[arg-type]
    assert seen == ["lifespan.seen", "websocket.seen"]


@pytest.mark.parametrize(
    ("body", "answer"),
    [
        (b"no JSON", b"{}"),
        (b"{}", b"no JSON"),
        (b"\xff\xfe", b"{}"),
        (b"[" * 100_000, b"{}"),
        ({"stream": True}, events({"choices": [{"delta": "no object"}]})),
        ({"stream": True}, events({"choices": [None]})),
    ],
)
def test_what_is_not_understood_is_answered(
    folder: Path, body: Any, answer: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    app = Saying([answer])
    log = RequestLog(app, folder)
    for _ in range(2):
        assert asked(log, body) == answer
    app.pieces = [answer_body({"content": "understood"})]
    asked(log, request_body())
    log.close()
    assert [assistant(record) for record in logged(folder)] == [["understood"]]
    assert [record.levelno for record in caplog.records] == [logging.ERROR]
    assert "not understood (said once)" in caplog.text


def test_half_a_surrogate_pair_costs_that_character_alone(folder: Path) -> None:
    body = rb'{"choices": [{"message": {"content": "half \ud83d of it"}}]}'
    (record,) = recorded(folder, Saying([body]), request_body())
    assert assistant(record) == ["half ? of it"]


def test_a_folder_must_be_named(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    monkeypatch.delenv("REQUEST_LOG", raising=False)
    with pytest.raises(ValueError, match="export REQUEST_LOG="):
        RequestLog(Saying([]))
    monkeypatch.setenv("REQUEST_LOG", str(folder))
    log = RequestLog(Saying([answer_body({"content": "a"})]))
    asked(log, request_body())
    log.close()
    assert len(logged(folder)) == 1


WRITES = """
    import sys
    from pathlib import Path
    from examples.nightly.request_log import RequestLog
    from tests.examples.asgi import Saying, asked
    folder, name = sys.argv[1:]
    app = Saying([])
    log = RequestLog(app, folder)
    for number in range(150):
        text = f"{name}{number:03d}" * (1 + 397 * number % 3000)
        app.pieces = [b'{"choices": [{"message": {"content": "%s"}}]}' % text.encode()]
        asked(log, {"messages": []})
"""


def started(source: str, *arguments: str) -> "subprocess.Popen[str]":
    command = [sys.executable, "-c", textwrap.dedent(source), *arguments]
    return subprocess.Popen(command, cwd=ROOT, stderr=subprocess.PIPE, text=True)


def test_processes_that_write_at_once_tear_no_line(folder: Path) -> None:
    """They end without closing their logs: what waits is written at the end of a process."""
    processes = [started(WRITES, str(folder), name) for name in "abc"]
    assert [process.communicate(timeout=60)[1] for process in processes] == ["", "", ""]
    texts = [assistant(record)[0] for record in logged(folder)]
    assert len(texts) == 450
    assert all(text == text[:4] * (len(text) // 4) for text in texts)
    assert {text[:4] for text in texts} == {f"{n}{i:03d}" for n in "abc" for i in range(150)}
    order = [text[:4] for text in texts if text[0] == "a"]
    assert order == sorted(order)


FILLS = """
    import resource, signal, sys
    from pathlib import Path
    from examples.nightly.request_log import RequestLog
    from tests.examples.asgi import Saying, asked
    folder = Path(sys.argv[1])
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    answer = b'{"choices": [{"message": {"content": "%s"}}]}' % (b"x" * 500)
    log = RequestLog(Saying([answer]), folder)
    for most in (1500, 1500, 1500, resource.RLIM_INFINITY):  # bytes of a file
        resource.setrlimit(resource.RLIMIT_FSIZE, (most, resource.RLIM_INFINITY))
        assert asked(log, {"messages": []}) == answer
        log.close()
"""


def test_a_full_disk_costs_whole_lines_of_the_log_alone(folder: Path) -> None:
    process = started(FILLS, str(folder))
    _, said = process.communicate(timeout=60)
    assert process.returncode == 0, said
    assert [assistant(record) for record in logged(folder)] == [["x" * 500]] * 3
    assert said.count("answered but not logged: the file cannot be written") == 1
    assert said.count("logged again; lost to the log: 1") == 1


def test_a_folder_that_cannot_be_made_costs_the_log_alone(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    taken = tmp_path / "taken"
    taken.write_text("of another program")
    body = answer_body({"content": "a"})
    log = RequestLog(Saying([body]), taken)
    assert [asked(log, request_body()) for _ in range(3)] == [body] * 3
    log.close()
    assert len(caplog.records) == 1
    assert "(said once)" in caplog.text
    assert taken.read_text() == "of another program"


def test_a_link_in_place_of_a_log_is_not_written_through(tmp_path: Path) -> None:
    other, link = tmp_path / "other", tmp_path / "2026-01-01.jsonl"
    other.write_text("of another program")
    link.symlink_to(other)
    with pytest.raises(OSError, match="symbolic links"):
        append(link, b"line\n")
    assert other.read_text() == "of another program"


def test_a_line_that_a_killed_process_left_costs_that_line_alone(folder: Path) -> None:
    path = folder / "2026-01-01.jsonl"
    append(path, b'{"number": 1}\n')
    with path.open("ab") as file:
        file.write(b'{"number"')
    append(path, b'{"number": 3}\n')
    assert path.read_bytes() == b'{"number": 1}\n{"number"\n{"number": 3}\n'


def test_answers_do_not_wait_for_the_disk(
    folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    body = answer_body({"content": "a" * 1000})
    monkeypatch.setattr(request_log, "MAX_WAITING_BYTES", 5 * len(body))
    log = RequestLog(Saying([body]), folder)
    asked(log, request_body())
    log.close()
    (path,) = folder.iterdir()
    with path.open("rb") as held:
        fcntl.flock(held, fcntl.LOCK_EX)  # the writer waits, as on a disk that hangs
        began_s = time.monotonic()
        for _ in range(20):
            assert asked(log, request_body()) == body
        assert time.monotonic() - began_s < 3
    log.close()
    assert 2 <= len(logged(folder)) <= 6
    assert caplog.text.count("the disk is too slow (said once)") == 1
    assert "logged again" in caplog.text


def test_what_is_too_long_is_answered_and_not_held(
    folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(request_log, "MAX_RECORD_BYTES", 1000)
    body = answer_body({"content": "a" * 1000})
    assert recorded(folder, Saying([body[:500], body[500:]]), request_body()) == []
    assert "too long (said once)" in caplog.text
