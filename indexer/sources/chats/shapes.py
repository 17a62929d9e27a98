"""Shapes of records: where in them a conversation stands.

A record is recognised by its keys and their values, never by its file's name. What each shape is
called in reports stands with it. `dialects` says how the turns inside are written.
"""

import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Any, Final

import jmespath
from jmespath.exceptions import JMESPathError

from indexer.sources.chats.dialects import are_turns, decoded, is_item, is_list
from indexer.sources.chats.streamed_answers import is_chunk, whole_answer


class Shape(StrEnum):
    """How a record writes a conversation; the value names it in reports."""

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
    """Where the conversation of a record stands.

    Attributes:
        shape: how the record writes it.
        given: what a model was given: turns, a message or a text; None for nothing.
        answers: what it wrote; several are samples of one prompt. None where turns of the
            assistant in `given` are what it wrote.
        left_out: what of the record is in neither, a noun for each.
        system: contents of which the first that has a text is what the system says.
        history: turns before `given`: pairs of what a user said, and the answer.
        has_turns: whether `given` is a list of turns by its key alone, whatever is in it.
        may_repeat: whether answers repeat the last turn that is given, where it is one.
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
"""Of these, what any list holds counts as turns; of the others only a list of evident turns."""

PROMPTS: Final = {
    "instruction": Shape.INSTRUCTION,
    "prompt": Shape.PROMPT,
    "question": Shape.QUESTION,
    "input": Shape.PROMPT,
}
"""Keys of what a model was given."""

SESSION: Final = "messages of a session"
"""The key of messages that stood in records of their own."""

SYSTEM: Final = (
    "system",
    "system_prompt",
    "instructions",
    "systemInstruction",
    "system_instruction",
)
"""Keys of what a system says next to turns."""

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
"""Keys of what a model wrote."""

BATCHES: Final = ("choices", "candidates")
"""Of these, those of which the value is a list of samples, each with what surrounds it."""

_BODIES: Final = frozenset(OUTPUTS) - {"content", "generation", "generated_text"}
"""Keys by which the text of a response is known for JSON; any object has contents."""

_REQUESTS: Final = ("request", "body", "params", "request_body", "input.inputBodyJson", "obj")
"""Keys of requests: of logs, of batches of OpenAI and Anthropic, of Helicone, of Bedrock's log
(https://docs.aws.amazon.com/bedrock/latest/userguide/model-invocation-logging.html), and of
SGLang's `--log-requests`."""

_RESPONSES: Final = ("response", "result", "response_body", "output.outputBodyJson", "out")
"""Those of what was answered, in the same order."""

_MAX_NESTING: Final = 6
"""Objects in objects that are looked for turns."""

_NO_MODEL: Final = ("span of no model",)
_NO_ANSWER: Final = ("response without an answer",)


def found_in(record: Any, field: str = "") -> Found | None:
    """Return where the conversation of a record stands; None if its shape is not recognised.

    Args:
        record: an object of JSON, a list of turns, or a row as a mapping of columns to values.
        field: names the text, the texts or the turns in it, before any shape: see `named`.
    """
    named_value = named(record, field)
    if named_value is not None:
        found = _named(named_value, record)
        if found is not None:
            return found
    if are_turns(record):
        record = {"messages": record}
    if not isinstance(record, Mapping) or is_chunk(record):
        return None
    return next(filter(None, (shape(record) for shape in _SHAPES)), None)


def named(record: Any, field: str) -> Any:
    """Return what a field names in a record; None where it names nothing there.

    Args:
        record: of any form.
        field: a key, or else an expression of JMESPath: https://jmespath.org.
    """
    if not field:
        return None
    if isinstance(record, Mapping) and field in record:
        return record[field]
    if not is_expression(field):
        return None
    try:
        return jmespath.search(field, record)
    except JMESPathError:  # a function that does not take what this record has
        return None


def is_expression(field: str) -> bool:
    """Return whether a field is an expression of JMESPath, if it is no key of a record."""
    return not set(".[{|@(").isdisjoint(field)


def _named(value: Any, record: Any) -> Found | None:
    """Return what a value is that was named: texts, turns, or an object of a known shape."""
    value = decoded(value) if are_turns(value) else value
    texts = [value] if isinstance(value, str) else value
    if is_list(texts) and texts and all(isinstance(each, str) for each in texts):
        return Found(Shape.TEXT, texts)
    if are_turns(value):
        beside = record if isinstance(record, Mapping) else {}
        others = {key: beside[key] for key in (*SYSTEM, *OUTPUTS) if key in beside}
        return _turns({**others, "messages": value})
    return found_in(value) if isinstance(value, Mapping) else None


def _asked(record: Mapping[str, Any]) -> tuple[str, Found] | None:
    """Return the key of what a model was given, and that; None where an object has none."""
    system = [record[key] for key in SYSTEM if record.get(key)]
    for key, shape in TURN_LISTS.items():
        turns = decoded(record.get(key))
        if is_list(turns) and (key in _ANY_LISTS or are_turns(turns)):
            return key, Found(shape, turns, system=system, has_turns=True)
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
    return key, Found(PROMPTS[key], prompt, system=system, history=pairs)


def _turns(record: Mapping[str, Any]) -> Found | None:
    """Turns, or a prompt, with what was written next to them, if that is not the last turn."""
    asked = _asked(record)
    if asked is None:
        return None
    key, found = asked
    turns = found.given
    if key in TURN_LISTS and turns and isinstance(turns[0], Mapping) and "from" in turns[0]:
        found = replace(found, shape=Shape.SHAREGPT)
    return replace(found, answers=_outputs(record), may_repeat=key in TURN_LISTS)


def _outputs(record: Mapping[str, Any]) -> list[Any] | None:
    """Return what a model wrote, if it stands under one of the usual keys."""
    for key in OUTPUTS:
        value = _unwrapped(record.get(key), _BODIES)
        if value is not None:
            if is_list(value) and len(value) > 1 and all(isinstance(each, str) for each in value):
                return value
            return [{key: value} if key in BATCHES else value]
    return None


def _server_log(record: Mapping[str, Any]) -> Found | None:
    """A request, with a response or not: each by itself, or in the envelope of its transport."""
    if not TURN_LISTS.keys().isdisjoint(record):
        return None
    for path in _REQUESTS:
        request = _unwrapped(_at(record, path), (*TURN_LISTS, *PROMPTS))
        if path == "obj" and isinstance(request, Mapping) and "text" in request:
            request = {"prompt": request["text"]}
        asked = _asked(request) if isinstance(request, Mapping) else None
        if asked is not None:
            answers = _responses(record)[:1] or _outputs(record) or ()
            without = () if answers else _NO_ANSWER
            return replace(asked[1], shape=Shape.SERVER_LOG, answers=answers, left_out=without)
    return None


def _responses(record: Mapping[str, Any]) -> list[Any]:
    found = (_unwrapped(_at(record, path), _BODIES) for path in _RESPONSES)
    return [each for each in found if each is not None]


def _response(record: Mapping[str, Any]) -> Found | None:
    """What a server answered, by itself or under a key, such as that of a batch's result."""
    if _is_response(record):
        return Found(Shape.RESPONSE, answers=[record])
    inner = _responses(record)
    if "custom_id" in record or any(_is_response(whole_answer(each)[0]) for each in inner):
        return Found(Shape.RESPONSE, answers=inner[:1]) if inner else None
    return None


def _is_response(value: Any) -> bool:
    """Return whether a value is the response of a server, whole, by its form alone."""
    if not isinstance(value, Mapping):
        return False
    choices, output = value.get("choices"), value.get("output")
    if is_list(choices) and choices:
        return all(
            isinstance(each, Mapping) and {"message", "text"} & each.keys() for each in choices
        )
    if is_list(output) and output:
        return all(map(is_item, output))
    inner = value.get("message")
    message = inner if isinstance(inner, Mapping) else value
    return message.get("role") == "assistant" and "content" in message


def _unwrapped(value: Any, keys: Collection[str]) -> Any:
    """Return a request or a response, taken out of the envelope of its transport.

    A text is decoded only where it has one of the keys: answers may be JSON themselves.
    """
    inner = decoded(value)
    if isinstance(inner, Mapping) and inner.get("body") is not None:
        inner = decoded(inner["body"])
    has_key = isinstance(inner, Mapping) and any(key in inner for key in keys)
    return inner if has_key or not isinstance(value, str) else value


def _at(record: Mapping[str, Any], path: str) -> Any:
    """Return what stands under a key, or under a key in an object under another."""
    outer, _, inner = path.partition(".")
    found = record.get(outer)
    if not inner:
        return found
    return found.get(inner) if isinstance(found, Mapping) else None


def _attributes(record: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return a span's attributes; OTLP writes them as a list of keys and typed values."""
    found = decoded(record.get("attributes", record.get("span_attributes")))
    if is_list(found):
        pairs = (each for each in found if isinstance(each, Mapping) and "key" in each)
        return {str(each["key"]): _typed(each.get("value")) for each in pairs}
    return found if isinstance(found, Mapping) else {}


def _typed(value: Any) -> Any:
    inner = next(iter(value.values()), None) if isinstance(value, Mapping) else value
    if isinstance(value, Mapping) and "arrayValue" in value and isinstance(inner, Mapping):
        values = inner.get("values")
        return [_typed(each) for each in values] if isinstance(values, list) else None
    return inner


def _span(record: Mapping[str, Any]) -> Found | None:
    """A span of OpenTelemetry's GenAI conventions, or of OpenInference (Phoenix).

    https://opentelemetry.io/docs/specs/semconv/gen-ai/gen-ai-spans (before: events and indexed
    attributes, as OpenLLMetry writes them), https://github.com/Arize-ai/openinference.
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


def _indexed(attributes: Mapping[str, Any], prefix: str) -> list[Any]:
    """Return messages that attributes spell out one by one: `prefix.0.message.role`."""
    nested = attributes
    for part in prefix.split("."):
        nested = nested.get(part, {}) if isinstance(nested, Mapping) else {}
    if is_list(nested):
        return [each.get("message", each) for each in nested if isinstance(each, Mapping)]
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


def _events(record: Mapping[str, Any]) -> tuple[list[Any], list[Any]]:
    """Return messages and choices that a span has as events."""
    given, written = [], []
    events = record.get("events")
    for event in events if is_list(events) else ():
        if not isinstance(event, Mapping):
            continue
        name, body = str(event.get("name", "")), event.get("body", _attributes(event))
        match = re.fullmatch(r"gen_ai\.(system|user|assistant|tool)\.message", name)
        if match and isinstance(body, Mapping):
            given.append({"role": match[1], **body})
        elif name == "gen_ai.choice" and isinstance(body, Mapping):
            written.append(decoded(body.get("message", body)))
    return given, written


def _run(record: Mapping[str, Any]) -> Found | None:
    """A run of LangSmith: https://docs.langchain.com/langsmith/run-data-format."""
    kind = record.get("run_type")
    inputs, outputs = decoded(record.get("inputs")), decoded(record.get("outputs"))
    if not isinstance(kind, str) or not isinstance(inputs, Mapping):
        return None
    if kind not in {"llm", "chat_model"} or not isinstance(outputs, Mapping):
        return Found(Shape.RUNS, left_out=_NO_MODEL)
    given = next((inputs[key] for key in ("messages", "prompts", "prompt") if inputs.get(key)), "")
    written: Any = outputs.get("generations", outputs.get("choices", outputs.get("messages")))
    written = _first(written) if written is not None else outputs.get("message", outputs)
    return Found(Shape.RUNS, _first(given), _listed(written))


def _first(value: Any) -> Any:
    """Return the first of a batch: lists within a list."""
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


def _observation(record: Mapping[str, Any]) -> Found | None:
    """An observation of Langfuse: https://langfuse.com/docs/observability/data-model."""
    kind = record.get("type", record.get("observationType"))
    if not isinstance(kind, str) or not {"input", "output"} <= record.keys():
        return None
    if kind in _SPANS:
        return Found(Shape.OBSERVATIONS, left_out=_NO_MODEL)
    if kind != "GENERATION":
        return None
    given, written = decoded(record["input"]), [decoded(record["output"])]
    asked = _asked({"model": "", **given}) if isinstance(given, Mapping) else None
    found = asked[1] if asked else Found(Shape.OBSERVATIONS, given)
    return replace(found, shape=Shape.OBSERVATIONS, answers=written)


def _evaluated(record: Mapping[str, Any]) -> Found | None:
    """A sample of lm-evaluation-harness: https://github.com/EleutherAI/lm-evaluation-harness."""
    answers, arguments = record.get("resps"), record.get("arguments")
    if not is_list(answers) or not answers or arguments is None:
        return None
    if isinstance(arguments, Mapping):
        arguments = list(arguments.values())
    given = arguments[0] if is_list(arguments) and arguments else None
    if isinstance(given, Mapping):
        given = given.get("arg_0")
    elif is_list(given) and given:
        given = given[0]
    texts = [each for each in _listed(answers[0]) if isinstance(each, str)]
    if not texts:
        return Found(Shape.EVALUATION, left_out=("likelihoods",))
    return Found(Shape.EVALUATION, decoded(given), texts)


def _benchmark(record: Mapping[str, Any]) -> Found | None:
    """A question of MT-Bench or Spec-Bench, of which the first turn can be asked by itself."""
    turns = record.get("turns")
    if not is_list(turns) or not turns or not all(isinstance(each, str) for each in turns):
        return None
    return Found(Shape.QUESTIONS, turns[0], answers=())


def _answers_alone(record: Mapping[str, Any]) -> Found | None:
    """An answer of MT-Bench, without its questions: https://github.com/lm-sys/FastChat."""
    choices = record.get("choices")
    if not is_list(choices) or not choices or not isinstance(choices[0], Mapping):
        return None
    turns = choices[0].get("turns")
    if not is_list(turns) or not all(isinstance(each, str) for each in turns):
        return None
    return Found(Shape.ANSWERS, [{"role": "assistant", "content": each} for each in turns])


def _preference(record: Mapping[str, Any]) -> Found | None:
    """A pair of which one is preferred, as TRL and LLaMA-Factory have it; the other isn't read."""
    chosen = decoded(record.get("chosen"))
    if not chosen or not isinstance(chosen, str | list | Mapping):
        return None
    if is_list(chosen) and len(chosen) > 1:
        return Found(Shape.PREFERENCES, chosen[:-1], chosen[-1:])
    asked = _asked({"model": "", **record})
    found = asked[1] if asked else Found(Shape.PREFERENCES)
    return replace(found, shape=Shape.PREFERENCES, answers=_listed(chosen))


def _tree(record: Mapping[str, Any]) -> Found | None:
    """A conversation as ChatGPT exports it: a tree, of which one path was shown last."""
    nodes = record.get("mapping")
    if not isinstance(nodes, Mapping) or not nodes:
        return None
    place = record.get("current_node")
    if place not in nodes:
        leaves: list[Any] = [key for key in nodes if not _children(nodes[key])]
        place = leaves[-1] if leaves else None
    path: list[Any] = []
    seen: set[str] = set()
    while isinstance(place, str) and place in nodes and place not in seen:
        seen.add(place)
        node = nodes[place]
        message = node.get("message") if isinstance(node, Mapping) else None
        if isinstance(message, Mapping) and not _is_hidden(message):
            path.append(message)
        place = node.get("parent") if isinstance(node, Mapping) else None
    others = sum(_is_answer(node) for key, node in nodes.items() if key not in seen)
    return Found(Shape.CHATGPT, path[::-1], left_out=("answer of another branch",) * others)


def _children(node: Any) -> Any:
    return node.get("children") if isinstance(node, Mapping) else None


def _is_hidden(message: Mapping[str, Any]) -> bool:
    metadata = message.get("metadata")
    return isinstance(metadata, Mapping) and bool(
        metadata.get("is_visually_hidden_from_conversation")
    )


def _is_answer(node: Any) -> bool:
    message = node.get("message") if isinstance(node, Mapping) else None
    author = message.get("author") if isinstance(message, Mapping) else None
    return isinstance(author, Mapping) and author.get("role") == "assistant"


def _nested(record: Mapping[str, Any]) -> Found | None:
    """The only list of evident turns in an object in it, under whatever keys."""
    waiting, lists = [(value, 1) for value in record.values()], list[Any]()
    while waiting and len(lists) < 2:  # noqa: PLR2004
        value, depth = waiting.pop()
        if is_list(value) and are_turns(value):
            lists.append(value)
        elif isinstance(value, Mapping) and depth < _MAX_NESTING:
            waiting += [(each, depth + 1) for each in value.values()]
    return Found(Shape.MESSAGES, lists[0], has_turns=True) if len(lists) == 1 else None


def _session(record: Mapping[str, Any]) -> Found | None:
    """A session that `sessions` put together."""
    return Found(Shape.SESSION, record[SESSION], has_turns=True) if [*record] == [SESSION] else None


_SHAPES: Final[tuple[Callable[[Mapping[str, Any]], Found | None], ...]] = (
    _session,
    _span,
    _run,
    _observation,
    _evaluated,
    _benchmark,
    _answers_alone,
    _preference,
    _tree,
    _server_log,
    _turns,
    _response,
    _nested,
)
