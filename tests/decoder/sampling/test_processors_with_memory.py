"""Processors that remember, on the CPU and on another device: as in plain decoding."""

from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
from transformers import PreTrainedModel, SuppressTokensLogitsProcessor, TopKLogitsWarper

from decoder.drafters.following import NoDrafter
from decoder.sampling.rule import accept_rule
from decoder.sampling.sampling_settings import SamplingSettings
from decoder.sampling.verification import AcceptRule, PassContext, accept_greedy
from decoder.sampling.walk import Acceptance
from retriever.tree import DraftTree
from tests.decoder.decoding import (
    Guess,
    ScriptedDrafter,
    at_random,
    decoded,
    decoder_with,
    every_token,
    oracle,
    prompt_of,
    random_tree,
    tiny_llama,
)
from tests.decoder.sampling.remembering import Remembering
from tests.oracles.elsewhere import elsewhere, sent

NEW_TOKENS = 14
SETTINGS = {
    "greedy": SamplingSettings(),
    "penalised greedy": SamplingSettings(repetition_penalty=1.3, frequency_penalty=0.2),
    "drawn": SamplingSettings(1.0, seed=5),
    "everything": SamplingSettings(0.9, 20, 0.95, 0.01, 1.2, 0.3, 0.2, seed=5),
}


def on_the_cpu(rule: AcceptRule) -> AcceptRule:
    return rule


def on_another_device(rule: AcceptRule) -> AcceptRule:
    def accepted(tree: DraftTree, logits: torch.Tensor, context: PassContext) -> Acceptance:
        with elsewhere():
            return rule(tree, sent(logits), context)

    return accepted


@cache
def double_llama() -> PreTrainedModel:
    return tiny_llama(dtype=torch.float64)


@cache
def plain_output(name: str) -> tuple[int, ...]:
    """Return what is written without drafts; there, too, each position is shown once."""
    plain, prompt = Remembering(), prompt_of(12)
    rule = accept_rule(SETTINGS[name], [plain])
    truth = decoded(decoder_with(double_llama(), NoDrafter(), accept=rule), prompt, NEW_TOKENS)
    assert plain.seen == [[*prompt, *truth[:end]] for end in range(NEW_TOKENS)]
    return tuple(truth)


@pytest.mark.parametrize("place", [on_the_cpu, on_another_device])
@pytest.mark.parametrize("name", SETTINGS)
def test_a_processor_with_a_memory_sees_each_position_once(
    name: str, place: Callable[[AcceptRule], AcceptRule]
) -> None:
    model, prompt = double_llama(), prompt_of(12)
    truth = plain_output(name)
    assert len(set(truth)) > 8
    guesses: list[Guess] = [every_token, oracle([*prompt, *truth]), at_random()]
    for guess in guesses:
        drafted = Remembering()
        rule = place(accept_rule(SETTINGS[name], [drafted]))
        decoder = decoder_with(model, ScriptedDrafter(guess), accept=rule)
        generation = decoder.generate(prompt, NEW_TOKENS)
        assert tuple(token for step in generation for token in step) == truth
        assert drafted.seen == [[*prompt, *truth[:end]] for end in range(NEW_TOKENS)]
        assert guess is guesses[-1] or generation.statistics.tokens_per_pass > 1.5


def some_passes(count: int) -> list[tuple[DraftTree, torch.Tensor, PassContext]]:
    rng = np.random.default_rng(8)
    passes = []
    for number in range(count):
        tree = random_tree(rng, 24, 12)
        logits = torch.from_numpy(rng.normal(0, 2, (25, 12))).float()
        passes.append((tree, logits, PassContext(number, np.arange(9, dtype=np.int32), 4)))
    return passes


BLIND = [
    SamplingSettings(0.7, seed=2),
    SamplingSettings(1.0, top_p=0.8, seed=2),
    SamplingSettings(1.0, 5, 0.9, 0.05, seed=2),
]


@pytest.mark.parametrize("settings", BLIND)
def test_what_looks_at_no_token_is_waited_for_once(settings: SamplingSettings) -> None:
    given: list[Any] = [SuppressTokensLogitsProcessor([3]), TopKLogitsWarper(9)]
    rule = accept_rule(settings, given)
    lengths = set()
    for tree, logits, context in some_passes(8):
        path, token = rule(tree, logits, context)
        with elsewhere() as device:
            other, other_token = rule(tree, sent(logits), context)
        assert (path.tolist(), token) == (other.tolist(), other_token)
        assert device.waits == 1
        assert device.launches.total() < 60
        lengths.add(len(path))
    assert len(lengths) > 1


def test_greedy_is_one_search_elsewhere() -> None:
    for tree, logits, context in some_passes(8):
        path, token = accept_greedy(tree, logits, context)
        with elsewhere() as device:
            other, other_token = accept_greedy(tree, sent(logits), context)
        assert (path.tolist(), token) == (other.tolist(), other_token)
        assert (device.launches, device.waits) == ({"argmax": 1}, 1)


def test_what_looks_at_tokens_is_computed_for_the_path_alone() -> None:
    rule = accept_rule(SETTINGS["everything"])
    for tree, logits, context in some_passes(8):
        path, token = rule(tree, logits, context)
        with elsewhere() as device:
            other, other_token = rule(tree, sent(logits), context)
        assert (path.tolist(), token) == (other.tolist(), other_token)
        assert device.waits == len(path) + 1
        assert device.launches.total() <= 80 * (len(path) + 1)
