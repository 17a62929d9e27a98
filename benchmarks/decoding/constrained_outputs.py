"""Tokens per step of constrained outputs, with what the grammar forces and without.

    python -m benchmarks.decoding.constrained_outputs --output forced.json

No model is run: written outputs are replayed under their grammar. Without a corpus, drafts come
from the prompt and, warm, from three earlier outputs; beside them stands what llguidance forces by
itself (`compute_ff_tokens`), which guesses no whitespace. JSON is written compactly, with spaces,
and in lines, with its schema in the prompt and without.
"""

import json
import random
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Final

import numpy as np
import typer

from decoder.model.pretrained import ModelOptions, prepare_model
from decoder.sampling.constraint import Grammar
from indexer.tokenizer import DEFAULT_MODEL
from retriever.drafter import DraftRequest
from retriever.predict.grammar.grammars import choice_grammar, regex_grammar, schema_grammar
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
}


def value(schema: dict[str, Any], draw: random.Random) -> Any:
    """Return a value that a schema describes."""
    if "const" in schema or "enum" in schema:
        return draw.choice(schema.get("enum", [schema.get("const")]))
    kind = schema["type"]
    if kind == "object":
        names = [n for n in schema["properties"] if n in schema["required"] or draw.random() < HALF]
        return {name: value(schema["properties"][name], draw) for name in names}
    if kind == "array":
        number = draw.randint(schema["minItems"], schema["maxItems"])
        return [value(schema["items"], draw) for _ in range(number)]
    if kind == "string":
        number = draw.randint(12, 40) if schema["maxLength"] == LONG else draw.randint(1, 4)
        return " ".join(draw.choices(WORDS, k=number))[: schema["maxLength"]]
    return draw.randint(1, 9999) if kind == "integer" else draw.random() < HALF


def date(draw: random.Random) -> str:
    """Return a sentence with a date."""
    day, hour = draw.randint(10, 28), draw.randint(10, 20)
    return f"The meeting is on 2026-0{draw.randint(1, 9)}-{day}, at {hour}:30."


def version(draw: random.Random) -> str:
    """Return a pinned package."""
    digest = f"{draw.getrandbits(64):016x}"
    return f"package-{draw.choice(WORDS)}=={draw.randint(0, 9)}.4.0 --hash=sha256:{digest}"


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
    }
    for name, (grammar, make) in others.items():
        draw = random.Random(name)  # noqa: S311  (as above)
        texts = tuple(make(draw) for _ in range(4))
        yield Case(name, "regular expressions, choices", grammar, "Answer.\n", texts)


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
    """Return by kind of grammar the median gain of forced drafts, and the least."""
    found: dict[str, dict[str, float]] = {}
    for kind in dict.fromkeys(row["kind"] for row in rows):
        for key in [f"{state} {nodes}" for state in ("cold", "warm") for nodes in BUDGETS]:
            each = [r[f"{key} forced"] / r[f"{key} {over}"] for r in rows if r["kind"] == kind]
            found.setdefault(kind, {})[key] = round(statistics.median(each), 2)
            found[kind][f"{key}, least"] = round(min(each), 2)
    return found


def main(
    tokenizer: Annotated[
        str, typer.Option(help="Of a model: a hub id or a folder.")
    ] = DEFAULT_MODEL,
    output: Annotated[Path | None, typer.Option(help="A file for all figures, as JSON.")] = None,
) -> None:
    """Replay every case and print medians."""
    replay = Replay(prepare_model(ModelOptions(tokenizer)).tokenizer)
    rows = [replay.figures(case) for case in cases()]
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
