"""Logs the requests to an OpenAI-compatible server and its answers, in one file per day.

This ASGI middleware needs no further packages. It works with vLLM and any server that takes ASGI
middleware:

    export REQUEST_LOG=logs PYTHONPATH=examples/nightly
    vllm serve MODEL --middleware request_log.RequestLog

`logs/2026-11-22.jsonl` then has a line `{"time": ..., "request": ..., "response": ...}` for every
answer that ended on that day (UTC). `foredraft build` and `foredraft estimate` read these files.

- A streamed answer is logged as the answer to the same request without streaming. If the client
  disconnected, the part sent so far is logged with `"is_aborted": true`.
- An answer never waits for the log, because a thread formats and writes the lines. If a line cannot
  be written, only the log loses it, and one message reports that.
- Only the owner can read the files. They contain what users wrote, but no headers and so no
  credentials.
- Several processes may write to one folder.
"""

import atexit
import fcntl
import json
import logging
import os
import queue
import threading
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator, MutableMapping
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final

FOLDER_VARIABLE: Final = "REQUEST_LOG"
"""Environment variable with the log folder. With the prefix FOREDRAFT_, it would be a setting."""

PATHS: Final = ("/v1/chat/completions", "/v1/completions", "/v1/responses")

MAX_RECORD_BYTES: Final = 16 << 20
"""Most bytes of a request and its answer together; longer ones are not logged."""

MAX_WAITING_BYTES: Final = 64 << 20
"""Most bytes that wait to be written. More means that the disk is slower than the server."""

_FLUSH_S: Final = 5.0
_OK: Final = 200
_NOT_WRITTEN: Final = "the file cannot be written"
_TOO_SLOW: Final = "the disk is too slow"
_TOO_LONG: Final = "a request is too long"
_UNREADABLE: Final = "a request is not understood"

Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[Message, Receive, Send], Awaitable[None]]

_log = logging.getLogger(__name__)


@dataclass(slots=True)
class Exchange:
    """A request and its answer, collected while they pass through.

    Attributes:
        request: the request's body.
        answer: the answer's body so far.
        status: HTTP status; 0 before the answer started.
        is_whole: whether the answer is complete.
        is_too_long: whether the exchange exceeds the size limit; then both bodies are empty.
    """

    request: bytearray = field(default_factory=bytearray)
    answer: bytearray = field(default_factory=bytearray)
    status: int = 0
    is_whole: bool = False
    is_too_long: bool = False

    def __len__(self) -> int:
        return len(self.request) + len(self.answer)

    def note_request(self, message: Message) -> None:
        """Record a message from the client."""
        if message["type"] == "http.request":
            self._add(self.request, message)

    def note_answer(self, message: Message) -> None:
        """Record a message to the client."""
        if message["type"] == "http.response.start":
            self.status = message["status"]
        elif message["type"] == "http.response.body":
            self._add(self.answer, message)
            self.is_whole = not message.get("more_body", False)

    def _add(self, body: bytearray, message: Message) -> None:
        if self.is_too_long:
            return
        body += message.get("body", b"")
        if len(self) > MAX_RECORD_BYTES:
            self.is_too_long = True
            self.request.clear()
            self.answer.clear()


class RequestLog:
    """The ASGI middleware that logs requests and answers.

    Args:
        app: the application that answers.
        folder: log folder, created if missing. By default, the folder that `REQUEST_LOG` names.

    Raises:
        ValueError: no folder is named.
    """

    def __init__(self, app: App, folder: str | Path | None = None) -> None:
        named = folder or os.environ.get(FOLDER_VARIABLE)
        if not named:
            raise ValueError(f"name the folder of the logs: export {FOLDER_VARIABLE}=logs")
        self._app = app
        self._writer = _Writer(Path(named))

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        """Answer a request, and log the request and its answer."""
        if scope["type"] != "http" or not str(scope["path"]).endswith(PATHS):
            await self._app(scope, receive, send)
            return
        exchange = Exchange()

        async def receive_and_note() -> Message:
            message = await receive()
            exchange.note_request(message)
            return message

        async def note_and_send(message: Message) -> None:
            exchange.note_answer(message)
            await send(message)

        try:
            await self._app(scope, receive_and_note, note_and_send)
        finally:
            if exchange.status == _OK:
                self._writer.put(exchange)

    def close(self) -> None:
        """Wait a few seconds at most until everything is written. Also runs at process exit."""
        self._writer.close()


class _Writer:
    """Writes exchanges in a thread. If some are lost, it logs that only once."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._queue: queue.SimpleQueue[Exchange | None] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None
        self._num_waiting_bytes = 0
        self._num_lost: Counter[str] = Counter()

    def put(self, exchange: Exchange) -> None:
        """Queue an exchange for writing; returns at once."""
        with self._lock:
            if exchange.is_too_long:
                self._lose(_TOO_LONG, f"more than {MAX_RECORD_BYTES} bytes")
                return
            if self._num_waiting_bytes + len(exchange) > MAX_WAITING_BYTES:
                self._lose(_TOO_SLOW, f"{self._num_waiting_bytes} bytes wait for {self._folder}")
                return
            self._num_waiting_bytes += len(exchange)
            if self._thread is None:  # not earlier, because a server may fork before it answers
                self._thread = threading.Thread(target=self._run, name="request-log", daemon=True)
                self._thread.start()
                atexit.register(self.close)
            self._queue.put(exchange)

    def close(self) -> None:
        with self._lock:
            thread, self._thread = self._thread, None
        if thread is not None:
            self._queue.put(None)
            thread.join(_FLUSH_S)
            atexit.unregister(self.close)

    def _run(self) -> None:
        while (exchange := self._queue.get()) is not None:
            self._write(exchange)
            with self._lock:
                self._num_waiting_bytes -= len(exchange)

    def _write(self, exchange: Exchange) -> None:
        now = datetime.now(UTC)
        try:
            line = line_of(exchange, now)
        except Exception as error:  # noqa: BLE001  servers differ, and the thread must go on
            with self._lock:
                self._lose(_UNREADABLE, f"{type(error).__name__}: {error}")
            return
        try:
            if line:
                append(self._folder / f"{now:%Y-%m-%d}.jsonl", line)
        except OSError as error:
            with self._lock:
                self._lose(_NOT_WRITTEN, str(error))
        else:
            with self._lock:
                self._recover()

    def _lose(self, kind: str, reason: str) -> None:
        if not self._num_lost[kind]:
            _log.error("answered but not logged: %s (said once): %s", kind, reason)
        self._num_lost[kind] += 1

    def _recover(self) -> None:
        lost = sum(self._num_lost.pop(kind, 0) for kind in (_NOT_WRITTEN, _TOO_SLOW))
        if lost:
            _log.warning("requests are logged again; lost to the log: %d", lost)


def line_of(exchange: Exchange, now: datetime) -> bytes:
    """Return an exchange as a line of JSON; empty if the answer had not started.

    Raises:
        Exception: of any kind, if a body does not match the API.
    """
    request = json.loads(exchange.request)
    is_streamed = isinstance(request, dict) and bool(request.get("stream"))
    if not is_streamed and not exchange.is_whole:
        return b""
    response = assembled(exchange.answer) if is_streamed else json.loads(exchange.answer)
    if response is None:
        return b""
    time = now.isoformat(timespec="milliseconds")
    record: dict[str, Any] = {"time": time, "request": request, "response": response}
    if not exchange.is_whole:
        record["is_aborted"] = True
    text = json.dumps(record, ensure_ascii=False, separators=(",", ":"))
    return text.encode("utf-8", "replace") + b"\n"  # half a surrogate pair is not valid UTF-8


def append(path: Path, line: bytes) -> None:
    """Append a line to a file, whole or not at all, even if other processes append as well.

    Raises:
        OSError: the disk is full, or the system denies the write.
    """
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    flags = os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
    descriptor = os.open(path, flags, 0o600)
    try:
        with suppress(OSError):  # without file locks, lines of a single process still stay whole
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        size = os.fstat(descriptor).st_size
        if size and os.pread(descriptor, 1, size - 1) != b"\n":
            line = b"\n" + line  # a writer was killed, and only its own line is lost
        try:
            _write_all(descriptor, line)
        except OSError:
            os.ftruncate(descriptor, size)
            raise
    finally:
        os.close(descriptor)


def _write_all(descriptor: int, content: bytes) -> None:
    left = memoryview(content)
    while left:
        left = left[os.write(descriptor, left) :]


def assembled(stream: bytes | bytearray) -> dict[str, Any] | None:
    """Return the answer that a stream of server-sent events contains; None if there is none.

    In the Responses API, the last event has the whole answer; without it, there is no answer. In
    other APIs, each event has the new part of each choice.
    """
    answer: dict[str, Any] = {}
    choices: dict[int, dict[str, Any]] = {}
    for event in _events(stream):
        if event.get("type") in {"response.completed", "response.incomplete"}:
            return event["response"] if isinstance(event.get("response"), dict) else None
        if not isinstance(event.get("choices"), list):
            continue
        answer |= {key: value for key, value in event.items() if value is not None}
        for number, delta in enumerate(event["choices"]):
            _add_choice(choices.setdefault(delta.get("index", number), {}), delta)
    if not choices:
        return None
    kind = str(answer.get("object", "")).removesuffix(".chunk")
    return answer | {"object": kind, "choices": [choices[number] for number in sorted(choices)]}


def _events(stream: bytes | bytearray) -> Iterator[dict[str, Any]]:
    """Yield the events of a stream that contain an object. A truncated event is left out."""
    text = stream.decode("utf-8", "replace").replace("\r\n", "\n")
    for block in text.split("\n\n"):
        lines = (line for line in block.split("\n") if line.startswith("data:"))
        data = "\n".join(line.removeprefix("data:").removeprefix(" ") for line in lines)
        with suppress(ValueError):  # `[DONE]`, or a truncated event
            event = json.loads(data)
            if isinstance(event, dict):
                yield event


_WRITTEN: Final = frozenset({"content", "reasoning", "reasoning_content", "refusal", "arguments"})
"""Keys of texts that arrive in pieces. Other values, such as a tool's name, arrive whole."""


def _add_choice(choice: dict[str, Any], event: dict[str, Any]) -> None:
    """Add an event's part of a choice: a piece of a message, or of a text."""
    for key, value in event.items():
        if key == "delta":
            _add_delta(choice.setdefault("message", {}), value)
        elif key == "text":
            choice["text"] = choice.get("text", "") + value
        elif value is not None or key not in choice:
            choice[key] = value


def _add_delta(message: dict[str, Any], delta: dict[str, Any]) -> None:
    for key, value in delta.items():
        if key == "tool_calls":
            _add_calls(message.setdefault("tool_calls", []), value or [])
        elif isinstance(value, dict):
            _add_delta(message.setdefault(key, {}), value)
        elif key in _WRITTEN and isinstance(value, str):
            message[key] = (message.get(key) or "") + value
        elif value is not None or key not in message:
            message[key] = value


def _add_calls(calls: list[dict[str, Any]], deltas: list[dict[str, Any]]) -> None:
    """Add pieces of tool calls. Each piece states the number of its call."""
    for delta in deltas:
        number = delta.get("index", len(calls))
        known = next((call for call in calls if call.get("index") == number), None)
        if known is None:
            known = {"index": number}
            calls.append(known)
        _add_delta(known, delta)
