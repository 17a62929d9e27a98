"""Telling a model from all others: what it is configured as, and a sample of its weights."""

import json
from hashlib import sha256
from typing import Final

import torch
from transformers import PreTrainedModel

_SAMPLE: Final = 32
"""Weights that are read of each parameter: any training moves most of them, and reading them takes
milliseconds."""

_UNSPECIFIC: Final = ("_name_or_path", "name_or_path", "transformers_version", "use_cache")


def fingerprint_of(model: PreTrainedModel, vocabulary_fingerprint: str) -> str:
    """Return 64 hexadecimal digits for a model as it computes now.

    Its architecture, configuration, precision, the names and shapes of its parameters, a sample of
    each and the tokenizer count; where it was loaded from and its device do not.

    Args:
        model: whose weights are in memory; what is elsewhere counts by its shape alone.
        vocabulary_fingerprint: of its tokenizer.
    """
    digest = sha256(type(model).__name__.encode())
    config = {k: v for k, v in model.config.to_dict().items() if k not in _UNSPECIFIC}
    digest.update(json.dumps(config, sort_keys=True, default=str).encode())
    digest.update(vocabulary_fingerprint.encode())
    for name, parameter in model.named_parameters():
        digest.update(f"{name} {parameter.dtype} {tuple(parameter.shape)}".encode())
        if parameter.device.type != "meta":
            digest.update(_sample(parameter.detach()))
    return digest.hexdigest()


def _sample(weights: torch.Tensor) -> bytes:
    """Return some values, evenly spaced, as bytes."""
    flat = weights.reshape(-1)
    values = flat[:: max(1, len(flat) // _SAMPLE)][:_SAMPLE]
    sampled: bytes = values.to(torch.float64).cpu().numpy().tobytes()
    return sampled
