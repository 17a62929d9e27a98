"""Dialects of turns: how tools write who speaks, what is said, and what tools are asked and answer.

A turn is an object with a role and a content. A content is a text, a part, or a list of parts. The
tables name the parts by their sources:

- chats and Responses of OpenAI: https://platform.openai.com/docs/api-reference
- Anthropic's Messages: https://docs.anthropic.com/en/api/messages
- Gemini and Vertex: https://ai.google.dev/api/caching#Content
- Converse of Bedrock:
  https://docs.aws.amazon.com/bedrock/latest/APIReference/API_runtime_ContentBlock.html
- the AI SDK: https://ai-sdk.dev/docs/reference/ai-sdk-core/model-message
- OpenTelemetry: https://opentelemetry.io/docs/specs/semconv/gen-ai/gen-ai-spans
- LangChain: https://docs.langchain.com/oss/python/langchain/messages
- ShareGPT and LLaMA-Factory: https://github.com/hiyouga/LLaMA-Factory/tree/main/data
"""

import json
from collections.abc import Iterator, Mapping
from enum import Enum
from typing import Any, Final, TypeGuard

_ROLES: Final = {
    **dict.fromkeys(("system", "developer"), "system"),
    **dict.fromkeys(("user", "human", "prompter", "customer"), "user"),
    **dict.fromkeys(
        ("assistant", "gpt", "chatgpt", "model", "ai", "bot", "chatbot", "bing", "bard"),
        "assistant",
    ),
    "function_call": "assistant",
    **dict.fromkeys(
        ("tool", "function", "observation", "ipython", "function_response", "tool_response"), "tool"
    ),
    **{  # LangChain's classes
        f"{name}message{chunk}": role
        for name, role in (
            ("system", "system"),
            ("human", "user"),
            ("ai", "assistant"),
            ("tool", "tool"),
            ("function", "tool"),
        )
        for chunk in ("", "chunk")
    },
}
"""Roles by what tools call them, in lower case."""

_ROLE_KEYS: Final = ("role", "from", "sender", "type")
_ROLE_TYPES: Final = frozenset(
    {"human", "ai", "system", "tool", *(name for name in _ROLES if "message" in name)}
)
"""Those that LangChain has as the type of a message; other tools have other types."""

_CONTENT_KEYS: Final = ("content", "value", "parts", "text")
_TEXT_TYPES: Final = frozenset(
    {"text", "input_text", "output_text", "reasoning_text", "reasoning", "markdown", "code"}
)
_OWN_TYPES: Final = frozenset({"thinking", "refusal"})
"""Types of parts whose text stands under the name of the type."""

_INNER_KEYS: Final = ("text", "value", "content", "parts", "reasoning", "result")
"""Keys of the content within a part."""

_CALL_TYPES: Final = frozenset(
    {"tool_use", "tool-call", "tool_call", "function_call", "dynamic-tool"}
)
_CALL_KEYS: Final = ("functionCall", "function_call", "toolUse")
"""Keys of a call within a part, of Gemini and Bedrock."""

_NAME_KEYS: Final = ("name", "toolName", "function")
_ARGUMENT_KEYS: Final = ("arguments", "input", "args")
_RESULT_TYPES: Final = frozenset(
    {"tool_result", "tool-result", "tool_call_response", "function_call_output"}
)
_RESULT_KEYS: Final = ("functionResponse", "toolResult")
_ITEMS: Final = ("message", "reasoning", "item_reference")
"""Types of items of OpenAI's Responses, next to calls and their outputs."""

_MAX_DEPTH: Final = 8
"""Contents within contents: tools nest two or three, and deeper ones could exhaust the stack."""


class Part(Enum):
    """What a part of a content is."""

    SAID = "said by who speaks"
    RESULT = "answered by a tool"
    LEFT_OUT = "no text: a noun that says what"


Parts = Iterator[tuple[Part, str]]


def is_list(value: Any) -> TypeGuard[list[Any]]:
    """Return whether a value is a list."""
    return isinstance(value, list)


def decoded(value: Any) -> Any:
    """Return a list or an object that is written as JSON text, as tables do; else the value."""
    if not isinstance(value, str) or value.lstrip()[:1] not in {"[", "{"}:
        return value
    try:
        return json.loads(value)
    except (ValueError, RecursionError):
        return value


def role_of(turn: Mapping[str, Any], otherwise: str = "") -> str | None:
    """Return who speaks: `system`, `user`, `assistant`, `tool`; None for a role that is unknown.

    Args:
        turn: as any dialect writes it.
        otherwise: the role of a turn that names none.
    """
    return _ROLES.get(named_role(turn) or otherwise)


def named_role(turn: Mapping[str, Any]) -> str:
    """Return what a turn calls its role, in lower case; empty if it names none."""
    author = turn.get("author")
    if isinstance(author, dict):  # ChatGPT's exports
        turn = author
    for key in _ROLE_KEYS:
        name = turn.get(key)
        if isinstance(name, str) and (key != "type" or name.lower() in _ROLE_TYPES):
            return name.strip().lower()
    return ""


def bare(turn: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return a message without what LangChain puts around it."""
    for key in ("kwargs", "data"):
        inner = turn.get(key)
        if isinstance(inner, dict) and "content" in inner and "content" not in turn:
            name = turn.get("id", turn.get("type"))
            name = name[-1] if is_list(name) and name else name
            further = inner.get("additional_kwargs")
            extra = further if isinstance(further, dict) else {}
            return {**extra, **inner, "role": name}
    return turn


def is_turn(value: Any) -> bool:
    """Return whether a value is evidently a turn: it has a role, or is an item of Responses."""
    if not isinstance(value, dict):
        return False
    inner = bare(value)
    return bool({"role", "from"} & inner.keys()) or named_role(inner) in _ROLES or is_item(value)


def are_turns(value: Any) -> bool:
    """Return whether a value is a list of turns, or the JSON text of one."""
    value = decoded(value)
    return is_list(value) and bool(value) and all(map(is_turn, value))


def may_be_turn(value: Any) -> bool:
    """Return whether an object can be a turn whose role follows from where it stands."""
    keys = {"role", "from", "content", "sender", "author", "parts"}
    return isinstance(value, dict) and not keys.isdisjoint(value)


def is_item(value: Any) -> bool:
    """Return whether a value is an item of OpenAI's Responses."""
    kind = value.get("type") if isinstance(value, dict) else None
    return isinstance(kind, str) and (kind in _ITEMS or kind.endswith(("_call", "_call_output")))


def turn_parts(turn: Mapping[str, Any], role: str) -> Parts:
    """Yield the parts of a turn: reasoning, content and calls, in the order of their writing."""
    if role == "assistant":
        yield from content_parts(turn.get("reasoning_content") or turn.get("reasoning"))
    found = [turn[key] for key in _CONTENT_KEYS if key in turn]
    yield from content_parts(next(filter(None, found), None))
    calls = turn.get("tool_calls")
    for call in calls if is_list(calls) else [turn.get("function_call")]:
        if call is not None:
            yield _call(call)


def item_parts(item: Mapping[str, Any]) -> Parts:
    """Yield the parts of an item of OpenAI's Responses that is no message."""
    kind = str(item["type"])
    if kind.endswith("_call_output"):
        yield from _results(item.get("output"))
    elif kind == "reasoning":
        parts = list(content_parts(item.get("content")))
        if not parts and item.get("summary"):
            parts = [(Part.LEFT_OUT, "reasoning that is only summarised")]
        yield from parts
    else:
        yield _call(item) if "name" in item else (Part.LEFT_OUT, _noun(kind))


def content_parts(content: Any, depth: int = 0) -> Parts:
    """Yield the parts of a content: a text, a part, or a list of these."""
    if content is None or content == "":
        return
    if isinstance(content, str):
        yield Part.SAID, content
    elif depth == _MAX_DEPTH:
        yield Part.LEFT_OUT, "content that is nested too deeply"
    elif is_list(content):
        for each in content:
            yield from content_parts(each, depth + 1)
    elif isinstance(content, dict):
        yield from _parts(content, depth + 1)
    else:
        yield Part.LEFT_OUT, "content that is no text"


def _parts(part: Mapping[str, Any], depth: int) -> Parts:
    """Yield what a part holds: a call, what a tool answered, or both, or an inner content."""
    call, result = _call_in(part), _result_in(part)
    if call is not None:
        yield _call(call)
    if result is not None:
        yield from _results(result, depth)
    if call is not None or result is not None:
        return
    thought = part.get("reasoningContent")
    if isinstance(thought, dict):  # Bedrock
        yield from content_parts(thought.get("reasoningText"), depth)
        return
    kind = _type_of(part)
    is_other = bool(kind) and kind not in _TEXT_TYPES
    keys = _INNER_KEYS if not is_other else (kind,) if kind in _OWN_TYPES else ()
    inner = next((part[key] for key in keys if part.get(key) is not None), None)
    if inner is not None:
        yield from content_parts(inner, depth)
        return
    media = [key for key in part if key in {"image_url", "image", "input_audio"}]
    for name in [kind] if is_other else media:
        yield Part.LEFT_OUT, _noun(name)
    if not is_other and not media:
        yield Part.LEFT_OUT, "content that is no text"


def _results(content: Any, depth: int = 0) -> Parts:
    """Yield what a tool answered as one text, and what is left out of it."""
    texts = []
    for kind, text in content_parts(content, depth):
        if kind == Part.LEFT_OUT:
            yield kind, text
        else:
            texts.append(text)
    yield Part.RESULT, "\n".join(texts)


def _result_in(part: Mapping[str, Any]) -> Any:
    """Return what a tool answered, of a part that has it; None of any other part."""
    kind = _type_of(part)
    found = next((part[key] for key in _RESULT_KEYS if isinstance(part.get(key), dict)), None)
    if found is not None:
        found = found.get("content", found.get("response", ""))
    elif kind in _RESULT_TYPES:
        found = next((part[key] for key in ("content", "output", "result") if key in part), "")
    elif _is_tool(kind):
        found = part.get("output")
    is_part = isinstance(found, dict) and not {*_CONTENT_KEYS}.isdisjoint(found)
    return _json(found) if isinstance(found, dict) and not is_part else found


def _type_of(part: Mapping[str, Any]) -> str:
    kind = part.get("type", part.get("content_type"))
    return kind if isinstance(kind, str) else ""


def _is_tool(kind: str) -> bool:
    """Return whether a part is a tool's, as the AI SDK names its type: `tool-weather`."""
    is_named = kind.startswith("tool-") and kind not in _RESULT_TYPES | _CALL_TYPES
    return is_named or kind == "dynamic-tool"


def _call_in(part: Mapping[str, Any]) -> Any:
    """Return the call of a tool that a part is, or has inside; None where there is none."""
    inner = next((part[key] for key in _CALL_KEYS if isinstance(part.get(key), dict)), None)
    kind = _type_of(part)
    return inner or (part if kind in _CALL_TYPES or _is_tool(kind) else None)


def _call(call: Any) -> tuple[Part, str]:
    """Return the call of a tool as an object of JSON with `name` and `arguments`."""
    given: Mapping[str, Any] = call if isinstance(call, dict) else {}
    if isinstance(given.get("function"), dict):
        given = given["function"]
    name = next((given[key] for key in _NAME_KEYS if isinstance(given.get(key), str)), None)
    if name is None and _is_tool(kind := _type_of(given)):
        name = kind.partition("-")[2]
    if not name:
        return Part.LEFT_OUT, "tool call without a name"
    arguments = next((given[key] for key in _ARGUMENT_KEYS if key in given), None)
    return Part.SAID, f'{{"name": {_json(name)}, "arguments": {_arguments(arguments)}}}'


def _arguments(value: Any) -> str:
    """Return arguments as the model wrote them, or as JSON; `{}` if there are none."""
    if value is None or (isinstance(value, str) and not value.strip()):
        return "{}"
    if not isinstance(value, str):
        return _json(value)
    try:
        json.loads(value)
    except (ValueError, RecursionError):
        return _json(value)
    return value


def _json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False, default=str)


def _noun(kind: str) -> str:
    """Return what a part of a content is, by its type: an image is called so in several ways."""
    return next((name for name in ("image", "audio", "video", "file") if name in kind), kind)
