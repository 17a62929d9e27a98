"""Published layouts of heads: the meaning of their configurations, and the names of their tensors.

These layouts can be read: EAGLE-1, 2 and 3 as their authors publish them, EAGLE-3 of SpecForge,
ModelOpt and `speculators`, EAGLE of `speculators` 0.1 to 0.3, and MLP speculators of fms-extras.
"""

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields
from typing import Any, Final

from transformers import PreTrainedConfig

from decoder.errors import HeadFileError
from decoder.model.states import FINAL
from decoder.plugins.speculators.eagle import LAYER_CONFIGS, EagleConfig, EagleKind
from decoder.plugins.speculators.mlp import MlpConfig

HeadConfig = EagleConfig | MlpConfig

Shapes = Mapping[str, tuple[int, ...]]
"""The shape of each tensor in a file, by name."""

OWN_KEY: Final = "foredraft"
"""Key of the configuration that holds the head's origin; other programs ignore the key."""

_READ: Final = "use an EAGLE-1, EAGLE-2, EAGLE-3 or MLP speculator"

_UNUSED: Final = re.compile(
    r"(rotary_emb\.(inv_freq|original_inv_freq)|^verifier_(norm|lm_head)\.|^ln0\.)"
)
"""Tensors in some files that no head needs: constants, and copies of the target's tensors."""

_RENAMED: Final = (
    (re.compile(r"^(model|speculator|draft_model)\."), ""),
    (re.compile(r"^midlayer\."), "layers.0."),
    (re.compile(r"^transformer\."), "layers.0."),
    (re.compile(r"^fusion_fc\."), "fc."),
)

_SIZES: Final = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "hidden_act",
    "rms_norm_eps",
    "max_position_embeddings",
)
_OPTIONAL: Final = ("rope_theta", "rope_scaling", "rope_parameters", "layer_types")
_REQUIRED: Final = ("hidden_size", "intermediate_size", "num_attention_heads", "vocab_size")


@dataclass(frozen=True, slots=True)
class HeadOrigin:
    """The target and the training texts of a head, as far as its file names them.

    Attributes:
        model: name of the target.
        revision: revision of the target on its hub.
        architectures: possible architectures of the target.
        fingerprint: fingerprint of the target's tokenizer; see `indexer.tokenizer.Vocabulary`.
        weights: digest of the target's weights; see `HeadTarget`.
        trained_on: names of the training texts.
    """

    model: str | None = None
    revision: str | None = None
    architectures: tuple[str, ...] = ()
    fingerprint: str | None = None
    weights: str | None = None
    trained_on: tuple[str, ...] = ()


def standard_names(names: Iterable[str]) -> dict[str, str]:
    """Return the names of the tensors that a head needs, by the parameter names in this package."""
    found: dict[str, str] = {}
    for name in names:
        standard = name
        for pattern, replacement in _RENAMED:
            standard = pattern.sub(replacement, standard)
        if not _UNUSED.search(standard):
            found[standard] = name
    return found


def config_of(config: Mapping[str, Any], shapes: Shapes, num_layers: int) -> HeadConfig:
    """Return the shape of a head.

    Args:
        config: content of `config.json`.
        shapes: shapes of the tensors, by their standard names.
        num_layers: number of layers of the target. It determines the states that the head reads
            if the configuration does not name them.

    Raises:
        HeadFileError: the layout cannot be read, or contradicts itself.
    """
    stated = config.get("speculators_model_type")
    if stated not in {None, "eagle", "eagle3"}:
        raise HeadFileError(f"a speculator of type {stated!r} cannot be used here: {_READ}")
    if "emb.0.weight" in shapes and "proj.0.weight" in shapes:
        return _mlp_config(config, shapes)
    if "fc.weight" not in shapes or "layers.0.self_attn.q_proj.weight" not in shapes:
        shown = ", ".join(sorted(shapes)[:4]) or "none"
        raise HeadFileError(f"the layout of the tensors is unknown ({shown}, …): {_READ}")
    if stated == "eagle3" or "layers.0.hidden_norm.weight" in shapes:
        return _eagle3_config(config, shapes, num_layers)
    return _eagle_config(config, shapes)


def origin_of(config: Mapping[str, Any]) -> HeadOrigin:
    """Return the head's target and training texts from its configuration."""
    own = config.get(OWN_KEY) or {}
    verifier = (config.get("speculators_config") or {}).get("verifier") or {}
    return HeadOrigin(
        model=own.get("model") or verifier.get("name_or_path"),
        revision=own.get("revision"),
        architectures=tuple(verifier.get("architectures") or own.get("architectures") or ()),
        fingerprint=own.get("fingerprint"),
        weights=own.get("weights"),
        trained_on=tuple(own.get("trained_on") or ()),
    )


def _mlp_config(config: Mapping[str, Any], shapes: Shapes) -> MlpConfig:
    if any(name.startswith(("forget_", "input_", "cell_", "output_")) for name in shapes):
        raise HeadFileError(f"LSTM speculators cannot be used here: {_READ}")
    inner, target_size = shapes["proj.0.weight"]
    depths = config.get("n_predict")
    if not isinstance(depths, int) or depths < 1:
        raise HeadFileError(f"n_predict is {depths!r}: it must be the number of tokens to draft")
    stages = [name for name in shapes if re.fullmatch(r"emb\.\d+\.weight", name)]
    return MlpConfig(
        vocab_size=shapes["emb.0.weight"][0],
        target_size=target_size,
        inner_size=inner,
        num_depths=depths,
        # Files of tied weights may store them once for each depth or only once.
        tie_weights=bool(config.get("tie_weights")) or len(stages) == 1 < depths,
        scale_input=bool(config.get("scale_input")),
    )


def _eagle_config(config: Mapping[str, Any], shapes: Shapes) -> EagleConfig:
    if config.get("layernorms") or config.get("add_para_norm"):
        raise HeadFileError(
            "EAGLE heads with further norms around the layer cannot be used: "
            "publishers apply these norms in different places"
        )
    layer = _layer_config(config, shapes)
    return EagleConfig(
        kind=EagleKind.EAGLE,
        layer=layer,
        states=(FINAL,),
        target_size=layer.hidden_size,
        has_embedding="embed_tokens.weight" in shapes,
        biased=_biased(shapes),
    )


def _eagle3_config(config: Mapping[str, Any], shapes: Shapes, num_layers: int) -> EagleConfig:
    options = {**(config.get("eagle_config") or {}), **config}
    if not options.get("use_aux_hidden_state", True):
        raise HeadFileError("EAGLE-3 heads without the target's inner states cannot be used")
    layer = _layer_config(config, shapes)
    target_size = config.get("target_hidden_size") or layer.hidden_size
    width = shapes["fc.weight"][1]
    states = _state_numbers(config, options, num_layers)
    if len(states) * target_size != width:
        raise HeadFileError(
            f"fc takes {width} features, but {len(states)} states of {target_size} are "
            f"{len(states) * target_size}: the configuration belongs to another head"
        )
    own_head = shapes.get("lm_head.weight")
    return EagleConfig(
        kind=EagleKind.EAGLE3,
        layer=layer,
        states=states,
        target_size=target_size,
        draft_vocabulary=None if own_head is None else own_head[0],
        has_embedding="embed_tokens.weight" in shapes,
        biased=_biased(shapes),
        norm_before_residual=bool(options.get("norm_before_residual")),
        norm_before_fc=bool(options.get("norm_before_fc")),
        fc_norm=bool(options.get("fc_norm")),
        norm_output=bool(options.get("norm_output")),
    )


def _state_numbers(
    config: Mapping[str, Any], options: Mapping[str, Any], num_layers: int
) -> tuple[int, ...]:
    """Return the numbers of the states that an EAGLE-3 head reads.

    vLLM and `speculators` number a state by the layer whose input it is, as `decoder.model.states`
    does. SpecForge and ModelOpt number it by the layer whose output it is, which is one less, and
    their first number is 1. SGLang distinguishes the two numberings by that first number
    (sgl-project/sglang#25454).
    """
    stated = options.get("eagle_aux_hidden_state_layer_ids")
    if not stated:
        return (2, num_layers // 2, num_layers - 3)
    if not isinstance(stated, list) or not all(isinstance(each, int) for each in stated):
        raise HeadFileError(f"eagle_aux_hidden_state_layer_ids is not a list of ids: {stated!r}")
    is_by_giver = "speculators_model_type" not in config and stated[0] == 1
    return tuple(number + 1 if is_by_giver else number for number in stated)


def _layer_config(config: Mapping[str, Any], shapes: Shapes) -> PreTrainedConfig:
    """Return the sizes and the rotary embedding of the layers.

    EAGLE's authors use the Llama layer for every target. Others also use the Qwen 3 layer, which
    has norms on queries and keys.
    """
    stated = config.get("transformer_layer_config") or config
    missing = [name for name in _REQUIRED if not isinstance(stated.get(name), int)]
    if missing:
        raise HeadFileError(f"config.json lacks {', '.join(missing)}")
    if (stated.get("partial_rotary_factor") or 1.0) != 1.0:
        raise HeadFileError("heads that rotate only a part of each query cannot be used")
    layers = {name.split(".")[1] for name in shapes if name.startswith("layers.")}
    known = {name: stated[name] for name in (*_SIZES, *_OPTIONAL) if stated.get(name) is not None}
    known["num_hidden_layers"] = len(layers)
    known["num_key_value_heads"] = known.get("num_key_value_heads", stated["num_attention_heads"])
    known["head_dim"] = known.get(
        "head_dim", stated["hidden_size"] // stated["num_attention_heads"]
    )
    if "layer_types" in known:
        known["layer_types"] = known["layer_types"][: len(layers)]
        known["sliding_window"] = stated.get("sliding_window")
    kind = "qwen3" if "layers.0.self_attn.q_norm.weight" in shapes else "llama"
    try:
        made = LAYER_CONFIGS[kind](**known)
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise HeadFileError(f"config.json describes no valid layer: {error}") from error
    made.sliding_window = known.get("sliding_window")
    return made


def _biased(shapes: Shapes) -> frozenset[str]:
    """Return the linear layers that have a bias, by the last part of their names."""
    return frozenset(
        name.split(".")[-2] for name in shapes if name.endswith(".bias") and "norm" not in name
    )


def published_config(
    config: HeadConfig, origin: HeadOrigin, *, num_drafted: int = 5
) -> dict[str, Any]:
    """Return the content of `config.json`.

    It has the layout of `speculators` for EAGLE-3, and the authors' layout for EAGLE.

    Args:
        config: shape of an EAGLE head.
        origin: target and training texts of the head.
        num_drafted: default number of tokens in the chains that engines draft with the head.

    Raises:
        HeadFileError: this kind of head cannot be written.
    """
    if isinstance(config, MlpConfig):
        raise HeadFileError("MLP speculators can be read, but not written")
    own = {field.name: getattr(origin, field.name) for field in fields(origin)}
    if config.kind is EagleKind.EAGLE:
        return {
            **_published_layer(config),
            "architectures": ["LlamaForCausalLM"],
            "bias": "fc" in config.biased,
            OWN_KEY: own,
        }
    return {
        "architectures": ["Eagle3Speculator"],
        "draft_vocab_size": config.draft_vocabulary or config.layer.vocab_size,
        "eagle_aux_hidden_state_layer_ids": list(config.states),
        "fc_norm": config.fc_norm,
        "norm_before_fc": config.norm_before_fc,
        "norm_before_residual": config.norm_before_residual,
        "norm_output": config.norm_output,
        "speculators_config": {
            "algorithm": "eagle3",
            "default_proposal_method": "greedy",
            "proposal_methods": [
                {
                    "accept_tolerance": 0.0,
                    "proposal_type": "greedy",
                    "speculative_tokens": num_drafted,
                    "verifier_accept_k": 1,
                }
            ],
            "verifier": {
                "architectures": list(origin.architectures),
                "name_or_path": origin.model,
            },
        },
        "speculators_model_type": "eagle3",
        "target_hidden_size": config.target_size,
        "tie_word_embeddings": False,
        "transformer_layer_config": _published_layer(config),
        OWN_KEY: own,
    }


def _published_layer(config: EagleConfig) -> dict[str, Any]:
    """Return a layer's settings, with older names of the rotary embedding that all engines know."""
    layer = config.layer
    rope = dict(layer.rope_parameters)
    theta, kind = rope.pop("rope_theta"), rope.get("rope_type", "default")
    return {
        **{name: getattr(layer, name) for name in _SIZES},
        "attention_bias": "q_proj" in config.biased,
        "mlp_bias": "up_proj" in config.biased,
        "model_type": layer.model_type,
        "rope_scaling": None if kind == "default" else rope,
        "rope_theta": theta,
        "tie_word_embeddings": False,
    }
