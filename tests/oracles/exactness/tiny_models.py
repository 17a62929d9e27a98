"""Tiny random models of all causal architectures that the installed transformers knows.

A configuration of the architecture's own class is shrunk: sizes become a few, windows and chunks
so short that a sequence of dozens of tokens crosses them, and of every kind of layer one or two
are kept. Weights are drawn so wide that greedy outputs change from token to token.
"""

from typing import Any, Final, cast

import torch
from transformers import (
    CONFIG_MAPPING,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    PreTrainedConfig,
    PreTrainedModel,
)
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
)

VOCABULARY: Final = 64
FIRST_FREE: Final = 8
"""Token ids below it are left to what configurations name: padding, beginnings, masks."""
WINDOW: Final = 8
_WIDTH: Final = 32
_HEADS: Final = 4
_LAYERS: Final = 4
_SPREAD: Final = 0.1

_NAMED: Final[dict[tuple[str, ...], Any]] = {
    ("vocab_size", "vocab_size_per_layer_input"): VOCABULARY,
    ("bos_token_id", "decoder_start_token_id", "start_token_id"): 1,
    ("sep_token_id", "cls_token_id", "eod_token_id", "forced_eos_token_id"): None,
    ("eos_token_id",): None,
    ("pad_token_id",): 0,
    ("mask_token_id",): 2,
    (
        "hidden_size",
        "d_model",
        "n_embd",
        "embedding_size",
        "embedding_dim",
        "emb_dim",
        "word_embed_proj_dim",
        "input_embedding_size",
        "output_embedding_size",
        "lru_width",
    ): _WIDTH,
    (
        "intermediate_size",
        "encoder_ffn_dim",
        "decoder_ffn_dim",
        "ffn_dim",
        "ffn_hidden_size",
        "dim_ff",
        "dff",
        "d_inner",
        "feed_forward_size",
        "intermediate_size_mlp",
        "dense_intermediate_size",
    ): 2 * _WIDTH,
    (
        "moe_intermediate_size",
        "shared_expert_intermediate_size",
        "shared_intermediate_size",
        "expert_ffn_hidden_size",
        "moe_shared_expert_intermediate_size",
        "shared_experts_intermediate_size",
    ): _WIDTH,
    (
        "num_attention_heads",
        "n_head",
        "n_heads",
        "num_heads",
        "attention_heads",
        "encoder_attention_heads",
        "decoder_attention_heads",
        "swa_num_attention_heads",
        "num_encoder_attention_heads",
        "num_decoder_attention_heads",
        "linear_num_heads",
        "linear_num_key_heads",
        "linear_num_value_heads",
    ): _HEADS,
    (
        "head_dim",
        "dim_head",
        "d_head",
        "swa_head_dim",
        "attention_head_size",
        "kv_channels",
        "global_head_dim",
        "qk_rope_head_dim",
        "v_head_dim",
        "qk_nope_head_dim",
        "index_head_dim",
        "linear_key_head_dim",
        "linear_value_head_dim",
        "linear_head_dim",
        "rotary_dim",
    ): _WIDTH // _HEADS,
    ("qk_head_dim",): 2 * _WIDTH // _HEADS,
    ("query_pre_attn_scalar",): _WIDTH // _HEADS,
    (
        "num_hidden_layers",
        "n_layer",
        "n_layers",
        "num_layers",
        "encoder_layers",
        "decoder_layers",
        "num_encoder_layers",
        "num_decoder_layers",
        "num_blocks",
    ): _LAYERS,
    ("kv_lora_rank", "q_lora_rank", "o_lora_rank"): 16,
    ("num_experts", "n_routed_experts", "num_local_experts", "moe_num_experts"): 4,
    ("num_experts_per_tok", "moe_topk", "moe_k", "num_experts_per_token", "top_k_experts"): 2,
    ("n_group", "topk_group", "num_expert_group"): 1,
    (
        "sliding_window",
        "sliding_window_size",
        "attention_chunk_size",
        "window_size",
        "local_attention",
        "attention_window_size",
        "keep_window_size",
        "local_attention_window_len",
        "local_attn_chunk_length",
        "lsh_attn_chunk_length",
    ): WINDOW,
    ("mamba_chunk_size", "chunk_size", "block_size"): WINDOW,
    ("mamba_d_state", "state_size", "ssm_state_size"): 8,
    ("index_topk", "index_topk_blocks", "index_block_size"): 4,
    ("index_n_heads",): 16,  # their scores are cut at 0: few heads would tie all the time
    ("max_position_embeddings",): 512,
    ("n_positions", "n_ctx", "max_seq_len", "max_target_positions"): 512,
    ("model_max_length", "context_length"): 512,
    ("max_window_layers",): 2,
    ("first_k_dense_replace",): 1,
    ("initializer_range", "init_std"): _SPREAD,
    ("initializer_factor",): 1.0,
    ("layerdrop", "dropout", "dropout_p"): 0.0,
    ("is_decoder", "use_sliding_window"): True,
    ("tie_word_embeddings",): False,
}
"""What configurations call their sizes, and what they are here."""

_SIZES: Final = {name: size for names, size in _NAMED.items() for name in names}

_KEY_HEADS: Final = ("num_key_value_heads", "num_kv_heads", "swa_num_key_value_heads")

_SLIDING, _FULL, _CONV = "sliding_attention", "full_attention", "conv"
_PLAIN_ROPE: Final = {"rope_type": "default", "rope_theta": 10_000.0}
_ROPES: Final = {_SLIDING: _PLAIN_ROPE, _FULL: _PLAIN_ROPE}
_MAMBA: Final = {"mamba_n_heads": 4, "mamba_d_head": 16}
_GEMMA_3N: Final = {"layer_types": [_SLIDING, _FULL] * 2, "num_kv_shared_layers": 2}
_ASSISTANT: Final = {
    "model_type": "gemma4_text",
    "num_kv_shared_layers": _LAYERS,
    "hidden_size_per_layer_input": 0,
    "vocab_size_per_layer_input": 0,
}
_QWEN_4: Final = {
    "indexer_n_heads": 2,
    "indexer_kv_heads": 1,
    "indexer_head_dim": 8,
    "indexer_budget": 8,
    "indexer_compress_ratio": 2,
    "ple_layer_ids": [1],
    "eos_token_id": VOCABULARY - 1,
    "ngram_vocab_size_base": 50,
    "make_ngram_vocab_size_divisible_by": 8,
    "split_ngram_parts": 1,
    "heads_per_ngram": 2,
    "hc_lowrank": 8,
}

_SECTIONS: Final = {
    "text_config": {"rope_parameters": {**_PLAIN_ROPE, "mrope_section": [1, 1, 2]}},
    "vision_config": {},
}

_OWN: Final[dict[str, dict[str, Any]]] = {
    **dict.fromkeys(("glm4v", "glm4v_moe", "glm46v", "glm_ocr", "paddleocr_vl"), _SECTIONS),
    **dict.fromkeys(("qwen2_vl", "qwen2_5_vl"), _SECTIONS),
    "bamba": {**_MAMBA, "attn_layer_indices": [1, 3]},
    "blt": {"encoder_hash_byte_group_vocab": VOCABULARY},
    "cohere_compass_text": {"layer_types": [_SLIDING, _FULL] * 2, "rope_parameters": _ROPES},
    "dbrx": {"attn_config": {"rope_theta": 10_000.0, "kv_n_heads": 2, "clip_qkv": 8.0}},
    "dots1": {"n_routed_experts": 4, "num_experts_per_tok": 2, "n_shared_experts": 1},
    "dots3_note": {
        "vision_config": {"adapter_in_dim": _WIDTH, "adapter_out_dim": _WIDTH},
        "audio_config": {"adapter_input_size": _WIDTH, "adapter_out_dim": _WIDTH},
    },
    "falcon_h1": {"mamba_d_ssm": _WIDTH, "mamba_n_heads": 4},
    "gemma3n": _GEMMA_3N,
    "gemma3n_text": _GEMMA_3N,
    "gpt_neo": {"attention_types": [[["global", "local"], 2]]},
    "granitemoehybrid": {**_MAMBA, "layer_types": ["linear_attention", _FULL] * 2},
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1},
    "lfm2": {"layer_types": [_CONV, _FULL] * 2},
    "lfm2_moe": {"layer_types": [_CONV, _FULL] * 2, "num_dense_layers": 1},
    "mamba2": {"head_dim": 16, "n_groups": 2},
    "gemma4": {"num_kv_shared_layers": 2},
    "gemma4_text": {"num_kv_shared_layers": 2},
    "gemma4_assistant": {"text_config": _ASSISTANT},
    "gemma4_unified_assistant": {"text_config": {"num_kv_shared_layers": _LAYERS}},
    "modernbert-decoder": {"cls_token_id": 1, "sep_token_id": 1},
    "nemotron": {"num_key_value_heads": 2},
    "qwen4_exp": _QWEN_4,
    "qwen4_exp_text": _QWEN_4,
    "reformer": {
        "attn_layers": ["local", "lsh", "local", "lsh"],
        "axial_pos_embds": False,
        "num_buckets": 2,
        "hash_seed": 0,
    },
    "roc_bert": {"enable_pronunciation": False, "enable_shape": False},
    "rwkv": {"attention_hidden_size": _WIDTH},
    "xlstm": {"hidden_size": 128, "embedding_dim": 128},
    "xmod": {"languages": ["en_XX"], "default_language": "en_XX"},
    "zaya": {"num_experts_per_tok": 1, "layer_types": ["hybrid", "hybrid_sliding"] * 2},
}
"""What an architecture needs besides."""


_WITHOUT_DEFAULTS: Final[dict[str, dict[str, Any]]] = {
    "gemma4_assistant": {"text_config": {**_ASSISTANT, "num_hidden_layers": _LAYERS}}
}
"""What a configuration needs to be made at all."""


def architectures() -> list[str]:
    """Return the model types of all causal architectures, as transformers lists them."""
    return list(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)


def tiny_config(model_type: str, **changes: Any) -> PreTrainedConfig:
    """Return a small configuration of a model type."""
    kind = CONFIG_MAPPING[model_type]
    own = {**_OWN.get(model_type, {}), **changes}
    return kind(**_shrunk(kind, own))


def tiny_model(model_type: str, **changes: Any) -> PreTrainedModel:
    """Return a small random model in float32, in evaluation mode."""
    torch.manual_seed(0)
    model: Any = _made(tiny_config(model_type, **changes))
    model.float().eval()
    _draw_weights(model)
    return cast("PreTrainedModel", model)


def tiny_multimodal(model_type: str) -> PreTrainedModel:
    """Return a small random model that takes text and more, in float32, in evaluation mode."""
    torch.manual_seed(0)
    auto: Any = AutoModelForImageTextToText
    model: Any = auto.from_config(tiny_config(model_type))
    model.float().eval()
    _draw_weights(model)
    return cast("PreTrainedModel", model)


def _made(config: PreTrainedConfig) -> PreTrainedModel:
    """Return a model; of some that are made of several, the text's part has to be named."""
    auto: Any = AutoModelForCausalLM
    try:
        return cast("PreTrainedModel", auto.from_config(config))
    except AttributeError:
        part = config.get_text_config(decoder=True)
        if part is config:
            raise
        kind: Any = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]
        return cast("PreTrainedModel", kind(part))


def _draw_weights(model: Any) -> None:
    """Draw weights that let outputs change: most architectures begin with the same few tokens."""
    for module in model.modules():
        if isinstance(module, torch.nn.Embedding):
            torch.nn.init.normal_(module.weight)
        elif isinstance(module, torch.nn.Linear):
            torch.nn.init.normal_(module.weight, std=_SPREAD)
    head = model.get_output_embeddings()
    if isinstance(head, torch.nn.Linear):  # where it is tied, the model repeats what it reads
        head.weight = torch.nn.Parameter(torch.randn_like(head.weight))


def _shrunk(kind: type[PreTrainedConfig], own: dict[str, Any]) -> dict[str, Any]:
    """Return what to make a configuration of."""
    whole = kind(**_WITHOUT_DEFAULTS.get(kind.model_type, {}))
    stated = whole.to_dict()
    values = {name: size for name, size in _SIZES.items() if name in stated}
    for name in _KEY_HEADS:
        if stated.get(name) is not None:
            heads = stated.get("num_attention_heads") or stated.get("n_head")
            values[name] = _HEADS if stated[name] == heads else _HEADS // 2
    for name in ("layer_types", "mlp_layer_types", "layers_block_type"):
        if isinstance(stated.get(name), list):
            values[name] = _kinds(stated[name], has_window="sliding_window" in values)
    for name in kind.sub_configs:
        part = getattr(whole, name, None)
        if isinstance(part, PreTrainedConfig):
            inner = own.get(name, own)
            values[name] = {"model_type": part.model_type, **_shrunk(type(part), inner)}
            values[name].update(own.get(name, {}))
    fields = [name for name in own if name in stated and name not in kind.sub_configs]
    return {**values, **{name: own[name] for name in fields}}


def _kinds(layers: list[str], *, has_window: bool) -> list[str]:
    """Return the types of a few layers, each that occurs among them."""
    kinds = list(dict.fromkeys(layers))
    if kinds == [_FULL] and has_window:
        kinds = [_SLIDING, _FULL]
    return [kinds[at % len(kinds)] for at in range(_LAYERS)]
