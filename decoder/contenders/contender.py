"""What decodes a prompt in a benchmark: this package's loop with a drafter, or transformers."""

import time
import warnings
import zlib
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Final, Protocol

import torch
from transformers import GenerationConfig, GenerationMixin

from decoder.budget.budget import FixedBudget
from decoder.drafters.following import NoDrafter
from decoder.loop import Decoder
from decoder.model.pretrained import LanguageModel
from decoder.model.target import Target
from decoder.observation import Statistics
from decoder.sampling.stated import without_own_settings
from decoder.sampling.verification import Acceptance, AcceptRule, PassContext
from retriever.tree import DraftTree

PLAIN: Final = "plain"
PROMPT_LOOKUP: Final = "transformers-lookup"
FOREDRAFT: Final = "foredraft"
UNDRAFTED: Final = "undrafted"
"""This package's own loop and target without drafts, so that drafting alone can be credited."""
PROMPT_LOOKUP_TOKENS: Final = 10
"""Tokens that prompt lookup proposes; transformers' documentation uses 3 and 10, 10 is faster."""

_TORCH_SEEDS: Final = 2**63


@dataclass(frozen=True, slots=True)
class Run:
    """One prompt decoded in one way.

    Attributes:
        token_ids: what was generated.
        seconds: from tokens to tokens, the prompt's pass included.
        num_passes: forward passes of the target, the prompt's included.
        statistics: this decoder's own figures, empty for the others.
    """

    token_ids: list[int]
    seconds: float
    num_passes: int
    statistics: Statistics = field(default_factory=Statistics)


class Contender(Protocol):
    """A way of decoding."""

    def __call__(self, prompt: list[int], *, remember: bool) -> Run:
        """Decode a prompt, and let later ones draw on the output if `remember` says so."""
        ...


def contenders(
    language_model: LanguageModel, decoder: Decoder, max_new_tokens: int
) -> dict[str, Contender]:
    """Return the ways of decoding by name: transformers' own two, a decoder's, and undrafted.

    All have the same limit of tokens, near the model's own limit too, and none applies what the
    model's generation_config asks for: they decode greedily, and nothing else.
    """
    target = decoder.target
    undrafted = Decoder(target, NoDrafter(), FixedBudget(0), decoder.accept, decoder.stop_ids)
    lookup = {"prompt_lookup_num_tokens": PROMPT_LOOKUP_TOKENS}
    return {
        PLAIN: LibraryContender(language_model, target, max_new_tokens),
        PROMPT_LOOKUP: LibraryContender(language_model, target, max_new_tokens, lookup),
        UNDRAFTED: OwnContender(undrafted, max_new_tokens),
        FOREDRAFT: OwnContender(decoder, max_new_tokens),
    }


@dataclass(frozen=True, slots=True)
class OwnContender:
    """Decodes with this package."""

    decoder: Decoder
    max_new_tokens: int

    @property
    def drafts(self) -> bool:
        """Whether there are drafts, and so something to remember answers."""
        return not isinstance(self.decoder.drafter, NoDrafter)

    def __call__(self, prompt: list[int], *, remember: bool) -> Run:
        """Decode a prompt, and read all of it."""
        self.decoder.target.forget()
        start = time.perf_counter()
        generation = self.decoder.generate(prompt, self.max_new_tokens, remember=remember)
        tokens = [token for step in generation for token in step]
        seconds = time.perf_counter() - start
        return Run(tokens, seconds, generation.statistics.num_passes, generation.statistics)


@dataclass(frozen=True, slots=True)
class LibraryContender:
    """Decodes with `model.generate` of transformers.

    Attributes:
        language_model: the model.
        target: the same as this package's target, which states its limit.
        max_new_tokens: most tokens to generate.
        options: more of `model.generate`.
        temperature: of sampling from the whole distribution; 0 decodes greedily.
        seed: of torch's random numbers, with the prompt, where it samples.
    """

    language_model: LanguageModel
    target: Target
    max_new_tokens: int
    options: Mapping[str, int] = field(default_factory=dict)
    temperature: float = 0.0
    seed: int = 0

    def __call__(self, prompt: list[int], *, remember: bool) -> Run:  # noqa: ARG002  keeps nothing
        """Decode a prompt."""
        model = self.language_model.model
        passes = _PassCount()
        counting = model.register_forward_pre_hook(passes)
        if self.temperature:
            torch.manual_seed((self.seed + zlib.crc32(repr(prompt).encode())) % _TORCH_SEEDS)
        start = time.perf_counter()
        tokens = torch.tensor([prompt], device=torch.device(model.device))
        with warnings.catch_warnings(), without_own_settings(model):
            warnings.simplefilter("ignore")  # advice about options that are none of ours
            output: Any = GenerationMixin.generate(
                model,  # type: ignore[arg-type]  # every causal model has the mixin
                tokens,
                attention_mask=torch.ones_like(tokens),
                generation_config=self._config(self.target.room(len(prompt), self.max_new_tokens)),
            )
        generated = output[0, len(prompt) :].tolist()
        seconds = time.perf_counter() - start
        counting.remove()
        return Run(generated, seconds, passes.count)

    def _config(self, max_new_tokens: int) -> GenerationConfig:
        stop_ids = list(self.language_model.stop_ids)
        sampling: dict[str, Any] = {"do_sample": False}
        if self.temperature:
            sampling = {"do_sample": True, "temperature": self.temperature, "top_k": 0}
        return GenerationConfig(  # type: ignore[no-untyped-call]  # the library gives no types
            max_new_tokens=max_new_tokens,
            eos_token_id=stop_ids or None,
            pad_token_id=stop_ids[0] if stop_ids else 0,
            **sampling,
            **self.options,
        )


class _PassCount:
    """A forward hook that counts."""

    def __init__(self) -> None:
        self.count = 0

    def __call__(self, *_: object) -> None:
        self.count += 1


@dataclass(frozen=True, slots=True)
class DrawnByPrompt:
    """A rule whose random numbers belong to the prompt, and not to how many were decoded before.

    So decoders draw the same tokens for the same prompt, whatever else each has decoded.

    Attributes:
        rule: draws by seed, sequence and position.
    """

    rule: AcceptRule

    def __call__(self, tree: DraftTree, logits: torch.Tensor, context: PassContext) -> Acceptance:
        """Accept as the rule does."""
        prompt = context.tokens[: context.num_prompt_tokens]
        return self.rule(tree, logits, replace(context, sequence=zlib.crc32(prompt.tobytes())))
