"""A draft model without a second model: the target's first layers, with its norm and its head.

Self-speculation (Zhang et al., 2023, arXiv:2309.08168) with the layers that come first. It stands
in for a smaller model of the same vocabulary where none is at hand; a trained one drafts better.
"""

import copy

import torch
from torch.nn import ModuleList
from transformers import PreTrainedModel


def layer_skipped(model: PreTrainedModel, num_layers: int) -> PreTrainedModel:
    """Return the first layers of a model as a model of its own, which shares all weights.

    Args:
        model: decoder-only, with its layers in `base_model.layers`.
        num_layers: how many to keep, at least one.

    Raises:
        ValueError: it has fewer layers.
    """
    layers = model.base_model.layers
    if not isinstance(layers, ModuleList) or not 0 < num_layers <= len(layers):
        raise ValueError(f"{type(model).__name__} does not have {num_layers} layers to keep")
    config = copy.deepcopy(model.config)
    config.num_hidden_layers = num_layers
    if getattr(config, "layer_types", None):
        config.layer_types = config.layer_types[:num_layers]
    with torch.device("meta"):
        skipped: PreTrainedModel = type(model)(config)
    for name, part in model.base_model.named_children():
        skipped.base_model.add_module(name, layers[:num_layers] if part is layers else part)
    skipped.set_output_embeddings(model.get_output_embeddings())  # type: ignore[no-untyped-call]  # not typed there
    return skipped.eval()  # type: ignore[no-untyped-call, no-any-return]  # nor this
