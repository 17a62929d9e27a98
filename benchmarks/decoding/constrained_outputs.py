"""Tokens per step of constrained outputs, with what the grammar forces and without.

    python -m benchmarks.decoding.constrained_outputs --output forced.json
    python -m benchmarks.decoding.constrained_outputs --agents agents.jsonl.gz --output agents.json
    python -m benchmarks.decoding.constrained_outputs --model smollm2-135m-instruct

The first runs no model: written outputs are replayed under their grammar. Without a corpus, drafts
come from the prompt and, warm, from three earlier outputs. They are compared with our own drafts
without the grammar's, and with what llguidance forces by itself (`compute_ff_tokens`), which
guesses no whitespace. JSON is written compactly, with spaces, and in lines, with its schema in the
prompt and without. The second replays recorded tool calls of agents, each behind its conversation,
under the schema that all calls of its tool have in common. The third runs a model, and times
`generate` with a constraint in turns: masks alone, with drafts, and with forced drafts, too.
"""

import gzip
import json
import random
import re
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Annotated, Any, Final

import numpy as np
import typer

from decoder.budget.budget import FixedBudget
from decoder.loop import Decoder
from decoder.model.pretrained import ModelOptions, load_model, prepare_model
from decoder.model.target import Target
from decoder.sampling.constraint import Grammar
from decoder.sampling.rule import accept_rule
from decoder.sampling.sampling_settings import SamplingSettings
from indexer.tokenizer import DEFAULT_MODEL
from retriever.drafter import DraftRequest
from retriever.predict.grammar.grammars import (
    choice_grammar,
    lark_grammar,
    regex_grammar,
    schema_grammar,
    tools_grammar,
)
from retriever.sessions.embedded import EmbeddedDrafter
from retriever.tree import ROOT, DraftTree, Source

STYLES: Final[dict[str, dict[str, Any]]] = {
    "compact": {"separators": (",", ":")},
    "spaced": {},
    "lines": {"indent": 2},
}
BUDGETS: Final = (8, 32)
TEXTS: Final = "harbour lamp river copper window garden paper silver morning engine letter bridge"
WORDS: Final = TEXTS.split(" ")
LONG: Final = 400
"""Characters of a text that is longer than a few words."""

HALF: Final = 0.5
DEEPEST: Final = 3
"""Of values that hold values of their own kind."""


def obj(**fields: Any) -> dict[str, Any]:
    """Return the schema of an object that has all of some fields and no others."""
    return {
        "type": "object",
        "properties": fields,
        "required": [*fields],
        "additionalProperties": False,
    }


TEXT: Final = {"type": "string", "maxLength": 80}
NUMBER: Final = {"type": "integer"}
CHOICE: Final = {"enum": ["low", "medium", "high"]}


def tool(name: str, **arguments: Any) -> dict[str, Any]:
    """Return the schema of a call of one tool."""
    return obj(name={"const": name}, arguments=obj(**arguments))


SCHEMAS: Final[dict[str, dict[str, Any]]] = {
    "tool: weather": tool("get_weather", place=TEXT, unit={"enum": ["celsius", "fahrenheit"]}),
    "tool: search": tool("search_documents", query=TEXT, limit=NUMBER, sort=CHOICE),
    "tool: mail": tool("send_mail", to=TEXT, subject=TEXT, body=TEXT),
    "tool: booking": tool("book_room", room=TEXT, nights=NUMBER, breakfast={"type": "boolean"}),
    "tool: edit": tool("edit_file", path=TEXT, old_text=TEXT, new_text=TEXT),
    "tool: shell": tool("run_command", command=TEXT, timeout_seconds=NUMBER),
    "person": obj(name=TEXT, age=NUMBER, city=TEXT, is_member={"type": "boolean"}),
    "order": obj(
        order_id=NUMBER,
        items={
            "type": "array",
            "minItems": 2,
            "maxItems": 4,
            "items": obj(product=TEXT, quantity=NUMBER),
        },
        express_delivery={"type": "boolean"},
    ),
    "ticket": obj(title=TEXT, priority=CHOICE, assignee=TEXT, estimated_hours=NUMBER),
    "labels": obj(sentiment={"enum": ["positive", "neutral", "negative"]}, confidence=CHOICE),
    "entities": {
        "type": "array",
        "minItems": 2,
        "maxItems": 4,
        "items": obj(text=TEXT, kind={"enum": ["person", "place", "organisation"]}),
    },
    "nested": obj(config=obj(server=obj(host=TEXT, port=NUMBER), logging=obj(level=CHOICE))),
    "optional": {
        **obj(title=TEXT, subtitle=TEXT, pages=NUMBER),
        "required": ["title"],
    },
    "answer": obj(reasoning={"type": "string", "maxLength": LONG}, answer=TEXT),
    "deployment": obj(
        apiVersion={"const": "apps/v1"},
        kind={"const": "Deployment"},
        metadata=obj(name=TEXT, labels={"type": "object", "additionalProperties": TEXT}),
        spec=obj(
            replicas=NUMBER, template=obj(image=TEXT, pull_policy={"enum": ["Always", "Never"]})
        ),
    ),
    "package": {
        **obj(
            name=TEXT, version=TEXT, private={"type": "boolean"}, scripts=obj(build=TEXT, test=TEXT)
        ),
        "required": ["name", "version"],
    },
    "event": obj(
        event_name=CHOICE,
        user_id=NUMBER,
        timestamp=NUMBER,
        properties=obj(page=TEXT, referrer=TEXT),
    ),
    "nullable": obj(
        name=TEXT, nickname={"anyOf": [TEXT, {"type": "null"}]}, score={"type": "number"}
    ),
    "shape": {
        "anyOf": [
            obj(kind={"const": "circle"}, radius=NUMBER),
            obj(kind={"const": "rectangle"}, width=NUMBER, height=NUMBER),
        ]
    },
    "tree": {
        "$defs": {
            "node": {
                **obj(
                    label=TEXT,
                    children={"type": "array", "items": {"$ref": "#/$defs/node"}, "maxItems": 2},
                ),
                "required": ["label", "children"],
            }
        },
        "$ref": "#/$defs/node",
    },
    "numbers": obj(
        values={"type": "array", "items": NUMBER, "minItems": 3, "maxItems": 8}, total=NUMBER
    ),
    "translation": obj(
        source_language=CHOICE,
        target_language=CHOICE,
        translation={"type": "string", "maxLength": LONG},
    ),
    "flags": obj(**{f"is_{word}": {"type": "boolean"} for word in WORDS[:8]}),
    "article": obj(
        headline=TEXT,
        byline=TEXT,
        sections={
            "type": "array",
            "minItems": 1,
            "maxItems": 3,
            "items": obj(title=TEXT, text={"type": "string", "maxLength": LONG}),
        },
    ),
    "invoice": obj(
        invoice_number=NUMBER,
        currency={"enum": ["EUR", "USD", "GBP"]},
        lines={
            "type": "array",
            "minItems": 2,
            "maxItems": 4,
            "items": obj(description=TEXT, unit_price={"type": "number"}, quantity=NUMBER),
        },
        paid={"type": "boolean"},
    ),
    "sensor": obj(
        device_id=TEXT,
        readings={
            "type": "array",
            "minItems": 2,
            "maxItems": 5,
            "items": obj(time=NUMBER, temperature={"type": "number"}, ok={"type": "boolean"}),
        },
    ),
}


def value(schema: dict[str, Any], draw: random.Random, depth: int = 0) -> Any:  # noqa: PLR0911  a kind each
    """Return a value that a schema describes; a part of the schema may refer to "tree"."""
    if "anyOf" in schema:
        return value(draw.choice(schema["anyOf"]), draw, depth)
    if "$ref" in schema:
        return value(SCHEMAS["tree"]["$defs"]["node"], draw, depth + 1)
    if "const" in schema or "enum" in schema:
        return draw.choice(schema.get("enum", [schema.get("const")]))
    kind = schema["type"]
    if kind == "object":
        others = schema["additionalProperties"]
        if others:
            return {word: value(others, draw) for word in draw.sample(WORDS, 2)}
        names = [n for n in schema["properties"] if n in schema["required"] or draw.random() < HALF]
        return {name: value(schema["properties"][name], draw, depth) for name in names}
    if kind == "array":
        most = schema["maxItems"] if depth < DEEPEST else 0
        number = draw.randint(min(schema.get("minItems", 0), most), most)
        return [value(schema["items"], draw, depth) for _ in range(number)]
    if kind == "string":
        number = draw.randint(12, 40) if schema["maxLength"] == LONG else draw.randint(1, 4)
        return " ".join(draw.choices(WORDS, k=number))[: schema["maxLength"]]
    simple: dict[str, Any] = {
        "integer": draw.randint(1, 9999),
        "number": round(draw.uniform(0, 100), 2),
        "null": None,
        "boolean": draw.random() < HALF,
    }
    return simple[kind]


def date(draw: random.Random) -> str:
    """Return a sentence with a date."""
    day, hour = draw.randint(10, 28), draw.randint(10, 20)
    return f"The meeting is on 2026-0{draw.randint(1, 9)}-{day}, at {hour}:30."


def version(draw: random.Random) -> str:
    """Return a pinned package."""
    digest = f"{draw.getrandbits(64):016x}"
    return f"package-{draw.choice(WORDS)}=={draw.randint(0, 9)}.4.0 --hash=sha256:{digest}"


SQL: Final = """
start: "SELECT " columns " FROM " table where? order? ";"
columns: column (", " column)* | "count(*)"
column: "customer_name" | "order_date" | "total_amount" | "shipping_city" | "product_id"
table: "customers" | "orders" | "order_items"
where: " WHERE " condition (" AND " condition)*
condition: column (" = " | " > " | " < ") (NUMBER | TEXT)
order: " ORDER BY " column (" ASC" | " DESC")
NUMBER: /[0-9]{1,5}/
TEXT: /'[a-z ]{1,20}'/
"""
COLUMNS: Final = ["customer_name", "order_date", "total_amount", "shipping_city", "product_id"]


def query(draw: random.Random) -> str:
    """Return a query of the grammar."""
    columns = ", ".join(draw.sample(COLUMNS, draw.randint(1, 3)))
    table = draw.choice(["customers", "orders", "order_items"])
    tested, wanted = (
        draw.choice(COLUMNS),
        draw.choice([str(draw.randint(1, 999)), f"'{draw.choice(WORDS)}'"]),
    )
    order = f" ORDER BY {draw.choice(COLUMNS)} {draw.choice(['ASC', 'DESC'])}"
    ending = order if draw.random() < HALF else ""
    return f"SELECT {columns} FROM {table} WHERE {tested} = {wanted}{ending};"  # noqa: S608  never run


CHOICES: Final = ["approve the request", "reject the request", "ask the manager for more"]


@dataclass(frozen=True, slots=True)
class Case:
    """Outputs of one grammar in one style.

    Attributes:
        name: in reports.
        kind: of the grammar: what medians are taken over.
        grammar: as `Grammar.of` takes it.
        prompt: that precedes each output.
        outputs: three of before, and the one that counts.
    """

    name: str
    kind: str
    grammar: str
    prompt: str
    outputs: tuple[str, ...]


def cases() -> Iterator[Case]:
    """Yield a case for each grammar and style."""
    for name, schema in SCHEMAS.items():
        grammar, is_tool = schema_grammar(schema), name.startswith("tool")
        for style, options in STYLES.items():
            draw = random.Random(f"{name} {style}")  # noqa: S311  (values, not secrets)
            outputs = tuple(json.dumps(value(schema, draw), **options) for _ in range(4))
            told = f"Answer by this schema: {json.dumps(schema)}\n"
            for prompt, kind in ((told, "schema in the prompt"), ("Answer.\n", "no schema there")):
                of = f"{'tool calls' if is_tool else 'JSON'}, {kind}"
                yield Case(f"{name}, {style}", of, grammar, prompt, outputs)
    others: dict[str, tuple[str, Callable[[random.Random], str]]] = {
        "date": (regex_grammar(r"The meeting is on \d{4}-\d{2}-\d{2}, at \d{2}:\d{2}\."), date),
        "version": (
            regex_grammar(r"package-[a-z]{3,12}==\d+\.\d+\.\d+ --hash=sha256:[0-9a-f]{16}"),
            version,
        ),
        "choice": (choice_grammar(CHOICES), lambda draw: draw.choice(CHOICES)),
        "SQL": (lark_grammar(SQL), query),
    }
    for name, (grammar, make) in others.items():
        draw = random.Random(name)  # noqa: S311  (as above)
        texts = tuple(make(draw) for _ in range(4))
        kind = "SQL" if name == "SQL" else "regular expressions, choices"
        yield Case(name, kind, grammar, "Answer.\n", texts)


CALL: Final = re.compile(r"<tool_call>\n(\{.*?\})\n</tool_call>", re.DOTALL)
LONGEST: Final = 6_000
"""Characters of a recorded call; longer ones write whole files, which no grammar forces."""

CONTEXT: Final = 6_000
"""Characters of a conversation before a recorded call."""


def called(text: str) -> dict[str, Any] | None:
    """Return a recorded call with its arguments as an object, None if it is none."""
    try:
        call = json.loads(text)
        arguments = call["arguments"]
        parsed = json.loads(arguments) if isinstance(arguments, str) else arguments
        return {"name": call["name"], "arguments": parsed} if isinstance(parsed, dict) else None
    except (ValueError, KeyError, TypeError):
        return None


def type_of(found: Any) -> str:
    """Return the type of a value as a schema names it."""
    names = {str: "string", bool: "boolean", int: "integer", float: "number", list: "array"}
    return names.get(type(found), "null" if found is None else "object")


def recorded_cases(path: Path) -> Iterator[Case]:
    """Yield a case for each recorded conversation that calls tools: its first call, and the last.

    Calls are written anew, in the conversation, too: names and arguments as one object.
    """
    with gzip.open(path, "rt", encoding="utf-8") as lines:
        records = [json.loads(line) for line in lines]
    tools: dict[str, list[dict[str, Any]]] = {}
    for record in records:
        for text in CALL.findall(record["prompt"] + record["output"]):
            if (call := called(text)) is not None:
                tools.setdefault(call["name"], []).append(call["arguments"])
    schemas = {name: common(arguments) for name, arguments in tools.items()}
    grammar = tools_grammar(
        [{"name": name, "parameters": schema} for name, schema in schemas.items()]
    )
    for number, record in enumerate(records):
        found = CALL.search(record["output"])
        call = None if found is None else called(found[1])
        if found is None or call is None or len(found[1]) > LONGEST:
            continue
        before = CALL.sub(
            lambda found: found[0].replace(found[1], written(found[1], schemas)),
            record["prompt"][-CONTEXT:],
        )
        kind = "agents, later calls" if "<tool_call>" in record["prompt"] else "agents, first calls"
        prompt = before + record["output"][: found.start()] + "<tool_call>\n"
        name = f"{number} {call['name']}"
        yield Case(name, kind, grammar, prompt, (written(found[1], schemas),))


def written(text: str, schemas: Mapping[str, dict[str, Any]]) -> str:
    """Return a recorded call as it would be written under its schema: properties in its order."""
    call = called(text)
    if call is None:
        return text
    order, arguments = schemas[call["name"]]["properties"], call["arguments"]
    return json.dumps(
        {"name": call["name"], "arguments": {k: arguments[k] for k in order if k in arguments}}
    )


def common(arguments: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return the schema of all calls of a tool: what all have is required."""
    properties: dict[str, Any] = {}
    for each in arguments:
        for name, found in each.items():
            kinds = properties.setdefault(name, {"type": []})["type"]
            if type_of(found) not in kinds:
                kinds.append(type_of(found))
    required = [name for name in properties if all(name in each for each in arguments)]
    return {
        "type": "object",
        "properties": properties,
        "required": required,
        "additionalProperties": False,
    }


class Replay:
    """Replays outputs under a grammar with one way of drafting.

    Args:
        tokenizer: of a model.
    """

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer, self._stop = tokenizer, int(tokenizer.eos_token_id)

    def figures(self, case: Case) -> dict[str, Any]:
        """Return tokens per step of a case's last output, alone and behind the others."""
        found: dict[str, Any] = {"name": case.name, "kind": case.kind}
        for state, taken in (("cold", case.outputs[-1:]), ("warm", case.outputs)):
            for nodes in BUDGETS:
                for way in ("drafts", "library", "forced"):
                    tokens, spent_us = self._steps(case, taken, nodes, way)
                    found[f"{state} {nodes} {way}"] = tokens
                    found[f"{state} {nodes} {way} us"] = spent_us
        return found

    def _steps(
        self, case: Case, outputs: Sequence[str], nodes: int, way: str
    ) -> tuple[float, float]:
        grammar = Grammar.of(case.grammar, self._tokenizer, [self._stop])
        prompt = np.array(self._tokenizer.encode(case.prompt), np.int32)
        drafter = EmbeddedDrafter()
        drafter.warm()
        for text in outputs:
            ids = self._tokenizer.encode(text, add_special_tokens=False)
            output = np.array([*ids, self._stop], np.int32)
            drafter.open("one", prompt)
            forced, done, sent, count, spent_s = grammar.drafts(), 0, 0, 0, 0.0
            if forced is None:
                raise ValueError(f"{case.name} is too large over bytes")
            while done < len(output):
                asked = DraftRequest(
                    "one",
                    output[sent:done],
                    len(prompt) + done,
                    forced.nodes_to_ask(nodes) if way == "forced" else nodes,
                )
                sent = done
                tree = drafter.draft([asked])[0]
                began = time.perf_counter()
                if way == "forced":
                    tree = forced.improved(tree, output[:done], nodes)
                elif way == "library":
                    tree = by_the_library(grammar, output[:done], nodes) or tree
                spent_s += time.perf_counter() - began
                came = output[done : done + len(tree.follow(output[done:-1])) + 1]
                done, count = done + len(came), count + 1
            drafter.close("one", output[sent:])
        drafter.shut_down()
        return len(output) / count, spent_s / count * 1e6


def by_the_library(grammar: Grammar, output: Any, nodes: int) -> DraftTree | None:
    """Return the chain that llguidance forces by itself; None where it forces nothing."""
    state = grammar.start().deep_copy()
    state.consume_tokens(output.tolist())
    tokens = state.compute_ff_tokens()[:nodes]
    if not tokens:
        return None
    shares = (0.97 ** np.arange(1, len(tokens) + 1)).astype(np.float32)
    parents = list(range(ROOT, len(tokens) - 1))
    return DraftTree.checked(tokens, parents, shares, [Source.GRAMMAR] * len(tokens))


def gains(rows: Sequence[dict[str, Any]], over: str) -> dict[str, dict[str, float]]:
    """Return the gain of forced drafts by kind of grammar: the median and the least.

    For recorded agents also the median over tools of a tool's mean gain: more than half of the
    recorded calls are of one tool.
    """
    found: dict[str, dict[str, float]] = {}
    for kind in dict.fromkeys(row["kind"] for row in rows):
        for key in [f"{state} {nodes}" for state in ("cold", "warm") for nodes in BUDGETS]:
            by_tool: dict[str, list[float]] = {}
            for row in rows:
                if row["kind"] == kind:
                    tool = row["name"].partition(" ")[2]
                    by_tool.setdefault(tool, []).append(row[f"{key} forced"] / row[f"{key} {over}"])
            each = list(chain.from_iterable(by_tool.values()))
            found.setdefault(kind, {})[key] = round(statistics.median(each), 2)
            found[kind][f"{key}, least"] = round(min(each), 2)
            if kind.startswith("agents"):
                mean = statistics.median(map(statistics.mean, by_tool.values()))
                found[kind][f"{key}, by tool"] = round(mean, 2)
    return found


class Masked:
    """A grammar that only masks: drafters do not see it.

    Args:
        grammar: that decides what may come.
    """

    def __init__(self, grammar: Grammar) -> None:
        self.start, self.advance, self.allowed = grammar.start, grammar.advance, grammar.allowed


def timed(name: str, num_tokens: int, rounds: int) -> dict[str, Any]:
    """Return tokens per second of a model under schemas, by ways in turns; outputs are compared."""
    loaded = load_model(ModelOptions(name))  # in float32
    EmbeddedDrafter().warm()
    stop = loaded.stop_ids
    target = Target(loaded.model)
    ways: dict[str, list[float]] = {"masks": [], "drafts": [], "forced": []}
    tokens, is_equal = 0, True
    for number, (label, schema) in enumerate(SCHEMAS.items()):
        if number % 3:
            continue
        grammar = Grammar.of(schema_grammar(schema), loaded.tokenizer, stop)
        prompt = loaded.encode(f"Give an example, as JSON of this schema: {json.dumps(schema)}")
        outputs: dict[str, list[int]] = {}
        for turn in range(rounds):
            for way in sorted(ways, key=lambda each: (len(each) * 7 + turn * 5) % 11):
                constraint: Any = grammar if way == "forced" else Masked(grammar)
                decoder = Decoder(
                    target,
                    EmbeddedDrafter(),
                    FixedBudget(0 if way == "masks" else BUDGETS[0]),
                    accept_rule(SamplingSettings(0.0), (), constraint),
                    stop,
                )
                began = time.perf_counter()
                outputs[way] = list(chain.from_iterable(decoder.generate(prompt, num_tokens)))
                ways[way].append((time.perf_counter() - began) / max(len(outputs[way]), 1))
        is_equal = is_equal and outputs["masks"] == outputs["drafts"] == outputs["forced"]
        tokens += len(outputs["masks"])
        typer.echo(f"{label}: {len(outputs['masks'])} tokens", err=True)
    pairs = {
        over: [a / b for a, b in zip(ways[over], ways["forced"], strict=True)]
        for over in ("masks", "drafts")
    }
    return {
        "outputs are equal": is_equal,
        "tokens": tokens,
        "ms a token": {way: round(1e3 * statistics.median(each), 1) for way, each in ways.items()},
        "times as fast": {over: round(statistics.median(each), 2) for over, each in pairs.items()},
    }


def main(  # noqa: PLR0913, PLR0917  (options)
    tokenizer: Annotated[
        str, typer.Option(help="Of a model: a hub id or a folder.")
    ] = DEFAULT_MODEL,
    agents: Annotated[Path | None, typer.Option(help="Recorded agents, .jsonl.gz.")] = None,
    model: Annotated[str | None, typer.Option(help="A model to run and time.")] = None,
    num_tokens: Annotated[int, typer.Option(help="Most tokens of an output that is timed.")] = 96,
    rounds: Annotated[int, typer.Option(help="Runs of each output that is timed.")] = 2,
    output: Annotated[Path | None, typer.Option(help="A file for all figures, as JSON.")] = None,
) -> None:
    """Replay every case and print medians."""
    if model is not None:
        measured = timed(model, num_tokens, rounds)
        typer.echo(json.dumps(measured, indent=1))
        if output is not None:
            output.write_text(json.dumps(measured, indent=1) + "\n")
        return
    replay = Replay(prepare_model(ModelOptions(tokenizer)).tokenizer)
    chosen = cases() if agents is None else recorded_cases(agents)
    rows = [replay.figures(case) for case in chosen]
    keys = [f"{state} {nodes}" for state in ("cold", "warm") for nodes in BUDGETS]
    report: dict[str, Any] = {
        "gain over drafts alone": gains(rows, "drafts"),
        "gain over what the library forces": gains(rows, "library"),
        "microseconds a draft": {
            key: round(statistics.median(row[f"{key} forced us"] for row in rows)) for key in keys
        },
    }
    typer.echo(json.dumps(report, indent=1))
    if output is not None:
        output.write_text(json.dumps({**report, "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    typer.run(main)
