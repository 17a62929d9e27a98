"""Keeps what an OpenAI-compatible server was asked and what it answered, one file a day.

An ASGI middleware without further packages, for vLLM and any other server that takes one:

    export REQUEST_LOG=logs PYTHONPATH=examples/nightly
    vllm serve MODEL --middleware request_log.RequestLog

`logs/2026-11-22.jsonl` then holds a line `{"time": ..., "request": ..., "response": ...}` for every
answer that ended on that day (UTC), as `foredraft build` and `foredraft estimate` read them.

- Streamed answers are put together to what the same request would have got without a stream. One
  that the client gave up is kept as far as it came, with `"is_aborted": true`.
- An answer never waits for the log: lines are made and written in a thread. What cannot be written
  is lost to the log alone, and that is said once.
- Files are their owner's alone. Headers, and so credentials, are not kept; what users wrote is.
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
"""Names the folder of the logs. Variables with FOREDRAFT_ would be taken for settings of drafts."""

PATHS: Final = ("/v1/chat/completions", "/v1/completions", "/v1/responses")

MAX_RECORD_BYTES: Final = 16 << 20
"""Longest request and answer that are kept; together with images they may be longer."""

MAX_WAITING_BYTES: Final = 64 << 20
"""Most that waits to be written: the disk is slower than the server, then, or hangs."""

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
    """A request and its answer, as they pass by.

    Attributes:
        request: the request's body.
        answer: the answer's body, as far as it came.
        status: of HTTP; 0 before the answer began.
        is_whole: whether the answer came to its end.
        is_too_long: whether more came than is kept; the bodies are empty, then.
    """

    request: bytearray = field(default_factory=bytearray)
    answer: bytearray = field(default_factory=bytearray)
    status: int = 0
    is_whole: bool = False
    is_too_long: bool = False

    def __len__(self) -> int:
        return len(self.request) + len(self.answer)

    def note_request(self, message: Message) -> None:
        """Note a message from the client."""
        if message["type"] == "http.request":
            self._add(self.request, message)

    def note_answer(self, message: Message) -> None:
        """Note a message to the client."""
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
    """The middleware.

    Args:
        app: the application that answers.
        folder: of the logs; made if it is missing. Default: the one that `REQUEST_LOG` names.

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
        """Answer a request, and note both."""
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
        """Wait, for some seconds at most, until all is written; also done at the process's end."""
        self._writer.close()


class _Writer:
    """Writes exchanges in a thread, and says once that some were lost."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._queue: queue.SimpleQueue[Exchange | None] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None
        self._num_waiting_bytes = 0
        self._num_lost: Counter[str] = Counter()

    def put(self, exchange: Exchange) -> None:
        """Hand over what is to be written; returns at once."""
        with self._lock:
            if exchange.is_too_long:
                self._lose(_TOO_LONG, f"more than {MAX_RECORD_BYTES} bytes")
                return
            if self._num_waiting_bytes + len(exchange) > MAX_WAITING_BYTES:
                self._lose(_TOO_SLOW, f"{self._num_waiting_bytes} bytes wait for {self._folder}")
                return
            self._num_waiting_bytes += len(exchange)
            if self._thread is None:  # not before: a server may fork until it answers
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
    """Return an exchange as a line of JSON; empty if the answer had not begun.

    Raises:
        Exception: of any kind, where a body is not as the interface has it.
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
    return text.encode("utf-8", "replace") + b"\n"  # half a surrogate pair is no UTF-8


def append(path: Path, line: bytes) -> None:
    """Append a line to a file, whole or not at all, whoever else does so at the same time.

    Raises:
        OSError: the disk is full or refuses.
    """
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    flags = os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
    descriptor = os.open(path, flags, 0o600)
    try:
        with suppress(OSError):  # a file system without locks: lines of one process stay whole
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        size = os.fstat(descriptor).st_size
        if size and os.pread(descriptor, 1, size - 1) != b"\n":
            line = b"\n" + line  # its writer was killed: that line alone is lost
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
    """Return the answer that a stream of server-sent events makes; None if it says nothing.

    Of the Responses API the last event holds the whole answer: without it there is none. Elsewhere
    each event holds what is new of each choice.
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
    """Yield the events of a stream that hold an object; one that was cut off is left out."""
    text = stream.decode("utf-8", "replace").replace("\r\n", "\n")
    for block in text.split("\n\n"):
        lines = (line for line in block.split("\n") if line.startswith("data:"))
        data = "\n".join(line.removeprefix("data:").removeprefix(" ") for line in lines)
        with suppress(ValueError):  # `[DONE]`, or cut off
            event = json.loads(data)
            if isinstance(event, dict):
                yield event


_WRITTEN: Final = frozenset({"content", "reasoning", "reasoning_content", "refusal", "arguments"})
"""Keys of texts that come in pieces; others, such as the name of a tool, come whole."""


def _add_choice(choice: dict[str, Any], event: dict[str, Any]) -> None:
    """Add what an event says of a choice: a piece of a message, or of a text."""
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
    """Add pieces of tool calls; the number of the call that a piece is of comes with it."""
    for delta in deltas:
        number = delta.get("index", len(calls))
        known = next((call for call in calls if call.get("index") == number), None)
        if known is None:
            known = {"index": number}
            calls.append(known)
        _add_delta(known, delta)
