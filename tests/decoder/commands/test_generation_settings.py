from pathlib import Path
from typing import Any

import pytest
import torch

from decoder.assembly import assemble, own_rule
from decoder.drafters.following import NoDrafter
from decoder.model.pretrained import LanguageModel, ModelOptions, load_model
from decoder.sampling.rule import accept_rule
from decoder.sampling.sampling_settings import SamplingSettings
from decoder.sampling.stated import stated_processors, unapplied_settings
from tests.decoder.decoding import (
    ScriptedDrafter,
    decoded,
    decoder_with,
    oracle,
    plainly,
    prompt_of,
    tiny_llama,
)

APPLIED_BY_GENERATE_ONLY = {
    "repetition_penalty": 1.3,
    "encoder_repetition_penalty": 1.2,
    "no_repeat_ngram_size": 2,
    "bad_words_ids": [[5]],
    "min_length": 5,
    "min_new_tokens": 5,
    "suppress_tokens": [5],
    "begin_suppress_tokens": [5],
    "forced_bos_token_id": 5,
    "forced_eos_token_id": 5,
    "sequence_bias": [[[5], 2.0]],
    "exponential_decay_length_penalty": (3, 1.2),
    "guidance_scale": 1.5,
    "num_beams": 4,
    "max_time": 0.1,
    "stop_strings": ["end"],
}
WITHOUT_EFFECT = {
    "repetition_penalty": 1.0,
    "min_length": 0,
    "num_beams": 1,
    "do_sample": True,
    "temperature": 0.7,
    "top_p": 0.9,
    "top_k": 20,
    "max_length": 4096,
}

STATED = {
    "repetition_penalty": 1.3,
    "no_repeat_ngram_size": 2,
    "bad_words_ids": [[5]],
    "min_length": 5,
    "suppress_tokens": [5],
    "forced_bos_token_id": 6,
}


def generated(language_model: LanguageModel, prompt: list[int], max_new_tokens: int) -> list[int]:
    """Return what transformers generates greedily with what the model's own config states."""
    model: Any = language_model.model
    tokens = torch.tensor([prompt])
    output = model.generate(
        tokens,
        attention_mask=torch.ones_like(tokens),
        do_sample=False,
        max_new_tokens=max_new_tokens,
        pad_token_id=0,
    )
    new: list[int] = output[0, len(prompt) :].tolist()
    return new


@pytest.mark.parametrize("name", APPLIED_BY_GENERATE_ONLY)
def test_settings_that_change_greedy_output_are_named(name: str) -> None:
    model = tiny_llama()
    value = APPLIED_BY_GENERATE_ONLY[name]
    setattr(model.generation_config, name, value)
    assert unapplied_settings(model, ()) == {name: value}


@pytest.mark.parametrize("stop_ids", [(), (7, 9)])
def test_settings_without_effect_on_greedy_output_are_not_named(stop_ids: tuple[int, ...]) -> None:
    model = tiny_llama()
    assert unapplied_settings(model, stop_ids) == {}
    for name, value in WITHOUT_EFFECT.items():
        setattr(model.generation_config, name, value)
    assert unapplied_settings(model, stop_ids) == {}


@pytest.mark.plugin("decoder.plugins.contenders")
def test_a_penalty_is_warned_of_and_put_aside_for_all_contenders(
    model_directory: Path, caplog: pytest.LogCaptureFixture
) -> None:
    from decoder.plugins.contenders.contender import contenders  # noqa: PLC0415

    language_model = load_model(ModelOptions(str(model_directory)))
    model: Any = language_model.model
    prompt = prompt_of(12)
    without = plainly(model, prompt, 40, language_model.stop_ids[0])
    model.generation_config.repetition_penalty = 1.3
    assert plainly(model, prompt, 40, language_model.stop_ids[0]) != without
    decoder = assemble(language_model, NoDrafter())
    assert "repetition_penalty=1.3, which is not applied" in caplog.text
    for name, contender in contenders(language_model, decoder, 40).items():
        assert contender([prompt], remember=False).token_ids == without, name
    assert model.generation_config.repetition_penalty == 1.3


def test_what_generate_obeys_is_obeyed_along_paths_and_not_warned_of(model_directory: Path) -> None:
    language_model = load_model(ModelOptions(str(model_directory)))
    model: Any = language_model.model
    prompt = prompt_of(12)
    for name, value in STATED.items():
        setattr(model.generation_config, name, value)
    truth = generated(language_model, prompt, 40)
    rule = own_rule(language_model, SamplingSettings())
    assert unapplied_settings(model, language_model.stop_ids, rule) == {}
    drafter = ScriptedDrafter(oracle(prompt + truth))
    decoder = decoder_with(model, drafter, accept=rule, stop_ids=language_model.stop_ids)
    assert decoded(decoder, prompt, 40) == truth


def test_a_sampling_rule_leaves_only_other_settings_unapplied() -> None:
    model = tiny_llama()
    for name, value in {**APPLIED_BY_GENERATE_ONLY, "top_p": 0.9, "typical_p": 0.9}.items():
        setattr(model.generation_config, name, value)
    settings = SamplingSettings(0.7).completed(model.generation_config)
    left = set(unapplied_settings(model, (), accept_rule(settings, stated_processors(model, ()))))
    assert left == APPLIED_BY_GENERATE_ONLY.keys() - STATED.keys() | {"typical_p"}
