"""What a model's generation_config asks for beyond choosing the most probable token."""

import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Final

import torch
from transformers import GenerationConfig, GenerationMixin, PreTrainedModel
from transformers.generation.configuration_utils import GenerationMode

_ENDING: Final = ("max_time", "stop_strings")
_GREEDY_MODES: Final = (GenerationMode.GREEDY_SEARCH, GenerationMode.ASSISTED_GENERATION)


def unapplied_settings(model: PreTrainedModel, stop_ids: Sequence[int]) -> dict[str, Any]:
    """Return the settings that `model.generate` would obey in greedy decoding and we do not.

    `model.generate` fills what its caller leaves open from the model's own generation_config.
    Each setting is tried alone: it counts if it brings a logits processor, another mode of
    decoding or another end.

    Args:
        model: whose settings these are.
        stop_ids: tokens that end a sequence.

    Returns:
        Name to value.
    """
    stated = getattr(model, "generation_config", None)
    settings = {} if stated is None else vars(stated)
    return {
        name: value
        for name, value in settings.items()
        if value is not None and name != "do_sample" and _matters(model, name, value, stop_ids)
    }


@contextmanager
def without_own_settings(model: PreTrainedModel) -> Iterator[None]:
    """Have `model.generate` follow its caller's settings only, for the block's time."""
    own = model.generation_config
    model.generation_config = GenerationConfig()  # type: ignore[no-untyped-call]  # not typed there
    try:
        yield
    finally:
        model.generation_config = own


def _matters(model: PreTrainedModel, name: str, value: Any, stop_ids: Sequence[int]) -> bool:
    if name in _ENDING:
        return True
    config: Any = GenerationConfig()  # type: ignore[no-untyped-call]  # as above
    setattr(config, name, value)
    if config.get_generation_mode() not in _GREEDY_MODES:
        return True
    device = torch.device(model.device)
    # Some processors cannot be made without a stop token, whichever it is.
    config._eos_token_tensor = torch.tensor(list(stop_ids) or [0], device=device)  # noqa: SLF001  as generate does
    some_prompt: Any = torch.zeros(1, 1, dtype=torch.int64, device=device)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about settings that have no effect
        processors = GenerationMixin._get_logits_processor(  # noqa: SLF001  no public name
            model,  # type: ignore[arg-type]  # every causal model has the mixin
            config,
            input_ids_seq_length=1,
            encoder_input_ids=some_prompt,
            device=str(device),
        )
    return bool(processors)
