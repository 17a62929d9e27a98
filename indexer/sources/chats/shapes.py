"""Recognises the shapes of records: where in a record its conversation is.

A record is recognised by its keys and their values, never by its file name. Each shape has a name
for reports. `dialects` reads the turns.
"""

import re
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Any, Final

import jmespath
from jmespath.exceptions import JMESPathError

from indexer.sources.chats.dialects import are_turns, decoded, is_item, is_list
from indexer.sources.chats.streamed_answers import is_chunk, whole_answer

Object = dict[str, Any]
"""A JSON object, or a table row as a mapping of columns to values."""


class Shape(StrEnum):
    """The shape of a record with a conversation. The value is the shape's name in reports."""

    TEXT = "texts"
    MESSAGES = "OpenAI messages"
    SESSION = "sessions of one message a line"
    SHAREGPT = "ShareGPT conversations"
    SERVER_LOG = "requests and responses of a server"
    RESPONSE = "responses of a server"
    INSTRUCTION = "instructions and outputs"
    PROMPT = "prompts and outputs"
    QUESTION = "questions and answers"
    SPANS = "spans"
    RUNS = "runs"
    OBSERVATIONS = "observations"
    EVALUATION = "samples of an evaluation"
    QUESTIONS = "questions of a benchmark"
    ANSWERS = "answers"
    PREFERENCES = "preferences"
    CHATGPT = "exports of ChatGPT"


@dataclass(frozen=True, slots=True)
class Found:
    """The location of the conversation in a record.

    Attributes:
        shape: shape of the record.
        given: the prompt, as turns, a message or a text; None if there is no prompt.
        answers: what the model wrote. Several answers are samples for one prompt. None if the
            assistant turns in `given` are the answers.
        left_out: parts of the record outside the prompt and the answers, each as a noun.
        system: contents, of which the first with a text is the system message.
        history: turns before `given`, as pairs of a user's text and the answer.
        has_turns: whether the key alone shows that `given` is a list of turns, whatever it has.
        may_repeat: whether `answers` may repeat the last turn of `given`, if that is an answer.
    """

    shape: Shape
    given: Any = None
    answers: Sequence[Any] | None = None
    left_out: tuple[str, ...] = ()
    system: Sequence[Any] = ()
    history: Sequence[Any] = ()
    has_turns: bool = False
    may_repeat: bool = False


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

_ANY_LISTS: Final = frozenset({"messages", "conversations", "conversation", "chat_messages"})
"""Keys whose list always counts as turns. Under other keys, its items must clearly be turns."""

PROMPTS: Final = {
    "instruction": Shape.INSTRUCTION,
    "prompt": Shape.PROMPT,
    "question": Shape.QUESTION,
    "input": Shape.PROMPT,
}
"""Keys of prompts."""

SESSION: Final = "messages of a session"
"""Key of messages that were in separate records."""

SYSTEM: Final = (
    "system",
    "system_prompt",
    "instructions",
    "systemInstruction",
    "system_instruction",
)
"""Keys of a system message that is stored separately from the turns."""

OUTPUTS: Final = (
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
"""Keys of outputs."""

BATCHES: Final = ("choices", "candidates")
"""Output keys whose value is a list of samples, each in a wrapper."""

_BODIES: Final = frozenset(OUTPUTS) - {"content", "generation", "generated_text"}
"""Keys that mark a text as the JSON of a response. `content` is too common for that."""

_OF_SGLANG: Final = ("obj",)
_REQUESTS: Final = (
    ("request",),
    ("body",),
    ("params",),
    ("request_body",),
    ("input", "inputBodyJson"),
    _OF_SGLANG,
)
"""Keys of requests: in logs, in batches of OpenAI and Anthropic, in Helicone, in Bedrock's log
(https://docs.aws.amazon.com/bedrock/latest/userguide/model-invocation-logging.html), and in
SGLang's `--log-requests`.
"""

_RESPONSES: Final = (
    ("response",),
    ("result",),
    ("response_body",),
    ("output", "outputBodyJson"),
    ("out",),
)
"""Keys of responses, in the order of `_REQUESTS`."""

_MAX_NESTING: Final = 6
"""Most levels of nested objects to search for turns."""

_NO_MODEL: Final = ("span of no model",)
_NO_ANSWER: Final = ("response without an answer",)


def found_in(record: Any, field: str = "") -> Found | None:
    """Return the location of the conversation in a record; None if the record's shape is unknown.

    Args:
        record: a JSON object, a list of turns, or a row as a mapping of columns to values.
        field: names the text, texts or turns in the record, see `named`. It takes precedence over
            shapes.
    """
    named_value = named(record, field)
    if named_value is not None:
        found = _named(named_value, record)
        if found is not None:
            return found
    if are_turns(record):
        record = {"messages": record}
    if not isinstance(record, dict) or is_chunk(record):
        return None
    for keys, shape in _SHAPES:
        found = None if keys and keys.isdisjoint(record) else shape(record)
        if found is not None:
            return found
    return None


def named(record: Any, field: str) -> Any:
    """Return the value that a field names in a record; None if it names nothing.

    Args:
        record: record of any form.
        field: a key, or otherwise a JMESPath expression: https://jmespath.org.
    """
    if not field:
        return None
    if isinstance(record, dict) and field in record:
        return record[field]
    if not is_expression(field):
        return None
    try:
        return jmespath.search(field, record)
    except JMESPathError:  # a function in the expression does not accept this record's values
        return None


def is_expression(field: str) -> bool:
    """Return whether a field that is not a key of a record is a JMESPath expression."""
    return not set(".[{|@(").isdisjoint(field)


def _named(value: Any, record: Any) -> Found | None:
    """Interpret the value that a field names: texts, turns, or an object of a known shape."""
    value = decoded(value) if are_turns(value) else value
    texts = [value] if isinstance(value, str) else value
    if is_list(texts) and texts and all(isinstance(each, str) for each in texts):
        return Found(Shape.TEXT, texts)
    if are_turns(value):
        beside = record if isinstance(record, dict) else {}
        others = {key: beside[key] for key in (*SYSTEM, *OUTPUTS) if key in beside}
        return _turns({**others, "messages": value})
    return found_in(value) if isinstance(value, dict) else None


def _asked(record: Object, answers: Sequence[Any] | None, shape: Shape | None) -> Found | None:
    """Return what a model was given, according to a request; None if it has no prompt.

    Args:
        record: a request, or an object with the same keys.
        answers: what the model wrote.
        shape: shape of the record. None if the keys determine the shape; then the answers may
            repeat the last turn.
    """
    system = [record[key] for key in SYSTEM if record.get(key)]
    for key, known in TURN_LISTS.items():
        turns = decoded(record[key]) if key in record else None
        if is_list(turns) and (key in _ANY_LISTS or are_turns(turns)):
            first = turns[0] if turns else None
            own = Shape.SHAREGPT if isinstance(first, dict) and "from" in first else known
            may_repeat = shape is None
            return Found(shape or own, turns, answers, (), system, (), True, may_repeat)
    key = next((key for key in PROMPTS if key in record), "")
    if not key or not isinstance(record[key], str | list | None):
        return None
    if key == "input" and not ("output" in record or "model" in record):
        return None
    prompt, history = record[key], record.get("history")
    if key == "instruction" and isinstance(further := record.get("input"), str) and further.strip():
        has_both = isinstance(prompt, str) and prompt.strip()
        prompt = f"{prompt}\n\n{further}" if has_both else further
    prompt = decoded(prompt) if are_turns(prompt) else prompt
    pairs = history if is_list(history) else ()
    return Found(shape or PROMPTS[key], prompt, answers, (), system, pairs)


def _turns(record: Object) -> Found | None:
    """Turns or a prompt, and a separate output unless it repeats the last turn."""
    return _asked(record, _outputs(record), None)


def _outputs(record: Object) -> list[Any] | None:
    """Return what a model wrote, if it is under one of the usual keys."""
    for key in OUTPUTS:
        value = _unwrapped(record[key], _BODIES) if key in record else None
        if value is not None:
            if is_list(value) and len(value) > 1 and all(isinstance(each, str) for each in value):
                return value
            return [{key: value} if key in BATCHES else value]
    return None


def _server_log(record: Object) -> Found | None:
    """A request with or without a response. Each may be in a transport envelope."""
    if not TURN_LISTS.keys().isdisjoint(record):
        return None
    for path in _REQUESTS:
        request = _unwrapped(_at(record, path), (*TURN_LISTS, *PROMPTS))
        if not isinstance(request, dict):
            continue
        if path == _OF_SGLANG and "text" in request:
            request = {"prompt": request["text"]}
        answers = _responses(record)[:1] or _outputs(record) or ()
        found = _asked(request, answers, Shape.SERVER_LOG)
        if found is not None:
            return found if answers else replace(found, left_out=_NO_ANSWER)
    return None


def _responses(record: Object) -> list[Any]:
    found = (_unwrapped(_at(record, path), _BODIES) for path in _RESPONSES)
    return [each for each in found if each is not None]


def _response(record: Object) -> Found | None:
    """A server's response, either alone or under a key, as in a batch result."""
    if _is_response(record):
        return Found(Shape.RESPONSE, answers=[record])
    inner = _responses(record)
    if "custom_id" in record or any(_is_response(whole_answer(each)[0]) for each in inner):
        return Found(Shape.RESPONSE, answers=inner[:1]) if inner else None
    return None


def _is_response(value: Any) -> bool:
    """Return whether a value is a complete server response, from its form alone."""
    if not isinstance(value, dict):
        return False
    choices, output = value.get("choices"), value.get("output")
    if is_list(choices) and choices:
        return all(isinstance(each, dict) and {"message", "text"} & each.keys() for each in choices)
    if is_list(output) and output:
        return all(map(is_item, output))
    inner = value.get("message")
    message = inner if isinstance(inner, dict) else value
    return message.get("role") == "assistant" and "content" in message


def _unwrapped(value: Any, keys: Collection[str]) -> Any:
    """Return a request or a response without its transport envelope.

    A text is decoded only if it contains one of the keys, because an answer may itself be JSON.
    """
    if value is None:
        return None
    inner = decoded(value)
    if isinstance(inner, dict) and inner.get("body") is not None:
        inner = decoded(inner["body"])
    has_key = isinstance(inner, dict) and any(key in inner for key in keys)
    return inner if has_key or not isinstance(value, str) else value


def _at(record: Object, path: tuple[str, ...]) -> Any:
    """Return the value under a key, or under a path of keys."""
    found: Any = record
    for key in path:
        found = found.get(key) if isinstance(found, dict) else None
    return found


def _attributes(record: Object) -> Object:
    """Return a span's attributes. OTLP writes them as a list of keys and typed values."""
    found = decoded(record.get("attributes", record.get("span_attributes")))
    if is_list(found):
        pairs = (each for each in found if isinstance(each, dict) and "key" in each)
        return {str(each["key"]): _typed(each.get("value")) for each in pairs}
    return found if isinstance(found, dict) else {}


def _typed(value: Any) -> Any:
    inner = next(iter(value.values()), None) if isinstance(value, dict) else value
    if isinstance(value, dict) and "arrayValue" in value and isinstance(inner, dict):
        values = inner.get("values")
        return [_typed(each) for each in values] if isinstance(values, list) else None
    return inner


def _span(record: Object) -> Found | None:
    """A span in OpenTelemetry's GenAI conventions, or in OpenInference (Phoenix).

    https://opentelemetry.io/docs/specs/semconv/gen-ai/gen-ai-spans describes the current form.
    Earlier forms are events and indexed attributes, which OpenLLMetry writes. OpenInference is at
    https://github.com/Arize-ai/openinference.
    """
    attributes = _attributes(record)
    pairs = (
        (attributes.get("gen_ai.input.messages"), attributes.get("gen_ai.output.messages")),
        (_indexed(attributes, "gen_ai.prompt"), _indexed(attributes, "gen_ai.completion")),
        (_indexed(attributes, "llm.input_messages"), _indexed(attributes, "llm.output_messages")),
        (attributes.get("gen_ai.prompt"), attributes.get("gen_ai.completion")),
        _events(record),
    )
    for pair in pairs:
        given, written = map(decoded, pair)
        if given and written:
            system = decoded(attributes.get("gen_ai.system_instructions"))
            return Found(Shape.SPANS, given, _listed(written), system=[system] if system else [])
    is_span = "gen_ai.operation.name" in attributes or "openinference.span.kind" in attributes
    return Found(Shape.SPANS, left_out=_NO_MODEL) if is_span else None


def _indexed(attributes: Object, prefix: str) -> list[Any]:
    """Return messages that are flattened into attributes: `prefix.0.message.role`."""
    nested = attributes
    for part in prefix.split("."):
        nested = nested.get(part, {}) if isinstance(nested, dict) else {}
    if is_list(nested):
        return [each.get("message", each) for each in nested if isinstance(each, dict)]
    found: dict[int, dict[str, Any]] = {}
    for key, value in attributes.items():
        match = re.fullmatch(rf"{re.escape(prefix)}\.(\d+)\.(?:message\.)?(.+)", key)
        if match:
            found.setdefault(int(match[1]), {})[match[2]] = value
    return [_with_calls(found[number]) for number in sorted(found)]


def _with_calls(message: dict[str, Any]) -> dict[str, Any]:
    calls: dict[int, dict[str, Any]] = {}
    for key, value in message.items():
        match = re.fullmatch(r"tool_calls\.(\d+)\.(?:tool_call\.)?(?:function\.)?(\w+)", key)
        if match:
            calls.setdefault(int(match[1]), {})[match[2]] = value
    return {**message, "tool_calls": [calls[number] for number in sorted(calls)]}


def _events(record: Object) -> tuple[list[Any], list[Any]]:
    """Return the messages and the choices in the events of a span."""
    given, written = [], []
    events = record.get("events")
    for event in events if is_list(events) else ():
        if not isinstance(event, dict):
            continue
        name, body = str(event.get("name", "")), event.get("body", _attributes(event))
        match = re.fullmatch(r"gen_ai\.(system|user|assistant|tool)\.message", name)
        if match and isinstance(body, dict):
            given.append({"role": match[1], **body})
        elif name == "gen_ai.choice" and isinstance(body, dict):
            written.append(decoded(body.get("message", body)))
    return given, written


def _run(record: Object) -> Found | None:
    """A run of LangSmith: https://docs.langchain.com/langsmith/run-data-format."""
    kind = record.get("run_type")
    inputs, outputs = decoded(record.get("inputs")), decoded(record.get("outputs"))
    if not isinstance(kind, str) or not isinstance(inputs, dict):
        return None
    if kind not in {"llm", "chat_model"} or not isinstance(outputs, dict):
        return Found(Shape.RUNS, left_out=_NO_MODEL)
    given = next((inputs[key] for key in ("messages", "prompts", "prompt") if inputs.get(key)), "")
    written: Any = outputs.get("generations", outputs.get("choices", outputs.get("messages")))
    written = _first(written) if written is not None else outputs.get("message", outputs)
    return Found(Shape.RUNS, _first(given), _listed(written))


def _first(value: Any) -> Any:
    """Return the first list of a batch, if the value is a list of lists."""
    is_batch = is_list(value) and value and isinstance(value[0], list)
    if is_batch:
        return value[0]
    is_prompts = is_list(value) and len(value) == 1 and isinstance(value[0], str)
    return value[0] if is_prompts else value


def _listed(value: Any) -> list[Any]:
    return value if is_list(value) else [value]


_SPANS: Final = frozenset(
    {"AGENT", "CHAIN", "EMBEDDING", "EVENT", "EVALUATOR", "GUARDRAIL", "RETRIEVER", "SPAN", "TOOL"}
)


def _observation(record: Object) -> Found | None:
    """An observation of Langfuse: https://langfuse.com/docs/observability/data-model."""
    kind = record.get("type", record.get("observationType"))
    if not isinstance(kind, str) or not {"input", "output"} <= record.keys():
        return None
    if kind in _SPANS:
        return Found(Shape.OBSERVATIONS, left_out=_NO_MODEL)
    if kind != "GENERATION":
        return None
    given, written = decoded(record["input"]), [decoded(record["output"])]
    of = Shape.OBSERVATIONS
    asked = _asked({"model": "", **given}, written, of) if isinstance(given, dict) else None
    return asked or Found(of, given, written)


def _evaluated(record: Object) -> Found | None:
    """A sample of lm-evaluation-harness: https://github.com/EleutherAI/lm-evaluation-harness."""
    answers, arguments = record.get("resps"), record.get("arguments")
    if not is_list(answers) or not answers or arguments is None:
        return None
    if isinstance(arguments, dict):
        arguments = list(arguments.values())
    given = arguments[0] if is_list(arguments) and arguments else None
    if isinstance(given, dict):
        given = given.get("arg_0")
    elif is_list(given) and given:
        given = given[0]
    texts = [each for each in _listed(answers[0]) if isinstance(each, str)]
    if not texts:
        return Found(Shape.EVALUATION, left_out=("likelihoods",))
    return Found(Shape.EVALUATION, decoded(given), texts)


def _benchmark(record: Object) -> Found | None:
    """A question of MT-Bench or Spec-Bench. Its first turn is a prompt by itself."""
    turns = record.get("turns")
    if not is_list(turns) or not turns or not all(isinstance(each, str) for each in turns):
        return None
    return Found(Shape.QUESTIONS, turns[0], answers=())


def _answers_alone(record: Object) -> Found | None:
    """An answer of MT-Bench, without its questions: https://github.com/lm-sys/FastChat."""
    choices = record.get("choices")
    if not is_list(choices) or not choices or not isinstance(choices[0], dict):
        return None
    turns = choices[0].get("turns")
    if not is_list(turns) or not all(isinstance(each, str) for each in turns):
        return None
    return Found(Shape.ANSWERS, [{"role": "assistant", "content": each} for each in turns])


def _preference(record: Object) -> Found | None:
    """A preference pair, as in TRL and LLaMA-Factory. Only the preferred answer is read."""
    chosen = decoded(record.get("chosen"))
    if not chosen or not isinstance(chosen, str | list | dict):
        return None
    if is_list(chosen) and len(chosen) > 1:
        return Found(Shape.PREFERENCES, chosen[:-1], chosen[-1:])
    written, of = _listed(chosen), Shape.PREFERENCES
    return _asked({"model": "", **record}, written, of) or Found(of, answers=written)


def _tree(record: Object) -> Found | None:
    """A conversation as ChatGPT exports it: a tree of messages, of which one path was shown."""
    nodes = record.get("mapping")
    if not isinstance(nodes, dict) or not nodes:
        return None
    place = record.get("current_node")
    if not isinstance(place, str) or place not in nodes:
        leaves: list[Any] = [key for key in nodes if not _children(nodes[key])]
        place = leaves[-1] if leaves else None
    path: list[Any] = []
    seen: set[str] = set()
    while isinstance(place, str) and place in nodes and place not in seen:
        seen.add(place)
        node = nodes[place]
        message = node.get("message") if isinstance(node, dict) else None
        if isinstance(message, dict) and not _is_hidden(message):
            path.append(message)
        place = node.get("parent") if isinstance(node, dict) else None
    others = sum(_is_answer(node) for key, node in nodes.items() if key not in seen)
    return Found(Shape.CHATGPT, path[::-1], left_out=("answer of another branch",) * others)


def _children(node: Any) -> Any:
    return node.get("children") if isinstance(node, dict) else None


def _is_hidden(message: Object) -> bool:
    metadata = message.get("metadata")
    return isinstance(metadata, dict) and bool(metadata.get("is_visually_hidden_from_conversation"))


def _is_answer(node: Any) -> bool:
    message = node.get("message") if isinstance(node, dict) else None
    author = message.get("author") if isinstance(message, dict) else None
    return isinstance(author, dict) and author.get("role") == "assistant"


def _nested(record: Object) -> Found | None:
    """The only list of clear turns in nested objects, under any keys."""
    waiting, lists = [(value, 1) for value in record.values()], list[Any]()
    while waiting and len(lists) < 2:  # noqa: PLR2004
        value, depth = waiting.pop()
        if is_list(value) and are_turns(value):
            lists.append(value)
        elif isinstance(value, dict) and depth < _MAX_NESTING:
            waiting += [(each, depth + 1) for each in value.values()]
    return Found(Shape.MESSAGES, lists[0], has_turns=True) if len(lists) == 1 else None


def _session(record: Object) -> Found | None:
    """A session whose messages `sessions` joined."""
    return Found(Shape.SESSION, record[SESSION], has_turns=True) if [*record] == [SESSION] else None


_SHAPES: Final[tuple[tuple[frozenset[str], Callable[[Object], Found | None]], ...]] = (
    (frozenset({SESSION}), _session),
    (frozenset({"attributes", "span_attributes", "events"}), _span),
    (frozenset({"run_type"}), _run),
    (frozenset({"type", "observationType"}), _observation),
    (frozenset({"resps"}), _evaluated),
    (frozenset({"turns"}), _benchmark),
    (frozenset({"choices"}), _answers_alone),
    (frozenset({"chosen"}), _preference),
    (frozenset({"mapping"}), _tree),
    (frozenset(path[0] for path in _REQUESTS), _server_log),
    (frozenset({*TURN_LISTS, *PROMPTS}), _turns),
    (frozenset(), _response),
    (frozenset(), _nested),
)
"""Shapes in the order in which they are tried. A record can match only if it has at least one of
the shape's keys; a shape without keys is tried on every record."""
