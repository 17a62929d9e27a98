"""A tiny model for llama.cpp, in float32: random weights, and a vocabulary of bytes."""

from pathlib import Path

import gguf
import numpy as np

VOCABULARY = 259
_WIDTH = 32
_HEADS = 2
LAYERS = 2
WIDEST = 64
_CONTEXT = 2048


def write_model(path: Path, seed: int = 0) -> None:
    """Write a Llama of two layers as GGUF."""
    writer = gguf.GGUFWriter(str(path), "llama")
    writer.add_context_length(_CONTEXT)
    writer.add_embedding_length(_WIDTH)
    writer.add_block_count(LAYERS)
    writer.add_feed_forward_length(WIDEST)
    writer.add_head_count(_HEADS)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_dimension_count(_WIDTH // _HEADS)
    writer.add_vocab_size(VOCABULARY)
    writer.add_file_type(gguf.LlamaFileType.ALL_F32)
    _add_tokenizer(writer)
    _add_weights(writer, np.random.default_rng(seed))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def write_adapter(path: Path, rank: int = 2, seed: int = 1) -> None:
    """Write a LoRA adapter for such a model as GGUF."""
    writer = gguf.GGUFWriter(str(path), "llama")
    writer.add_type(gguf.GGUFType.ADAPTER)
    writer.add_string(gguf.Keys.Adapter.TYPE, "lora")
    writer.add_float32(gguf.Keys.Adapter.LORA_ALPHA, float(rank))
    random = np.random.default_rng(seed)
    for layer in range(LAYERS):
        name = f"blk.{layer}.attn_q.weight"
        for part, shape in (("lora_a", (rank, _WIDTH)), ("lora_b", (_WIDTH, rank))):
            writer.add_tensor(f"{name}.{part}", random.normal(0, 1, shape).astype(np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _add_tokenizer(writer: gguf.GGUFWriter) -> None:
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    types = [gguf.TokenType.UNKNOWN, gguf.TokenType.CONTROL, gguf.TokenType.CONTROL]
    writer.add_tokenizer_model("llama")
    writer.add_token_list(tokens)
    writer.add_token_scores([0.0] * len(tokens))
    writer.add_token_types([*types, *[gguf.TokenType.BYTE] * 256])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)


def _add_weights(writer: gguf.GGUFWriter, random: np.random.Generator) -> None:
    def add(name: str, *shape: int, scale: float = 0.3) -> None:
        writer.add_tensor(f"{name}.weight", random.normal(0, scale, shape).astype(np.float32))

    def add_norm(name: str) -> None:
        writer.add_tensor(f"{name}.weight", np.ones(_WIDTH, np.float32))

    add("token_embd", VOCABULARY, _WIDTH, scale=1.0)
    add("output", VOCABULARY, _WIDTH)
    add_norm("output_norm")
    for layer in range(LAYERS):
        prefix = f"blk.{layer}."
        for name in ("attn_q", "attn_k", "attn_v", "attn_output"):
            add(prefix + name, _WIDTH, _WIDTH)
        add(prefix + "ffn_gate", WIDEST, _WIDTH)
        add(prefix + "ffn_up", WIDEST, _WIDTH)
        add(prefix + "ffn_down", _WIDTH, WIDEST)
        add_norm(prefix + "attn_norm")
        add_norm(prefix + "ffn_norm")
