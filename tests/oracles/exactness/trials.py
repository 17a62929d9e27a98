"""Many short outputs of one rule, counted and compared with what plain sampling would give."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, Final

import numpy as np
import torch
from numpy.typing import NDArray

from decoder.sampling.rule import ProcessedRule, accept_rule
from decoder.sampling.verification import PassContext
from tests.oracles.exactness.drafts import SHAPES, Drafts
from tests.oracles.exactness.scripted_target import LENGTH, PROMPT, SETTINGS, SIZE, expected
from tests.oracles.exactness.steps import stepped, stepped_together

RULES: Final = (
    ("certain", True),
    ("certain", False),
    ("drawn", False),
    ("both", False),
    ("both", True),
)
"""Kinds of nodes, and whether random numbers belong to positions."""
SIGNIFICANCE: Final = 0.01

_LEAST_EXPECTED: Final = 5.0


@dataclass(frozen=True, slots=True)
class Case:
    """What is tested.

    Attributes:
        setting: one of `SETTINGS`.
        shape: of the drafts.
        kind: of their nodes.
        coupled: whether random numbers belong to positions.
    """

    setting: str
    shape: str
    kind: str
    coupled: bool


@dataclass(frozen=True, slots=True)
class TrialOutcome:
    """What came of a case.

    Attributes:
        case: which.
        draws: tokens that were looked at.
        statistic: chi-square.
        freedom: its degrees of freedom.
        p: probability of so great a statistic if the rule is exact.
        tokens_per_pass: that were accepted and chosen.
    """

    case: Case
    draws: int
    statistic: float
    freedom: int
    p: float
    tokens_per_pass: float

    def report(self) -> dict[str, Any]:
        """Return it as plain values."""
        values = asdict(self)
        return {**values.pop("case"), **values}


def all_cases() -> list[Case]:
    """Return every setting with every shape and every rule that it allows."""
    return [
        Case(setting, shape, kind, coupled)
        for setting in SETTINGS
        for shape in SHAPES
        for kind, coupled in RULES
        if shape != "empty" or kind == "certain"
        if shape != "chain" or kind != "both"
    ]


def covering_cases() -> list[Case]:
    """Return every setting with every rule, and every shape with every rule."""
    shaped = ("temperature 1", "top-p")
    return [case for case in all_cases() if case.shape == "mixed" or case.setting in shaped]


def run(
    case: Case,
    draws: int,
    seed: int = 0,
    drafts: Drafts | None = None,
    *,
    one_by_one: bool = False,
) -> TrialOutcome:
    """Decode short outputs by the rule, and test their distribution.

    Args:
        case: what to test.
        draws: how many tokens to look at, at least.
        seed: of rule and drafts.
        drafts: others than the case's.
        one_by_one: whether the rule is asked for every sequence alone, as decoders do.
    """
    setting = SETTINGS[case.setting]
    sampling = replace(setting.sampling, seed=seed, coupled=case.coupled)
    rule = accept_rule(sampling, setting.processors)
    if not isinstance(rule, ProcessedRule):
        raise TypeError(f"{case.setting} draws nothing")
    drafts = drafts or Drafts(case.shape, case.kind)
    outputs, num_passes = _decoded(rule, drafts, draws, one_by_one=one_by_one)
    counts = np.zeros((SIZE,) * LENGTH, np.int64)
    np.add.at(counts, tuple(np.array([output[:LENGTH] for output in outputs]).T), 1)
    statistic, freedom = chi_square(counts, expected(setting) * len(outputs))
    return TrialOutcome(
        case,
        int(counts.sum()) * LENGTH,
        statistic,
        freedom,
        survival(statistic, freedom),
        sum(map(len, outputs)) / num_passes,
    )


def _decoded(
    rule: ProcessedRule, drafts: Drafts, draws: int, *, one_by_one: bool
) -> tuple[list[list[int]], int]:
    """Return outputs of `LENGTH` tokens or more, and how many passes they took."""
    step = stepped if one_by_one else stepped_together
    rng = np.random.default_rng([rule.seed, 7])
    outputs: list[list[int]] = [[] for _ in range(-(-draws // LENGTH))]
    num_passes = 0
    for length in range(LENGTH):
        # All outputs of one length are gone on with, and none gets shorter.
        active = [number for number, output in enumerate(outputs) if len(output) == length]
        if not active:
            continue
        tokens = np.array([[*PROMPT, *outputs[number]] for number in active])
        batch = drafts.after(tokens[:, -2], tokens[:, -1], rng)
        contexts = [
            PassContext(number, row, len(PROMPT))
            for number, row in zip(active, tokens.astype(np.int32), strict=True)
        ]
        for number, emitted in zip(active, step(rule, batch, contexts), strict=True):
            outputs[number] += emitted
        num_passes += len(active)
    return outputs, num_passes


def chi_square(counts: NDArray[np.int64], wanted: NDArray[np.float64]) -> tuple[float, int]:
    """Return the statistic and its degrees of freedom; rare outcomes count as one.

    An outcome that is impossible makes the statistic infinite.
    """
    if counts[wanted == 0].any():
        return float("inf"), 1
    is_rare = wanted < _LEAST_EXPECTED
    observed = np.append(counts[~is_rare], counts[is_rare].sum())
    needed = np.append(wanted[~is_rare], wanted[is_rare].sum())
    observed, needed = observed[needed > 0], needed[needed > 0]
    return float(((observed - needed) ** 2 / needed).sum()), len(needed) - 1


def survival(statistic: float, freedom: int) -> float:
    """Return the probability that chi-square exceeds a statistic."""
    half = torch.tensor([freedom / 2, statistic / 2], dtype=torch.float64)
    return float(torch.special.gammaincc(half[0], half[1]))


def corrected(p_values: Sequence[float]) -> list[float]:
    """Return p-values corrected for their number (Holm, 1979), in the order given."""
    order = np.argsort(p_values)
    factors = len(p_values) - np.arange(len(p_values))
    steps = np.minimum(np.maximum.accumulate(np.array(p_values)[order] * factors), 1.0)
    adjusted = np.empty(len(p_values))
    adjusted[order] = steps
    return [float(value) for value in adjusted]
