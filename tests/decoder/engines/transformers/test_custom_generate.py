"""Drafts inside `model.generate` of transformers."""

import gc
import json
from pathlib import Path
from typing import Any
from weakref import ref

import pytest
import torch
from transformers import (
    DynamicCache,
    GenerationConfig,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    StoppingCriteriaList,
)
from transformers.generation.utils import GenerateDecoderOnlyOutput

from decoder.budget import pass_timing
from decoder.budget.budget import MeasuredBudget
from decoder.budget.cost_store import CostStore, known_costs
from decoder.budget.costs import CostSurface
from decoder.engines.transformers import custom_generate
from decoder.engines.transformers.custom_generate import Foredraft, foredraft_generate
from decoder.engines.transformers.requests import checked_rows
from decoder.errors import DecoderBusyError, InvalidPromptError, UnsupportedGenerationError
from decoder.model.target import Target
from indexer.tokenizer import CACHE_VARIABLE
from tests.decoder.decoding import (
    MODELS,
    VOCABULARY,
    ScriptedDrafter,
    at_random,
    evaluated,
    nothing,
    oracle,
    plainly,
    prompt_of,
    tiny_llama,
    tiny_mamba,
)
from tests.decoder.engines.transformers.generating import (
    NEW_TOKENS,
    EndsAfter,
    foredraft,
    generated,
    late_stop,
)


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"max_length": 30},
        {"eos_token_id": late_stop},
        {"repetition_penalty": 1.3, "no_repeat_ngram_size": 3},
        {"suppress_tokens": [11, 12], "min_new_tokens": 10, "eos_token_id": 7},
        {"guidance_scale": 1.7},
        {"sequence_bias": [[[5], 3.0]], "forced_eos_token_id": 9},
        {"prefix_allowed_tokens_fn": lambda _, ids: range(len(ids) % 2, VOCABULARY, 2)},
    ],
)
def test_greedy_output_is_that_of_generate(name: str, options: dict[str, Any]) -> None:
    model, prompt = MODELS[name](), prompt_of(12)
    options = {
        name: value(model, prompt) if value is late_stop else value
        for name, value in options.items()
    }
    expected = generated(model, prompt, do_sample=False, **options)
    drafter = ScriptedDrafter(oracle(expected[0].tolist()))
    plugin = foredraft(model, drafter)
    output = generated(model, prompt, do_sample=False, custom_generate=plugin, **options)
    assert output.tolist() == expected.tolist()
    assert output.dtype == torch.int64
    assert drafter.closed == output.tolist()
    assert plugin.statistics.num_passes < plugin.statistics.num_tokens


def test_what_drafts_were_worth_is_known_where_passes_were_measured() -> None:
    model, prompt = tiny_llama(), prompt_of(12)
    drafter = ScriptedDrafter(oracle(plainly(model, prompt, NEW_TOKENS)))
    costs = CostSurface((0, 64), (1, 64), ((1.0, 1.0), (1.0, 1.0)))  # s, far above these passes'
    plugin = Foredraft(model, drafter, budget=MeasuredBudget(costs))
    generated(model, prompt, do_sample=False, custom_generate=plugin)
    speedup = plugin.speedup
    most = plugin.statistics.num_tokens / speedup.num_passes
    assert 0 < speedup.plain_s < most * speedup.own_s
    assert speedup.times_plain is None  # passes do not take what is said to have been measured
    passes = speedup.num_passes
    generated(model, prompt, do_sample=False, custom_generate=plugin)
    assert speedup.num_passes > passes
    unmeasured = foredraft(model, drafter)
    generated(model, prompt, do_sample=False, custom_generate=unmeasured)
    assert unmeasured.speedup.num_passes == 0


def test_what_a_generation_config_says_holds() -> None:
    model, prompt = tiny_llama(), prompt_of(12)
    config = GenerationConfig(  # type: ignore[no-untyped-call]
        max_new_tokens=17, repetition_penalty=1.4, no_repeat_ngram_size=2, pad_token_id=0
    )
    generate: Any = model.generate
    expected = generate(torch.tensor([prompt]), generation_config=config)
    drafter = ScriptedDrafter(oracle(expected[0].tolist()))
    output = generate(
        torch.tensor([prompt]), generation_config=config, custom_generate=foredraft(model, drafter)
    )
    assert output.tolist() == expected.tolist()
    assert output.shape == (1, len(prompt) + 17)


def test_a_model_that_cannot_give_up_tokens_is_decoded_without_drafts() -> None:
    model, prompt = tiny_mamba(), prompt_of(12)
    drafter = ScriptedDrafter(at_random())
    output = generated(model, prompt, custom_generate=foredraft(model, drafter))
    assert output.tolist() == [prompt + plainly(model, prompt, NEW_TOKENS)]
    heard: list[int] = []
    output = generated(
        model, prompt, custom_generate=foredraft(model, drafter), on_tokens=heard.extend
    )
    assert output[0, len(prompt) :].tolist() == heard


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
        ({"attention_mask": torch.tensor([[1, 0, 1]])}, "hides tokens"),
        ({"position_ids": torch.tensor([[0, 2, 3]])}, "not this position_ids"),
        ({"inputs_embeds": torch.zeros(1, 3, 32)}, "without inputs_embeds"),
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


WIDTH = 5


def cache_of(num_tokens: int) -> DynamicCache:
    cache = DynamicCache()
    if num_tokens:
        cache.update(torch.zeros(1, 1, num_tokens, 2), torch.zeros(1, 1, num_tokens, 2), 0)
    return cache


@pytest.mark.parametrize(
    "value",
    [
        None,
        {},
        [],
        {"images": None, "videos": []},
        cache_of(0),
        torch.empty(0, WIDTH),
    ],
    ids=str,
)
def test_an_input_that_adds_nothing_to_the_tokens_is_served_by_any_name(value: Any) -> None:
    given = {"of_a_later_release": value}
    (row,) = checked_rows(torch.full((1, WIDTH), 9), GenerationConfig(), given)  # type: ignore[no-untyped-call]
    assert row.num_padding == 0


PADDED = torch.tensor([[0, 1, 2, 3, 4], [7, 7, 0, 1, 2]])


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("position_ids", PADDED),
        ("position_ids", PADDED.expand(3, 2, WIDTH)),
        ("token_type_ids", torch.zeros(2, WIDTH, dtype=torch.int64)),
        ("mm_token_type_ids", torch.zeros(2, WIDTH, dtype=torch.int32)),
    ],
)
def test_positions_and_types_of_a_padded_text_are_served(name: str, value: torch.Tensor) -> None:
    mask = torch.tensor([[1, 1, 1, 1, 1], [0, 0, 1, 1, 1]])
    given = {"attention_mask": mask, name: value}
    rows = checked_rows(torch.full((2, WIDTH), 9), GenerationConfig(), given)  # type: ignore[no-untyped-call]
    assert [row.num_padding for row in rows] == [0, 2]
    (row,) = checked_rows(
        torch.full((1, WIDTH), 9),
        GenerationConfig(),  # type: ignore[no-untyped-call]
        {"cache_position": torch.arange(WIDTH)},
    )
    assert row.num_padding == 0


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("position_ids", torch.zeros(1, WIDTH, dtype=torch.int64)),
        ("position_ids", torch.tensor([[False, True, True, True, True]])),
        ("position_ids", torch.arange(WIDTH, dtype=torch.float16)[None]),
        ("position_ids", torch.stack([torch.arange(WIDTH)[None], torch.ones(1, WIDTH).long()])),
        ("token_type_ids", torch.arange(WIDTH)[None]),
        ("lang", torch.zeros(WIDTH, dtype=torch.int64)),
        ("a_mask", torch.zeros(1, WIDTH, dtype=torch.int64)),
    ],
)
def test_other_positions_and_types_are_refused(name: str, value: torch.Tensor) -> None:
    with pytest.raises(UnsupportedGenerationError, match=f"not this {name}"):
        checked_rows(torch.full((1, WIDTH), 9), GenerationConfig(), {name: value})  # type: ignore[no-untyped-call]


@pytest.mark.parametrize(
    "value",
    [
        True,
        False,
        3,
        "prompt",
        {"images": torch.ones(3, 8, 8)},
        [cache_of(2)],
        torch.arange(WIDTH),
        torch.zeros(1, WIDTH, 4),
        torch.ones(1, WIDTH),
    ],
    ids=str,
)
def test_an_input_that_adds_to_the_tokens_is_refused_by_any_name(value: Any) -> None:
    given = {"of_a_later_release": value}
    with pytest.raises(UnsupportedGenerationError, match="of_a_later_release"):
        checked_rows(torch.full((1, WIDTH), 9), GenerationConfig(), given)  # type: ignore[no-untyped-call]


def test_embeddings_instead_of_tokens_are_refused() -> None:
    model = tiny_llama()
    generate: Any = model.generate
    plugin = foredraft(model, ScriptedDrafter(nothing))
    with pytest.raises(UnsupportedGenerationError, match="without inputs_embeds"):
        generate(inputs_embeds=torch.zeros(1, 3, 32), max_new_tokens=3, custom_generate=plugin)


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("kind", ["static", "dynamic"])
def test_another_cache_gives_the_same_output(name: str, kind: str) -> None:
    model, prompt = MODELS[name](), prompt_of(12)
    expected = generated(model, prompt, do_sample=False, cache_implementation=kind)
    plugin = foredraft(model, ScriptedDrafter(at_random()))
    options = {"do_sample": False, "cache_implementation": kind, "custom_generate": plugin}
    assert generated(model, prompt, **options).tolist() == expected.tolist()


def test_a_cache_that_rounds_is_refused() -> None:
    config = GenerationConfig(cache_implementation="quantized")  # type: ignore[no-untyped-call]
    with pytest.raises(UnsupportedGenerationError, match="quantized cache rounds"):
        checked_rows(torch.ones(1, 3, dtype=torch.int64), config, {})


def rotating(rope: dict[str, Any]) -> PreTrainedModel:
    model = tiny_llama()
    config = LlamaConfig.from_dict(
        {
            **model.config.to_dict(),
            "max_position_embeddings": 20,
            "rope_parameters": {"rope_theta": 10000.0, **rope},
        }
    )
    torch.manual_seed(1)
    return evaluated(LlamaForCausalLM(config))


@pytest.mark.parametrize("length", [12, 30])
def test_fixed_rotations_go_on_beyond_the_stated_length(
    length: int, caplog: pytest.LogCaptureFixture
) -> None:
    model, prompt = rotating({"rope_type": "default"}), prompt_of(length)
    expected = generated(model, prompt, do_sample=False)
    plugin = foredraft(model, ScriptedDrafter(oracle(expected[0].tolist())))
    output = generated(model, prompt, do_sample=False, custom_generate=plugin)
    assert output.tolist() == expected.tolist()
    assert output.shape == (1, length + NEW_TOKENS)
    assert not [record for record in caplog.records if record.name == custom_generate.__name__]


LONG: dict[str, Any] = {
    "rope_type": "longrope",
    "factor": 4.0,
    "short_factor": [1.0] * 4,
    "long_factor": [3.0] * 4,
    "original_max_position_embeddings": 20,
}


@pytest.mark.parametrize("rope", [LONG, {"rope_type": "dynamic", "factor": 2.0}])
def test_rotations_that_change_end_an_output_with_a_word(
    rope: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    model, prompt = rotating(rope), prompt_of(12)
    expected = generated(model, prompt, do_sample=False, max_new_tokens=8)
    plugin = foredraft(model, ScriptedDrafter(oracle(expected[0].tolist())))
    generated(model, prompt, do_sample=False, max_new_tokens=8, custom_generate=plugin)
    assert not [record for record in caplog.records if record.name == custom_generate.__name__]
    output = generated(model, prompt, do_sample=False, custom_generate=plugin)
    assert output.tolist() == expected.tolist()
    (told,) = [record for record in caplog.records if record.name == custom_generate.__name__]
    assert "LlamaForCausalLM: the output ends at 20 tokens" in told.getMessage()
    with pytest.raises(InvalidPromptError, match="limit is 20"):
        generated(model, prompt_of(30), custom_generate=plugin)


def test_other_models_and_nested_calls_are_refused() -> None:
    model = tiny_llama()
    plugin = foredraft(model, ScriptedDrafter(nothing))
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

    def watched(target: Target, *_: Any) -> CostSurface:
        measured.append(target)
        return CostSurface.flat((1, 64), (1.0, 1.0))

    monkeypatch.setattr(custom_generate, "known_costs", watched)
    expected = prompt + plainly(model, prompt, NEW_TOKENS)
    for _ in range(2):
        drafter = ScriptedDrafter(oracle(expected))
        output = generated(model, prompt, custom_generate=foredraft_generate, drafter=drafter)
        assert output.tolist() == drafter.closed == [expected]
    assert len(measured) == 1
    measured.clear()
    kept = ref(model)
    del model
    gc.collect()
    assert kept() is None  # nor does what was measured keep it


def test_what_passes_cost_is_kept_for_the_next_start(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv(CACHE_VARIABLE, str(tmp_path))
    monkeypatch.setattr(pass_timing, "_MOST_ROUNDS", 2)
    model = tiny_llama()
    used: list[CostSurface] = []

    def noted(*given: Any) -> CostSurface:
        used.append(known_costs(*given))
        return used[-1]

    monkeypatch.setattr(custom_generate, "known_costs", noted)
    Foredraft(model, ScriptedDrafter(nothing))
    (kept,) = tmp_path.glob("cost-*.json")
    surface = CostStore(tmp_path).load(json.loads(kept.read_bytes())["key"])
    assert used == [surface]
