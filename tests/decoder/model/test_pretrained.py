from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import (
    BloomConfig,
    BloomForCausalLM,
    GPT2Config,
    GPT2LMHeadModel,
    JambaConfig,
    JambaForCausalLM,
    Llama4ForCausalLM,
    Llama4TextConfig,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    PreTrainedModel,
    T5Config,
    T5ForConditionalGeneration,
)

from decoder.budget.budget import MeasuredBudget
from decoder.budget.pass_timing import measure_costs
from decoder.errors import DeviceError, ModelLoadError, UncroppableCacheError, UnsupportedModelError
from decoder.model.capability_check import FOUND_HERE
from decoder.model.compatibility import Capability
from decoder.model.pretrained import LanguageModel, ModelOptions, Precision, load_model
from decoder.model.target import Target
from decoder.sampling.verification import SampledTree
from indexer.errors import TokenizerError
from retriever.tree import ROOT
from tests.decoder.decoding import (
    SIZES,
    ScriptedDrafter,
    at_random,
    decoded,
    decoder_with,
    evaluated,
    oracle,
    plainly,
    prompt_of,
    tiny_convolution,
    tiny_gemma,
    tiny_llama,
    tiny_mamba,
    tree_of,
)

SHAPES_LOG = "decoder.model.compatibility"

TWO_LAYERS: dict[str, Any] = {
    **SIZES,
    "vocab_size": 48,
    "num_hidden_layers": 2,
    "eos_token_id": None,
}


def tiny_jamba() -> PreTrainedModel:
    return JambaForCausalLM(
        JambaConfig(**TWO_LAYERS, num_experts=2, attn_layer_period=2, attn_layer_offset=1)
    )


def tiny_encoder_decoder() -> PreTrainedModel:
    return T5ForConditionalGeneration(
        T5Config(vocab_size=48, d_model=32, d_ff=64, num_layers=1, num_heads=2, d_kv=16)
    )


def tiny_chunked() -> PreTrainedModel:
    config = Llama4TextConfig(
        **TWO_LAYERS,
        intermediate_size_mlp=64,
        num_local_experts=2,
        head_dim=8,
        attention_chunk_size=8,
    )
    return Llama4ForCausalLM(config)


def tiny_bloom() -> PreTrainedModel:
    config = BloomConfig(
        vocab_size=48, hidden_size=32, n_layer=2, n_head=4, initializer_range=0.3, eos_token_id=None
    )
    return BloomForCausalLM(config)


def tiny_gpt2() -> PreTrainedModel:
    config = GPT2Config(
        vocab_size=48,
        n_embd=32,
        n_layer=2,
        n_head=4,
        n_positions=128,
        initializer_range=0.4,
        bos_token_id=0,
        eos_token_id=None,
    )
    return GPT2LMHeadModel(config)


@pytest.mark.parametrize(
    ("make", "capability", "reason"),
    [
        (tiny_mamba, Capability.PLAIN, "recurrent state"),
        (tiny_jamba, Capability.PLAIN, "recurrent state"),
        (tiny_convolution, Capability.CHAINS, "LinearAttentionLayer"),
        (tiny_chunked, Capability.TREES, ""),
        (tiny_bloom, Capability.CHAINS, "positions from slots"),
        (tiny_gpt2, Capability.TREES, ""),
    ],
)
def test_models_get_the_drafts_that_they_can_verify(
    make: Callable[[], PreTrainedModel],
    capability: Capability,
    reason: str,
    caplog: pytest.LogCaptureFixture,
) -> None:
    torch.manual_seed(0)
    model = evaluated(make())
    prompt = prompt_of(20)
    expected = plainly(model, prompt, 30)
    guesses = {"right": oracle(prompt + expected), "wrong": at_random()}
    for name, guess in guesses.items():
        drafter = ScriptedDrafter(guess)
        decoder = decoder_with(model, drafter, verdicts=FOUND_HERE)
        assert decoder.target.capability is capability
        generation = decoder.generate(prompt, 30)
        assert [token for step in generation for token in step] == expected
        if capability is Capability.PLAIN:
            assert drafter.num_drafts == 0
        elif name == "right":
            assert generation.statistics.num_passes < 12
    told = [record.getMessage() for record in caplog.records if record.name == SHAPES_LOG]
    assert len(told) == (1 if reason else 0)
    assert all(reason in message for message in told)


def test_costs_are_measured_of_models_that_take_no_drafts() -> None:
    curve = measure_costs(Target(tiny_mamba()), max_seconds=0.01)
    assert curve.widths == (1,)
    assert MeasuredBudget(curve).max_nodes == 0


def test_encoder_decoders_are_refused() -> None:
    with pytest.raises(UncroppableCacheError, match="encoder-decoder"):
        Target(tiny_encoder_decoder())


def test_models_that_look_ahead_are_refused() -> None:
    model = tiny_gemma()
    model.config.use_bidirectional_attention = True
    with pytest.raises(UnsupportedModelError, match="both directions"):
        Target(model)


def test_flash_attention_gets_chains_and_a_way_out(caplog: pytest.LogCaptureFixture) -> None:
    model = tiny_llama()
    model.config._attn_implementation = "flash_attention_2"
    assert Target(model).capability is Capability.CHAINS
    assert "flash_attention_2" in caplog.text
    assert "sdpa" in caplog.text


def test_a_drawn_chain_is_not_chosen_by_what_was_drawn() -> None:
    edges = tree_of([(ROOT, 5), (ROOT, 6), (1, 7), (0, 8), (2, 9), (3, 9)])
    drawn = SampledTree(
        edges.token_ids,
        edges.parents,
        edges.probabilities,
        edges.sources,
        torch.full((1, 48), 1 / 48),
        np.zeros(6, np.int32),
    )
    chain = Target(tiny_bloom()).fitting(drawn)
    assert isinstance(chain, SampledTree)
    assert chain.token_ids.tolist() == [5, 8, 9]
    assert chain.parents.tolist() == [ROOT, 0, 1]
    assert len(chain.rows) == 3


def test_models_that_slide_in_every_layer_take_one_mask() -> None:
    torch.manual_seed(4)
    config = MistralConfig(**TWO_LAYERS, sliding_window=6, head_dim=8)
    model = evaluated(MistralForCausalLM(config))
    prompt = prompt_of(10)
    expected = plainly(model, prompt, 40)
    drafter = ScriptedDrafter(oracle(prompt + expected))
    assert decoded(decoder_with(model, drafter, verdicts=FOUND_HERE), prompt, 40) == expected


ORIGINAL = 24
DYNAMIC = {"rope_type": "dynamic", "factor": 4.0}
LONG = {
    "rope_type": "longrope",
    "factor": 4.0,
    "short_factor": [1.0] * 4,
    "long_factor": [3.0] * 4,
    "original_max_position_embeddings": ORIGINAL,
}


def rotating(rope: dict[str, Any], max_positions: int) -> PreTrainedModel:
    torch.manual_seed(6)
    config = LlamaConfig(
        **TWO_LAYERS,
        max_position_embeddings=max_positions,
        rope_parameters={"rope_theta": 10000.0, **rope},
    )
    return evaluated(LlamaForCausalLM(config))


@pytest.mark.parametrize(("rope", "max_positions"), [(DYNAMIC, ORIGINAL), (LONG, 4 * ORIGINAL)])
def test_rotations_that_depend_on_length_limit_it(rope: dict[str, Any], max_positions: int) -> None:
    model = rotating(rope, max_positions)
    prompt = prompt_of(10)
    room = ORIGINAL - len(prompt)
    expected = plainly(model, prompt, room)
    assert Target(model).max_length == ORIGINAL
    for guess in (oracle(prompt + expected), at_random()):
        assert (
            decoded(decoder_with(model, ScriptedDrafter(guess), verdicts=FOUND_HERE), prompt, 99)
            == expected
        )


def test_fixed_rotations_leave_the_models_limit_alone() -> None:
    assert Target(rotating({"rope_type": "linear", "factor": 4.0}, 96)).max_length == 96


def test_rotations_that_depend_on_an_unknown_length_are_refused() -> None:
    model = rotating(DYNAMIC, ORIGINAL)
    object.__setattr__(model.config, "max_position_embeddings", None)
    with pytest.raises(UnsupportedModelError, match="original_max_position_embeddings"):
        Target(model)


def test_rotations_are_looked_up_for_every_layer_type() -> None:
    model = rotating(LONG, 4 * ORIGINAL)
    model.config.rope_parameters = {
        "full_attention": LONG,
        "sliding_attention": {"rope_type": "default"},
    }
    assert Target(model).max_length == ORIGINAL


@pytest.mark.parametrize("precision", Precision)
def test_models_load_from_a_directory(model_directory: Path, precision: Precision) -> None:
    loaded = load_model(ModelOptions(str(model_directory), precision=precision))
    assert loaded.model.dtype == precision.dtype
    assert not loaded.model.training
    assert loaded.stop_ids == (0,)


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"name": "./no-such-model"}, TokenizerError, "there is no folder"),
        ({"device": "nowhere"}, DeviceError, "nowhere"),
        ({"device": "meta"}, DeviceError, "meta"),
        ({"attention": "imaginary"}, ModelLoadError, "imaginary"),
    ],
)
def test_what_cannot_be_loaded_is_named(
    model_directory: Path, options: dict[str, Any], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        load_model(ModelOptions(**{"name": str(model_directory), **options}))


def test_a_directory_without_weights_is_named(model_directory: Path, tmp_path: Path) -> None:
    for file in model_directory.iterdir():
        if file.suffix != ".safetensors":
            (tmp_path / file.name).write_bytes(file.read_bytes())
    with pytest.raises(ModelLoadError, match="cannot load the model"):
        load_model(ModelOptions(str(tmp_path)))


def test_loading_is_quiet(model_directory: Path, capfd: pytest.CaptureFixture[str]) -> None:
    load_model(ModelOptions(str(model_directory)))
    assert capfd.readouterr() == ("", "")


def test_chat_templates_are_applied_if_wanted(model_directory: Path) -> None:
    plain = load_model(ModelOptions(str(model_directory)))
    tokenizer = plain.tokenizer
    tokenizer.chat_template = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"
    options = (plain.name, plain.model, tokenizer, plain.vocabulary, plain.stop_ids)
    assert LanguageModel(*options).encode("ab") == tokenizer.encode("<user>ab")
    unadorned = LanguageModel(*options, use_chat_template=False)
    assert unadorned.encode("ab") == tokenizer.encode("ab")


def test_an_empty_prompt_has_no_tokens_under_any_template(model_directory: Path) -> None:
    loaded = load_model(ModelOptions(str(model_directory)))
    loaded.tokenizer.chat_template = "hello"
    assert loaded.encode(" \n") == []
