"""Checks, before anything is recorded, whether a head can be made from a target's last layer.

Heads are made from Llama layers. Layers of other families may have the same weights, but compute
something else with them: they normalise queries and keys, scale their output, rotate only a part of
each attention head, or use another norm. So the target's layer is compared with a Llama layer of
the same weights. Both get the same input, recorded in a pass over a few tokens.
"""

from contextlib import ExitStack
from typing import Any, Final

import torch
from transformers.models.llama.modeling_llama import LlamaDecoderLayer, LlamaRotaryEmbedding

from decoder.model.compatibility import compatibility_of, num_embeddings
from decoder.model.pretrained import LanguageModel
from decoder.plugins.training.head_start import last_layer, layer_config, other_kind

_NUM_TOKENS: Final = 32
_FIRST: Final = 4
"""Positions at the start of a text that are left out. Their states are a hundred times as long as
other states, and so are their rounding errors."""

_TOLERANCE: Final = {torch.float32: 1e-3, torch.float64: 1e-3}
_TOLERANCE_16: Final = 0.05
"""Largest difference between the two layers, as a share of what the layer adds to its input. In 16
bits, other kernels cause differences of one or two percent; other norms or rotations cause tens of
percent."""


def check_last_layer(language_model: LanguageModel) -> None:
    """Refuse a target if no head can be made from its last layer.

    The check takes one pass over 32 tokens.

    Raises:
        UnsupportedModelError: the layer has other parts than a Llama layer, or computes something
            else.
    """
    layer = last_layer(language_model)
    layers = compatibility_of(language_model.model).layers
    if layers is not None and layers[-1][1] is not None:
        raise other_kind(language_model, f"a window of {layers[-1][1]} positions")
    own, others = _as_llamas(language_model, layer)
    if others:
        raise other_kind(language_model, ", ".join(others))
    given, came = _pass_through(language_model, layer)
    if not _is_same(given, came, _given_by(own, given)):
        raise other_kind(language_model, "it computes something else with the same weights")


def _as_llamas(language_model: LanguageModel, layer: Any) -> tuple[Any, list[str]]:
    """Return a Llama layer with the layer's weights, and the names of weights that do not match.

    Raises:
        UnsupportedModelError: the weights have other shapes.
    """
    config = layer_config(language_model)
    config._attn_implementation = "eager"  # noqa: SLF001  transformers' own way to choose it
    weight = layer.self_attn.q_proj.weight
    own: Any = LlamaDecoderLayer(config, 0)
    own = own.to(weight.device, weight.dtype).eval()
    for name, value in own.named_parameters():
        if name.endswith(".bias"):
            torch.nn.init.zeros_(value)  # biases that the layer lacks
    try:
        loaded = own.load_state_dict(layer.state_dict(), strict=False)
    except RuntimeError as error:
        raise other_kind(language_model, "weights of other shapes") from error
    missing = [name for name in loaded.missing_keys if not name.endswith(".bias")]
    return own, sorted([*loaded.unexpected_keys, *missing])


@torch.inference_mode()
def _pass_through(language_model: LanguageModel, layer: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the layer's input and output in one pass, each [1, tokens, hidden size]."""
    model: Any = language_model.model
    seen: dict[str, torch.Tensor] = {}

    def note(_: object, given: Any, options: Any, output: Any) -> None:
        seen["given"] = given[0] if given else options["hidden_states"]
        seen["came"] = output[0] if isinstance(output, tuple) else output

    size = num_embeddings(language_model.model)
    tokens = torch.arange(1, _NUM_TOKENS + 1)[None] * (size // (_NUM_TOKENS + 1) or 1) % size
    with ExitStack() as hooks:
        hooks.callback(layer.register_forward_hook(note, with_kwargs=True).remove)
        model(input_ids=tokens.to(model.device), use_cache=False)
    return seen["given"], seen["came"]


@torch.inference_mode()
def _given_by(own: Any, given: torch.Tensor) -> torch.Tensor:
    """Return the output of the Llama layer for states [1, tokens, hidden size]."""
    count = given.shape[1]
    positions = torch.arange(count, device=given.device)[None]
    rotation: Any = LlamaRotaryEmbedding(own.self_attn.config).to(given.device)
    mask = torch.full((count, count), torch.finfo(given.dtype).min, device=given.device).triu(1)
    output = own(
        given,
        attention_mask=mask[None, None].to(given.dtype),
        position_ids=positions,
        position_embeddings=rotation(given, positions),
    )
    came: torch.Tensor = output[0] if isinstance(output, tuple) else output
    return came


def _is_same(given: torch.Tensor, came: torch.Tensor, other: torch.Tensor) -> bool:
    """Return whether two layers add the same to the states; also true if outputs are not finite."""
    added = (came - given).float()[0, _FIRST:].norm(dim=-1)
    apart = (came - other).float()[0, _FIRST:].norm(dim=-1)
    if not bool(torch.isfinite(added).all()):
        return True  # recording reports the error later
    tolerance = _TOLERANCE.get(came.dtype, _TOLERANCE_16)
    return float(apart.median()) <= tolerance * float(added.median())
