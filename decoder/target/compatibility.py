"""Which models can verify a draft tree, and with which masks."""

import inspect
from typing import Any

from transformers import DynamicCache, PreTrainedConfig, PreTrainedModel
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer

from decoder.errors import UncroppableCacheError, UnsupportedModelError

_TREE_ATTENTION = ("sdpa", "eager")
_TREE_LAYER_TYPES = ("full_attention", "sliding_attention")
_LENGTH_DEPENDENT_ROPE = ("dynamic", "longrope")


def attention_windows(model: PreTrainedModel) -> dict[str, int | None]:
    """Return the look-back of each kind of attention layer that the model has.

    Returns:
        Layer type, as in the model's configuration, to its window in positions, `None` where
        attention is full.

    Raises:
        UncroppableCacheError: the model carries state that cannot be rolled back.
        UnsupportedModelError: its attention takes no mask or no positions for trees.
    """
    _check_state(model)
    _check_attention(model)
    windows: dict[str, int | None] = {}
    for layer_type, window in _layers(model):
        if windows.setdefault(layer_type, window) != window:
            raise UnsupportedModelError(f"{_name(model)}: {layer_type} layers differ in window")
    return windows


def position_limit(config: PreTrainedConfig) -> int | None:
    """Return the most tokens of a sequence, `None` where a configuration states no limit.

    Where rotations depend on the longest position of a pass, a drafted token far ahead would
    change those of the tokens before it. Such models are limited to the length that they were
    trained with, up to which rotations do not change.

    Raises:
        UnsupportedModelError: that length is not known.
    """
    config = config.get_text_config(decoder=True)
    stated: int | None = getattr(config, "max_position_embeddings", None)
    limits = [] if stated is None else [stated]
    for rope in _ropes(config):
        if not any(kind in rope["rope_type"] for kind in _LENGTH_DEPENDENT_ROPE):
            continue
        original = rope.get("original_max_position_embeddings") or stated
        if original is None:
            raise UnsupportedModelError(
                f"{config.model_type} has {rope['rope_type']} positions, which depend on the "
                "length of the sequence, and states no original_max_position_embeddings"
            )
        limits.append(int(original))
    return min(limits, default=None)


def _ropes(config: PreTrainedConfig) -> list[dict[str, Any]]:
    """Return the parameters of rotary positions: of all layers, or of each layer type."""
    parameters = getattr(config, "rope_parameters", None) or {}
    candidates = [parameters, *parameters.values()]
    return [rope for rope in candidates if isinstance(rope, dict) and rope.get("rope_type")]


def _check_state(model: PreTrainedModel) -> None:
    if model.config.is_encoder_decoder:
        raise UncroppableCacheError(
            f"{_name(model)} is an encoder-decoder model: only decoder-only models can be targets"
        )
    if model._is_stateful:  # noqa: SLF001  transformers has no public name for it
        raise UncroppableCacheError(
            f"{_name(model)} keeps recurrent state, which cannot give up rejected tokens: "
            "decode it without drafts, with model.generate"
        )


def _check_attention(model: PreTrainedModel) -> None:
    implementation = model.config._attn_implementation  # noqa: SLF001  no public name either
    if implementation not in _TREE_ATTENTION:
        raise UnsupportedModelError(
            f"{implementation} attention takes no mask for trees: "
            f"load {_name(model)} with one of {', '.join(_TREE_ATTENTION)}"
        )
    takes_positions = "position_ids" in inspect.signature(model.forward).parameters
    if not takes_positions or getattr(model.config, "alibi", False):
        raise UnsupportedModelError(
            f"{_name(model)} derives positions from slots: siblings of a tree cannot share one"
        )


def _layers(model: PreTrainedModel) -> list[tuple[str, int | None]]:
    """Return type and window of every layer, by the cache that transformers would choose."""
    config = model.config.get_text_config(decoder=True)
    if getattr(config, "use_bidirectional_attention", False):
        raise UnsupportedModelError(f"{_name(model)} attends in both directions")
    try:
        layers = DynamicCache(config=config).layers
    except KeyError as error:
        raise UncroppableCacheError(
            f"{_name(model)} has layers of type {error}, whose cache is of a kind of its own"
        ) from error
    kinds = getattr(config, "layer_types", None) or [None] * len(layers)
    return [_layer(model, layer, kind) for layer, kind in zip(layers, kinds, strict=True)]


def _layer(model: PreTrainedModel, layer: object, kind: str | None) -> tuple[str, int | None]:
    is_chunked = kind is None and hasattr(model.config, "attention_chunk_size")
    if is_chunked or (kind is not None and kind not in _TREE_LAYER_TYPES):
        raise UncroppableCacheError(
            f"{_name(model)} has {kind or 'chunked_attention'} layers, "
            "whose cache cannot give up rejected tokens"
        )
    if type(layer) is DynamicSlidingWindowLayer:
        return kind or "sliding_attention", layer.sliding_window
    if type(layer) is DynamicLayer:
        return kind or "full_attention", None
    raise UncroppableCacheError(
        f"{_name(model)} keeps a {type(layer).__name__}, which cannot give up rejected tokens"
    )


def _name(model: PreTrainedModel) -> str:
    return type(model).__name__
