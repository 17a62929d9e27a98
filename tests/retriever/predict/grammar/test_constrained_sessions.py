"""Sessions with a constraint: their drafts are allowed and forced, embedded and over gRPC."""

import json
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from retriever.client.strict import RemoteDrafter
from retriever.drafter import DraftRequest, OutputConstraint, SequenceOptions
from retriever.errors import (
    InvalidConstraintError,
    LimitExceededError,
    NotServedError,
    RetrieverError,
)
from retriever.limits import MAX_CONSTRAINT_BYTES
from retriever.predict.generations import Scope
from retriever.predict.grammar.grammars import CompiledGrammar, schema_grammar
from retriever.sessions.embedded import EmbeddedDrafter
from retriever.tree import DraftTree, Source
from tests.golden.byte_tokenizer import byte_tokenizer
from tests.retriever.client.kinds_of_clients import CLIENTS, ready
from tests.retriever.security.in_process import serving
from tests.retriever.token_ids import ids

pytest.importorskip("llguidance", reason="an extra: run pip install '.[grammar]'")

SCHEMA = {
    "type": "object",
    "properties": {"place": {"type": "string"}, "unit": {"enum": ["celsius", "fahrenheit"]}},
    "required": ["place", "unit"],
    "additionalProperties": False,
}
CONSTRAINT = OutputConstraint(json_schema=json.dumps(SCHEMA))
OPTIONS = SequenceOptions(constraint=CONSTRAINT)
ANSWER = json.dumps({"place": "Rome", "unit": "celsius"})


class Bytes:
    """A tokenizer of bytes as a service loads one."""

    def __init__(self) -> None:
        self.backend_tokenizer = byte_tokenizer()
        self.special_tokens_map = {"eos_token": "<|endoftext|>"}

    def encode(self, text: str) -> np.ndarray[Any, Any]:
        return np.array(self.backend_tokenizer.encode(text, add_special_tokens=False).ids, np.int32)


TOKENIZER: Any = Bytes()


def embedded() -> EmbeddedDrafter:
    return EmbeddedDrafter(tokenizer=lambda: TOKENIZER)


@pytest.fixture
def drafter() -> Iterator[EmbeddedDrafter]:
    made = embedded()
    yield made
    made.shut_down()


def steps(drafter: Any, name: str, options: SequenceOptions, text: str = ANSWER) -> list[DraftTree]:
    """Decode a text with the drafts of a session; return the trees."""
    prompt, output = TOKENIZER.encode("Where? "), TOKENIZER.encode(text)
    drafter.open(name, prompt, options)
    trees, done, sent = [], 0, 0
    while done < len(output):
        request = DraftRequest(name, output[sent:done], len(prompt) + done, 24)
        [tree] = drafter.draft([request])
        trees.append(tree)
        sent, done = done, done + len(tree.follow(output[done:-1])) + 1
    drafter.close(name, output[sent:])
    return trees


def test_what_is_forced_is_drafted_and_nothing_that_is_forbidden(drafter: EmbeddedDrafter) -> None:
    wrong = '{"place": "Oslo", "unit": "kelvin"}'
    for number in range(3):
        steps(drafter, f"plain {number}", SequenceOptions(), wrong)
    plain = steps(drafter, "plain", SequenceOptions())
    forced = steps(drafter, "forced", OPTIONS)
    assert len(forced) < len(plain)
    grammar = CompiledGrammar.of(schema_grammar(SCHEMA), TOKENIZER)
    output, done = TOKENIZER.encode(ANSWER), 0
    for tree in forced:
        state = grammar._initial.deep_copy()
        state.consume_tokens(output[:done].tolist())
        for node in range(len(tree)):
            path = tree.token_ids[tree.path_to(node)].tolist()
            assert state.validate_tokens(path) == len(path)
        done += len(tree.follow(output[done:-1])) + 1
    assert Source.GRAMMAR in {Source(each) for tree in forced for each in tree.sources.tolist()}


@pytest.mark.parametrize("name", [each for each in CLIENTS if each != "parts"])
def test_every_client_is_drafted_for_as_the_embedded_drafter_is(name: str) -> None:
    local = embedded()
    with serving(embedded()) as address, ready(CLIENTS[name](address)) as client:
        for number in range(3):
            options = SequenceOptions(constraint=CONSTRAINT if number else None)
            pairs = zip(
                steps(client, str(number), options), steps(local, str(number), options), strict=True
            )
            for one, other in pairs:
                assert one.token_ids.tolist() == other.token_ids.tolist()
                assert one.parents.tolist() == other.parents.tolist()
                assert one.sources.tolist() == other.sources.tolist()
    local.shut_down()


def test_sequences_of_one_step_have_their_own(drafter: EmbeddedDrafter) -> None:
    prompt = TOKENIZER.encode("Which? ")
    choices = OutputConstraint(choices=("yes", "yellow"))
    digits = OutputConstraint(regular_expression="2026-[0-9]{2}")
    for name, constraint in (("a", choices), ("b", None), ("c", digits)):
        drafter.open(name, prompt, SequenceOptions(constraint=constraint))
    trees = drafter.draft([DraftRequest(name, ids(), len(prompt), 8) for name in "abc"])
    texts = [
        TOKENIZER.backend_tokenizer.decode(tree.best_chain(8).token_ids.tolist()) for tree in trees
    ]
    assert texts[0].startswith("ye")
    assert Source.GRAMMAR not in trees[1].sources
    assert texts[2].startswith("2026-")
    assert len(drafter.draft([DraftRequest("a", ids(), len(prompt), 0)])[0]) == 0


@pytest.mark.parametrize(
    ("constraint", "error"),
    [
        (OutputConstraint(), InvalidConstraintError),
        (OutputConstraint(json_schema="{", regular_expression=None), InvalidConstraintError),
        (OutputConstraint(json_schema="[]"), InvalidConstraintError),
        (OutputConstraint(json_schema='{"minimum": 5, "maximum": 3, "type": "integer"}'), None),
        (OutputConstraint(regular_expression="("), InvalidConstraintError),
        (OutputConstraint(regular_expression=""), InvalidConstraintError),
        (OutputConstraint(json_schema="{}", choices=("a",)), InvalidConstraintError),
        (OutputConstraint(choices=("a", "")), InvalidConstraintError),
        (OutputConstraint(json_schema='{"items":' * 400 + "{}" + "}" * 400), None),
        (OutputConstraint(json_schema="[" * 100_000), InvalidConstraintError),
        (OutputConstraint(regular_expression="(((a{40}){40}){40})"), None),
        (OutputConstraint(choices=("x" * (MAX_CONSTRAINT_BYTES + 1),)), LimitExceededError),
        (
            OutputConstraint(
                json_schema='{"$ref": "#/$defs/n", "$defs": {"n": {"$ref": "#/$defs/n"}}}'
            ),
            None,
        ),
    ],
)
def test_what_cannot_be_followed_is_refused_and_leaves_nothing(
    drafter: EmbeddedDrafter, constraint: OutputConstraint, error: type[RetrieverError] | None
) -> None:
    """Where no error is expected, the library decides; nothing may hang or crash."""
    refused: RetrieverError | None = None
    try:
        drafter.open("s", TOKENIZER.encode("x"), SequenceOptions(constraint=constraint))
    except RetrieverError as raised:
        refused = raised
        drafter.open("s", TOKENIZER.encode("x"))
    assert isinstance(refused, error or InvalidConstraintError | None)
    assert len(drafter.draft([DraftRequest("s", ids(), 1, 8)])) == 1


def test_a_refusal_says_what_to_do_over_grpc() -> None:
    with serving(embedded()) as address:
        client = RemoteDrafter(address)
        with pytest.raises(InvalidConstraintError, match="cannot follow the JSON schema"):
            client.open("s", ids(1), SequenceOptions(constraint=OutputConstraint('{"type": 7}')))
        client.open("s", ids(1))
    with serving(EmbeddedDrafter()) as address, pytest.raises(NotServedError, match="--tokenizer"):
        RemoteDrafter(address).open("s", ids(1), OPTIONS)


def test_what_outputs_taught_stays_with_their_tenant_and_goes_with_its_data(
    drafter: EmbeddedDrafter,
) -> None:
    """How a tenant writes shows in its drafts alone: a draft tells what was learned."""
    spaced, compact = ANSWER, json.dumps(json.loads(ANSWER), separators=(",", ":"))

    def first(tenant: str) -> list[int]:
        name = f"first {tenant}"
        drafter.open(
            name,
            TOKENIZER.encode("?"),
            SequenceOptions(False, constraint=CONSTRAINT, tenant=tenant),
        )
        [tree] = drafter.draft([DraftRequest(name, ids(), 1, 24)])
        drafter.close(name)
        best = tree.best_chain(24)
        return [int(token) for token in best.token_ids]

    steps(drafter, "one", SequenceOptions(False, constraint=CONSTRAINT, tenant="a"), compact)
    expected = [TOKENIZER.encode(text)[:10].tolist() for text in (compact, spaced)]
    assert first("a")[:10] == expected[0]
    assert first("b")[:10] == expected[1]
    assert set(drafter.state.grammars.bytes_by_tenant()) == {"a", "b"}
    drafter.state.grammars.on_deleted(Scope("a"))
    assert set(drafter.state.grammars.bytes_by_tenant()) == {"b"}
    assert first("a")[:10] == expected[1]


def test_grammars_of_a_tenant_are_bounded(drafter: EmbeddedDrafter) -> None:
    for number in range(70):
        constraint = OutputConstraint(regular_expression=f"a{number}")
        drafter.open(f"s{number}", ids(1), SequenceOptions(constraint=constraint))
    held = drafter.state.grammars.bytes_by_tenant()[""]
    assert held < 33 * (2 << 20) * 1.1
    assert drafter.state.grammars.evict_idle(lambda tenant: tenant == "")
    assert not drafter.state.grammars.bytes_by_tenant()
