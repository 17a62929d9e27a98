"""Options of a model's generation_config: which an accept rule applies, and which it does not."""

import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Final

import torch
from transformers import (
    GenerationConfig,
    GenerationMixin,
    LogitsProcessor,
    PreTrainedModel,
    TopPLogitsWarper,
)
from transformers.generation.configuration_utils import GenerationMode

from decoder.sampling.rule import ProcessedRule
from decoder.sampling.verification import AcceptRule, accept_greedy

_ENDING: Final = ("max_time", "stop_strings")
_FOLLOWED_MODES: Final = (
    GenerationMode.GREEDY_SEARCH,
    GenerationMode.SAMPLE,
    GenerationMode.ASSISTED_GENERATION,
)
_OF_THE_CALLER: Final = ("do_sample", "temperature")
_FOLLOWED_ALONG_PATHS: Final = (
    "bad_words_ids",
    "forced_bos_token_id",
    "min_length",
    "no_repeat_ngram_size",
    "remove_invalid_values",
    "suppress_tokens",
)
"""Options whose processors keep no state and do not depend on where the prompt ends."""


def stated_processors(model: PreTrainedModel, stop_ids: Sequence[int]) -> list[LogitsProcessor]:
    """Return processors for options of a model's generation_config beyond sampling settings.

    The processors run after the repetition penalty, in transformers' order.

    Args:
        model: the model; its generation_config is read.
        stop_ids: ids of the tokens that end a sequence.
    """
    stated = getattr(model, "generation_config", None)
    values = {name: getattr(stated, name, None) for name in _FOLLOWED_ALONG_PATHS}
    return _processors(model, _config(values, stop_ids, model))


def unapplied_settings(
    model: PreTrainedModel, stop_ids: Sequence[int], rule: AcceptRule = accept_greedy
) -> dict[str, Any]:
    """Return the settings that `model.generate` would apply but the rule does not.

    If the caller of `model.generate` does not set an option, the model's generation_config applies.
    Each setting is tried separately: it counts if it leads to another generation mode, another
    stopping condition, or a type of logits processor that the rule lacks.

    Args:
        model: the model; its generation_config is read.
        stop_ids: ids of the tokens that end a sequence.
        rule: the acceptance rule; settings that only apply to sampling count if it samples.

    Returns:
        The values of these settings by name.
    """
    stated = getattr(model, "generation_config", None)
    settings = {} if stated is None else vars(stated)
    return {
        name: value
        for name, value in settings.items()
        if value is not None
        and name not in _OF_THE_CALLER
        and not _is_followed(model, name, value, stop_ids, rule)
    }


@contextmanager
def without_own_settings(model: PreTrainedModel) -> Iterator[None]:
    """Let `model.generate` follow only its caller's settings during the block."""
    own = model.generation_config
    model.generation_config = GenerationConfig()  # type: ignore[no-untyped-call]  # not typed there
    try:
        yield
    finally:
        model.generation_config = own


def _is_followed(
    model: PreTrainedModel, name: str, value: Any, stop_ids: Sequence[int], rule: AcceptRule
) -> bool:
    if name in _ENDING:
        return False
    processed = rule if isinstance(rule, ProcessedRule) else None
    samples = processed is not None and not processed.settings.is_greedy
    config = _config({name: value, "do_sample": samples}, stop_ids, model)
    if config.get_generation_mode() not in _FOLLOWED_MODES:
        return False
    applied = processed.processing.all_processors if processed else []
    followed = {_kind(processor) for processor in applied}
    return {_kind(processor) for processor in _processors(model, config)} <= followed


def _kind(processor: LogitsProcessor) -> type[LogitsProcessor]:
    return TopPLogitsWarper if isinstance(processor, TopPLogitsWarper) else type(processor)


def _config(values: dict[str, Any], stop_ids: Sequence[int], model: PreTrainedModel) -> Any:
    """Return a GenerationConfig with these values, prepared as `generate` does."""
    config: Any = GenerationConfig()  # type: ignore[no-untyped-call]  # not typed there
    for name, value in values.items():
        setattr(config, name, value)
    # Some processors need a stop token, but any token will do.
    stops = torch.tensor(list(stop_ids) or [0], device=torch.device(model.device))
    config._eos_token_tensor = stops  # noqa: SLF001  as generate does
    return config


def _processors(model: PreTrainedModel, config: Any) -> list[LogitsProcessor]:
    device = torch.device(model.device)
    some_prompt: Any = torch.zeros(1, 1, dtype=torch.int64, device=device)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # warnings about settings without effect
        processors = GenerationMixin._get_logits_processor(  # noqa: SLF001  no public name
            model,  # type: ignore[arg-type]  # every causal model has the mixin
            config,
            input_ids_seq_length=1,
            encoder_input_ids=some_prompt,
            device=str(device),
        )
    return list(processors)
