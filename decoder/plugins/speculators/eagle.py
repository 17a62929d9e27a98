"""The arithmetic of EAGLE heads, used both for drafting and for training.

EAGLE-1 and 2 (Li et al., 2024, arXiv:2401.15077 and 2406.16858) draft from the target's last state.
EAGLE-3 (Li et al., 2025, arXiv:2503.01840) drafts from three states between the target's layers.
Parameters have the names of the published files: those of EAGLE, of vLLM's `llama_eagle3` and of
`speculators`.

A head reads pairs: the state at position t and the token at t + 1. The pair has position t. Its
output is the draft's state at t + 1, which is paired with the token at t + 2. The logits of the
token at t + 2 are computed from the same output.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Final, Protocol

import torch
from torch import nn
from torch.nn import functional
from transformers import LlamaConfig, PreTrainedConfig, Qwen3Config
from transformers.activations import ACT2FN
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding, apply_rotary_pos_emb

from decoder.model.attention import tree_attention
from decoder.model.states import FINAL

LAYER_CONFIGS: Final[dict[str, type[PreTrainedConfig]]] = {
    "llama": LlamaConfig,
    "qwen3": Qwen3Config,
}
"""Configurations of the layers in heads, by `model_type`."""


class EagleKind(StrEnum):
    """The published kind of a head."""

    EAGLE = "eagle"
    EAGLE3 = "eagle3"


@dataclass(frozen=True, slots=True, kw_only=True)
class EagleConfig:
    """The shape of an EAGLE head.

    Attributes:
        kind: the published kind; EAGLE means both 1 and 2, which differ only in growing trees.
        layer: sizes, norms and rotary embedding of the layers; `vocab_size` is the target's.
        states: numbers of the target's states that the head reads; see `decoder.model.states`.
        target_size: size of each of these states.
        draft_vocabulary: columns of the head's own output layer; `None` if it uses the target's.
        has_embedding: whether the head has its own embedding instead of the target's.
        biased: linear layers that have a bias, such as `fc` or `q_proj`.
        norm_before_residual: whether the residual is the normalised hidden state (EAGLE-3).
        norm_before_fc: whether the concatenated states are normalised before `fc` (EAGLE-3).
        fc_norm: whether each state is normalised separately before `fc` (EAGLE-3.1).
        norm_output: whether the next depth takes the normalised output (EAGLE-3.1).
    """

    kind: EagleKind
    layer: PreTrainedConfig
    states: tuple[int, ...]
    target_size: int
    draft_vocabulary: int | None = None
    has_embedding: bool = False
    biased: frozenset[str] = frozenset()
    norm_before_residual: bool = False
    norm_before_fc: bool = False
    fc_norm: bool = False
    norm_output: bool = False

    @classmethod
    def eagle(cls, layer: PreTrainedConfig, *, bias: bool = True, **options: Any) -> "EagleConfig":
        """Return the shape of an EAGLE-1 or 2 head for a target of the same hidden size."""
        return cls(
            kind=EagleKind.EAGLE,
            layer=layer,
            states=(FINAL,),
            target_size=layer.hidden_size,
            biased=frozenset({"fc"} if bias else ()),
            **options,
        )

    @property
    def is_cut(self) -> bool:
        """Whether the head's own vocabulary is only a part of the target's."""
        return self.draft_vocabulary not in {None, self.layer.vocab_size}

    @property
    def window(self) -> int | None:
        """Number of positions that a token attends to, itself included; `None` for all."""
        kinds = set(getattr(self.layer, "layer_types", None) or ())
        return self.layer.sliding_window if "sliding_attention" in kinds else None


class KeyValues(Protocol):
    """The keys and values of a layer, which grow with each step."""

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Append keys and values, each [batch, heads, rows, head size], and return all of them."""
        ...


class JoinedKeyValues:
    """Keys and values that gradients flow through, for training at several depths."""

    def __init__(self) -> None:
        self._states: tuple[torch.Tensor, torch.Tensor] | None = None

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """See `KeyValues.update`."""
        if self._states is not None:
            keys, values = self._states
            key_states = torch.cat([keys, key_states], dim=-2)
            value_states = torch.cat([values, value_states], dim=-2)
        self._states = key_states, value_states
        return self._states


class EagleHead(nn.Module):
    """The common part of EAGLE heads: layers that attend to pairs of a state and the next token.

    Args:
        config: shape of the head.

    Attributes:
        config: shape of the head.
        embed_tokens: the head's own embedding; `None` if it uses the target's.
        lm_head: the head's own output layer; `None` if it uses the target's.
    """

    def __init__(self, config: EagleConfig) -> None:
        super().__init__()
        self.config = config
        layer = config.layer
        self.embed_tokens = (
            nn.Embedding(layer.vocab_size, layer.hidden_size) if config.has_embedding else None
        )
        self.lm_head: nn.Linear | None = None
        self.layers = nn.ModuleList(
            DraftLayer(config, number) for number in range(layer.num_hidden_layers)
        )
        self.make_rotation()

    def make_rotation(self) -> None:
        """Make the rotary embedding again: files do not store its constants."""
        layer: Any = self.config.layer  # a Qwen 3 layer has all attributes that it reads
        self.rotary_emb: nn.Module = LlamaRotaryEmbedding(layer)

    @property
    def hidden_size(self) -> int:
        """Size of the head's own states."""
        return int(self.config.layer.hidden_size)

    @property
    def num_layers(self) -> int:
        """Number of layers; each has keys and values."""
        return len(self.layers)

    def project(self, features: torch.Tensor) -> torch.Tensor:
        """Return the head's states, [..., hidden size], from the target's states.

        Args:
            features: [..., len(states) * target size], the concatenated states in their order.
        """
        raise NotImplementedError

    def step(
        self,
        embeddings: torch.Tensor,
        hidden: torch.Tensor,
        positions: torch.Tensor,
        mask: torch.Tensor | None = None,
        cache: Sequence[KeyValues] | None = None,
    ) -> torch.Tensor:
        """Read pairs of a state and the token after it.

        Args:
            embeddings: [batch, rows, hidden size], embeddings of the tokens.
            hidden: [batch, rows, hidden size], states from `project` or from this method.
            positions: int64[batch, rows], positions of the states.
            mask: bool, or numbers to add to the scores, [batch or 1, 1, rows, keys]. The default is
                causal over the rows, which is right only if the cache is empty.
            cache: earlier keys and values of each layer; those of these rows are appended.

        Returns:
            [batch, rows, hidden size], the states one position further.
        """
        if mask is None and self.config.window is not None and embeddings.shape[1] > 1:
            mask = window_mask(positions, positions, self.config.window)
        rotation = self.rotary_emb(embeddings, positions)
        states = self._entered(embeddings, hidden)
        for number, layer in enumerate(self.layers):
            own = None if cache is None else cache[number]
            states = layer(states, embeddings, rotation, mask, own)
        return self._left(states)

    def outputs(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return the input of the output layer, [..., hidden size]."""
        raise NotImplementedError

    def logits(self, hidden: torch.Tensor, target_head: nn.Module | None = None) -> torch.Tensor:
        """Return [..., columns], the logits of the tokens after the states from `step`.

        Args:
            hidden: [..., hidden size], the states.
            target_head: the target's output layer, for heads without their own.
        """
        output = self.lm_head if self.lm_head is not None else target_head
        if output is None:
            raise ValueError("a head without an output layer needs the target's")
        logits: torch.Tensor = output(self.outputs(hidden))
        return logits

    def _entered(self, embeddings: torch.Tensor, hidden: torch.Tensor) -> torch.Tensor:
        """Return the input of the first layer."""
        raise NotImplementedError

    def _left(self, states: torch.Tensor) -> torch.Tensor:
        """Return the head's states from the output of the last layer."""
        return states


class Eagle1Head(EagleHead):
    """EAGLE-1 and 2: `fc` joins embedding and state, and the first layer has no norm before it.

    The output layer is the target's, without a norm before it: the head's output stands for the
    target's state after its last norm.
    """

    def __init__(self, config: EagleConfig) -> None:
        super().__init__(config)
        size = self.hidden_size
        self.fc = nn.Linear(2 * size, size, bias="fc" in config.biased)

    def project(self, features: torch.Tensor) -> torch.Tensor:
        """Return the target's states as they are; see `EagleHead.project`."""
        return features

    def outputs(self, hidden: torch.Tensor) -> torch.Tensor:
        """See `EagleHead.outputs`."""
        return hidden

    def _entered(self, embeddings: torch.Tensor, hidden: torch.Tensor) -> torch.Tensor:
        joined: torch.Tensor = self.fc(torch.cat([embeddings, hidden], dim=-1))
        return joined


class Eagle3Head(EagleHead):
    """EAGLE-3: `fc` joins three states into one; attention reads it joined with the embedding.

    The head has its own output layer, for a part of the vocabulary. Column i stands for token
    i + d2t[i], and t2d says which tokens have a column.

    Attributes:
        d2t: int64[columns], token minus column; absent if each token has a column.
        t2d: bool[vocabulary], whether each token has a column; absent if d2t is.
    """

    d2t: torch.Tensor
    t2d: torch.Tensor

    def __init__(self, config: EagleConfig) -> None:
        super().__init__(config)
        size, eps = self.hidden_size, config.layer.rms_norm_eps
        width = len(config.states) * config.target_size
        self.fc = nn.Linear(width, size, bias="fc" in config.biased)
        self.input_norm = RMSNorm(width, eps) if config.norm_before_fc else None
        self.fc_norm = (
            nn.ModuleList(RMSNorm(config.target_size, eps) for _ in config.states)
            if config.fc_norm
            else None
        )
        self.norm = RMSNorm(size, eps)
        if config.draft_vocabulary is not None:
            self.lm_head = nn.Linear(size, config.draft_vocabulary, bias=False)
        if config.draft_vocabulary is not None and config.is_cut:
            self.register_buffer("d2t", torch.zeros(config.draft_vocabulary, dtype=torch.long))
            self.register_buffer("t2d", torch.zeros(config.layer.vocab_size, dtype=torch.bool))

    @property
    def columns(self) -> torch.Tensor | None:
        """int64[C], the token of each column; `None` if each token has a column."""
        if not self.config.is_cut:
            return None
        return torch.arange(len(self.d2t), device=self.d2t.device) + self.d2t

    def keep(self, tokens: torch.Tensor) -> None:
        """Let the columns stand for these tokens, int64[C], ascending."""
        self.d2t.copy_(tokens - torch.arange(len(tokens), device=tokens.device))
        self.t2d.zero_()
        self.t2d[tokens] = True

    def project(self, features: torch.Tensor) -> torch.Tensor:
        """See `EagleHead.project`."""
        if self.input_norm is not None:
            features = self.input_norm(features)
        if self.fc_norm is not None:
            parts = torch.split(features, self.config.target_size, dim=-1)
            norms = zip(self.fc_norm, parts, strict=True)
            features = torch.cat([norm(part) for norm, part in norms], dim=-1)
        projected: torch.Tensor = self.fc(features)
        return projected

    def outputs(self, hidden: torch.Tensor) -> torch.Tensor:
        """See `EagleHead.outputs`."""
        return hidden if self.config.norm_output else self.norm(hidden)

    def _entered(self, embeddings: torch.Tensor, hidden: torch.Tensor) -> torch.Tensor:  # noqa: ARG002  the first layer takes both
        return hidden

    def _left(self, states: torch.Tensor) -> torch.Tensor:
        return self.norm(states) if self.config.norm_output else states


def eagle_head(config: EagleConfig) -> EagleHead:
    """Return a new, untrained head of the given shape."""
    return Eagle3Head(config) if config.kind is EagleKind.EAGLE3 else Eagle1Head(config)


class RMSNorm(nn.RMSNorm):
    """A root mean square norm over the last dimension, computed in the precision of its weights."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return x divided by its root mean square, times the weights."""
        return functional.rms_norm(
            x.to(self.weight.dtype), self.normalized_shape, self.weight, self.eps
        )


class DraftAttention(nn.Module):
    """Attention with grouped heads and rotary positions, as in Llama and Qwen 3.

    Args:
        config: shape of the head.
        width: size of the input.

    Attributes:
        num_key_value_groups: query heads per key head; transformers reads this name.
        is_causal: whether attention without a mask is causal; transformers reads this name.
    """

    def __init__(self, config: EagleConfig, width: int) -> None:
        super().__init__()
        layer, biased = config.layer, config.biased
        self.head_size = int(layer.head_dim)
        self.num_key_value_groups = layer.num_attention_heads // layer.num_key_value_heads
        self.is_causal = True
        queries = layer.num_attention_heads * self.head_size
        keys = layer.num_key_value_heads * self.head_size
        self.q_proj = nn.Linear(width, queries, bias="q_proj" in biased)
        self.k_proj = nn.Linear(width, keys, bias="k_proj" in biased)
        self.v_proj = nn.Linear(width, keys, bias="v_proj" in biased)
        self.o_proj = nn.Linear(queries, layer.hidden_size, bias="o_proj" in biased)
        has_norms = layer.model_type == "qwen3"
        self.q_norm = RMSNorm(self.head_size, layer.rms_norm_eps) if has_norms else None
        self.k_norm = RMSNorm(self.head_size, layer.rms_norm_eps) if has_norms else None

    def forward(
        self,
        states: torch.Tensor,
        rotation: tuple[torch.Tensor, torch.Tensor],
        mask: torch.Tensor | None,
        cache: KeyValues | None,
    ) -> torch.Tensor:
        """Return the attention's output, [batch, rows, hidden size]; see `EagleHead.step`."""
        batch, rows, _ = states.shape
        shape = (batch, rows, -1, self.head_size)
        query = self.q_proj(states).view(shape)
        key = self.k_proj(states).view(shape)
        value = self.v_proj(states).view(shape).transpose(1, 2)
        if self.q_norm is not None and self.k_norm is not None:
            query, key = self.q_norm(query), self.k_norm(key)
        query, key = apply_rotary_pos_emb(query.transpose(1, 2), key.transpose(1, 2), *rotation)
        query, key = query.to(value.dtype), key.to(value.dtype)  # autocast rotates in float32
        if cache is not None:
            key, value = cache.update(key, value)
        if mask is not None and mask.is_floating_point():
            mask = mask.to(query.dtype)
        attended, _ = tree_attention(self, query, key, value, mask)
        output: torch.Tensor = self.o_proj(attended.reshape(batch, rows, -1))
        return output


class DraftMLP(nn.Module):
    """The gated layer after attention."""

    def __init__(self, config: EagleConfig) -> None:
        super().__init__()
        layer, biased = config.layer, config.biased
        size, inner = layer.hidden_size, layer.intermediate_size
        self.gate_proj = nn.Linear(size, inner, bias="gate_proj" in biased)
        self.up_proj = nn.Linear(size, inner, bias="up_proj" in biased)
        self.down_proj = nn.Linear(inner, size, bias="down_proj" in biased)
        self.activation = ACT2FN[layer.hidden_act]

    def forward(self, states: torch.Tensor) -> torch.Tensor:
        """Return the layer's output, [..., hidden size]."""
        gated = self.activation(self.gate_proj(states)) * self.up_proj(states)
        output: torch.Tensor = self.down_proj(gated)
        return output


class DraftLayer(nn.Module):
    """A layer of a head; the first layer differs from a layer of a language model.

    In EAGLE-3, the first layer attends over the normalised embedding joined with the normalised
    state. In EAGLE-1, it has no norm before its attention.
    """

    def __init__(self, config: EagleConfig, number: int) -> None:
        super().__init__()
        size, eps = config.layer.hidden_size, config.layer.rms_norm_eps
        is_first, is_eagle3 = number == 0, config.kind is EagleKind.EAGLE3
        self._norms_residual = config.norm_before_residual
        self.self_attn = DraftAttention(config, 2 * size if is_first and is_eagle3 else size)
        self.mlp = DraftMLP(config)
        self.input_layernorm = RMSNorm(size, eps) if is_eagle3 or not is_first else None
        self.hidden_norm = RMSNorm(size, eps) if is_eagle3 and is_first else None
        self.post_attention_layernorm = RMSNorm(size, eps)

    def forward(
        self,
        states: torch.Tensor,
        embeddings: torch.Tensor,
        rotation: tuple[torch.Tensor, torch.Tensor],
        mask: torch.Tensor | None,
        cache: KeyValues | None,
    ) -> torch.Tensor:
        """Return the layer's output, [batch, rows, hidden size]; see `EagleHead.step`."""
        inputs, residual = self.prepared(states, embeddings)
        states = residual + self.self_attn(inputs, rotation, mask, cache)
        output: torch.Tensor = states + self.mlp(self.post_attention_layernorm(states))
        return output

    def prepared(
        self, states: torch.Tensor, embeddings: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the input of attention, and the residual that its output is added to."""
        if self.hidden_norm is not None and self.input_layernorm is not None:
            normed = self.hidden_norm(states)
            inputs = torch.cat([self.input_layernorm(embeddings), normed], dim=-1)
            return inputs, normed if self._norms_residual else states
        if self.input_layernorm is not None:
            return self.input_layernorm(states), states
        return states, states


def window_mask(
    positions: torch.Tensor, key_positions: torch.Tensor, window: int | None
) -> torch.Tensor:
    """Return bool[batch, 1, rows, keys], whether each row sees each key, by positions alone.

    Args:
        positions: int64[batch, rows], positions of the rows.
        key_positions: int64[batch, keys], positions of the keys.
        window: number of positions that a row sees, its own included; `None` for all.
    """
    distances = positions[:, None, :, None] - key_positions[:, None, None, :]
    visible = distances >= 0
    return visible if window is None else visible & (distances < window)


def unrolled_mask(length: int, depth: int, device: torch.device | str = "cpu") -> torch.Tensor:
    """Return bool[1, 1, length, (depth + 1) * length], which keys a row at a depth sees.

    In training, all rows of a sequence continue from their own outputs at once. Row t at depth 0 is
    the pair at position t, with the target's state. Row t at depth k is the pair at t + k, with the
    output of row t at the depth before. It sees the pairs at depth 0 up to t, row t at each depth
    before it, and itself, just as in a draft (EAGLE-3, training-time test).
    """
    causal = torch.ones(length, length, dtype=torch.bool, device=device).tril()
    own = torch.eye(length, dtype=torch.bool, device=device)
    return torch.cat([causal, *[own] * depth], dim=-1)[None, None]
