"""What a call gets back beside tokens, and what it may hand over: as `generate` has it."""

from collections.abc import Callable
from typing import Any, Final

import pytest
import torch
from transformers import DynamicCache, PreTrainedModel, StaticCache, StoppingCriteriaList
from transformers.cache_utils import Cache
from transformers.generation.utils import GenerateDecoderOnlyOutput

from decoder.errors import UnsupportedGenerationError
from decoder.model.user_model import cache_argument
from tests.decoder.decoding import (
    MODELS,
    ScriptedDrafter,
    at_random,
    by_tokens,
    nothing,
    oracle,
    prompt_of,
    tiny_convolution,
    tiny_llama,
    tiny_mamba,
)
from tests.decoder.engines.transformers.batched import PROMPTS, foredraft, padded
from tests.decoder.engines.transformers.generating import EndsAfter

NEW_TOKENS: Final = 14
GENERATION: Final[dict[str, Any]] = {
    "max_new_tokens": NEW_TOKENS,
    "do_sample": False,
    "pad_token_id": 0,
}
ALL: Final[dict[str, Any]] = {
    "return_dict_in_generate": True,
    "output_scores": True,
    "output_logits": True,
}
FAMILIES: Final[dict[str, Callable[[], PreTrainedModel]]] = {
    **MODELS,
    "mamba": tiny_mamba,
    "convolution": tiny_convolution,
}


def call(model: PreTrainedModel, inputs: dict[str, Any], **options: Any) -> Any:
    generate: Any = model.generate
    return generate(**inputs, **{**GENERATION, **options})


def assert_same(found: GenerateDecoderOnlyOutput, plain: GenerateDecoderOnlyOutput) -> None:
    """Compare all fields: types, shapes and values."""
    assert type(found) is type(plain)
    assert found.keys() == plain.keys()
    assert found.sequences.dtype == plain.sequences.dtype
    assert found.sequences.tolist() == plain.sequences.tolist()
    for name in ("scores", "logits"):
        torch.testing.assert_close(found[name], plain[name], rtol=1e-4, atol=1e-4)
    if "past_key_values" in plain:
        assert_same_cache(found.past_key_values, plain.past_key_values)


def assert_same_cache(found: Any, plain: Any) -> None:
    if plain is None:
        assert found is None
        return
    assert type(found) is type(plain)
    for one, other in zip(found.layers, plain.layers, strict=True):
        assert type(one) is type(other)
        if not hasattr(other, "keys"):  # it keeps a state, which generate itself has written
            continue
        assert one.get_seq_length() == other.get_seq_length()
        assert one.keys.dtype == other.keys.dtype
        torch.testing.assert_close(one.keys, other.keys, rtol=1e-3, atol=1e-4)
        torch.testing.assert_close(one.values, other.values, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("options", [ALL, {**ALL, "use_cache": False}])
def test_all_fields_are_those_of_generate(family: str, options: dict[str, Any]) -> None:
    model = FAMILIES[family]()
    inputs = {"input_ids": torch.tensor([prompt_of(12)])}
    plain = call(model, inputs, repetition_penalty=1.3, **options)
    drafting = foredraft(model, ScriptedDrafter(oracle(plain.sequences[0].tolist())))
    found = call(model, inputs, repetition_penalty=1.3, custom_generate=drafting, **options)
    assert_same(found, plain)
    if family in MODELS:
        assert drafting.statistics.num_passes < NEW_TOKENS


def batch_of(model: PreTrainedModel, **options: Any) -> tuple[dict[str, torch.Tensor], Any, Any]:
    """Return padded prompts, what `generate` returns for them, and what drafts do."""
    inputs = padded(PROMPTS)
    plain = call(model, inputs, **ALL, **options)
    width = inputs["input_ids"].shape[1]
    truths = [
        (prompt, row[width:]) for prompt, row in zip(PROMPTS, plain.sequences.tolist(), strict=True)
    ]
    drafting = foredraft(model, ScriptedDrafter(by_tokens(truths, 0.9)), parallel=3)
    return inputs, plain, call(model, inputs, custom_generate=drafting, **ALL, **options)


@pytest.mark.parametrize("name", MODELS)
def test_a_padded_batch_has_all_fields(name: str) -> None:
    inputs, plain, found = batch_of(MODELS[name](), no_repeat_ngram_size=2)
    assert found.sequences.tolist() == plain.sequences.tolist()
    for field in ("scores", "logits"):
        torch.testing.assert_close(found[field], plain[field], rtol=1e-4, atol=1e-4)
    assert_same_cache_of_tokens(found, plain, inputs["attention_mask"])


def assert_same_cache_of_tokens(found: Any, plain: Any, mask: torch.Tensor) -> None:
    """Compare what caches hold of tokens; of padding they hold anything."""
    length = plain.past_key_values.get_seq_length()
    assert found.past_key_values.get_seq_length() == length == plain.sequences.shape[1] - 1
    shown = torch.nn.functional.pad(mask, (0, length - mask.shape[1]), value=1).bool()
    for one, other in zip(found.past_key_values.layers, plain.past_key_values.layers, strict=True):
        at = shown[:, -one.keys.shape[-2] :]
        for states in ("keys", "values"):
            ours, theirs = (getattr(each, states).transpose(1, 2)[at] for each in (one, other))
            torch.testing.assert_close(ours, theirs, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("name", MODELS)
def test_rows_that_end_early_have_scores_up_to_there_and_a_cache_beyond(name: str) -> None:
    model = MODELS[name]()
    free = call(model, padded(PROMPTS))[:, len(max(PROMPTS, key=len)) :]
    stop = int(free[1, 4])
    inputs, plain, found = batch_of(model, eos_token_id=stop)
    assert found.sequences.tolist() == plain.sequences.tolist()
    new = plain.sequences[:, inputs["input_ids"].shape[1] :].tolist()
    lengths = [row.index(stop) + 1 if stop in row else len(row) for row in new]
    assert min(lengths) < max(lengths)
    for step, (ours, theirs) in enumerate(zip(found.scores, plain.scores, strict=True)):
        assert ours.shape == theirs.shape
        for row, length in enumerate(lengths):
            expected = theirs[row] if step < length else torch.zeros_like(theirs[row])
            torch.testing.assert_close(ours[row], expected, rtol=1e-4, atol=1e-4)
    assert_same_cache_of_tokens(found, plain, inputs["attention_mask"])


class Confident(EndsAfter):
    """Ends a sequence by the scores that it is shown, of which there is one for each token."""

    def __call__(self, input_ids: torch.Tensor, _scores: Any, **_: Any) -> Any:
        assert len(_scores) == input_ids.shape[1] - 12
        return torch.stack([_scores[-1].argmax(dim=-1) == self.token]).any(dim=0)


def test_a_criterion_is_shown_the_scores() -> None:
    model, inputs = tiny_llama(), {"input_ids": torch.tensor([prompt_of(12)])}
    truth = call(model, inputs)[0]
    options = {**ALL, "stopping_criteria": StoppingCriteriaList([Confident(int(truth[18]))])}
    plain = call(model, inputs, **options)
    drafting = foredraft(model, ScriptedDrafter(oracle(truth.tolist())))
    assert_same(call(model, inputs, custom_generate=drafting, **options), plain)
    assert plain.sequences.shape[1] <= 19


def test_integers_of_32_bits_give_those_of_64() -> None:
    model, inputs = tiny_llama(), {"input_ids": torch.tensor([prompt_of(12)]).int()}
    plain = call(model, inputs)
    found = call(model, inputs, custom_generate=foredraft(model, ScriptedDrafter(at_random())))
    assert found.dtype == plain.dtype == torch.int64
    assert found.tolist() == plain.tolist()


GIVEN: Final[dict[str, Callable[[PreTrainedModel], Cache | None]]] = {
    "generate's own": lambda _: None,
    "of the configuration": lambda model: DynamicCache(config=model.config),
    "of no configuration": lambda _: DynamicCache(),
    "static": lambda model: StaticCache(config=model.config, max_cache_len=80),
}


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize(
    ("kind", "drafted"),
    [
        *(("generate's own", each) for each in ((0, 1, 2), (0, 2), (1,))),
        *((kind, (0, 1, 2)) for kind in GIVEN),
    ],
    ids=str,
)
def test_what_a_call_left_is_continued_from(name: str, kind: str, drafted: tuple[int, ...]) -> None:
    """The prompts of later turns are not what the cache was filled with: so it is what counts."""
    model = MODELS[name]()
    drafting = foredraft(model, ScriptedDrafter(at_random()))

    def turns(drafted: tuple[int, ...]) -> list[list[int]]:
        cache, length, outputs = GIVEN[kind](model), 12, []
        for turn in range(3):
            given = {} if cache is None else {cache_argument(model): cache}
            way = {"custom_generate": drafting} if turn in drafted else {}
            prompt = torch.tensor([prompt_of(length, seed=turn)])
            output = call(
                model, {"input_ids": prompt, **given}, return_dict_in_generate=True, **way
            )
            if cache is not None:
                assert output.past_key_values is cache
            cache = output.past_key_values
            assert cache.get_seq_length() == length + NEW_TOKENS - 1
            outputs.append(output.sequences[0].tolist())
            length += NEW_TOKENS + 3
        return outputs

    assert turns(drafted) == turns(())


@pytest.mark.parametrize("name", MODELS)
def test_a_padded_batch_is_continued_from(name: str) -> None:
    model, inputs = MODELS[name](), padded(PROMPTS)
    plain = call(model, inputs, return_dict_in_generate=True)
    drafting = foredraft(model, ScriptedDrafter(at_random()), parallel=2)
    found = call(model, inputs, return_dict_in_generate=True, custom_generate=drafting)
    asked = torch.tensor([prompt_of(4, seed=row) for row in range(len(PROMPTS))])
    mask = torch.nn.functional.pad(inputs["attention_mask"], (0, NEW_TOKENS + 4), value=1)
    expected, *outputs = (
        call(
            model,
            {"input_ids": torch.cat([plain.sequences, asked], dim=1), "attention_mask": mask},
            **{cache_argument(model): before.past_key_values},
            **way,
        ).tolist()
        for before, way in ((plain, {}), (found, {"custom_generate": drafting}))
    )
    assert outputs == [expected]


def test_a_cache_of_tokens_that_are_not_given_is_left_to_generate() -> None:
    """The mask tells of them: the prompt is the new tokens alone."""
    model = tiny_llama()
    drafting = foredraft(model, ScriptedDrafter(at_random()))
    outputs = []
    for way in ({}, {"custom_generate": drafting}):
        first = call(
            model, {"input_ids": torch.tensor([prompt_of(12)])}, return_dict_in_generate=True
        )
        inputs = {
            "input_ids": torch.cat([first.sequences[:, -1:], torch.tensor([[5, 6]])], dim=1),
            "attention_mask": torch.ones(1, 12 + NEW_TOKENS + 2, dtype=torch.int64),
            cache_argument(model): first.past_key_values,
        }
        outputs.append(call(model, inputs, **way).tolist())
    assert outputs[0] == outputs[1]
    assert drafting.statistics.num_passes == 0


@pytest.mark.parametrize("name", ["output_attentions", "output_hidden_states"])
def test_what_cannot_be_had_is_refused_by_name(name: str) -> None:
    model, inputs = tiny_llama(), {"input_ids": torch.tensor([prompt_of(12)])}
    drafting = foredraft(model, ScriptedDrafter(nothing))
    with pytest.raises(UnsupportedGenerationError, match=name):
        call(model, inputs, custom_generate=drafting, return_dict_in_generate=True, **{name: True})
