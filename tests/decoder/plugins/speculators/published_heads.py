"""Small heads in exactly the published layouts, and what their publishers' code computes with them.

The references are written row by row from EAGLE's `cnets.py` and `cnets1.py`, vLLM's
`llama_eagle3.py`, `speculators` and fms-extras, with names as the files have them.
"""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor
from torch.nn import functional

from tests.decoder.decoding import VOCABULARY

SIZE, INNER, HEADS, KEY_HEADS, HEAD_SIZE = 32, 48, 4, 2, 8
DRAFTED = (0, 3, 4, 7, 9, 11, 12, 17, 20, 21, 22, 30, 31, 33, 40, 41, 44, 47)
"""Tokens of a head's own vocabulary."""
THETA = 10000.0
EPS = 1e-5

Weights = dict[str, Tensor]


@dataclass(frozen=True)
class Published:
    """A head's files: what `config.json` and the tensors hold."""

    config: dict[str, Any]
    weights: Weights

    def write(self, folder: Path) -> Path:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "config.json").write_text(json.dumps(self.config))
        save_file(self.weights, folder / "model.safetensors")
        return folder


class _Draw:
    """Draws weights that are large enough for every part of a head to matter."""

    def __init__(self, seed: int) -> None:
        self._generator = torch.Generator().manual_seed(seed)

    def matrix(self, rows: int, columns: int) -> Tensor:
        drawn = torch.randn(rows, columns, generator=self._generator)
        return drawn * 0.8 / math.sqrt(columns)

    def norm(self, size: int = SIZE) -> Tensor:
        return 1 + 0.3 * torch.randn(size, generator=self._generator)

    def bias(self, size: int) -> Tensor:
        return 0.3 * torch.randn(size, generator=self._generator)


def _layer(draw: _Draw, prefix: str, width: int, *, query_norms: bool = False) -> Weights:
    layer = {
        "self_attn.q_proj.weight": draw.matrix(HEADS * HEAD_SIZE, width),
        "self_attn.k_proj.weight": draw.matrix(KEY_HEADS * HEAD_SIZE, width),
        "self_attn.v_proj.weight": draw.matrix(KEY_HEADS * HEAD_SIZE, width),
        "self_attn.o_proj.weight": draw.matrix(SIZE, HEADS * HEAD_SIZE),
        "mlp.gate_proj.weight": draw.matrix(INNER, SIZE),
        "mlp.up_proj.weight": draw.matrix(INNER, SIZE),
        "mlp.down_proj.weight": draw.matrix(SIZE, INNER),
        "post_attention_layernorm.weight": draw.norm(),
    }
    if query_norms:
        layer["self_attn.q_norm.weight"] = draw.norm(HEAD_SIZE)
        layer["self_attn.k_norm.weight"] = draw.norm(HEAD_SIZE)
    return {prefix + name: value for name, value in layer.items()}


def _vocabulary() -> Weights:
    tokens = torch.tensor(DRAFTED)
    t2d = torch.zeros(VOCABULARY, dtype=torch.bool)
    t2d[tokens] = True
    return {"d2t": tokens - torch.arange(len(tokens)), "t2d": t2d}


def _llama_config() -> dict[str, Any]:
    return {
        "architectures": ["LlamaForCausalLM"],
        "bos_token_id": 1,
        "eos_token_id": 2,
        "hidden_act": "silu",
        "hidden_size": SIZE,
        "initializer_range": 0.02,
        "intermediate_size": INNER,
        "max_position_embeddings": 128,
        "model_type": "llama",
        "num_attention_heads": HEADS,
        "num_key_value_heads": KEY_HEADS,
        "num_hidden_layers": 1,
        "pad_token_id": 0,
        "rms_norm_eps": EPS,
        "tie_word_embeddings": False,
        "torch_dtype": "float16",
        "transformers_version": "4.28.1",
        "use_cache": True,
        "vocab_size": VOCABULARY,
    }


def official_eagle3(seed: int = 1) -> Published:
    """EAGLE-3 as its authors publish it: a `midlayer`, no embedding, states by default."""
    draw = _Draw(seed)
    weights = {
        **_vocabulary(),
        **_layer(draw, "midlayer.", 2 * SIZE),
        "midlayer.hidden_norm.weight": draw.norm(),
        "midlayer.input_layernorm.weight": draw.norm(),
        "norm.weight": draw.norm(),
        "fc.weight": draw.matrix(SIZE, 3 * SIZE),
        "lm_head.weight": draw.matrix(len(DRAFTED), SIZE),
    }
    return Published(_llama_config() | {"draft_vocab_size": len(DRAFTED)}, weights)


def speculators_eagle3(
    seed: int = 2, *, states: Sequence[int] = (0, 2, 3), num_layers: int = 1, **options: Any
) -> Published:
    """EAGLE-3 as `speculators` saves it, with any of its options."""
    draw = _Draw(seed)
    kind = options.pop("model_type", "llama")
    window = options.pop("sliding_window", None)
    weights = {**_vocabulary(), "embed_tokens.weight": draw.matrix(VOCABULARY, SIZE)}
    for number in range(num_layers):
        prefix = f"layers.{number}."
        width = 2 * SIZE if number == 0 else SIZE
        weights |= _layer(draw, prefix, width, query_norms=kind == "qwen3")
        weights[prefix + "input_layernorm.weight"] = draw.norm()
    weights |= {
        "layers.0.hidden_norm.weight": draw.norm(),
        "norm.weight": draw.norm(),
        "fc.weight": draw.matrix(SIZE, len(states) * SIZE),
        "lm_head.weight": draw.matrix(len(DRAFTED), SIZE),
    }
    if options.get("norm_before_fc"):
        weights["input_norm.weight"] = draw.norm(len(states) * SIZE)
    if options.get("fc_norm"):
        weights |= {f"fc_norm.{i}.weight": draw.norm() for i in range(len(states))}
    layer = {
        **_llama_config(),
        "architectures": None,
        "attention_bias": False,
        "head_dim": HEAD_SIZE,
        "mlp_bias": False,
        "model_type": kind,
        "num_hidden_layers": num_layers,
        "rope_parameters": {"rope_theta": THETA, "rope_type": "default"},
    }
    if window is not None:
        layer |= {"sliding_window": window, "layer_types": ["sliding_attention"] * num_layers}
    config = {
        "architectures": ["Eagle3DraftModel"],
        "auto_map": {"": "eagle3.Eagle3SpeculatorConfig"},
        "draft_vocab_size": len(DRAFTED),
        "eagle_aux_hidden_state_layer_ids": list(states),
        "norm_before_residual": False,
        "speculators_config": {
            "algorithm": "eagle3",
            "default_proposal_method": "greedy",
            "proposal_methods": [
                {
                    "accept_tolerance": 0.0,
                    "proposal_type": "greedy",
                    "speculative_tokens": 3,
                    "verifier_accept_k": 1,
                }
            ],
            "verifier": {"architectures": ["LlamaForCausalLM"], "name_or_path": "tiny/llama"},
        },
        "speculators_model_type": "eagle3",
        "speculators_version": "0.9.0",
        "target_hidden_size": None,
        "tie_word_embeddings": False,
        "transformer_layer_config": layer,
        **options,
    }
    return Published(config, weights)


def official_eagle(
    seed: int = 3, *, bias: bool = True, embeds: bool = True, num_layers: int = 1
) -> Published:
    """EAGLE-1 or 2 as its authors publish it."""
    draw = _Draw(seed)
    weights = {"fc.weight": draw.matrix(SIZE, 2 * SIZE)}
    for number in range(num_layers):
        weights |= _layer(draw, f"layers.{number}.", SIZE)
        if number:
            weights[f"layers.{number}.input_layernorm.weight"] = draw.norm()
    if bias:
        weights["fc.bias"] = draw.bias(SIZE)
    if embeds:
        weights["embed_tokens.weight"] = draw.matrix(VOCABULARY, SIZE)
    return Published(_llama_config() | {"num_hidden_layers": num_layers, "bias": bias}, weights)


def speculators_eagle(seed: int = 4) -> Published:
    """EAGLE-1 as `speculators` saved it up to 0.3."""
    made = official_eagle(seed, bias=False, embeds=False)
    weights = {
        name.replace("layers.0.", "transformer.").replace("fc.", "fusion_fc."): value
        for name, value in made.weights.items()
    }
    config = {
        "architectures": ["EagleSpeculator", "LlamaDecoderLayer"],
        "fusion_bias": False,
        "layernorms": False,
        "speculators_config": {
            "algorithm": "eagle",
            "verifier": {"architectures": ["LlamaForCausalLM"], "name_or_path": "tiny/llama"},
        },
        "speculators_model_type": "eagle",
        "transformer_layer_architecture": "LlamaDecoderLayer",
        "transformer_layer_config": made.config,
    }
    return Published(config, weights)


def mlp_speculator(
    seed: int = 5, *, tied: bool = False, scaled: bool = False, depths: int = 3
) -> Published:
    """An MLP speculator as fms-extras publishes it; tied weights are stored once."""
    draw, inner = _Draw(seed), 40
    weights: Weights = {}
    for stage in range(depths):
        if tied and stage > 1:
            break
        if not (tied and stage):
            weights[f"speculator.emb.{stage}.weight"] = draw.matrix(VOCABULARY, inner)
            weights[f"speculator.ln.{stage}.weight"] = draw.norm(inner)
            weights[f"speculator.ln.{stage}.bias"] = draw.bias(inner)
            weights[f"speculator.head.{stage}.weight"] = draw.matrix(VOCABULARY, inner)
        weights[f"speculator.proj.{stage}.weight"] = draw.matrix(inner, inner if stage else SIZE)
    config = {
        "architectures": ["MLPSpeculatorPreTrainedModel"],
        "emb_dim": SIZE,
        "inner_dim": inner,
        "model_type": "mlp_speculator",
        "n_candidates": 5,
        "n_predict": depths,
        "scale_input": scaled,
        "tie_weights": tied,
        "top_k_tokens_per_head": [4, 3, 2][:depths],
        "torch_dtype": "float16",
        "vocab_size": VOCABULARY,
    }
    return Published(config, weights)


@dataclass(frozen=True)
class TargetParts:
    """What a head takes of its target: embedding, output layer, and states by number."""

    embedding: Tensor
    head: Tensor
    states: Mapping[int, Tensor]


def eagle3_logits(  # noqa: PLR0913, PLR0917  the last is an option
    made: Published,
    target: TargetParts,
    states: Sequence[int],
    tokens: Sequence[int],
    chain: Sequence[int],
    first: int = 0,
) -> Tensor:
    """Return [1 + len(chain), columns]: logits after the last token, and after each of a chain.

    Args:
        made: the head.
        target: its states at all positions but the last.
        states: which of them the head takes.
        tokens: the committed tokens.
        chain: tokens drafted behind them.
        first: position of the first pair that is read.
    """
    weights = _of_first_layer(made)
    options = made.config
    embedding = weights.get("embed_tokens.weight", target.embedding)
    features = [target.states[number] for number in states]
    if options.get("fc_norm"):
        features = [_rms(x, weights[f"fc_norm.{i}.weight"]) for i, x in enumerate(features)]
    joined = torch.cat(features, dim=-1)
    if options.get("norm_before_fc"):
        joined = _rms(joined, weights["input_norm.weight"])
    hidden = joined @ weights["fc.weight"].T

    def row(rows: "_Rows", token: int, state: Tensor, position: int) -> Tensor:
        embedded = _rms(embedding[token], weights["layers.0.input_layernorm.weight"])
        normed = _rms(state, weights["layers.0.hidden_norm.weight"])
        residual = normed if options.get("norm_before_residual") else state
        entered = torch.cat([embedded, normed])
        output = rows.layer(0, entered, residual, position)
        for number in range(1, rows.num_layers):
            entered = _rms(output, weights[f"layers.{number}.input_layernorm.weight"])
            output = rows.layer(number, entered, output, position)
        return _rms(output, weights["norm.weight"]) if options.get("norm_output") else output

    outputs = _chained(_Rows(made, weights), row, hidden, tokens, chain, first)
    normed = outputs if options.get("norm_output") else _rms(outputs, weights["norm.weight"])
    return normed @ weights["lm_head.weight"].T


def eagle_logits(
    made: Published,
    target: TargetParts,
    state: int,
    tokens: Sequence[int],
    chain: Sequence[int],
) -> Tensor:
    """Return what `eagle3_logits` does, for EAGLE-1 and 2."""
    weights = _of_first_layer(made)
    embedding = weights.get("embed_tokens.weight", target.embedding)
    bias = weights.get("fc.bias", torch.zeros(SIZE))

    def row(rows: "_Rows", token: int, hidden: Tensor, position: int) -> Tensor:
        output = torch.cat([embedding[token], hidden]) @ weights["fc.weight"].T + bias
        for number in range(rows.num_layers):
            norm = weights.get(f"layers.{number}.input_layernorm.weight")
            entered = output if norm is None else _rms(output, norm)
            output = rows.layer(number, entered, output, position)
        return output

    outputs = _chained(_Rows(made, weights), row, target.states[state], tokens, chain)
    return outputs @ target.head.T


def mlp_logits(
    made: Published,
    target: TargetParts,
    state: int,
    tokens: Sequence[int],
    chain: Sequence[int],
) -> Tensor:
    """Return what `eagle3_logits` does, for MLP speculators: as deep as they go."""
    config = made.config
    weights = {name.removeprefix("speculator."): value for name, value in made.weights.items()}
    depths, inner = config["n_predict"], config["inner_dim"]
    state_weight = 0.5 ** (0.5 / depths)
    token_weight = math.sqrt(1 - state_weight**2) * math.sqrt(inner / 2)
    hidden = target.states[state][-1]
    if config["scale_input"]:
        hidden = hidden * torch.rsqrt(hidden.pow(2).mean() + 1e-6) / math.sqrt(2)
    logits = []
    for depth, token in enumerate([tokens[-1], *chain]):
        stage = 0 if config["tie_weights"] else depth
        proj = min(depth, 1) if config["tie_weights"] else depth
        mixed = weights[f"proj.{proj}.weight"] @ hidden * state_weight
        mixed = mixed + weights[f"emb.{stage}.weight"][token] * token_weight
        normed = mixed * torch.rsqrt(mixed.pow(2).mean() + 1e-6)
        normed = weights[f"ln.{stage}.weight"] * normed + weights[f"ln.{stage}.bias"]
        hidden = functional.gelu(normed)
        logits.append(weights[f"head.{stage}.weight"] @ hidden)
    return torch.stack(logits)


def _of_first_layer(made: Published) -> Weights:
    """Return weights by the names that vLLM gives them."""
    renamed = (("midlayer.", "layers.0."), ("transformer.", "layers.0."), ("fusion_fc", "fc"))
    found = {}
    for name, value in made.weights.items():
        new = name
        for old, replacement in renamed:
            new = new.replace(old, replacement)
        found[new] = value
    return found


def _chained(  # noqa: PLR0913, PLR0917  likewise
    rows: "_Rows", row: Any, states: Tensor, tokens: Any, chain: Any, first: int = 0
) -> Tensor:
    """Run the true pairs, then a chain on the head's own outputs; return the last outputs.

    The pair of the state at t and the token at t + 1 stands at position t.
    """
    output = states[0]
    for position in range(first, len(tokens) - 1):
        output = row(rows, tokens[position + 1], states[position], position)
    outputs = [output]
    for depth, token in enumerate(chain):
        output = row(rows, token, output, len(tokens) - 1 + depth)
        outputs.append(output)
    return torch.stack(outputs)


class _Rows:
    """The layers of a head, one row after another, with the keys and values of all before."""

    def __init__(self, made: Published, weights: Weights) -> None:
        self._weights = weights
        config = made.config.get("transformer_layer_config") or made.config
        self.num_layers = config["num_hidden_layers"]
        self._window = config.get("sliding_window")
        self._keys: list[list[Tensor]] = [[] for _ in range(self.num_layers)]
        self._values: list[list[Tensor]] = [[] for _ in range(self.num_layers)]

    def layer(self, number: int, entered: Tensor, residual: Tensor, position: int) -> Tensor:
        prefix = f"layers.{number}."
        output = residual + self._attend(number, prefix + "self_attn.", entered, position)
        normed = _rms(output, self._weights[prefix + "post_attention_layernorm.weight"])
        gate = self._weights[prefix + "mlp.gate_proj.weight"] @ normed
        up = self._weights[prefix + "mlp.up_proj.weight"] @ normed
        down = self._weights[prefix + "mlp.down_proj.weight"]
        return output + down @ (gate / (1 + torch.exp(-gate)) * up)

    def _attend(self, number: int, prefix: str, entered: Tensor, position: int) -> Tensor:
        def projected(name: str) -> Tensor:
            return (self._weights[f"{prefix}{name}.weight"] @ entered).view(-1, HEAD_SIZE)

        query, key, value = projected("q_proj"), projected("k_proj"), projected("v_proj")
        if prefix + "q_norm.weight" in self._weights:
            query = _rms(query, self._weights[prefix + "q_norm.weight"])
            key = _rms(key, self._weights[prefix + "k_norm.weight"])
        self._keys[number].append(_rotated(key, position))
        self._values[number].append(value)
        keys, values = torch.stack(self._keys[number]), torch.stack(self._values[number])
        if self._window is not None:
            keys, values = keys[-self._window :], values[-self._window :]
        query = _rotated(query, position)
        attended = []
        for head in range(HEADS):
            own = head // (HEADS // KEY_HEADS)
            scores = keys[:, own] @ query[head] / math.sqrt(HEAD_SIZE)
            attended.append(scores.softmax(0) @ values[:, own])
        output: Tensor = self._weights[prefix + "o_proj.weight"] @ torch.cat(attended)
        return output


def _rms(x: Tensor, weight: Tensor) -> Tensor:
    return weight * x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + EPS)


def _rotated(x: Tensor, position: int) -> Tensor:
    """Rotate [heads, head size] by a position: halves of each head are real and imaginary parts."""
    half = HEAD_SIZE // 2
    angles = position * THETA ** (-torch.arange(half) / half)
    real, imaginary = x[:, :half], x[:, half:]
    cosine, sine = angles.cos(), angles.sin()
    return torch.cat([real * cosine - imaginary * sine, imaginary * cosine + real * sine], dim=-1)
