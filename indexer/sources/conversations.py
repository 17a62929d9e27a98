"""Conversations in records as chat tools, trainers and servers write them.

A record is an object of JSON or a row of a table. `conversation_of` recognises its shape by its
keys and returns plain values; keys that it does not know are ignored.
"""

import json
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Final, TypeGuard

from indexer.sources.blocks import HALF_CHARACTER, whole_characters
from indexer.sources.envelopes import SYSTEM, decoded, opened
from indexer.sources.streamed_answers import is_chunk, whole_answer


class Shape(StrEnum):
    """How a record writes a conversation; the value names it in reports."""

    MESSAGES = "OpenAI messages"
    SHAREGPT = "ShareGPT conversations"
    SERVER_LOG = "requests and responses of a server"
    RESPONSE = "responses of a server"
    INSTRUCTION = "instructions and outputs"
    PROMPT = "prompts and outputs"
    QUESTION = "questions and answers"


class Turns(StrEnum):
    """Which turns of a conversation are taken."""

    ASSISTANT = "assistant"
    USER = "user"
    ALL = "all"


@dataclass(frozen=True, slots=True)
class Turn:
    """What one side said.

    Attributes:
        role: `system`, `user`, `assistant` or `tool`; other names for these are translated.
        text: never empty. Its parts, such as several texts, or a text and tool calls, are joined
            by line ends; a tool call is an object of JSON with `name` and `arguments`.
    """

    role: str
    text: str


@dataclass(frozen=True, slots=True)
class Conversation:
    """A conversation.

    Attributes:
        shape: how the record wrote it, in words.
        turns: in order; there may be none.
        left_out: what of the record is in no turn, a noun for each: `image`, `empty turn`.
        num_given: how many turns a model was given, where the record says so. An answer among
            them is part of a prompt: a server is sent all that was said before, again and again.
        samples: further answers to what the last turn answers.
    """

    shape: str
    turns: tuple[Turn, ...]
    left_out: tuple[str, ...] = ()
    num_given: int = 0
    samples: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Exchange:
    """What a model was given, and what it wrote then.

    Attributes:
        prompt: all turns before; there may be none.
        output: the text of an assistant's turn.
        num_samples: how many answers the record has to this prompt, this one included.
    """

    prompt: tuple[Turn, ...]
    output: str
    num_samples: int = 1


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
    **{  # LangChain's classes of messages
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
"""Roles by what tools call them."""

_ROLE_TYPES: Final = frozenset(
    {"human", "ai", "system", "tool", *(name for name in _ROLES if "message" in name)}
)
"""Those that LangChain has as the type of a message."""

TURN_LISTS: Final = {
    "messages": Shape.MESSAGES,
    "conversations": Shape.SHAREGPT,
    "conversation": Shape.SHAREGPT,
    "chat_messages": Shape.MESSAGES,
    "contents": Shape.MESSAGES,
    "history": Shape.MESSAGES,
    "trajectory": Shape.MESSAGES,
}
"""Keys of lists of turns."""

_PROMPTS: Final = {
    "instruction": Shape.INSTRUCTION,
    "prompt": Shape.PROMPT,
    "question": Shape.QUESTION,
    "input": Shape.PROMPT,
}
_ANY_LISTS: Final = frozenset({"messages", "conversations", "conversation", "chat_messages"})
"""Of these, what any list holds counts as turns; of the others only a list of evident turns."""

_OUTPUTS: Final = (
    "output",
    "completion",
    "response",
    "answer",
    "choices",
    "candidates",
    "content",
    "generation",
    "generated_text",
)
_BODIES: Final = frozenset(_OUTPUTS) - {"content", "generation", "generated_text"}
"""Keys by which the text of a response is known for JSON; any object has contents."""

_REQUESTS: Final = ("request", "body", "params")
_RESPONSES: Final = ("response", "result")
_TEXT_PARTS: Final = frozenset(
    {"text", "input_text", "output_text", "reasoning_text", "reasoning", "markdown", "code"}
)
_CALLS: Final = frozenset({"tool_use", "tool-call", "tool_call", "function_call", "dynamic-tool"})
"""Types of parts that call a tool: of Anthropic, of the AI SDK, of OpenTelemetry, of OpenAI."""

_RESULTS: Final = frozenset(
    {"tool_result", "tool-result", "tool_call_response", "function_call_output"}
)
"""Types of parts with what a tool answered, which no model wrote."""
_ITEMS: Final = ("message", "reasoning", "item_reference")
"""Types of items of OpenAI's Responses, next to calls and their outputs."""
_MAX_DEPTH: Final = 8
"""Contents within contents: tools nest two or three, and deeper ones could exhaust the stack."""


def conversation_of(record: object, field: str = "") -> Conversation | None:
    """Return the conversation that a record holds, or None if its shape is not recognised.

    Recognised are, in this order: a request and its response, as servers of OpenAI's and
    Anthropic's interfaces are sent and give them, streamed or not, also those of batches; lists of
    turns under `messages` or `conversations`; `instruction` (with `input`), `prompt`, `question` or
    `input` with `output`, `completion`, `response` or `answer`; a response alone. A value may be
    the JSON text of what is expected, as tables have it.

    Args:
        record: an object of JSON, a list of turns, or a row as a mapping of columns to values.
        field: a further key of a list of turns, which comes before all others.
    """
    if isinstance(record, list) and _is_turns(record):
        record = {"messages": record}
    if not isinstance(record, Mapping) or is_chunk(record):
        return None
    reading = _Reading()
    shape = reading.read(record, field)
    if shape is None:
        return None
    return Conversation(
        str(shape),
        tuple(reading.turns),
        tuple(reading.left_out),
        reading.num_given,
        tuple(reading.samples),
    )


def conversation_columns(names: Collection[str], *, with_outputs: bool = True) -> list[str]:
    """Return the columns of a table that its conversations stand in; empty if it has none.

    Args:
        names: of all columns.
        with_outputs: whether prompts alone are no conversations.
    """
    is_log = "request" in names and "response" in names
    has_output = not with_outputs or any(key in names for key in (*_OUTPUTS, "chosen"))
    has_pair = has_output and any(key in names for key in _PROMPTS)
    if not (is_log or has_pair or any(key in names for key in TURN_LISTS)):
        return []
    known = {*TURN_LISTS, *_PROMPTS, *_OUTPUTS, *SYSTEM, *_REQUESTS, "chosen"}
    return [name for name in names if name in known]


def turns_of(conversation: Conversation, role: str) -> Iterator[tuple[int, str]]:
    """Yield the number, counted from 1, and the text of every turn of a role."""
    for number, turn in enumerate(conversation.turns, 1):
        if turn.role == role:
            yield number, turn.text


def exchanges_of(conversation: Conversation) -> Iterator[Exchange]:
    """Yield each of the assistant's turns that is an output, with all turns before it."""
    last = len(conversation.turns)
    for number, text in turns_of(conversation, "assistant"):
        if number > conversation.num_given:
            before = conversation.turns[: number - 1]
            # Of answers alone none is the prompt of the next.
            prompt = before if any(turn.role != "assistant" for turn in before) else ()
            samples = conversation.samples if number == last else ()
            for output in (text, *samples):
                yield Exchange(prompt, output, 1 + len(samples))


def prompts_of(conversation: Conversation) -> Iterator[tuple[Turn, ...]]:
    """Yield what a model was given: the turns before each output, and all if the last has none.

    Turns among which no user speaks are none.
    """
    # Samples have one prompt together.
    prompts = [*dict.fromkeys(exchange.prompt for exchange in exchanges_of(conversation))]
    if conversation.turns and conversation.turns[-1].role != "assistant":
        prompts.append(conversation.turns)
    return (prompt for prompt in prompts if any(turn.role == "user" for turn in prompt))


def plain_text(turns: tuple[Turn, ...]) -> str:
    """Return the texts of turns, with an empty line between two."""
    return "\n\n".join(turn.text for turn in turns)


def messages_of(turns: tuple[Turn, ...]) -> list[dict[str, str]]:
    """Return turns as chat templates take them."""
    return [{"role": turn.role, "content": turn.text} for turn in turns]


class _Reading:
    """The turns of a record so far, and what was left out."""

    def __init__(self) -> None:
        self.turns: list[Turn] = []
        self.left_out: list[str] = []
        self.num_given = 0
        self.samples: list[str] = []

    def read(self, record: Mapping[str, Any], field: str) -> str | None:
        """Add the turns of a record, and return its shape; None if it has none that is known."""
        found = None if field and field in record else opened(record)
        if found is not None:
            self.left_out += found.left_out
            if found.given is not None:
                self._add_side(found.given, "user")
            if found.answers:
                self.num_given = len(self.turns)
                self._add_samples(found.answers)
            return found.name
        request = None if TURN_LISTS.keys() & record.keys() else _request_in(record)
        if request is not None and self._add_request(request):
            self.num_given = len(self.turns)
            self._add_response(record)
            return Shape.SERVER_LOG
        if key := self._add_request(record, field):
            return self._shape(record, key)
        if _is_response(record):
            self._add_answer(record)
            return Shape.RESPONSE
        inner = [_body(record.get(key), _BODIES) for key in _RESPONSES]
        is_batch = "custom_id" in record and any(each is not None for each in inner)
        if is_batch or any(_is_response(whole_answer(each)[0]) for each in inner):
            self._add_response(record)
            return Shape.RESPONSE
        return None

    @staticmethod
    def _shape(record: Mapping[str, Any], key: str) -> str:
        known = {**TURN_LISTS, **_PROMPTS}.get(key)
        if known is not None:
            return known
        items = decoded(record[key])
        return Shape.SHAREGPT if "from" in items[0] else Shape.MESSAGES

    def _add_request(self, record: Mapping[str, Any], field: str = "") -> str:
        """Add what a model was given and, of records, what it wrote; return its key, if any."""
        for key in (field, *TURN_LISTS):
            value = decoded(record.get(key))
            if isinstance(value, list) and (key in _ANY_LISTS or _is_turns(value)):
                self._add_system(record, value)
                self._add_turns(value, "")
                if self.turns and self.turns[-1].role != "assistant":
                    self._add_output(record)
                return key
        key = next((key for key in _PROMPTS if key in record), "")
        if not key or not isinstance(record[key], str | list | None):
            return ""
        if key == "input" and not ("output" in record or "model" in record):
            return ""
        prompt = self._prompt(record, key)
        is_turns = _is_turns(prompt)
        self._add_system(record, decoded(prompt) if is_turns else [])
        self._add_history(record.get("history"))
        self._add_side(prompt, "user")
        self._add_output(record)
        return key

    def _add_system(self, record: Mapping[str, Any], items: list[Any]) -> None:
        first = items[0] if items else None
        has_own = isinstance(first, Mapping) and _role(first) == "system"
        for key in () if has_own else SYSTEM:
            value = record.get(key)
            texts = self._texts(value) if isinstance(value, str | list | Mapping) else []
            if any(text.strip() for text in texts):
                self._add_text("system", texts)
                return

    def _add_history(self, pairs: Any) -> None:
        """Add turns before the prompt, as LLaMA-Factory writes them: pairs of texts."""
        for pair in pairs if _is_list(pairs) else ():
            if _is_list(pair) and len(pair) == 2:  # noqa: PLR2004
                self._add_side(pair[0], "user")
                self._add_side(pair[1], "assistant")

    @staticmethod
    def _prompt(record: Mapping[str, Any], key: str) -> Any:
        value, further = record[key], record.get("input")
        if key != "instruction" or not isinstance(further, str) or not further.strip():
            return value
        return f"{value}\n\n{further}" if isinstance(value, str) and value.strip() else further

    def _add_response(self, record: Mapping[str, Any]) -> None:
        """Add what a server answered: its response, or what stands next to the request."""
        before = len(self.turns), len(self.left_out)
        for key in _RESPONSES:
            value = _body(record.get(key), _BODIES)
            if value is not None:
                self._add_answer(value)
                break
        else:
            self._add_output(record)
        if before == (len(self.turns), len(self.left_out)):
            self.left_out.append("response without an answer")

    def _add_output(self, record: Mapping[str, Any]) -> None:
        """Add what a model wrote, if it stands under one of the usual keys."""
        for key in _OUTPUTS:
            value = _body(record.get(key), _BODIES)
            if value is not None:
                self.num_given = len(self.turns)
                if _is_samples(value):
                    self._add_samples(value)
                else:
                    self._add_answer({key: value} if key in _BATCHES else value)
                return

    def _add_samples(self, values: Sequence[Any]) -> None:
        """Add the first of several answers to one prompt, and keep the others beside it."""
        first = len(self.turns)
        for value in values:
            begin = len(self.turns)
            self._add_answer(value)
            if begin > first:
                self.samples += [turn.text for turn in self.turns[begin:]]
                del self.turns[begin:]

    def _add_answer(self, value: Any, depth: int = 0) -> None:
        """Add a response: its first choice, its items, its message, its content or its text."""
        value, num_damaged = whole_answer(value)
        self.left_out += ["piece of a stream that is no JSON"] * num_damaged
        if not isinstance(value, Mapping):
            self._add_side(value, "assistant")
        elif "choices" in value:
            self._add_choices(decoded(value["choices"]))
        elif _is_list(value.get("candidates")):
            self._add_choices([each.get("content") for each in value["candidates"] if each])
        elif isinstance(value.get("message"), Mapping):
            self._add_turn(value["message"], "assistant")
        elif "role" in value or "content" in value:
            self._add_turn(value, "assistant")
        elif depth == 0 and (key := next((each for each in _OUTPUTS if value.get(each)), "")):
            self._add_answer(value[key], depth + 1)
        elif not self._texts_of_answer(value):
            self.left_out.append("response without an answer")

    def _texts_of_answer(self, value: Mapping[str, Any]) -> bool:
        """Add the text of a response that is a part of a content; return whether it is one."""
        if not any(isinstance(value.get(key), str | list) for key in ("text", "value", "parts")):
            return False
        self._add_text("assistant", self._texts(value))
        return True

    def _add_choices(self, choices: Any) -> None:
        found = [each for each in choices if isinstance(each, Mapping)] if _is_list(choices) else []
        if not found:
            self.left_out.append("response without an answer")
            return
        self._add_samples([_chosen(each) for each in found])

    def _add_side(self, value: Any, role: str) -> None:
        """Add one side of an exchange: a text, a message, or a list of either."""
        if _is_turns(value):
            self._add_turns(decoded(value), role)
        elif isinstance(value, Mapping) and _is_turn(value):
            self._add_turn(value, role)
        elif _is_list(value) and any(isinstance(each, int) for each in value):
            self.left_out.append("text that is given as token ids")
        else:
            self._add_text(role, self._texts(value))

    def _add_turns(self, items: list[Any], role: str) -> None:
        was_item = False
        for item in items:
            if not isinstance(item, Mapping):
                self.left_out.append("turn that is no object")
                continue
            is_item = _is_item(item) and not _role(item)
            before = len(self.turns)
            if is_item:
                self._add_item(item, role)
            else:
                self._add_turn(item, role)
            if is_item or was_item:
                self._join_answers(before)
            was_item = is_item

    def _add_item(self, item: Mapping[str, Any], role: str) -> None:
        """Add an item of OpenAI's Responses that names no role."""
        kind = str(item["type"])
        if kind == "message":
            self._add_turn(item, role)
        elif kind == "reasoning":
            texts = self._texts(item.get("content"))
            if texts:
                self._add_text("assistant", texts)
            elif item.get("summary"):
                self.left_out.append("reasoning that is only summarised")
        elif kind.endswith("_call_output"):
            self._add_text("tool", self._texts(item.get("output")))
        elif "name" in item:
            self._add_text("assistant", self._calls([item]))
        else:
            self.left_out.append(_named(kind))

    def _join_answers(self, before: int) -> None:
        """Join a turn that was added to the one before it where a model wrote both as one."""
        last = self.turns[before - 1 :] if before else []
        if len(last) == 2 and {turn.role for turn in last} == {"assistant"}:  # noqa: PLR2004
            self.turns[before - 1 :] = [Turn("assistant", f"{last[0].text}\n{last[1].text}")]

    def _add_turn(self, item: Mapping[str, Any], role: str) -> None:
        item = _bare(item)
        role = _role(item) or role
        known = _ROLES.get(role)
        if known is None:
            self.left_out.append(f"turn of unknown role {role!r}" if role else "turn without role")
            return
        texts: list[str] = []
        if known == "assistant":
            texts = self._texts(item.get("reasoning_content") or item.get("reasoning"))
        content = _content(item)
        was_given = False
        for part in content if _is_list(content) else [content]:
            result = _result_in(part)
            if result is not None and known != "tool":
                if known == "assistant":  # the call is part of what it wrote before
                    texts += self._texts(part)
                if texts:
                    self._add_text(known, texts)
                self._add_text("tool", self._texts(result))
                texts, was_given = [], True
            else:
                texts += self._texts(part)
        calls = item.get("tool_calls")
        texts += self._calls(calls if isinstance(calls, list) else [item.get("function_call")])
        if texts or not was_given:
            self._add_text(known, texts)

    def _add_text(self, role: str, texts: list[str]) -> None:
        joined = "\n".join(texts)
        text = whole_characters(joined)
        if text != joined:
            self.left_out.append(HALF_CHARACTER)
        if text and not text.isspace():
            self.turns.append(Turn(role, text))
        else:
            self.left_out.append("empty turn")

    def _texts(self, content: Any, depth: int = 0) -> list[str]:
        """Return the texts of a content: a text, a part, or a list of these."""
        if content is None:
            return []
        if isinstance(content, str):
            return [content] if content else []
        if depth == _MAX_DEPTH:
            self.left_out.append("content that is nested too deeply")
            return []
        if _is_list(content):
            return [text for part in content for text in self._texts(part, depth + 1)]
        if isinstance(content, Mapping):
            return self._part(content, depth + 1)
        self.left_out.append("content that is no text")
        return []

    def _part(self, part: Mapping[str, Any], depth: int) -> list[str]:
        call, inner = _call_in(part), _inner_of(part)
        if call is not None:
            return self._calls([call])
        if inner is not None:
            return self._texts(inner, depth)
        kind = part.get("type", part.get("content_type"))
        if isinstance(kind, str) and kind not in _TEXT_PARTS:
            self.left_out.append(_named(kind))
            return []
        others = [_named(key) for key in part if key in {"image_url", "image", "input_audio"}]
        self.left_out += others or ["content that is no text"]
        return []

    def _calls(self, calls: list[Any]) -> list[str]:
        """Return tool calls as texts; those without a name are left out."""
        written = []
        for call in calls:
            if call is None:
                continue
            given: Mapping[str, Any] = call if isinstance(call, Mapping) else {}
            if isinstance(given.get("function"), Mapping):
                given = given["function"]
            name = next((given[key] for key in _NAMES if isinstance(given.get(key), str)), None)
            if name is None and _is_tool(given.get("type")):
                name = str(given["type"]).partition("-")[2]
            arguments = next((given[key] for key in _ARGUMENTS if key in given), None)
            if not isinstance(name, str) or not name:
                self.left_out.append("tool call without a name")
                continue
            written.append(f'{{"name": {_json(name)}, "arguments": {_arguments(arguments)}}}')
        return written


_NAMES: Final = ("name", "toolName", "function")
_ARGUMENTS: Final = ("arguments", "input", "args")
_BATCHES: Final = frozenset({"choices", "candidates"})


def _bare(item: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return a message without what LangChain or ChatGPT's export put around it."""
    for key in ("kwargs", "data"):
        inner = item.get(key)
        if isinstance(inner, Mapping) and "content" in inner and "content" not in item:
            name = item.get("id", item.get("type"))
            name = name[-1] if _is_list(name) and name else name
            further = inner.get("additional_kwargs")
            extra = further if isinstance(further, Mapping) else {}
            return {**extra, **inner, "role": name}
    return item


def _role(item: Mapping[str, Any]) -> str:
    author = item.get("author")
    if isinstance(author, Mapping):
        item = author
    for key in ("role", "from", "sender", "type"):
        name = item.get(key)
        if isinstance(name, str) and (key != "type" or name.lower() in _ROLE_TYPES):
            return name.strip().lower()
    return ""


def _content(item: Mapping[str, Any]) -> Any:
    keys = ("content", "value", "parts", "text")
    found = [item[key] for key in keys if key in item]
    return next((each for each in found if each), found[0] if found else None)


def _is_tool(kind: Any) -> bool:
    """Return whether a part is a tool's, as the AI SDK names its type: `tool-weather`."""
    return isinstance(kind, str) and kind.startswith("tool-") and kind not in _RESULTS


def _result_in(part: Any) -> Any:
    """Return what a tool answered, of a part that has it; None of any other part."""
    if not isinstance(part, Mapping):
        return None
    for key in ("functionResponse", "toolResult"):
        inner = part.get(key)
        if isinstance(inner, Mapping):
            return _told(inner.get("content", inner.get("response", "")))
    if part.get("type") in _RESULTS:
        return _told(next((part[k] for k in ("content", "output", "result") if k in part), ""))
    if (_is_tool(part.get("type")) or part.get("type") == "dynamic-tool") and "output" in part:
        return _told(part["output"])
    return None


def _call_in(part: Mapping[str, Any]) -> Any:
    """Return the call of a tool that a part is, or has inside as Gemini and Bedrock write it."""
    for key in ("functionCall", "function_call", "toolUse"):
        if isinstance(part.get(key), Mapping):
            return part[key]
    kind = part.get("type")
    return part if isinstance(kind, str) and (kind in _CALLS or _is_tool(kind)) else None


def _inner_of(part: Mapping[str, Any]) -> Any:
    """Return the content within a part; None where it holds none that is text."""
    result = _result_in(part)
    if result is not None:
        return result
    thought = part.get("reasoningContent")
    if isinstance(thought, Mapping):
        return thought.get("reasoningText", "")
    kind = part.get("type", part.get("content_type"))
    keys: tuple[str, ...] = ("text", "value", "content", "parts", "reasoning", "result")
    if isinstance(kind, str) and kind not in _TEXT_PARTS:
        keys = (kind,) if kind in {"thinking", "refusal"} else ()
    return next((part[key] for key in keys if part.get(key) is not None), None)


def _told(value: Any) -> Any:
    """Return a tool's answer as contents have it: objects that are no parts are JSON."""
    is_part = isinstance(value, Mapping) and {"text", "value", "content", "parts"} & value.keys()
    return _json(value) if isinstance(value, Mapping) and not is_part else value


def _chosen(choice: Mapping[str, Any]) -> Any:
    """Return what a choice holds: a message, a text, or a content by itself."""
    return next((choice[key] for key in ("message", "text") if choice.get(key)), choice)


def _is_turn(value: Mapping[str, Any]) -> bool:
    return bool({"role", "content", "sender", "author", "parts"} & value.keys()) or "from" in value


def _is_samples(value: Any) -> bool:
    """Return whether a list holds several answers: texts, or one message each."""
    return _is_list(value) and len(value) > 1 and all(isinstance(each, str) for each in value)


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


def _named(kind: str) -> str:
    """Return what a part of a content is, by its type: an image is called so in several ways."""
    return next((name for name in ("image", "audio", "video", "file") if name in kind), kind)


def _is_item(value: Mapping[str, Any]) -> bool:
    """Return whether a value is an item of OpenAI's Responses."""
    kind = value.get("type")
    return isinstance(kind, str) and (kind in _ITEMS or kind.endswith(("_call", "_call_output")))


def _request_in(record: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """Return the request of a server's log or of a batch, if a record has one."""
    known = (*TURN_LISTS, *_PROMPTS)
    for key in _REQUESTS:
        request = _body(record.get(key), known)
        if isinstance(request, Mapping) and any(each in request for each in known):
            return request
    return None


def _is_response(value: Any) -> bool:
    """Return whether a value is the response of a server, whole, by its form alone."""
    if not isinstance(value, Mapping):
        return False
    choices, output = value.get("choices"), value.get("output")
    if _is_list(choices) and choices:
        return all(
            isinstance(each, Mapping) and {"message", "text"} & each.keys() for each in choices
        )
    if _is_list(output) and output:
        return all(isinstance(each, Mapping) and _is_item(each) for each in output)
    inner = value.get("message")
    message = inner if isinstance(inner, Mapping) else value
    return message.get("role") == "assistant" and "content" in message


def _is_list(value: Any) -> TypeGuard[list[Any]]:
    return isinstance(value, list)


def _has_role(value: Mapping[str, Any]) -> bool:
    inner = _bare(value)
    return bool({"role", "from"} & inner.keys()) or _role(inner) in _ROLES


def _is_turns(value: Any) -> bool:
    value = decoded(value)
    if not _is_list(value) or not value:
        return False
    return all(isinstance(each, Mapping) and (_has_role(each) or _is_item(each)) for each in value)


def _body(value: Any, keys: Collection[str]) -> Any:
    """Return a request or a response, taken out of the envelope of its transport.

    A text is decoded only where it has one of the keys: answers may be JSON themselves.
    """
    inner = decoded(value)
    if isinstance(inner, Mapping) and inner.get("body") is not None:
        inner = decoded(inner["body"])
    has_key = isinstance(inner, Mapping) and any(key in inner for key in keys)
    return inner if has_key or not isinstance(value, str) else value
