"""The initial head of a training, made from the target's last layer and least squares.

An EAGLE-3 head that starts from random weights needs millions of texts. This head can draft before
its first training step: it is a copy of the target's last layer, with inputs fitted to recorded
states.

The EAGLE-3 layer adds its output to the state alone. The embedding of the next token reaches the
layer only through attention. So the head has twice as many attention heads as the target's layer.
Half of them are copies. The others look only at their own position: their queries and keys are one
constant vector, whose rotations agree only at distance zero. Their values carry the difference
between the input of the target's layer and the head's state.
"""

from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import nn
from torch.nn import functional
from transformers import LlamaConfig

from decoder.errors import TeachingTextError, UnsupportedModelError
from decoder.model.pretrained import LanguageModel
from decoder.model.states import num_states
from decoder.plugins.speculators.eagle import Eagle3Head, EagleConfig, EagleKind, eagle_head
from decoder.plugins.training.taught_store import TaughtStore

NUM_PLACES: Final = 40_000
"""Positions that least squares are fitted to: about twenty for each unknown of a row."""

_RIDGE: Final = 1e-2
"""Share of the inputs' mean square that ridge regression adds to the diagonal."""

_FIRST: Final = 4
"""Positions at the start of a text that are left out. Their states are a hundred times as long as
other states, so only they would determine the fit."""

_SELF_SCORE: Final = 100.0
"""Attention score of a position with itself in the attention heads that look only at their own
position. The highest frequencies share the score, so the score of the next position is at least 9
lower, and the frequencies hardly ever agree again. With heads of 64 or 128 numbers, over 0.999 of
the attention stays at distance zero among 8,192 positions. With three frequencies and a score of
30, only half would stay there among 512 positions."""

_SELF_FREQUENCIES: Final = 8


def trained_states(num_layers: int) -> tuple[int, int, int]:
    """Return the numbers of the states that a trained head reads.

    The third is the input of the last layer, while EAGLE-3 reads a state two layers lower. The
    copied layer drafts better from the state that it had as its input.
    """
    return min(2, num_layers - 1), num_layers // 2, num_layers - 1


def recorded_states(num_layers: int) -> tuple[int, ...]:
    """Return the states to record: those that the head reads, and the output of the last layer."""
    return *trained_states(num_layers), num_layers


@dataclass(frozen=True, slots=True, eq=False)
class Places:
    """Recorded float32 values at positions t of texts.

    Attributes:
        features: [N, F], the states at t that the head reads.
        embeddings: [N, d], the embeddings of the tokens at t + 1.
        last: [N, d], the output of the target's last layer at t.
        entering: [N, d], the input of the target's last layer at t + 1.
    """

    features: torch.Tensor
    embeddings: torch.Tensor
    last: torch.Tensor
    entering: torch.Tensor


def layer_config(language_model: LanguageModel, more: int = 1) -> LlamaConfig:
    """Return the shape of a Llama layer like the target's own, with biases in its attention.

    Args:
        language_model: the target.
        more: factor for the number of attention heads.
    """
    config = language_model.model.config.get_text_config(decoder=True)
    return LlamaConfig(
        hidden_size=config.hidden_size,
        intermediate_size=config.intermediate_size,
        num_hidden_layers=1,
        num_attention_heads=more * config.num_attention_heads,
        num_key_value_heads=more * config.num_key_value_heads,
        head_dim=_head_size(config),
        hidden_act=config.hidden_act,
        rms_norm_eps=config.rms_norm_eps,
        rope_parameters=config.rope_parameters,
        max_position_embeddings=config.max_position_embeddings,
        vocab_size=config.vocab_size,
        attention_bias=True,
    )


def head_config(language_model: LanguageModel, num_columns: int) -> EagleConfig:
    """Return the shape of a head for a target: the target's layer with twice the attention heads.

    Raises:
        UnsupportedModelError: no head can be made from the target's kind of layers.
    """
    last_layer(language_model)
    layer = layer_config(language_model, more=2)
    return EagleConfig(
        kind=EagleKind.EAGLE3,
        layer=layer,
        states=trained_states(num_states(language_model.model)),
        target_size=layer.hidden_size,
        draft_vocabulary=num_columns,
        biased=frozenset({"q_proj", "k_proj", "v_proj", "o_proj"}),
    )


def last_layer(language_model: LanguageModel) -> Any:
    """Return the target's last layer.

    Raises:
        UnsupportedModelError: it is not a Llama layer; heads can only be made from Llama layers.
    """
    base: Any = language_model.model.base_model
    layer = base.layers[num_states(language_model.model) - 1]
    config = language_model.model.config.get_text_config(decoder=True)
    missing = [name for name in _PARTS if _part(layer, name) is None]
    missing += [name for name in _STATED if getattr(config, name, None) is None]
    extra = [name for name, _ in layer.named_children() if name not in _CHILDREN]
    if missing or extra:
        raise other_kind(language_model, ", ".join([*missing, *extra]))
    return layer


def other_kind(language_model: LanguageModel, difference: str) -> UnsupportedModelError:
    """Return the error for a target that no head can be trained for."""
    return UnsupportedModelError(
        f"{language_model.name} has other layers than Llama ({difference}), so no head can be "
        "trained for it: use a published head with --speculator"
    )


_CHILDREN: Final = ("self_attn", "mlp", "input_layernorm", "post_attention_layernorm")
_PARTS: Final = (
    *(f"self_attn.{name}_proj" for name in "qkvo"),
    *(f"mlp.{name}_proj" for name in ("gate", "up", "down")),
    *_CHILDREN[2:],
)

_STATED: Final = ("intermediate_size", "hidden_act", "rms_norm_eps", "rope_parameters")


def _part(layer: nn.Module, name: str) -> Any:
    found: Any = layer
    for step in name.split("."):
        found = getattr(found, step, None)
    return found


@torch.no_grad()
def started_head(
    language_model: LanguageModel, store: TaughtStore, tokens: torch.Tensor
) -> Eagle3Head:
    """Return an initial float32 head that can draft already.

    Args:
        language_model: the target.
        store: texts with the target's `recorded_states`.
        tokens: int64[C], ascending, the tokens that the head may draft.

    Raises:
        TeachingTextError: the texts are too short.
        UnsupportedModelError: no head can be made from the target's kind of layers.
    """
    head = eagle_head(head_config(language_model, len(tokens)))
    if not isinstance(head, Eagle3Head) or head.lm_head is None:
        raise TypeError("a trained head is an EAGLE-3 head with an output layer of its own")
    layer = last_layer(language_model)
    places = _places(language_model, store, head.config.states)
    if head.config.is_cut:
        head.keep(tokens)
    _copy_outputs(head, language_model, layer, tokens)
    head.fc.weight.copy_(_fitted(places.features, places.last))
    own: Any = head.layers[0]
    inputs, _ = own.prepared(head.project(places.features), places.embeddings)
    missing = places.entering - head.project(places.features)
    _set_attention(own.self_attn, layer, inputs, places.entering)
    _set_own_position(own.self_attn, layer.self_attn, inputs, missing)
    return head


def _copy_outputs(
    head: Eagle3Head, language_model: LanguageModel, layer: Any, tokens: torch.Tensor
) -> None:
    """Copy all parts after attention: the layer's second half, the norm and the output layer."""
    base: Any = language_model.model.base_model
    output: Any = language_model.model.get_output_embeddings()  # type: ignore[no-untyped-call]  # not typed there
    own: Any = head.layers[0]
    own.mlp.gate_proj.weight.copy_(layer.mlp.gate_proj.weight)
    own.mlp.up_proj.weight.copy_(layer.mlp.up_proj.weight)
    own.mlp.down_proj.weight.copy_(layer.mlp.down_proj.weight)
    own.post_attention_layernorm.weight.copy_(layer.post_attention_layernorm.weight)
    head.norm.weight.copy_(base.norm.weight)
    if head.lm_head is not None:
        head.lm_head.weight.copy_(output.weight[tokens.to(output.weight.device)])


def _set_attention(own: Any, layer: Any, inputs: torch.Tensor, entering: torch.Tensor) -> None:
    """Make the first half of the attention heads imitate the target's.

    Args:
        own: the head's attention, which is changed.
        layer: the target's last layer.
        inputs: [N, 2 d], the input of the head's attention at each position.
        entering: [N, d], the input of the target's layer there.
    """
    copied = layer.self_attn
    normed = layer.input_layernorm(entering.to(layer.input_layernorm.weight.dtype)).float()
    for name in ("q_proj", "k_proj", "v_proj"):
        given, taken = getattr(copied, name), getattr(own, name)
        size = given.weight.shape[0]
        taken.weight[:size] = _fitted(inputs, functional.linear(normed, given.weight.float()))
        taken.weight[size:] = 0.0
        taken.bias.zero_()
        if given.bias is not None:
            taken.bias[:size] = given.bias
        if name != "v_proj":
            taken.bias[size:] = _constant(own.head_size).repeat(size // own.head_size)


def _set_own_position(own: Any, copied: Any, inputs: torch.Tensor, missing: torch.Tensor) -> None:
    """Make the second half of the attention heads add what the residual lacks.

    Their values have as many directions as the target's, so they can add a matrix of that rank.

    Args:
        own: the head's attention, which is changed.
        copied: the target's attention.
        inputs: [N, 2 d], the input of the head's attention at each position.
        missing: [N, d], the input of the target's layer minus the head's state.
    """
    rank, width = copied.v_proj.weight.shape[0], copied.o_proj.weight.shape[1]
    down, up = _low_rank(_fitted(inputs, missing), inputs, rank)
    own.v_proj.weight[rank:] = down
    own.o_proj.bias.zero_()
    if copied.o_proj.bias is not None:
        own.o_proj.bias.copy_(copied.o_proj.bias)
    own.o_proj.weight[:, :width] = copied.o_proj.weight
    groups, size = own.num_key_value_groups, own.head_size
    shared = up.view(-1, rank // size, 1, size).expand(-1, -1, groups, -1) / groups
    own.o_proj.weight[:, width:] = shared.reshape(len(up), -1)


def _constant(head_size: int) -> torch.Tensor:
    """Return the vector, both query and key, that scores `_SELF_SCORE` only at distance zero."""
    vector = torch.zeros(head_size)
    shared = min(_SELF_FREQUENCIES, head_size // 2)  # a frequency turns two numbers
    vector[:shared] = (_SELF_SCORE * head_size**0.5 / shared) ** 0.5
    return vector


def _fitted(inputs: torch.Tensor, outputs: torch.Tensor) -> torch.Tensor:
    """Return [d_out, d_in], the matrix from inputs to outputs [N, d_out], by ridge regression."""
    products = (inputs.T @ inputs).double()
    least = products.diagonal().mean().clamp(min=torch.finfo(torch.float32).tiny)
    products += _RIDGE * least * torch.eye(len(products)).double()
    solved: torch.Tensor = torch.linalg.solve(products, (inputs.T @ outputs).double())
    return solved.T.float()


def _low_rank(
    matrix: torch.Tensor, inputs: torch.Tensor, rank: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return [rank, d_in] and [d_out, rank], whose product approximates a matrix on the inputs."""
    # Inputs may span only a few directions, for example if a text repeats itself.
    values, vectors = torch.linalg.eigh((inputs.T @ inputs).double() / len(inputs))
    least = (1e-6 * values.mean()).clamp(min=torch.finfo(torch.float32).tiny)
    lengths = values.clamp(min=least).sqrt()
    root = vectors * lengths
    left, sizes, right = torch.linalg.svd(matrix.double() @ root, full_matrices=False)
    half = sizes[:rank].sqrt()
    down = half[:, None] * (right[:rank] / lengths) @ vectors.T
    return down.float(), (left[:, :rank] * half).float()


def _places(language_model: LanguageModel, store: TaughtStore, states: tuple[int, ...]) -> Places:
    """Return positions of texts from all parts of the recording.

    Raises:
        TeachingTextError: all texts are too short.
    """
    size = int(language_model.model.config.get_text_config(decoder=True).hidden_size)
    embed: Any = language_model.model.get_input_embeddings()
    width = len(states) * size
    step = max(1, int(store.lengths().sum()) // NUM_PLACES)
    features, embeddings, last, entering = [], [], [], []
    for number in range(0, len(store), step):
        example = store[number]
        known = example.states[: len(example.tokens) - 1].float()[_FIRST:]
        if len(known) < 2:  # noqa: PLR2004  a place and the next one
            continue
        following = torch.from_numpy(example.tokens[_FIRST + 1 :][: len(known) - 1].astype("int64"))
        features.append(known[:-1, :width])
        embeddings.append(embed(following.to(embed.weight.device)).float().cpu())
        last.append(known[:-1, width:])
        entering.append(known[1:, width - size : width])
    if not features:
        raise TeachingTextError(
            f"all texts are shorter than {_FIRST + 3} tokens: add longer texts to train a "
            "speculator"
        )
    return Places(*(torch.cat(each) for each in (features, embeddings, last, entering)))


def _head_size(config: Any) -> int:
    return int(
        getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    )
