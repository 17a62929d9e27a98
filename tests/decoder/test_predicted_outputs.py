"""Predictions change how fast an output comes, and never the output."""

from collections.abc import Sequence
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
from transformers import PreTrainedModel

from decoder.errors import InvalidPromptError
from decoder.loop import Decoder, Generation, Request
from decoder.sampling.rule import accept_rule
from decoder.sampling.sampling_settings import SamplingSettings
from retriever.drafter import Prediction, SequenceOptions
from retriever.sessions.embedded import EmbeddedDrafter
from retriever.tree import Source
from tests.decoder.decoding import (
    VOCABULARY,
    ScriptedDrafter,
    decoder_with,
    fused,
    nothing,
    plainly,
    prompt_of,
    tiny_llama,
)
from tests.decoder.engines.transformers.generating import foredraft

NEW_TOKENS = 60
PROMPTS = [prompt_of(12, seed=seed) for seed in range(3)]


@cache
def llama() -> PreTrainedModel:
    return tiny_llama()


@cache
def truth_of(number: int) -> tuple[int, ...]:
    """Return what follows one of the prompts."""
    return tuple(plainly(llama(), PROMPTS[number], NEW_TOKENS))


def predicting(tokens: Sequence[int], label: str = "") -> list[Prediction]:
    return [Prediction(np.array(tokens, np.int32), label)]


def wrong(seed: int = 9) -> list[Prediction]:
    return predicting(np.random.default_rng(seed).integers(0, VOCABULARY, 80).tolist())


def run(decoder: Decoder, prompt: list[int], predictions: Sequence[Prediction]) -> Generation:
    generation = decoder.generate(
        prompt, NEW_TOKENS, SequenceOptions(predictions=tuple(predictions), remember=False)
    )
    for _ in generation:
        pass
    return generation


def output_of(generation: Generation, prompt: list[int]) -> list[int]:
    tokens: list[int] = generation.tokens[len(prompt) :].tolist()
    return tokens


@pytest.mark.parametrize(
    ("make", "ahead"), [(EmbeddedDrafter, 0), (fused, 4)], ids=["embedded", "fused and ahead"]
)
def test_a_true_prediction_saves_passes_and_a_wrong_one_changes_nothing(
    make: Any, ahead: int
) -> None:
    model = llama()
    decoder = decoder_with(model, make(), num_ahead=ahead)
    for number, prompt in enumerate(PROMPTS[:2]):
        truth = list(truth_of(number))
        edited = [*truth[:20], 3, *truth[24:40], *truth[44:]]
        for predictions, most in (
            (predicting(truth), NEW_TOKENS // 6),
            (predicting(edited), NEW_TOKENS // 3),
            (wrong(), NEW_TOKENS),
            ([*wrong(), *predicting(truth)], NEW_TOKENS // 4),
        ):
            generation = run(decoder, prompt, predictions)
            assert output_of(generation, prompt) == truth
            assert generation.statistics.num_passes <= most
            assert ahead or not generation.statistics.num_failures  # it may be late
        assert generation.statistics.accepted[Source.PREDICTIONS] > NEW_TOKENS // 3


def test_a_drawn_output_is_that_of_its_seed() -> None:
    model, prompt = tiny_llama(dtype=torch.float64), PROMPTS[0]
    rule = accept_rule(SamplingSettings(temperature=1.0, seed=5))

    def drawn(predictions: Sequence[Prediction]) -> Generation:
        return run(decoder_with(model, EmbeddedDrafter(), accept=rule), prompt, predictions)

    plain = output_of(drawn([]), prompt)
    generation = drawn(predicting(plain))
    assert output_of(generation, prompt) == plain == output_of(drawn(wrong()), prompt)
    assert generation.statistics.num_passes < NEW_TOKENS // 2


def test_each_of_many_has_its_own_predictions() -> None:
    """No row is drafted for from another's: theirs would be accepted where prompts are equal."""
    model, prompt = llama(), PROMPTS[0]
    truth = list(truth_of(0))
    requests = [
        Request(prompt, NEW_TOKENS, SequenceOptions(remember=False, predictions=tuple(each)))
        for each in (predicting(truth), (), wrong())
    ]
    decoder = decoder_with(model, EmbeddedDrafter())
    tokens: dict[int, list[int]] = {}
    done: dict[int, Generation] = {}
    for generation, new in decoder.generate_many(requests, 3):
        tokens.setdefault(generation.number, []).extend(new)
        done[generation.number] = generation
    assert list(tokens.values()) == [truth] * 3
    accepted = [done[number].statistics.accepted[Source.PREDICTIONS] for number in range(3)]
    assert accepted[0] > NEW_TOKENS // 2
    assert accepted[1] == 0


@pytest.mark.parametrize("ahead", [0, 4])
def test_predictions_may_come_while_an_output_does(ahead: int) -> None:
    model, prompt = llama(), PROMPTS[1]
    truth = list(truth_of(1))
    decoder = decoder_with(model, EmbeddedDrafter(), num_ahead=ahead)
    generation = decoder.generate(prompt, NEW_TOKENS)
    tokens: list[int] = []
    for new in generation:
        if not generation.statistics.accepted[Source.PREDICTIONS] and len(tokens) < 10:
            generation.add_predictions(predicting(truth))
        tokens += new
    assert tokens == truth
    assert generation.statistics.accepted[Source.PREDICTIONS] > NEW_TOKENS // 3
    with pytest.raises(InvalidPromptError, match="prediction 'plan' has no tokens"):
        generation.add_predictions(predicting([], "plan"))


def test_drafters_that_take_no_predictions_draft_without() -> None:
    model, prompt = llama(), PROMPTS[0]
    truth = list(truth_of(0))
    generation = run(decoder_with(model, ScriptedDrafter(nothing)), prompt, predicting(truth))
    assert output_of(generation, prompt) == truth
    assert generation.statistics.num_failures == 0


@pytest.mark.parametrize(
    ("tokens", "reason"),
    [
        ([], "prediction 'plan' has no tokens"),
        ([VOCABULARY], f"prediction 'plan': token id {VOCABULARY} is outside the vocabulary"),
        ([0] * ((1 << 20) + 1), "beyond the limit of 1048576"),
    ],
)
def test_what_is_no_prediction_ends_its_own_sequence_alone(tokens: list[int], reason: str) -> None:
    model = llama()
    decoder = decoder_with(model, EmbeddedDrafter())
    predictions = predicting(tokens, "plan")
    with pytest.raises(InvalidPromptError, match=reason):
        decoder.generate(PROMPTS[0], 4, SequenceOptions(predictions=tuple(predictions)))
    requests = [
        Request(PROMPTS[0], 4, SequenceOptions(predictions=tuple(predictions))),
        Request(PROMPTS[1], 4),
    ]
    done = {each.number: each for each, _ in decoder.generate_many(requests, 2) if each.is_over}
    assert isinstance(done[0].error, InvalidPromptError)
    assert output_of(done[1], PROMPTS[1]) == plainly(model, PROMPTS[1], 4)


def test_tokens_that_the_drafter_does_not_know_cost_their_prediction_alone() -> None:
    """A model's embedding may have rows beyond the vocabulary that is drafted for."""
    model, prompt = llama(), [1, 2, 3] * 5
    decoder = decoder_with(model, EmbeddedDrafter(), drafter_vocabulary=VOCABULARY - 1)
    truth = plainly(model, prompt, 20)
    generation = run(decoder, prompt, predicting([VOCABULARY - 1, *truth]))
    assert output_of(generation, prompt)[:20] == truth


def called(model: Any, rows: list[list[int]], **options: Any) -> tuple[list[list[int]], Any]:
    """What `model.generate` returns with drafts, and the figures of its passes."""
    plugin = foredraft(model, EmbeddedDrafter())
    generate: Any = model.generate
    options = {"max_new_tokens": NEW_TOKENS, "do_sample": False, "pad_token_id": 0, **options}
    output = generate(torch.tensor(rows), custom_generate=plugin, **options)
    return output[:, len(rows[0]) :].tolist(), plugin.statistics


def test_a_call_of_generate_has_predictions_of_its_rows() -> None:
    model, prompt = llama(), PROMPTS[0]
    truth = list(truth_of(0))
    for predictions in (predicting(truth), [predicting(truth)]):
        output, statistics = called(model, [prompt], predictions=predictions)
        assert output == [truth]
        assert statistics.accepted[Source.PREDICTIONS] > NEW_TOKENS // 2
    rows = [PROMPTS[0], PROMPTS[1]]
    truths = [list(truth_of(number)) for number in range(2)]
    for predictions in (
        [predicting(each) for each in truths],
        [each for truth in truths for each in predicting(truth)],
    ):
        output, statistics = called(model, rows, predictions=predictions)
        assert output == truths
        assert statistics.accepted[Source.PREDICTIONS] > NEW_TOKENS
    assert called(model, rows)[1].accepted[Source.PREDICTIONS] == 0
    with pytest.raises(InvalidPromptError, match="for each of the 2 rows"):
        called(model, rows, predictions=[predicting(truths[0])])
    with pytest.raises(InvalidPromptError, match="has no tokens"):
        called(model, rows, predictions=predicting([]))
