"""Runs `model.generate` of transformers with several methods, and counts the target's passes."""

import time
from dataclasses import dataclass, field
from typing import Any

import torch
from transformers import GenerationConfig, GenerationMixin

from benchmarks.engines.engine_report import Run, Whose
from decoder.model.pretrained import LanguageModel
from decoder.sampling.stated import without_own_settings


@dataclass(frozen=True, slots=True)
class Contender:
    """A method of decoding: `model.generate` with some options.

    Attributes:
        name: name in the report.
        whose: kind of the method.
        settings: settings of the generation config.
        options: further options of `model.generate`.
    """

    name: str
    whose: Whose
    settings: dict[str, int] = field(default_factory=dict)
    options: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Engine:
    """The model of all contenders.

    One permanent hook counts its passes. A new hook would make `Foredraft` check the model again,
    and that check runs passes too.

    Attributes:
        language_model: the model.
        max_new_tokens: most tokens for each prompt.
    """

    language_model: LanguageModel
    max_new_tokens: int
    _passes: list[int] = field(default_factory=list, init=False)

    def __post_init__(self) -> None:
        self.language_model.model.register_forward_pre_hook(lambda *_: self._passes.append(1))

    def run(self, contender: Contender, text: str) -> Run:
        """Decode a prompt and count the passes of the target."""
        model = self.language_model.model
        prompt, passes = self.language_model.encode(text), self._passes
        passes.clear()
        start = time.perf_counter()
        tokens = torch.tensor([prompt])
        with without_own_settings(model):
            output: Any = GenerationMixin.generate(
                model,  # type: ignore[arg-type]  # every causal model has the mixin
                tokens,
                attention_mask=torch.ones_like(tokens),
                generation_config=self._config(contender.settings),
                **contender.options,
            )
        seconds = time.perf_counter() - start
        return Run(output[0, len(prompt) :].tolist(), len(passes), seconds)

    def _config(self, settings: dict[str, int]) -> GenerationConfig:
        stop_ids = list(self.language_model.stop_ids)
        return GenerationConfig(  # type: ignore[no-untyped-call]  # the library gives no types
            do_sample=False,
            max_new_tokens=self.max_new_tokens,
            eos_token_id=stop_ids,
            pad_token_id=stop_ids[0],
            **settings,
        )
