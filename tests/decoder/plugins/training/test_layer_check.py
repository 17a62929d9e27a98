from typing import Any

import pytest
import torch
from transformers import (
    GemmaConfig,
    GemmaForCausalLM,
    GraniteConfig,
    GraniteForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
    StableLmConfig,
    StableLmForCausalLM,
)

from decoder.errors import UnsupportedModelError
from decoder.plugins.training.layer_check import check_last_layer
from tests.decoder.decoding import VOCABULARY
from tests.decoder.plugins.training.teaching import counting_llama, language_model_of

SIZES: Any = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_hidden_layers": 2,
    "initializer_range": 0.3,
    "max_position_embeddings": 256,
    "pad_token_id": None,
    "bos_token_id": None,
    "eos_token_id": None,
}
LLAMA3: Any = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}


def made(kind: Any, config: Any, dtype: torch.dtype = torch.float32) -> PreTrainedModel:
    """Return a model whose norms and biases are none that would not show."""
    torch.manual_seed(0)
    model: Any = kind(config)
    for name, value in model.named_parameters():
        if "norm" in name or name.endswith("bias"):
            torch.nn.init.normal_(value, 0.7, 0.3)
    evaluated: PreTrainedModel = model.to(dtype).eval()
    return evaluated


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("kind", "config"),
    [
        (LlamaForCausalLM, LlamaConfig(**SIZES)),
        (LlamaForCausalLM, LlamaConfig(**SIZES, attention_bias=True)),
        (LlamaForCausalLM, LlamaConfig(**SIZES, head_dim=16, rope_parameters=LLAMA3)),
        (Qwen2ForCausalLM, Qwen2Config(**SIZES)),
        (MistralForCausalLM, MistralConfig(**SIZES, sliding_window=None)),
    ],
)
def test_layers_like_llamas_are_taken(
    kind: Any, config: Any, dtype: torch.dtype, byte_tokenizer: PreTrainedTokenizerBase
) -> None:
    check_last_layer(language_model_of(made(kind, config, dtype), byte_tokenizer))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("kind", "config", "difference"),
    [
        (Qwen3ForCausalLM, Qwen3Config(**SIZES, head_dim=8), "self_attn.k_norm.weight"),
        (LlamaForCausalLM, LlamaConfig(**SIZES, mlp_bias=True), "mlp.down_proj.bias"),
        (MistralForCausalLM, MistralConfig(**SIZES, sliding_window=7), "a window of 7 positions"),
        (GemmaForCausalLM, GemmaConfig(**SIZES, head_dim=8), "computes something else"),
        (
            GraniteForCausalLM,
            GraniteConfig(**SIZES, attention_multiplier=0.02),
            "computes something else",
        ),
        (
            GraniteForCausalLM,
            GraniteConfig(**SIZES, residual_multiplier=0.5),
            "computes something else",
        ),
        (StableLmForCausalLM, StableLmConfig(**SIZES), "rms_norm_eps"),
    ],
)
def test_layers_that_do_something_else_are_refused(
    kind: Any,
    config: Any,
    difference: str,
    dtype: torch.dtype,
    byte_tokenizer: PreTrainedTokenizerBase,
) -> None:
    language_model = language_model_of(made(kind, config, dtype), byte_tokenizer)
    with pytest.raises(UnsupportedModelError, match="--speculator") as refused:
        check_last_layer(language_model)
    assert difference in str(refused.value)


def test_another_rotation_than_the_configuration_states_is_noticed(
    byte_tokenizer: PreTrainedTokenizerBase,
) -> None:
    model: Any = made(LlamaForCausalLM, LlamaConfig(**SIZES))
    model.model.rotary_emb.inv_freq = torch.nn.Buffer(model.model.rotary_emb.inv_freq * 0.5)
    with pytest.raises(UnsupportedModelError, match="computes something else"):
        check_last_layer(language_model_of(model, byte_tokenizer))


def test_a_pass_of_the_check_leaves_no_hooks(byte_tokenizer: PreTrainedTokenizerBase) -> None:
    model: Any = counting_llama()
    check_last_layer(language_model_of(model, byte_tokenizer))
    assert not model.model.layers[-1]._forward_hooks
