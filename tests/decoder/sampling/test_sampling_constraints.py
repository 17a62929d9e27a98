import json
import re
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from transformers import PreTrainedTokenizerBase

from decoder.drafters.following import NoDrafter
from decoder.errors import DeadEndError
from decoder.sampling.constraint import ConstraintMemory, Grammar
from decoder.sampling.rule import accept_rule
from decoder.sampling.sampling_settings import SamplingSettings
from decoder.sampling.verification import AcceptRule, PassContext
from retriever.errors import InvalidConstraintError
from retriever.predict.grammar.grammars import regex_grammar
from retriever.tree import DraftTree
from tests.decoder.decoding import (
    ScriptedDrafter,
    decoded,
    decoder_with,
    every_token,
    oracle,
    prompt_of,
    tiny_llama,
)
from tests.oracles.exactness.trials import chi_square, survival
from tests.suite_parts import cases

VOCABULARY = 48


class Automaton:
    """A small deterministic automaton over tokens: (a | b) c* d, where letters are sets of tokens.

    A state is how much of the expression is there: nothing, its first letter, or all.
    """

    LETTERS = ({5, 6, 7}, {10, 11, 12, 13, 14, 15, 16}, {30, 31})
    STEPS = ({0: 1}, {1: 1, 2: 2}, dict[int, int]())

    def __init__(self) -> None:
        self.num_advances = 0

    def start(self) -> int:
        return 0

    def advance(self, state: int, token: int) -> int:
        self.num_advances += 1
        return next(to for letter, to in self.STEPS[state].items() if token in self.LETTERS[letter])

    def allowed(self, state: int) -> torch.Tensor:
        tokens = set().union(*(self.LETTERS[letter] for letter in self.STEPS[state]))
        return torch.tensor([token in tokens for token in range(40)])


def masked_by_hand(logits: torch.Tensor, state: int) -> NDArray[np.float64]:
    mask = torch.zeros(VOCABULARY, dtype=torch.bool)
    mask[:40] = Automaton().allowed(state)
    row: NDArray[np.float64] = logits.masked_fill(~mask, -torch.inf).double().softmax(-1).numpy()
    return row


def pairs(rule: AcceptRule, logits: torch.Tensor, trials: int) -> NDArray[np.int64]:
    """Count the first two tokens where all tokens are drafted after the first, by a wide tree."""
    tree = every_token([], VOCABULARY)
    rows = torch.cat([logits[:1], logits[torch.from_numpy(tree.token_ids)]])
    counts = np.zeros((VOCABULARY, VOCABULARY), np.int64)
    for trial in range(trials):
        path, token = rule(tree, rows, PassContext(trial, np.zeros(3, np.int32), 3))
        counts[tree.token_ids[path[0]], token] += 1
    return counts


@pytest.mark.seeds
@pytest.mark.parametrize("coupled", [True, False])
def test_constrained_sampling_is_that_of_masked_rows(coupled: bool) -> None:  # noqa: FBT001
    logits = torch.randn(VOCABULARY, VOCABULARY, generator=torch.Generator().manual_seed(5))
    settings = SamplingSettings(1.0, seed=4, coupled=coupled)
    trials = cases(1000, of=4000)
    counts = pairs(accept_rule(settings, (), Automaton()), logits, trials)
    wanted = masked_by_hand(logits[0], 0)[:, None] * np.array(
        [masked_by_hand(logits[token], 1) for token in range(VOCABULARY)]
    )
    assert survival(*chi_square(counts, wanted * trials)) > 0.01


def greedily_by_hand(model: Any, prompt: list[int], most: int) -> list[int]:
    automaton = Automaton()
    state, output = automaton.start(), list[int]()
    while state != 2 and len(output) < most:
        with torch.inference_mode():
            logits = model(torch.tensor([[*prompt, *output]])).logits[0, -1]
        output.append(int(masked_by_hand(logits, state).argmax()))
        state = automaton.advance(state, output[-1])
    return output


def test_constrained_greedy_output_is_that_of_masked_rows() -> None:
    model = tiny_llama()
    rule = accept_rule(constraint=Automaton())
    decoder = decoder_with(model, ScriptedDrafter(every_token), accept=rule, stop_ids=[30, 31])
    outputs = []
    for seed in range(8):
        prompt = prompt_of(12, seed)
        outputs.append(greedily_by_hand(model, prompt, 12))
        assert decoded(decoder, prompt, 12) == outputs[-1]
    assert max(map(len, outputs)) > 4


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_constrained_output_does_not_depend_on_drafts(temperature: float) -> None:
    model, prompt = tiny_llama(dtype=torch.float64), prompt_of(12)

    def output(drafter: NoDrafter | ScriptedDrafter) -> list[int]:
        rule = accept_rule(SamplingSettings(temperature, seed=2), (), Automaton())
        decoder = decoder_with(model, drafter, accept=rule, stop_ids=[30, 31])
        return decoded(decoder, prompt, 40)

    plain = output(NoDrafter())
    assert plain[0] in Automaton.LETTERS[0]
    assert set(plain[1:-1]) <= Automaton.LETTERS[1]
    for guess in (every_token, oracle(prompt + plain)):
        assert output(ScriptedDrafter(guess)) == plain


def test_all_text_before_a_dead_end_is_given_out() -> None:
    prompt = prompt_of(12)
    rule = accept_rule(SamplingSettings(3.0, seed=6), (), Automaton())
    decoder = decoder_with(tiny_llama(), ScriptedDrafter(every_token), accept=rule)
    given: list[int] = []
    with pytest.raises(DeadEndError, match="no token may come next: the constraint"):
        given.extend(token for step in decoder.generate(prompt, 200) for token in step)
    assert given[-1] in Automaton.LETTERS[2]


def test_each_token_is_taken_in_once_and_sequences_are_not_mixed() -> None:
    automaton = Automaton()
    memory = ConstraintMemory(automaton)
    tokens = np.array([1, 2, 5, 10, 11, 12], np.int32)
    for length in range(2, 7):
        assert memory.state(PassContext(0, tokens[:length], 2)) == min(1, length - 2)
    assert automaton.num_advances == 4
    assert memory.state(PassContext(0, np.array([1, 2, 5, 30], np.int32), 2)) == 2
    assert memory.state(PassContext(0, tokens[:2], 2)) == 0


def test_a_regular_expression_holds_for_the_whole_output(
    byte_tokenizer: PreTrainedTokenizerBase,
) -> None:
    pytest.importorskip("llguidance", reason="an extra: run pip install '.[grammar]'")
    pattern = "(ab|ü)+[0-9]{2}"
    constraint = Grammar.of_regex(pattern, byte_tokenizer, (0,))
    rng = np.random.default_rng(2)
    for _ in range(20):
        state, output = constraint.start(), list[int]()
        while True:
            allowed = torch.nonzero(constraint.allowed(state))[:, 0].tolist()
            token = int(rng.choice(allowed))
            again = constraint.advance(state, allowed[0])
            assert torch.equal(constraint.allowed(state).nonzero()[:, 0], torch.tensor(allowed))
            state = constraint.advance(state, token) if token != allowed[0] else again
            if token == 0:
                break
            output.append(token)
        assert re.fullmatch(pattern, str(byte_tokenizer.decode(output)))
        assert constraint.allowed(state).nonzero().tolist() == [[0]]


def test_a_json_schema_holds_for_the_whole_output(byte_tokenizer: PreTrainedTokenizerBase) -> None:
    pytest.importorskip("llguidance", reason="an extra: run pip install '.[grammar]'")
    schema = {
        "type": "object",
        "properties": {"n": {"type": "boolean"}},
        "required": ["n"],
        "additionalProperties": False,
    }
    constraint = Grammar.of_json_schema(schema, byte_tokenizer, (0,))
    rule = accept_rule(SamplingSettings(1.0, seed=1), (), constraint)
    tokens: list[int] = []
    while not tokens or tokens[-1] != 0:
        logits = torch.zeros(1, 257)
        logits[0, [byte_tokenizer.convert_tokens_to_ids("Ġ"), 0]] = torch.tensor([-20.0, 9.0])
        tokens.append(
            rule(DraftTree.empty(), logits, PassContext(0, np.array(tokens, np.int32)))[1]
        )
    assert json.loads(str(byte_tokenizer.decode(tokens[:-1])))["n"] in {True, False}


@pytest.mark.parametrize(
    ("pattern", "message"),
    [
        ("(a", r"cannot follow the pattern '\(a': unclosed group \(at character 1\)$"),
        ("é[z-a]", r"invalid character class range, .* \(at character 3\)$"),
        ("x\ny(", "unclosed group$"),
        ("a{2,1}", r"invalid repetition count range, .* \(at character 2\)$"),
    ],
)
def test_bad_patterns_are_refused_in_one_line(pattern: str, message: str) -> None:
    pytest.importorskip("llguidance", reason="an extra: run pip install '.[grammar]'")
    with pytest.raises(InvalidConstraintError, match=message) as caught:
        regex_grammar(pattern)
    assert "\n" not in str(caught.value)
