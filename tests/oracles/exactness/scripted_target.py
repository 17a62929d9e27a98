"""A target that is a pure function of its last two tokens, and what plain sampling makes of it."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise, product
from typing import Final

import numpy as np
from numpy.typing import NDArray
from transformers import LogitsProcessor, NoRepeatNGramLogitsProcessor

from decoder.sampling.sampling_settings import SamplingSettings

SIZE: Final = 5
"""Of the vocabulary."""
LENGTH: Final = 3
"""Tokens of output that are looked at."""
PROMPT: Final = (3, 1, 3)

_TABLE: Final = np.random.default_rng(11).normal(0, 1.2, (SIZE, SIZE, SIZE))

Change = Callable[[NDArray[np.float64], Sequence[int]], NDArray[np.float64]]
"""What a processor makes of logits, given all tokens before."""


@dataclass(frozen=True, slots=True)
class Setting:
    """What tokens are chosen by.

    Attributes:
        sampling: settings.
        processors: transformers' own.
        change: the same, written once more.
    """

    sampling: SamplingSettings
    processors: tuple[LogitsProcessor, ...] = ()
    change: Change = lambda logits, _tokens: logits


def _without_repeated_pairs(
    logits: NDArray[np.float64], tokens: Sequence[int]
) -> NDArray[np.float64]:
    seen = set(pairwise(tokens))
    is_seen = [(tokens[-1], token) in seen for token in range(SIZE)]
    return np.where(is_seen, -np.inf, logits)


SETTINGS: Final = {
    "temperature 1": Setting(SamplingSettings(1.0)),
    "temperature 0.6": Setting(SamplingSettings(0.6)),
    "top-k": Setting(SamplingSettings(1.0, top_k=3)),
    "top-p": Setting(SamplingSettings(1.0, top_p=0.8)),
    "min-p": Setting(SamplingSettings(1.0, min_p=0.2)),
    "repetition penalty": Setting(SamplingSettings(1.0, repetition_penalty=1.5)),
    "presence penalty": Setting(SamplingSettings(1.0, presence_penalty=1.0)),
    "frequency penalty": Setting(SamplingSettings(1.0, frequency_penalty=0.7)),
    "all of them": Setting(
        SamplingSettings(0.8, 4, 0.95, 0.02, 1.2, 0.5, 0.3),
        (NoRepeatNGramLogitsProcessor(2),),
        _without_repeated_pairs,
    ),
    "a processor": Setting(
        SamplingSettings(1.0), (NoRepeatNGramLogitsProcessor(2),), _without_repeated_pairs
    ),
}


def logits_after(before: NDArray[np.int64], last: NDArray[np.int64]) -> NDArray[np.float64]:
    """Return float64[..., SIZE], the target's logits after two tokens."""
    logits: NDArray[np.float64] = _TABLE[before, last]
    return logits


LogitsOf = Callable[[Sequence[int]], NDArray[np.float64]]
"""float64[SIZE], the target's logits after the prompt and some output."""


def scripted_logits(output: Sequence[int]) -> NDArray[np.float64]:
    """Return float64[SIZE], the logits after some output; see `LogitsOf`."""
    before, last = [*PROMPT, *output][-2:]
    logits: NDArray[np.float64] = _TABLE[before, last]
    return logits


def expected(setting: Setting, logits_of: LogitsOf = scripted_logits) -> NDArray[np.float64]:
    """Return float64[SIZE, SIZE, SIZE], the probability of each output of `LENGTH` tokens."""
    probabilities = np.ones((SIZE,) * LENGTH)
    for output in product(range(SIZE), repeat=LENGTH):
        for position in range(LENGTH):
            row = distribution(setting, output[:position], logits_of)
            probabilities[output] *= row[output[position]]
    return probabilities


def distribution(
    setting: Setting, output: Sequence[int], logits_of: LogitsOf = scripted_logits
) -> NDArray[np.float64]:
    """Return float64[SIZE], the next token's distribution after some output, in plain words."""
    sampling, tokens = setting.sampling, [*PROMPT, *output]
    logits = logits_of(output).copy()
    for token in set(tokens):
        penalty = sampling.repetition_penalty or 1.0
        logits[token] = logits[token] / penalty if logits[token] > 0 else logits[token] * penalty
    for token in range(SIZE):
        times = list(output).count(token)
        logits[token] -= times * (sampling.frequency_penalty or 0.0)
        logits[token] -= (times > 0) * (sampling.presence_penalty or 0.0)
    return _truncated(setting.change(logits, tokens) / sampling.temperature, sampling)


def _truncated(logits: NDArray[np.float64], sampling: SamplingSettings) -> NDArray[np.float64]:
    row: NDArray[np.float64] = np.exp(logits - logits.max())
    row /= row.sum()
    if sampling.top_k:
        row = _kept(row, row >= np.sort(row)[-min(sampling.top_k, SIZE)])
    if sampling.top_p is not None:
        mass_of_better = np.array([row[row > share].sum() for share in row])
        row = _kept(row, mass_of_better < sampling.top_p)
    if sampling.min_p is not None:
        row = _kept(row, row >= sampling.min_p * row.max())
    return row


def _kept(row: NDArray[np.float64], is_kept: NDArray[np.bool_]) -> NDArray[np.float64]:
    kept: NDArray[np.float64] = np.where(is_kept, row, 0.0)
    kept /= kept.sum()
    return kept
