"""Finds out whether a model can verify trees, chains or only single tokens."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import IntEnum
from logging import getLogger
from typing import Any, Final
from weakref import WeakSet

import numpy as np
from transformers import DynamicCache, PreTrainedConfig, PreTrainedModel
from transformers.cache_utils import (
    DummyLayer,
    DynamicLayer,
    DynamicSlidingWindowLayer,
    LinearAttentionCacheLayerMixin,
)

from decoder.errors import UncroppableCacheError, UnsupportedModelError
from decoder.model.user_model import taken_by
from decoder.sampling.verification import SampledTree
from retriever.tree import ROOT, DraftTree

_TREE_ATTENTION = ("sdpa", "eager")
_MASKED_LAYER_TYPES: Final = ("full_attention", "sliding_attention")
"""Layer types whose masks this package builds; for other types, the model builds the mask."""
_CAUSAL_FOR_TEXT: Final = (False, None, "vision")
"""Values of `use_bidirectional_attention` that do not affect text tokens."""
_CHUNKED: Final = "chunked_attention"
_LENGTH_DEPENDENT_ROPE = ("dynamic", "longrope")

Layers = tuple[tuple[str, int | None], ...]
"""Type of every layer, and its window in positions; `None` for full attention."""


class Capability(IntEnum):
    """Which drafts a model can verify in one pass."""

    PLAIN = 0
    CHAINS = 1
    TREES = 2


@dataclass(frozen=True, slots=True)
class Compatibility:
    """What a model's configuration says about the model before the first pass.

    Attributes:
        capability: which drafts the model can verify.
        reason: why the model cannot verify trees, for users; empty if it can.
        layers: type and window of the layers, if a `TreeCache` can hold their keys and values;
            types are named as in the model's configuration. `None` if the model needs another kind
            of cache.
    """

    capability: Capability
    reason: str = ""
    layers: Layers | None = None


def compatibility_of(model: PreTrainedModel) -> Compatibility:
    """Find out which drafts a model can verify.

    Raises:
        UncroppableCacheError: the model is not a decoder-only model.
        UnsupportedModelError: the model's attention is bidirectional, layers of one type have
            different windows, or transformers has no cache for the model.
    """
    _check_direction(model)
    if model._is_stateful:  # noqa: SLF001  transformers has no public name for it
        return Compatibility(
            Capability.PLAIN, "it keeps recurrent state, which cannot give up rejected tokens"
        )
    try:
        layers = layers_of(model)
    except KeyError as error:
        return Compatibility(
            Capability.PLAIN, f"its layers of type {error} use a special kind of cache"
        )
    except AttributeError as error:
        raise UnsupportedModelError(
            f"{_name(model)}: transformers makes no cache for its configuration: {error}"
        ) from error
    if layers is None:
        return _with_own_cache(DynamicCache(config=model.config).layers)
    trees = Compatibility(Capability.TREES, "", layers)
    reason = _reason_against_trees(model, layers)
    if reason:
        return reduced(trees, Capability.CHAINS, reason)
    _check_windows(model, layers)
    return trees


def reduced(compatibility: Compatibility, capability: Capability, reason: str) -> Compatibility:
    """Return the compatibility of a model that verifies less than its configuration promises."""
    if capability is compatibility.capability:
        return compatibility
    layers = None
    if capability is Capability.CHAINS and compatibility.layers is not None:
        layers = tuple((kind, None) for kind, _ in compatibility.layers)
    return Compatibility(capability, reason, layers)


def position_limit(config: PreTrainedConfig) -> int | None:
    """Return the most tokens of a sequence; `None` if the configuration sets no limit.

    In some models rotary embeddings depend on the longest position in a pass, so a draft token
    would change the rotations of the tokens before it. Such models are limited to their original
    training length, up to which rotations do not change.

    Raises:
        UnsupportedModelError: the original training length is unknown.
    """
    config = config.get_text_config(decoder=True)
    stated: int | None = getattr(config, "max_position_embeddings", None)
    limits = [] if stated is None or stated <= 0 else [stated]  # XLNet has -1 for no limit
    for rope in _ropes(config):
        if not _depends_on_length(rope):
            continue
        original = rope.get("original_max_position_embeddings") or stated
        if original is None:
            raise UnsupportedModelError(
                f"{config.model_type} has {rope['rope_type']} positions, which depend on the "
                "length of the sequence, and states no original_max_position_embeddings"
            )
        limits.append(int(original))
    return min(limits, default=None)


def num_embeddings(model: PreTrainedModel) -> int:
    """Return the number of token embeddings of a model.

    Raises:
        UnsupportedModelError: the model has several embedding tables, or none.
    """
    weight: Any = getattr(model.get_input_embeddings(), "weight", None)
    if weight is None:
        raise UnsupportedModelError(f"{_name(model)} has no single table of token embeddings")
    return int(weight.shape[0])


def takes_masks(layers: Iterable[str]) -> bool:
    """Return whether this package can build masks for all these layer types."""
    return set(layers) <= set(_MASKED_LAYER_TYPES)


def common_window(layers: Mapping[str, int | None]) -> int | None:
    """Return the window of all layer types if they have the same window, else `None`."""
    windows = set(layers.values())
    return windows.pop() if len(windows) == 1 else None


def computed_limit(config: PreTrainedConfig) -> int | None:
    """Return the most tokens for which passes can match those of `generate`; `None` for no limit.

    Fixed rotations can be computed for any position: beyond the configured length a model gets
    worse, but `generate` continues. Position tables end at that length. See `position_limit` for
    rotations that depend on the length, and for the errors.
    """
    ropes = _ropes(config.get_text_config(decoder=True))
    return None if ropes and not any(map(_depends_on_length, ropes)) else position_limit(config)


def _depends_on_length(rope: dict[str, Any]) -> bool:
    return any(kind in rope["rope_type"] for kind in _LENGTH_DEPENDENT_ROPE)


def _ropes(config: PreTrainedConfig) -> list[dict[str, Any]]:
    """Return the parameters of rotary embeddings, of all layers or of each layer type."""
    parameters = getattr(config, "rope_parameters", None) or {}
    candidates = [parameters, *parameters.values()]
    return [rope for rope in candidates if isinstance(rope, dict) and rope.get("rope_type")]


def _check_direction(model: PreTrainedModel) -> None:
    if model.config.is_encoder_decoder:
        raise UncroppableCacheError(
            f"{_name(model)} is an encoder-decoder model: only decoder-only models can be targets"
        )
    config = model.config.get_text_config(decoder=True)
    if getattr(config, "use_bidirectional_attention", False) not in _CAUSAL_FOR_TEXT:
        raise UnsupportedModelError(f"{_name(model)} attends in both directions")


def _check_windows(model: PreTrainedModel, layers: Layers) -> None:
    windows = dict(layers)
    differing = [kind for kind, window in layers if windows[kind] != window]
    if differing:
        raise UnsupportedModelError(f"{_name(model)}: {differing[0]} layers have different windows")


def _reason_against_trees(model: PreTrainedModel, layers: Layers) -> str:
    """Return why a model that can drop tokens cannot verify trees; empty if it can."""
    implementation = model.config._attn_implementation  # noqa: SLF001  no public name either
    if implementation not in _TREE_ATTENTION:
        return (
            f"{implementation} attention supports no masks for trees "
            f"(load it with one of {', '.join(_TREE_ATTENTION)})"
        )
    takes_positions = "position_ids" in taken_by(model)
    if not takes_positions or getattr(model.config, "alibi", False):
        return "it derives positions from slots, and siblings of a tree cannot share one"
    others = sorted({kind for kind, _ in layers} - {*_MASKED_LAYER_TYPES, _CHUNKED})
    return f"its {', '.join(others)} layers support no masks for trees" if others else ""


def layers_of(model: PreTrainedModel) -> Layers | None:
    """Return the type and window of every layer, as in the cache that transformers would use.

    Returns `None` if a layer's cache holds more than keys and values. A layer without a cache uses
    the keys of an earlier layer of its type, and has the same window.

    Raises:
        KeyError: transformers uses a special cache for a layer type.
    """
    cached = DynamicCache(config=model.config).layers
    if not {type(layer) for layer in cached} <= {
        DynamicLayer,
        DynamicSlidingWindowLayer,
        DummyLayer,
    }:
        return None
    windows = [getattr(layer, "sliding_window", None) for layer in cached]
    config = model.config.get_text_config(decoder=True)
    kinds = getattr(config, "layer_types", None)
    if not kinds:
        is_chunked = getattr(config, "sliding_window", None) is None
        bounded = _CHUNKED if is_chunked else "sliding_attention"
        kinds = ["full_attention" if window is None else bounded for window in windows]
    layers = list(zip(kinds, windows, (type(each) is DummyLayer for each in cached), strict=True))
    shared = {kind: window for kind, window, shares in layers if not shares}
    return tuple((kind, shared.get(kind) if shares else window) for kind, window, shares in layers)


def _with_own_cache(cached: list[Any]) -> Compatibility:
    """Return the compatibility of a model that needs transformers' own cache."""
    kinds = ", ".join(sorted({type(layer).__name__ for layer in cached}))
    if all(map(_can_roll_back, cached)):
        return Compatibility(Capability.CHAINS, f"its cache of {kinds} takes no trees")
    return Compatibility(Capability.PLAIN, f"its cache of {kinds} cannot give up rejected tokens")


def _can_roll_back(layer: Any) -> bool:
    """Return whether a layer can drop tokens; a convolution layer knows once it holds tokens."""
    return isinstance(layer, LinearAttentionCacheLayerMixin) or bool(layer.is_croppable)


def _name(model: PreTrainedModel) -> str:
    return type(model).__name__


_log = getLogger(__name__)
_told: Final[WeakSet[PreTrainedModel]] = WeakSet()

_MEANING: Final = {
    Capability.CHAINS: "verifies one chain of each draft",
    Capability.PLAIN: "is decoded without drafts",
}


def tell_once(model: PreTrainedModel, capability: Capability, reason: str) -> None:
    """Log once per model that it cannot verify trees."""
    if capability in _MEANING and model not in _told:
        _told.add(model)
        _log.warning("%s %s: %s", type(model).__name__, _MEANING[capability], reason)


def chain_of(tree: DraftTree) -> DraftTree:
    """Return one path of a tree, from the root down.

    It is the path with the most tokens expected to be accepted. In a tree of sampled nodes it is
    the path of first children, because nodes selected by their sampled token would no longer follow
    the drafter's distribution.
    """
    if not isinstance(tree, SampledTree):
        return tree.best_chain(len(tree))
    kept = np.zeros(len(tree), np.bool_)
    last = ROOT
    for node, parent in enumerate(tree.parents.tolist()):
        if parent == last:
            kept[node] = True
            last = node
    return tree.among(kept)
