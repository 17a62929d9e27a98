"""Records of exports, traces and evaluations: the conversations that are in their envelopes.

An envelope is recognised by its shape, not by a file's name, and taken off: what is inside is what
`conversations` reads. One message a line, as agents write their sessions, is put together first.
"""

import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

Record = tuple[str, Any]
"""A record's name, and the value that JSON or a table has there."""


@dataclass(frozen=True, slots=True)
class Opened:
    """What an envelope holds.

    Attributes:
        name: of the shape, for reports.
        given: what a model was given: turns, a message, or a text; None for nothing.
        answers: what it wrote; several are samples of one prompt. Where there are none, turns of
            the assistant in `given` are what it wrote.
        left_out: what of the record is in neither.
    """

    name: str
    given: Any = None
    answers: Sequence[Any] = ()
    left_out: tuple[str, ...] = ()


_NO_MODEL: Final = "span of no model"


def opened(record: Mapping[str, Any]) -> Opened | None:
    """Return what the envelope of a record holds; None where it has none that is known."""
    for envelope in _ENVELOPES:
        found = envelope(record)
        if found is not None:
            return found
    return None


def decoded(value: Any) -> Any:
    """Return a list or an object that is written as JSON text, as tables do; else the value."""
    if not isinstance(value, str) or value.lstrip()[:1] not in {"[", "{"}:
        return value
    try:
        return json.loads(value)
    except (ValueError, RecursionError):
        return value


def _attributes(record: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return a span's attributes; OTLP writes them as a list of keys and typed values."""
    found = decoded(record.get("attributes", record.get("span_attributes")))
    if isinstance(found, list):
        pairs = (each for each in found if isinstance(each, Mapping) and "key" in each)
        return {str(each["key"]): _typed(each.get("value")) for each in pairs}
    return found if isinstance(found, Mapping) else {}


def _typed(value: Any) -> Any:
    inner = next(iter(value.values()), None) if isinstance(value, Mapping) else value
    if isinstance(value, Mapping) and "arrayValue" in value and isinstance(inner, Mapping):
        values = inner.get("values")
        return [_typed(each) for each in values] if isinstance(values, list) else None
    return inner


def _span(record: Mapping[str, Any]) -> Opened | None:
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
            before = [{"role": "system", "content": system}] if system else []
            turns = [*before, *given] if isinstance(given, list) else given
            return Opened("spans", turns, written if isinstance(written, list) else [written])
    is_span = "gen_ai.operation.name" in attributes or "openinference.span.kind" in attributes
    return Opened("spans", left_out=(_NO_MODEL,)) if is_span else None


def _indexed(attributes: Mapping[str, Any], prefix: str) -> list[Any]:
    """Return messages that attributes spell out one by one: `prefix.0.message.role`."""
    nested = attributes
    for part in prefix.split("."):
        nested = nested.get(part, {}) if isinstance(nested, Mapping) else {}
    if isinstance(nested, list):
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
    for event in events if isinstance(events, list) else ():
        if not isinstance(event, Mapping):
            continue
        name, body = str(event.get("name", "")), event.get("body", _attributes(event))
        match = re.fullmatch(r"gen_ai\.(system|user|assistant|tool)\.message", name)
        if match and isinstance(body, Mapping):
            given.append({"role": match[1], **body})
        elif name == "gen_ai.choice" and isinstance(body, Mapping):
            written.append(decoded(body.get("message", body)))
    return given, written


def _langsmith(record: Mapping[str, Any]) -> Opened | None:
    """A run of LangSmith: https://docs.langchain.com/langsmith/run-data-format."""
    kind = record.get("run_type")
    inputs, outputs = decoded(record.get("inputs")), decoded(record.get("outputs"))
    if not isinstance(kind, str) or not isinstance(inputs, Mapping):
        return None
    if kind not in {"llm", "chat_model"} or not isinstance(outputs, Mapping):
        return Opened("runs", left_out=(_NO_MODEL,))
    given = next((inputs[key] for key in ("messages", "prompts", "prompt") if inputs.get(key)), "")
    written: Any = outputs.get("generations", outputs.get("choices", outputs.get("messages")))
    written = _first(written) if written is not None else outputs.get("message", outputs)
    return Opened("runs", _first(given), _listed(written))


def _first(value: Any) -> Any:
    """Return the first of a batch: lists within a list."""
    is_batch = isinstance(value, list) and value and isinstance(value[0], list)
    if is_batch:
        return value[0]
    is_prompts = isinstance(value, list) and len(value) == 1 and isinstance(value[0], str)
    return value[0] if is_prompts else value


def _listed(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [value]


_SPANS: Final = frozenset(
    {"AGENT", "CHAIN", "EMBEDDING", "EVENT", "EVALUATOR", "GUARDRAIL", "RETRIEVER", "SPAN", "TOOL"}
)


def _langfuse(record: Mapping[str, Any]) -> Opened | None:
    """An observation of Langfuse: https://langfuse.com/docs/observability/data-model."""
    kind = record.get("type", record.get("observationType"))
    if not isinstance(kind, str) or not {"input", "output"} <= record.keys():
        return None
    if kind in _SPANS:
        return Opened("observations", left_out=(_NO_MODEL,))
    if kind != "GENERATION":
        return None
    given = decoded(record["input"])
    if isinstance(given, Mapping):
        given = next((given[key] for key in ("messages", "prompt", "input") if key in given), given)
    return Opened("observations", given, [decoded(record["output"])])


def _bodies(record: Mapping[str, Any]) -> Opened | None:
    """A request and a response in envelopes of proxies and clouds, and of SGLang's log.

    Helicone (`request_body`), invocations of Bedrock
    (https://docs.aws.amazon.com/bedrock/latest/userguide/model-invocation-logging.html), SGLang's
    `--log-requests` (`obj` and `out`).
    """
    for pair in (
        (record.get("request_body"), record.get("response_body")),
        (_within(record, "input", "inputBodyJson"), _within(record, "output", "outputBodyJson")),
        (record.get("obj"), record.get("out")),
    ):
        request, response = map(decoded, pair)
        if isinstance(request, Mapping) and isinstance(response, Mapping):
            keys = ("messages", "contents", "prompt", "text", "input")
            given = next((request[key] for key in keys if request.get(key)), None)
            system = next((request[key] for key in SYSTEM if request.get(key)), None)
            if isinstance(given, list) and isinstance(given[0], Mapping) and system:
                given = [{"role": "system", "content": system}, *given]
            return Opened("requests and responses of a server", given, [response])
    return None


SYSTEM: Final = (
    "system",
    "system_prompt",
    "instructions",
    "systemInstruction",
    "system_instruction",
)
"""Keys of what a system says next to turns."""


def _within(record: Mapping[str, Any], outer: str, inner: str) -> Any:
    found = record.get(outer)
    return found.get(inner) if isinstance(found, Mapping) else None


def _lm_eval(record: Mapping[str, Any]) -> Opened | None:
    """A sample of lm-evaluation-harness: https://github.com/EleutherAI/lm-evaluation-harness."""
    answers, arguments = record.get("resps"), record.get("arguments")
    if not isinstance(answers, list) or not answers or arguments is None:
        return None
    if isinstance(arguments, Mapping):
        arguments = list(arguments.values())
    given = arguments[0] if isinstance(arguments, list) and arguments else None
    if isinstance(given, Mapping):
        given = given.get("arg_0")
    elif isinstance(given, list) and given:
        given = given[0]
    texts = [each for each in _listed(answers[0]) if isinstance(each, str)]
    if not texts:
        return Opened("samples of an evaluation", left_out=("likelihoods",))
    return Opened("samples of an evaluation", decoded(given), texts)


def _answers_alone(record: Mapping[str, Any]) -> Opened | None:
    """An answer of MT-Bench, without its questions: https://github.com/lm-sys/FastChat."""
    choices = record.get("choices")
    if not isinstance(choices, list) or not choices or not isinstance(choices[0], Mapping):
        return None
    turns = choices[0].get("turns")
    if not isinstance(turns, list) or not all(isinstance(each, str) for each in turns):
        return None
    return Opened("answers", [{"role": "assistant", "content": each} for each in turns])


def _preference(record: Mapping[str, Any]) -> Opened | None:
    """A pair of which one is preferred, as TRL and LLaMA-Factory have it; the other isn't read."""
    chosen = decoded(record.get("chosen"))
    if not chosen or not isinstance(chosen, str | list | Mapping):
        return None
    if isinstance(chosen, list) and len(chosen) > 1:
        return Opened("preferences", chosen[:-1], chosen[-1:])
    keys = ("prompt", "conversations", "messages", "instruction", "question", "input")
    given = next((decoded(record[key]) for key in keys if record.get(key)), None)
    return Opened("preferences", given, _listed(chosen))


def _tree(record: Mapping[str, Any]) -> Opened | None:
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
    return Opened("exports of ChatGPT", path[::-1], left_out=("answer of another branch",) * others)


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


_ENVELOPES: Final[tuple[Callable[[Mapping[str, Any]], Opened | None], ...]] = (
    _span,
    _langsmith,
    _langfuse,
    _bodies,
    _lm_eval,
    _answers_alone,
    _preference,
    _tree,
)

_OF_SESSIONS: Final = frozenset(
    {
        "compacted",
        "event_msg",
        "file-history-snapshot",
        "queue-operation",
        "session_meta",
        "summary",
        "system",
        "turn_context",
    }
)
"""Lines of sessions that hold no turn: of Claude Code, and of Codex."""


def sessions(records: Iterable[Record], field: str = "") -> Iterator[Record]:
    """Yield records; those of one message a line together, as one record with all their messages.

    A session ends where lines name another, where a system speaks, and where a record of another
    kind comes. It has the name of its first line.

    Args:
        records: in order.
        field: a record with this key is none of a session.
    """
    name, session, messages, last_id = "", None, list[Any](), None
    for place, record in records:
        line = None if isinstance(record, Mapping) and field in record else _line(record)
        if line is None:
            if messages and isinstance(record, Mapping) and record.get("type") in _OF_SESSIONS:
                continue
            if messages:
                yield name, {"messages": messages}
            messages = []
            if not (isinstance(record, Mapping) and _is_bare_note(record)):
                yield place, record
            continue
        of, message = line
        begins = message.get("role") == "system" and any(
            each.get("role") != "system" for each in messages
        )
        if messages and (of != session or begins):
            yield name, {"messages": messages}
            messages = []
        if not messages:
            name, session = place, of
        own_id = message.get("id")
        if messages and own_id is not None and own_id == last_id and _joins(messages[-1], message):
            messages[-1] = {
                **messages[-1],
                "content": [*messages[-1]["content"], *message["content"]],
            }
        else:
            messages.append(message)
        last_id = own_id
    if messages:
        yield name, {"messages": messages}


def _joins(before: Mapping[str, Any], message: Mapping[str, Any]) -> bool:
    """Return whether two lines hold parts of one message."""
    return isinstance(before.get("content"), list) and isinstance(message.get("content"), list)


def _is_bare_note(record: Mapping[str, Any]) -> bool:
    """Return whether a record is a line of a session that begins with it."""
    return record.get("type") in _OF_SESSIONS and not {"messages", "text", "prompt"} & record.keys()


def _line(record: Any) -> tuple[Any, Mapping[str, Any]] | None:
    """Return the session and the message of a record that is a single message; None for others."""
    if not isinstance(record, Mapping):
        return None
    kind, message, payload = record.get("type"), record.get("message"), record.get("payload")
    if kind in {"user", "assistant"} and isinstance(message, Mapping) and "content" in message:
        return (record.get("sessionId"), record.get("isSidechain")), {"role": kind, **message}
    if kind == "response_item" and isinstance(payload, Mapping):
        return None, payload
    has_turn = isinstance(record.get("role"), str) and "content" in record
    if has_turn and not {"messages", "prompt", "choices"} & record.keys() and kind != "message":
        keys = ("session_id", "sessionId", "conversation_id", "thread_id", "conversation")
        return next((record[key] for key in keys if key in record), None), record
    return None
