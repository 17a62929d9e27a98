"""Drafts that a grammar forces: they save passes, are never forbidden, and change no output."""

import json
import random
from collections.abc import Sequence
from functools import lru_cache
from typing import Any, cast

import numpy as np
import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel, PreTrainedTokenizerBase

from decoder.budget.budget import FixedBudget
from decoder.engines.transformers.custom_generate import Foredraft
from decoder.sampling.constraint import Grammar, GrammarProcessor
from decoder.sampling.rule import ProcessedRule, accept_rule
from decoder.sampling.sampling_settings import SamplingSettings
from decoder.sampling.verification import PassContext
from retriever.errors import InvalidConstraintError
from retriever.predict.grammar.forced_drafts import ForcedDrafts
from retriever.predict.grammar.grammars import choice_grammar, regex_grammar, tools_grammar
from retriever.sessions.embedded import EmbeddedDrafter
from retriever.tree import ROOT, DraftTree, Source
from tests.decoder.decoding import SIZES, ScriptedDrafter, decoded, decoder_with
from tests.oracles.exactness.trials import chi_square, survival
from tests.suite_parts import cases

pytest.importorskip("llguidance", reason="an extra: run pip install '.[grammar]'")

TOOL = {
    "type": "object",
    "properties": {
        "name": {"const": "get_weather"},
        "arguments": {
            "type": "object",
            "properties": {
                "place": {"type": "string", "maxLength": 4},
                "unit": {"enum": ["celsius", "fahrenheit"]},
            },
            "required": ["place", "unit"],
            "additionalProperties": False,
        },
    },
    "required": ["name", "arguments"],
    "additionalProperties": False,
}
CALL = {"name": "get_weather", "arguments": {"place": "Rome", "unit": "celsius"}}
END = 0


def drafts_of(grammar: Grammar) -> ForcedDrafts:
    forced = grammar.drafts()
    assert forced is not None
    return forced


def steps(
    forced: ForcedDrafts, ids: Sequence[int], tree: DraftTree | None = None, nodes: int = 32
) -> int:
    """Count the passes that an output takes with forced drafts, each checked."""
    output, done, count = np.array(ids, np.int32), 0, 0
    while done < len(output):
        drafted = forced.improved(tree or DraftTree.empty(), output[:done], nodes)
        DraftTree.checked(
            drafted.token_ids, drafted.parents, drafted.probabilities, drafted.sources
        )
        path = drafted.follow(output[done:-1])
        done, count = done + len(path) + 1, count + 1
    return count


def written(tokenizer: PreTrainedTokenizerBase, value: Any, **style: Any) -> list[int]:
    text = json.dumps(value, **style)
    return [*tokenizer.encode(text, add_special_tokens=False), END]


@pytest.mark.parametrize(
    "style", [{"separators": (",", ":")}, {}, {"indent": 2}, {"indent": 4}, {"indent": "\t"}]
)
def test_what_a_schema_forces_takes_no_passes_however_it_is_spaced(
    byte_tokenizer: PreTrainedTokenizerBase, style: dict[str, Any]
) -> None:
    grammar = Grammar.of_json_schema(TOOL, byte_tokenizer, (END,))
    ids = written(byte_tokenizer, CALL, **style)
    first, second = steps(drafts_of(grammar), ids), steps(drafts_of(grammar), ids)
    # Of bytes: the place has five, and an enumeration is told apart by one.
    assert second <= 8
    assert second <= first <= second + 8
    assert len(ids) > 5 * first


def test_forbidden_nodes_leave_a_tree_and_the_end_is_drafted(
    byte_tokenizer: PreTrainedTokenizerBase,
) -> None:
    a, b, c = (int(byte_tokenizer.encode(each)[0]) for each in "abc")
    grammar = Grammar.of(regex_grammar("(ab|cb)"), byte_tokenizer, (END,))
    tree = DraftTree.checked(
        [a, b, a, c, c, END],
        [ROOT, ROOT, 0, ROOT, 0, ROOT],
        [0.5, 0.4, 0.3, 0.2, 0.2, 0.1],
        [1] * 6,
    )
    drafted = drafts_of(grammar).improved(tree, np.empty(0, np.int32), 9)
    found = {tuple(drafted.token_ids[drafted.path_to(n)].tolist()) for n in range(len(drafted))}
    assert found == {(a,), (a, b), (a, b, END), (c,), (c, b), (c, b, END)}
    added = {Source(s) for t, s in zip(drafted.token_ids, drafted.sources, strict=True) if t == b}
    assert added == {Source.GRAMMAR}
    over = drafts_of(grammar).improved(tree, np.array([a, b, END], np.int32), 9)
    assert len(over) == 0


def test_the_end_of_a_string_is_drafted_where_it_came_before(
    byte_tokenizer: PreTrainedTokenizerBase,
) -> None:
    grammar = Grammar.of_json_schema(TOOL, byte_tokenizer, (END,))
    for _ in range(6):
        steps(drafts_of(grammar), written(byte_tokenizer, CALL))
    ids = np.array(written(byte_tokenizer, CALL), np.int32)
    behind = len(json.dumps(CALL).split("Rome")[0])
    shares = []
    for length in range(5):
        tree = drafts_of(grammar).improved(DraftTree.empty(), ids[: behind + length], 32)
        quotes = np.flatnonzero((tree.parents == ROOT) & (tree.token_ids == ids[behind + 4]))
        shares += tree.probabilities[quotes].tolist()
    assert len(shares) == 5
    assert max(shares[:4]) < 0.5 < shares[4]


def test_what_was_forced_at_such_a_place_before_is_drafted_only_if_it_is_allowed(
    byte_tokenizer: PreTrainedTokenizerBase,
) -> None:
    """Brackets, keys and marks before it are equal; what is forced behind them is not."""
    either = [
        {
            "properties": {"kind": {"const": kind}, key: {"type": "boolean"}},
            "required": ["kind", key],
        }
        for kind, key in (("cat", "purrs"), ("dog", "barks"))
    ]
    shape = {"type": "object", "additionalProperties": False}
    grammar = Grammar.of_json_schema(
        {"anyOf": [{**shape, **each} for each in either]}, byte_tokenizer, (END,)
    )
    for value in ({"kind": "cat", "purrs": True}, {"kind": "dog", "barks": False}) * 2:
        ids = written(byte_tokenizer, value)
        assert steps(drafts_of(grammar), ids) < len(ids) / 4
        at = json.dumps(value).index(",") + 1
        tree = drafts_of(grammar).improved(DraftTree.empty(), np.array(ids[:at], np.int32), 8)
        assert len(tree.follow(np.array(ids[at:], np.int32))) == 8


def test_an_output_that_was_cut_and_goes_on_is_followed_anew(
    byte_tokenizer: PreTrainedTokenizerBase,
) -> None:
    grammar = Grammar.of_json_schema(TOOL, byte_tokenizer, (END,))
    ids = np.array(written(byte_tokenizer, CALL), np.int32)
    forced = drafts_of(grammar)
    for length in (20, 3, 30, 0, 12):
        fresh = drafts_of(grammar).improved(DraftTree.empty(), ids[:length], 16)
        again = forced.improved(DraftTree.empty(), ids[:length], 16)
        assert again.token_ids.tolist() == fresh.token_ids.tolist()


def schema(draw: random.Random, depth: int = 0) -> Any:
    """Return a schema of small values, some of which nothing but one text satisfies."""
    kind = draw.choice(["enum", "const", "integer", "string", "boolean", "object", "array"])
    if depth > 1 and kind in {"object", "array"}:
        kind = "boolean"
    if kind == "object":
        names = draw.sample(["name", "unit", "id", "ok", "a b"], draw.randint(0, 3))
        return {
            "type": "object",
            "properties": {name: schema(draw, depth + 1) for name in names},
            "required": [name for name in names if draw.random() < 0.7],
            "additionalProperties": False,
        }
    if kind == "array":
        return {"type": "array", "items": schema(draw, depth + 1), "maxItems": 2}
    if kind == "string":
        return {"type": "string", "maxLength": draw.randint(0, 3)}
    values = draw.sample(["red", "green", "blue", 17, None, True], draw.randint(1, 3))
    others = {
        "enum": {"enum": values},
        "const": {"const": values[0]},
        "integer": {"type": "integer", "minimum": 0, "maximum": 99},
    }
    return others.get(kind, {"type": kind})


@lru_cache(4)
def tiny_model(seed: int) -> PreTrainedModel:
    """Return a random model of bytes."""
    torch.manual_seed(seed % 4)
    config = LlamaConfig(
        **SIZES, vocab_size=260, num_hidden_layers=2, max_position_embeddings=256, eos_token_id=None
    )
    model: Any = LlamaForCausalLM(config)
    return cast("PreTrainedModel", model.eval())


def both(grammar: Grammar, settings: SamplingSettings, seed: int) -> tuple[list[int], list[int]]:
    """Decode with forced drafts, and without any draft at all."""
    model = tiny_model(seed % 4)
    prompt = [5, 6, 7 + seed % 40]
    drafter = ScriptedDrafter(lambda tokens, nodes: _wrong(tokens, nodes, seed))
    outputs = []
    for is_drafted in (True, False):
        decoder = decoder_with(
            model,
            drafter,
            accept=accept_rule(settings, (), grammar),
            stop_ids=[END],
        )
        decoder.budget = FixedBudget(12 if is_drafted else 0)
        outputs.append(decoded(decoder, prompt, 60))
    return outputs[0], outputs[1]


def _wrong(tokens: Sequence[int], nodes: int, seed: int) -> DraftTree:
    """Return a tree of tokens by chance, most of which are forbidden."""
    rng = np.random.default_rng([seed, len(tokens)])
    size = min(nodes, 10)
    parents = [int(rng.integers(-1, node)) if node else ROOT for node in range(size)]
    siblings = set[tuple[int, int]]()
    kept = []
    for parent in parents:
        token = int(rng.integers(0, 257))
        while (parent, token) in siblings:
            token = int(rng.integers(0, 257))
        siblings.add((parent, token))
        kept.append(token)
    shares = np.sort(rng.random(size))[::-1]
    return DraftTree.checked(kept, parents, shares.astype(np.float32), [1] * size)


@pytest.mark.seeds
def test_outputs_are_those_of_masking_alone(byte_tokenizer: PreTrainedTokenizerBase) -> None:
    draw, lengths = random.Random(3), []
    for seed in range(cases(7, of=1000)):
        grammar = Grammar.of_json_schema(schema(draw), byte_tokenizer, (END,))
        for settings in (SamplingSettings(0.0), SamplingSettings(1.0, seed=seed)):
            drafted, plain = both(grammar, settings, seed)
            assert drafted == plain
            lengths.append(len(plain))
    assert max(lengths) > 10


@pytest.mark.seeds
def test_drawn_outputs_are_distributed_as_masked_ones(
    byte_tokenizer: PreTrainedTokenizerBase,
) -> None:
    """Under one set of logits at every node: which of three texts comes is told by its bytes."""
    texts = ["aab", "aac", "ba"]
    grammar = Grammar.of(choice_grammar(texts), byte_tokenizer, (END,))
    ids = [[*byte_tokenizer.encode(each), END] for each in texts]
    logits = torch.randn(260, generator=torch.Generator().manual_seed(1))
    trials, counts = cases(200, of=4000), np.zeros(3, np.int64)
    for trial in range(trials):
        rule = accept_rule(SamplingSettings(1.0, seed=trial, coupled=False), (), grammar)
        assert isinstance(rule, ProcessedRule)
        forced, output = rule.forced(""), list[int]()
        assert forced is not None
        while not output or output[-1] != END:
            generated = np.array(output, np.int32)
            tree = forced.improved(_wrong(output, 6, trial), generated, 8)
            rows = logits.repeat(1 + len(tree), 1)
            path, token = rule(tree, rows, PassContext(trial, generated, 0))
            output += [*tree.token_ids[path].tolist(), token]
        counts[ids.index(output[: output.index(END) + 1])] += 1
    shares = []
    for each in ids:
        share = 1.0
        state = grammar.start()
        for token in each:
            allowed = grammar.allowed(state)
            row = logits.clone()
            row[: len(allowed)][~allowed[:260]] = -torch.inf
            share *= float(row[: len(allowed)].softmax(-1)[token])
            state = grammar.advance(state, token)
        shares.append(share)
    assert survival(*chi_square(counts[None], np.array(shares)[None] * trials)) > 0.01


def test_wrong_drafts_in_their_place_change_nothing(
    byte_tokenizer: PreTrainedTokenizerBase, monkeypatch: pytest.MonkeyPatch
) -> None:
    grammar = Grammar.of(choice_grammar(["abc", "xyz"]), byte_tokenizer, (END,))
    wanted = [[*byte_tokenizer.encode(each), END] for each in ("abc", "xyz")]
    right, plain = both(grammar, SamplingSettings(0.0), 2)
    monkeypatch.setattr(ForcedDrafts, "improved", lambda *given: _wrong([1, 2], given[-1], 4))
    wrong, _ = both(grammar, SamplingSettings(0.0), 2)
    assert right == plain == wrong
    assert plain in wanted


@pytest.mark.parametrize("num_rows", [1, 3])
def test_generate_gives_the_same_with_drafts_in_fewer_passes(
    byte_tokenizer: PreTrainedTokenizerBase, num_rows: int
) -> None:
    model: Any = tiny_model(1)
    grammar = Grammar.of_json_schema(TOOL, byte_tokenizer, (END,))
    prompts = torch.tensor([[5 + row, 6, 9 + row] for row in range(num_rows)])
    foredraft = Foredraft(model, EmbeddedDrafter(), budget=FixedBudget(24))
    asked: dict[str, Any] = {
        "max_new_tokens": 90,
        "do_sample": False,
        "eos_token_id": END,
        "pad_token_id": END,
    }
    for _ in range(2):
        processors = [GrammarProcessor(grammar)]
        plain = model.generate(prompts, logits_processor=processors, **asked)
        drafted = model.generate(
            prompts,
            logits_processor=[GrammarProcessor(grammar)],
            custom_generate=foredraft,
            **asked,
        )
        stated = model.generate(prompts, custom_generate=foredraft, constraint=grammar, **asked)
        assert drafted.tolist() == stated.tolist() == plain.tolist()
    for row in plain.tolist():
        text = str(byte_tokenizer.decode([token for token in row[3:] if token != END]))
        assert '"get_weather"' in text
    statistics = foredraft.statistics
    assert statistics.accepted[Source.GRAMMAR] > 40
    assert statistics.num_passes < statistics.num_tokens / 2


def test_a_stated_constraint_comes_before_what_draws(
    byte_tokenizer: PreTrainedTokenizerBase,
) -> None:
    """Behind top-k nothing that the grammar allows might be left."""
    model: Any = tiny_model(1)
    grammar = Grammar.of(choice_grammar(["abc", "xyz"]), byte_tokenizer, (END,))
    foredraft = Foredraft(model, EmbeddedDrafter(), budget=FixedBudget(8))
    asked: dict[str, Any] = {"do_sample": True, "top_k": 1, "max_new_tokens": 8}
    ids = torch.tensor([[5, 6, 7]])
    ends = {"eos_token_id": END, "pad_token_id": END}
    output = model.generate(ids, custom_generate=foredraft, constraint=grammar, **asked, **ends)
    assert byte_tokenizer.decode(output[0, 3:6]) in {"abc", "xyz"}


@pytest.mark.parametrize(
    "tools",
    [
        [],
        "get_weather",
        [{"parameters": {}}],
        ["get_weather"],
        [{"name": "a", "parameters": {"type": 7}}],
    ],
)
def test_tools_that_are_none_are_refused(tools: Any) -> None:
    with pytest.raises(InvalidConstraintError):
        tools_grammar(tools)


def test_a_call_is_of_one_of_the_tools(byte_tokenizer: PreTrainedTokenizerBase) -> None:
    tools = [
        {"type": "function", "function": {"name": "get_weather", "parameters": TOOL}},
        {"name": "stop"},
    ]
    grammar = Grammar.of(tools_grammar(tools), byte_tokenizer, (END,))
    right = [{"name": "get_weather", "arguments": CALL}, {"name": "stop", "arguments": {}}]
    for call in right:
        ids = written(byte_tokenizer, call)
        assert grammar.is_match(ids[:-1])
        steps(drafts_of(grammar), ids)
    assert steps(drafts_of(grammar), written(byte_tokenizer, right[0])) < 16
    wrong = {"name": "get_news", "arguments": CALL}
    assert not grammar.is_match(written(byte_tokenizer, wrong)[:-1])
    with_new = Grammar.of(
        tools_grammar([*tools, {"name": "get_news"}]), byte_tokenizer, (END,)
    )  # a tool that comes later is another grammar
    assert with_new.is_match(written(byte_tokenizer, wrong)[:-1])


@pytest.mark.parametrize("is_drafted", [False, True])
def test_a_grammar_of_a_larger_vocabulary_is_refused(
    byte_tokenizer: PreTrainedTokenizerBase, *, is_drafted: bool
) -> None:
    """Its tokens are other texts than the model's: the output would be neither."""
    smaller: Any = LlamaForCausalLM(LlamaConfig(vocab_size=100, **SIZES))
    smaller.eval()
    grammar = Grammar.of_json_schema(TOOL, byte_tokenizer, (END,))
    processors = [GrammarProcessor(grammar)]
    drafts: dict[str, Any] = {}
    if is_drafted:
        drafts["custom_generate"] = Foredraft(smaller, EmbeddedDrafter(), budget=FixedBudget(8))
    with pytest.raises(InvalidConstraintError, match="the model has 100: make it with"):
        smaller.generate(
            torch.tensor([[5, 6]]), logits_processor=processors, max_new_tokens=4, **drafts
        )
