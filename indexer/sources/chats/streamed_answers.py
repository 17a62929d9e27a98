"""Reassembles a streamed answer into the response that a server would have sent in one piece.

Logs store streamed answers as lists of chunks, or as the text of server-sent events. This module
reads the chunks of OpenAI's completions (`choices` with `delta` or `text`), the events of OpenAI's
Responses, and the events of Anthropic's Messages.
"""

import json
from collections.abc import Iterator, Mapping
from typing import Any, Final

Chunk = dict[str, Any]

_FIELDS: Final = ("data:", "event:", "id:", "retry:", ":")
"""Prefixes of lines of server-sent events."""

_ENDED: Final = frozenset({"response.completed", "response.incomplete", "response.failed"})
_TEXTS: Final = ("content", "reasoning_content", "reasoning", "refusal")


def whole_answer(value: Any) -> tuple[Any, int]:
    """Return a streamed answer as one response. Any other value is returned unchanged.

    Returns:
        The response, and the number of its events that are not JSON. In a truncated log, the last
        event usually is not.
    """
    chunks, num_damaged = _chunks_in(value)
    if chunks:
        for assembled in (_of_choices, _of_items, _of_blocks):
            answer = assembled(chunks)
            if answer is not None:
                return answer, num_damaged
    return value, 0


def is_chunk(record: Any) -> bool:
    """Return whether a record is a single chunk of a streamed answer."""
    if not isinstance(record, dict):
        return False
    if any("delta" in choice for choice in _choices(record)):
        return True
    kind = record.get("type")
    return isinstance(kind, str) and kind.startswith(("response.", "content_block_"))


def _chunks_in(value: Any) -> tuple[list[Chunk], int]:
    if isinstance(value, str):
        return _events(value) if value.lstrip("\ufeff \r\n").startswith(_FIELDS) else ([], 0)
    if isinstance(value, dict):
        return ([value], 0) if is_chunk(value) else ([], 0)
    if not isinstance(value, list) or not value:
        return [], 0
    if all(isinstance(each, str) for each in value):
        return _events("\n\n".join(value)) if value[0].startswith(_FIELDS) else ([], 0)
    if not all(isinstance(each, dict) for each in value):
        return [], 0
    return [_unwrapped(each) for each in value], 0


def _unwrapped(chunk: Chunk) -> Chunk:
    """Return an event's data, if the log stores `event` and `data` of each event."""
    data = chunk.get("data")
    if isinstance(data, str) and "event" in chunk:
        data = _parsed(data)
    return data if isinstance(data, dict) else chunk


def _events(text: str) -> tuple[list[Chunk], int]:
    """Return the server-sent events whose data are objects, and the number that are not JSON."""
    chunks, num_damaged = [], 0
    for data in _data(text):
        if not data.strip() or data.strip() == "[DONE]":
            continue
        chunk = _parsed(data)
        if isinstance(chunk, dict):
            chunks.append(chunk)
        else:
            num_damaged += 1
    return chunks, num_damaged


def _data(text: str) -> Iterator[str]:
    """Yield the data of each event, which are its data lines up to an empty line."""
    lines: list[str] = []
    for line in text.replace("\r\n", "\n").replace("\r", "\n").split("\n"):
        if not line.strip():
            yield "\n".join(lines)
            lines = []
        elif line.lstrip().startswith("data:"):
            # Some logs store only one of the two line breaks between events.
            data = line.lstrip().removeprefix("data:").removeprefix(" ")
            if lines and data.startswith(("{", "[DONE]")):
                yield "\n".join(lines)
                lines = []
            lines.append(data)
    yield "\n".join(lines)


def _parsed(text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None


def _choices(chunk: Chunk) -> list[Mapping[str, Any]]:
    found = chunk.get("choices")
    return [each for each in found if isinstance(each, dict)] if isinstance(found, list) else []


class _Message:
    """A message that is assembled from deltas."""

    def __init__(self) -> None:
        self._texts: dict[str, list[str]] = {}
        self._calls: dict[Any, dict[str, list[str]]] = {}

    def add(self, delta: Mapping[str, Any]) -> None:
        for key in _TEXTS:
            self._texts.setdefault(key, []).append(_fragment(delta.get(key)))
        calls = delta.get("tool_calls")
        for call in calls if isinstance(calls, list) else []:
            if isinstance(call, dict):
                self._add_call(call.get("index"), call.get("function"))
        self._add_call("function_call", delta.get("function_call"))

    def _add_call(self, index: Any, function: Any) -> None:
        if not isinstance(function, dict):
            return
        name = _fragment(function.get("name"))
        if not isinstance(index, int | str):  # without an index, a name starts the next call
            index = len(self._calls) - (not name and bool(self._calls))
        call = self._calls.setdefault(index, {"name": [], "arguments": []})
        call["name"].append(name)
        arguments = function.get("arguments")
        is_object = isinstance(arguments, dict)
        call["arguments"].append(json.dumps(arguments) if is_object else _fragment(arguments))

    def whole(self) -> dict[str, Any]:
        texts = {key: "".join(texts) for key, texts in self._texts.items()}
        calls = [
            {"function": {key: "".join(texts) for key, texts in call.items()}}
            for call in self._calls.values()
        ]
        written = {key: text for key, text in texts.items() if text}
        return {"role": "assistant", **written, "tool_calls": calls}


def _fragment(value: Any) -> str:
    """Return the text of a delta, which is a text or a list of parts with texts."""
    if isinstance(value, list):
        parts = [part.get("text") for part in value if isinstance(part, dict)]
        return "".join(part for part in parts if isinstance(part, str))
    return value if isinstance(value, str) else ""


def _of_choices(chunks: list[Chunk]) -> Any:
    """Return a response from the chunks of a chat or text completion; None for other chunks."""
    messages: dict[int, _Message] = {}
    texts: dict[int, list[str]] = {}
    for chunk in chunks:
        for place, choice in enumerate(_choices(chunk)):
            stated = choice.get("index")
            index = stated if isinstance(stated, int) else place
            delta, text = choice.get("delta"), choice.get("text")
            if isinstance(delta, dict):
                messages.setdefault(index, _Message()).add(delta)
            elif isinstance(text, str):
                texts.setdefault(index, []).append(text)
    if messages:
        return {"choices": [{"message": messages[index].whole()} for index in sorted(messages)]}
    return {"choices": [{"text": "".join(texts[i])} for i in sorted(texts)]} if texts else None


def _of_items(chunks: list[Chunk]) -> Any:
    """Return a response from events of OpenAI's Responses; None for other events.

    The last event repeats the whole response. If it is missing, the result has all finished items,
    and as much text of the unfinished item as was sent.
    """
    items: dict[Any, Any] = {}
    texts: dict[Any, list[str]] = {}
    is_stream = False
    for chunk in chunks:
        kind, place = chunk.get("type"), _key(chunk.get("output_index"))
        if not isinstance(kind, str) or not kind.startswith("response."):
            continue
        is_stream = True
        if kind in _ENDED and isinstance(chunk.get("response"), dict):
            return chunk["response"]
        if kind == "response.output_item.done":
            items[place] = chunk.get("item")
        elif kind == "response.output_text.delta":
            texts.setdefault(place, []).append(_fragment(chunk.get("delta")))
    for place, fragments in texts.items():
        parts = [{"type": "output_text", "text": "".join(fragments)}]
        items.setdefault(place, {"type": "message", "role": "assistant", "content": parts})
    return {"object": "response", "output": list(items.values())} if is_stream else None


def _of_blocks(chunks: list[Chunk]) -> Any:
    """Return a message from events of Anthropic's Messages; None for other events."""
    blocks: dict[Any, dict[str, Any]] = {}
    deltas: dict[Any, list[str]] = {}
    is_stream = False
    for chunk in chunks:
        kind, place = chunk.get("type"), _key(chunk.get("index"))
        block, delta = chunk.get("content_block"), chunk.get("delta")
        is_stream = is_stream or kind in ("message_start", "content_block_start")
        if kind == "content_block_start" and isinstance(block, dict):
            blocks[place] = dict(block)
        elif kind == "content_block_delta" and isinstance(delta, dict):
            fragments = [_fragment(delta.get(k)) for k in ("text", "thinking", "partial_json")]
            deltas.setdefault(place, []).extend(fragments)
    for place, fragments in deltas.items():
        block = blocks.setdefault(place, {"type": "text"})
        kind = block.get("type")
        key = "input" if kind == "tool_use" else "thinking" if kind == "thinking" else "text"
        begun = block.get(key)
        block[key] = (begun if isinstance(begun, str) else "") + "".join(fragments)
    content = [blocks[place] for place in blocks]
    return {"type": "message", "role": "assistant", "content": content} if is_stream else None


def _key(value: Any) -> Any:
    return value if isinstance(value, int) else 0
