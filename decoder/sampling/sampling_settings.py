"""Settings of how the next token is chosen: temperature, truncation, penalties and randomness."""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Final, Self

from pydantic import Field

from decoder.errors import ContradictoryOptionsError, InvalidSettingsError
from indexer.flags import RARE

if TYPE_CHECKING:
    from transformers import GenerationConfig

_MIN_TEMPERATURE: Final = 1e-5
"""Lowest temperature above 0. At this temperature a difference of 0.001 between two logits already
means a factor of e^100; lower temperatures would differ from greedy decoding only by rounding."""

_TRUNCATIONS: Final = ("top_k", "top_p", "min_p")
_STATED_PENALTIES: Final = ("repetition_penalty",)
_SEEDS: Final = 2**64


@dataclass(frozen=True, slots=True)
class SamplingSettings:
    """How tokens are chosen; settings that are `None` are not applied.

    Settings mean the same as in transformers and apply in the same order: repetition penalty,
    frequency and presence penalty, temperature, top-k, top-p, min-p.

    Attributes:
        temperature: divisor of the logits; with 0 the most probable token is chosen.
        top_k: only the k most probable tokens may be chosen; 0 for all.
        top_p: only the most probable tokens that together have this probability may be chosen,
            above 0 and at most 1 (Holtzman et al., 2020, arXiv:1904.09751).
        min_p: only tokens with at least this share of the greatest probability may be chosen, 0 to
            1 (Nguyen et al., 2024, arXiv:2407.01082).
        repetition_penalty: divides positive logits of tokens in prompt and output, and multiplies
            negative logits, above 0 (Keskar et al., 2019, arXiv:1909.05858).
        presence_penalty: subtracted from the logits of tokens in the output, -2 to 2.
        frequency_penalty: subtracted from a token's logit once for each occurrence in the output,
            -2 to 2.
        seed: makes sampling repeatable, from 0 to 2**64 - 1; `None` for a random seed.
        coupled: whether random numbers depend on positions, so that a seed gives the same output
            with any drafts. Otherwise they depend on passes, sampled drafts are accepted based on
            the distribution from which they were sampled, and the output of a seed depends on the
            drafter.

    Raises:
        InvalidSettingsError: a value is out of its range.
        ContradictoryOptionsError: a setting that has no effect at temperature 0 is given.
    """

    flags_title: ClassVar[str] = "Sampling"

    temperature: Annotated[float, Field(ge=0, description="0 decodes greedily.")] = 0.0
    top_k: Annotated[
        int | None,
        RARE,
        Field(ge=0, description="Sample from this many most probable tokens; 0: from all."),
    ] = None
    top_p: Annotated[
        float | None,
        Field(
            gt=0,
            le=1,
            description="Sample from the most probable tokens with this total probability.",
        ),
    ] = None
    min_p: Annotated[
        float | None,
        RARE,
        Field(
            ge=0,
            le=1,
            description="Sample only tokens with at least this share of the greatest probability.",
        ),
    ] = None
    repetition_penalty: Annotated[
        float | None,
        RARE,
        Field(
            gt=0,
            description="Above 0; makes tokens of prompt and output less probable; 1: none. "
            "Default, as for --top-k, --top-p and --min-p: the value in the model's "
            "generation_config, if any.",
        ),
    ] = None
    presence_penalty: Annotated[
        float | None,
        RARE,
        Field(ge=-2, le=2, description="Subtracted from the logits of tokens in the output."),
    ] = None
    frequency_penalty: Annotated[
        float | None,
        RARE,
        Field(ge=-2, le=2, description="Subtracted again for each occurrence in the output."),
    ] = None
    seed: Annotated[
        int | None,
        Field(
            ge=0,
            le=_SEEDS - 1,
            description="Makes sampling repeatable; no effect at temperature 0.",
        ),
    ] = None
    coupled: bool = True

    def __post_init__(self) -> None:
        for name, (is_valid, wanted) in _RANGES.items():
            value = getattr(self, name)
            if value is not None and not (_is_number(value) and is_valid(value)):
                raise InvalidSettingsError(f"{name} must be {wanted}, not {value}")
        if self.is_greedy and self._truncates:
            raise ContradictoryOptionsError(
                f"{self._truncates[0]} has no effect at temperature 0, which takes the most "
                "probable token: leave it out, or give a temperature above 0"
            )

    @classmethod
    def of(cls, config: "GenerationConfig") -> Self:
        """Return the settings of a model's generation_config.

        Raises:
            InvalidSettingsError: the generation_config sets a value that is out of its range.
        """
        samples = bool(getattr(config, "do_sample", None))
        stated = getattr(config, "temperature", None)
        temperature = (1.0 if stated is None else stated) if samples else 0.0
        return cls(temperature).completed(config)

    @property
    def is_greedy(self) -> bool:
        """Whether the most probable token is always taken."""
        return self.temperature == 0

    def completed(self, config: "GenerationConfig") -> Self:
        """Fill the settings that are `None`, except the seed, from a generation_config."""
        names = _STATED_PENALTIES if self.is_greedy else (*_STATED_PENALTIES, *_TRUNCATIONS)
        stated: dict[str, Any] = {
            name: getattr(config, name, None) for name in names if getattr(self, name) is None
        }
        return replace(self, **stated)

    @property
    def _truncates(self) -> list[str]:
        neutral = {"top_k": 0, "top_p": 1.0, "min_p": 0.0}
        return [name for name in _TRUNCATIONS if getattr(self, name) not in {None, neutral[name]}]


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _is_whole(value: float) -> bool:
    return isinstance(value, int)


_RANGES: Final[dict[str, tuple[Callable[[float], bool], str]]] = {
    "temperature": (
        lambda value: value == 0 or value >= _MIN_TEMPERATURE,
        f"0 (greedy) or at least {_MIN_TEMPERATURE:g}",
    ),
    "top_k": (lambda value: _is_whole(value) and value >= 0, "a whole number, 0 (off) or more"),
    "top_p": (lambda value: 0 < value <= 1, "above 0 and at most 1 (off)"),
    "min_p": (lambda value: 0 <= value <= 1, "between 0 (off) and 1"),
    "repetition_penalty": (lambda value: value > 0, "above 0; 1 is none"),
    "presence_penalty": (lambda value: abs(value) <= 2, "between -2 and 2"),  # noqa: PLR2004  OpenAI's range
    "frequency_penalty": (lambda value: abs(value) <= 2, "between -2 and 2"),  # noqa: PLR2004  as above
    "seed": (
        lambda value: _is_whole(value) and 0 <= value < _SEEDS,
        "a whole number from 0 to 2**64 - 1",
    ),
}
