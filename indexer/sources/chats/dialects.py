"""Reads the dialects of turns: how tools write roles, contents, tool calls and tool results.

A turn is an object with a role and a content. A content is a text, a part, or a list of parts. The
tables in this module follow these sources:

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
"""Maps role names that tools use, in lower case, to roles."""

_ROLE_KEYS: Final = ("role", "from", "sender", "type")
_ROLE_TYPES: Final = frozenset(
    {"human", "ai", "system", "tool", *(name for name in _ROLES if "message" in name)}
)
"""Roles that LangChain uses as the type of a message. Other tools use other types."""

_CONTENT_KEYS: Final = ("content", "value", "parts", "text")
_TEXT_TYPES: Final = frozenset(
    {"text", "input_text", "output_text", "reasoning_text", "reasoning", "markdown", "code"}
)
_OWN_TYPES: Final = frozenset({"thinking", "refusal"})
"""Part types whose text is under a key with the same name as the type."""

_INNER_KEYS: Final = ("text", "value", "content", "parts", "reasoning", "result")
"""Keys that may contain the content of a part."""

_CALL_TYPES: Final = frozenset(
    {"tool_use", "tool-call", "tool_call", "function_call", "dynamic-tool"}
)
_CALL_KEYS: Final = ("functionCall", "function_call", "toolUse")
"""Keys of a tool call in a part, in Gemini and Bedrock."""

_NAME_KEYS: Final = ("name", "toolName", "function")
_ARGUMENT_KEYS: Final = ("arguments", "input", "args")
_RESULT_TYPES: Final = frozenset(
    {"tool_result", "tool-result", "tool_call_response", "function_call_output"}
)
_RESULT_KEYS: Final = ("functionResponse", "toolResult")
_ITEMS: Final = ("message", "reasoning", "item_reference")
"""Types of items in OpenAI's Responses, apart from calls and call outputs."""

_MAX_DEPTH: Final = 8
"""Most levels of nested contents. Tools nest two or three; more could exhaust the stack."""


class Part(Enum):
    """The kind of a part of a content."""

    SAID = "said by who speaks"
    RESULT = "answered by a tool"
    LEFT_OUT = "no text: a noun that says what"


Parts = Iterator[tuple[Part, str]]


def is_list(value: Any) -> TypeGuard[list[Any]]:
    """Return whether a value is a list."""
    return isinstance(value, list)


def decoded(value: Any) -> Any:
    """Return the list or object in a JSON text, as tables store it; otherwise the value itself."""
    if not isinstance(value, str) or value.lstrip()[:1] not in {"[", "{"}:
        return value
    try:
        return json.loads(value)
    except (ValueError, RecursionError):
        return value


def role_of(turn: Mapping[str, Any], otherwise: str = "") -> str | None:
    """Return a turn's role: `system`, `user`, `assistant` or `tool`; None if it is unknown.

    Args:
        turn: turn in any dialect.
        otherwise: role to return if the turn names no role.
    """
    return _ROLES.get(named_role(turn) or otherwise)


def named_role(turn: Mapping[str, Any]) -> str:
    """Return the role name that a turn states, in lower case; empty if it states none."""
    author = turn.get("author")
    if isinstance(author, dict):  # as in ChatGPT's exports
        turn = author
    for key in _ROLE_KEYS:
        name = turn.get(key)
        if isinstance(name, str) and (key != "type" or name.lower() in _ROLE_TYPES):
            return name.strip().lower()
    return ""


def bare(turn: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return a message without LangChain's wrapper, if it has one."""
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
    """Return whether a value is clearly a turn: it has a role, or is a Responses item."""
    if not isinstance(value, dict):
        return False
    inner = bare(value)
    return bool({"role", "from"} & inner.keys()) or named_role(inner) in _ROLES or is_item(value)


def are_turns(value: Any) -> bool:
    """Return whether a value is a list of turns, or the JSON text of such a list."""
    value = decoded(value)
    return is_list(value) and bool(value) and all(map(is_turn, value))


def may_be_turn(value: Any) -> bool:
    """Return whether an object can be a turn whose role follows from its position."""
    keys = {"role", "from", "content", "sender", "author", "parts"}
    return isinstance(value, dict) and not keys.isdisjoint(value)


def is_item(value: Any) -> bool:
    """Return whether a value is an item of OpenAI's Responses."""
    kind = value.get("type") if isinstance(value, dict) else None
    return isinstance(kind, str) and (kind in _ITEMS or kind.endswith(("_call", "_call_output")))


def turn_parts(turn: Mapping[str, Any], role: str) -> Parts:
    """Yield the parts of a turn in the order written: reasoning, content and calls."""
    if role == "assistant":
        yield from content_parts(turn.get("reasoning_content") or turn.get("reasoning"))
    found = [turn[key] for key in _CONTENT_KEYS if key in turn]
    yield from content_parts(next(filter(None, found), None))
    calls = turn.get("tool_calls")
    for call in calls if is_list(calls) else [turn.get("function_call")]:
        if call is not None:
            yield _call(call)


def item_parts(item: Mapping[str, Any]) -> Parts:
    """Yield the parts of an item of OpenAI's Responses that is not a message."""
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
        yield Part.LEFT_OUT, "content that is not text"


def _parts(part: Mapping[str, Any], depth: int) -> Parts:
    """Yield what a part contains: a tool call, a tool result, both, or an inner content."""
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
        yield Part.LEFT_OUT, "content that is not text"


def _results(content: Any, depth: int = 0) -> Parts:
    """Yield a tool result as one text, and the nouns of what is left out of it."""
    texts = []
    for kind, text in content_parts(content, depth):
        if kind == Part.LEFT_OUT:
            yield kind, text
        else:
            texts.append(text)
    yield Part.RESULT, "\n".join(texts)


def _result_in(part: Mapping[str, Any]) -> Any:
    """Return the tool result in a part, or None if the part has none."""
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
    """Return whether a part type belongs to a tool, as in the AI SDK: `tool-weather`."""
    is_named = kind.startswith("tool-") and kind not in _RESULT_TYPES | _CALL_TYPES
    return is_named or kind == "dynamic-tool"


def _call_in(part: Mapping[str, Any]) -> Any:
    """Return the tool call that a part is or contains; None if there is none."""
    inner = next((part[key] for key in _CALL_KEYS if isinstance(part.get(key), dict)), None)
    kind = _type_of(part)
    return inner or (part if kind in _CALL_TYPES or _is_tool(kind) else None)


def _call(call: Any) -> tuple[Part, str]:
    """Return a tool call as a JSON object with `name` and `arguments`."""
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
    """Return a call's arguments as the model wrote them, or as JSON; `{}` if there are none."""
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
    """Return a noun for a content part, from its type. Several types mean an image."""
    return next((name for name in ("image", "audio", "video", "file") if name in kind), kind)
