"""Drafts inside `model.generate` of transformers."""

import gc
from typing import Any
from weakref import WeakKeyDictionary

import pytest
import torch
from transformers import PreTrainedModel, StoppingCriteria, StoppingCriteriaList
from transformers.generation.utils import GenerateDecoderOnlyOutput

from decoder.budget.budget import FixedBudget
from decoder.budget.costs import CostSurface
from decoder.drafters.session import DraftLimits
from decoder.engines.transformers import custom_generate
from decoder.engines.transformers.assisted import assisted_generate
from decoder.engines.transformers.candidates import DrafterCandidates
from decoder.engines.transformers.custom_generate import Foredraft, foredraft_generate
from decoder.errors import DecoderBusyError, UnsupportedGenerationError
from decoder.target.target import Target
from tests.decoder.decoding import (
    MODELS,
    VOCABULARY,
    Guess,
    ScriptedDrafter,
    at_random,
    nothing,
    oracle,
    plainly,
    prompt_of,
    tiny_llama,
    tree_of,
)

NEW_TOKENS = 40


def generated(model: PreTrainedModel, prompt: list[int], **options: Any) -> Any:
    generate: Any = model.generate
    tokens = torch.tensor([prompt])
    length = {} if "max_length" in options else {"max_new_tokens": NEW_TOKENS}
    return generate(tokens, **{"pad_token_id": 0, **length, **options})


def late_stop(model: PreTrainedModel, prompt: list[int]) -> list[int]:
    """Return stop tokens one of which comes late in the greedy output."""
    truth = plainly(model, prompt, NEW_TOKENS)
    return [VOCABULARY - 1, max(set(truth), key=truth.index)]


def perfect(truth: list[int]) -> Guess:
    """Draft the next true tokens as a chain."""
    return lambda tokens, _: tree_of(
        [(at - 1, token) for at, token in enumerate(truth[len(tokens) :][:8])]
    )


def foredraft(model: PreTrainedModel, drafter: ScriptedDrafter) -> Foredraft:
    return Foredraft(model, drafter, budget=FixedBudget(64))


class EndsAfter(StoppingCriteria):
    """Ends a sequence behind a token, and counts how often it is asked."""

    def __init__(self, token: int) -> None:
        self.token = token
        self.num_calls = 0

    def __call__(self, input_ids: torch.Tensor, _scores: Any, **_: Any) -> Any:
        self.num_calls += 1
        return input_ids[:, -1] == self.token


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"max_length": 30},
        {"eos_token_id": late_stop},
        {"repetition_penalty": 1.3, "no_repeat_ngram_size": 3},
        {"suppress_tokens": [11, 12], "min_new_tokens": 10, "eos_token_id": 7},
    ],
)
def test_greedy_output_is_that_of_generate(name: str, options: dict[str, Any]) -> None:
    model, prompt = MODELS[name](), prompt_of(12)
    options = {
        name: value(model, prompt) if callable(value) else value for name, value in options.items()
    }
    expected = generated(model, prompt, do_sample=False, **options)
    drafter = ScriptedDrafter(oracle(expected[0].tolist()))
    plugin = foredraft(model, drafter)
    output = generated(model, prompt, do_sample=False, custom_generate=plugin, **options)
    assert output.tolist() == expected.tolist()
    assert output.dtype == torch.int64
    assert drafter.closed == output.tolist()
    assert plugin.statistics.num_passes < plugin.statistics.num_tokens


def test_sampled_output_is_one_of_the_seed_and_follows_the_warpers() -> None:
    model, prompt = tiny_llama(), prompt_of(12)
    plugin = foredraft(model, ScriptedDrafter(at_random()))
    options = {"do_sample": True, "temperature": 2.0, "custom_generate": plugin}
    outputs = []
    for seed in (1, 1, 2):
        torch.manual_seed(seed)
        outputs.append(generated(model, prompt, **options).tolist())
    assert outputs[0] == outputs[1] != outputs[2]
    top = generated(model, prompt, **{**options, "top_k": 1})[0, len(prompt) :].tolist()
    assert top == plainly(model, prompt, NEW_TOKENS)


def test_criteria_are_asked_token_by_token_and_cut_within_a_path() -> None:
    model, prompt = tiny_llama(), prompt_of(12)
    truth = plainly(model, prompt, NEW_TOKENS)
    for token in sorted(set(truth))[:6]:
        drafter = ScriptedDrafter(oracle(prompt + truth))
        criterion = EndsAfter(token)
        output = generated(
            model,
            prompt,
            custom_generate=foredraft(model, drafter),
            stopping_criteria=StoppingCriteriaList([criterion]),
        )
        expected = prompt + truth[: truth.index(token) + 1]
        assert output.tolist() == drafter.closed == [expected]
        assert criterion.num_calls == len(expected) - len(prompt)


def test_tokens_are_told_as_they_come_and_outputs_are_wrapped_if_wanted() -> None:
    model, prompt = tiny_llama(), prompt_of(12)
    plugin = foredraft(model, ScriptedDrafter(nothing))
    steps: list[list[int]] = []
    output = generated(
        model,
        prompt,
        custom_generate=plugin,
        on_tokens=steps.append,
        return_dict_in_generate=True,
    )
    assert isinstance(output, GenerateDecoderOnlyOutput)
    assert prompt + [token for step in steps for token in step] == output.sequences[0].tolist()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_beams": 2}, "beam_search"),
        ({"do_sample": True, "num_return_sequences": 2}, "one sequence at a time, not 2"),
        ({"attention_mask": torch.tensor([[0, 1, 1]])}, "hides tokens"),
        ({"position_ids": torch.tensor([[0, 2, 3]])}, "positions other"),
        ({"return_dict_in_generate": True, "output_scores": True}, "output_scores"),
        ({"inputs_embeds": torch.zeros(1, 3, 32)}, "inputs_embeds"),
        ({"drafter": None}, "needs a drafter"),
    ],
)
def test_what_drafts_do_not_serve_is_refused(options: dict[str, Any], message: str) -> None:
    model = tiny_llama()
    drafter = ScriptedDrafter(nothing)
    way: Any = foredraft_generate if "drafter" in options else foredraft(model, drafter)
    with pytest.raises(UnsupportedGenerationError, match=message):
        generated(model, [4, 5, 6], custom_generate=way, **options)
    assert not drafter.closed


def test_batches_other_models_and_nested_calls_are_refused() -> None:
    model = tiny_llama()
    plugin = foredraft(model, ScriptedDrafter(nothing))
    generate: Any = model.generate
    with pytest.raises(UnsupportedGenerationError, match="not 2"):
        generate(torch.ones(2, 3, dtype=torch.int64), max_new_tokens=3, custom_generate=plugin)
    with pytest.raises(UnsupportedGenerationError, match="another model"):
        generated(tiny_llama(), [4, 5], custom_generate=plugin)

    def nested(_tokens: list[int]) -> None:
        generated(model, [4, 5], custom_generate=plugin)

    with pytest.raises(DecoderBusyError):
        generated(model, [4, 5], custom_generate=plugin, on_tokens=nested)
    assert len(generated(model, [4, 5], custom_generate=plugin)[0]) == 2 + NEW_TOKENS


def test_the_function_measures_a_model_once(monkeypatch: pytest.MonkeyPatch) -> None:
    model, prompt = tiny_llama(), prompt_of(12)
    measured = []

    def watched(target: Target) -> CostSurface:
        measured.append(target)
        return CostSurface.flat((1, 64), (1.0, 1.0))

    curves: WeakKeyDictionary[Any, CostSurface] = WeakKeyDictionary()
    monkeypatch.setattr(custom_generate, "_curves", curves)
    monkeypatch.setattr(custom_generate, "measure_costs", watched)
    expected = prompt + plainly(model, prompt, NEW_TOKENS)
    for _ in range(2):
        drafter = ScriptedDrafter(oracle(expected))
        output = generated(model, prompt, custom_generate=foredraft_generate, drafter=drafter)
        assert output.tolist() == drafter.closed == [expected]
    assert len(measured) == 1
    measured.clear()
    assert list(curves) == [model]
    del model
    gc.collect()
    assert not list(curves)


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("options", [{}, {"max_length": 30}, {"eos_token_id": late_stop}])
def test_chains_give_the_output_of_generate(name: str, options: dict[str, Any]) -> None:
    model, prompt = MODELS[name](), prompt_of(12)
    options = {
        name: value(model, prompt) if callable(value) else value for name, value in options.items()
    }
    expected = generated(model, prompt, do_sample=False, **options)
    truth = expected[0].tolist()
    passes: list[int] = []
    model.register_forward_pre_hook(lambda *_: passes.append(1))
    num_passes = []
    for guess in (perfect(truth), oracle(truth), at_random(), nothing):
        passes.clear()
        drafter = ScriptedDrafter(guess)
        output = generated(
            model, prompt, custom_generate=assisted_generate, drafter=drafter, **options
        )
        assert output.tolist() == drafter.closed == [truth]
        assert "_get_candidate_generator" not in vars(model)
        num_new = len(truth) - len(prompt)
        assert len(passes) <= num_new
        num_passes.append(len(passes))
    assert num_passes[0] < num_passes[-1] / 2


def test_candidates_of_another_sequence_begin_another_session() -> None:
    drafter = ScriptedDrafter(at_random(4))
    candidates = DrafterCandidates(drafter, DraftLimits(VOCABULARY), max_candidates=3)
    first, _ = candidates.get_candidates(torch.tensor([[4, 5, 6]]))
    assert first[0, :3].tolist() == [4, 5, 6]
    assert 3 < first.shape[1] <= 6
    candidates.update_candidate_strategy(torch.tensor([[4, 5, 6, 7]]), torch.empty(0), 0)
    candidates.get_candidates(torch.tensor([[8, 9]]))
    assert drafter.closed == [[4, 5, 6, 7]]
    candidates.close()
    assert drafter.closed == [[4, 5, 6, 7], [8, 9]]
