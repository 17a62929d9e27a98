"""Measuring this decoder against transformers' own plain generation and prompt lookup."""

import os
import platform
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

from decoder.budget.budget import Budget, MeasuredBudget
from decoder.contenders import FOREDRAFT, PLAIN, PROMPT_LOOKUP, Contender, Run, contenders
from decoder.errors import InvalidPromptError
from decoder.loop import Decoder
from decoder.models import LanguageModel
from decoder.prompts import Prompt
from decoder.statistics import Statistics
from decoder.target.target import Target

_WARM_UP_TEXT = "Count from one to ten."
_CPU_INFO = Path("/proc/cpuinfo")


@dataclass(frozen=True, slots=True)
class Case:
    """A prompt that the model can take.

    Attributes:
        category: the prompt's.
        token_ids: its tokens.
    """

    category: str
    token_ids: list[int]


Track = Callable[[Sequence[Case]], Iterable[Case]]
"""Passes cases through one by one and shows how far it is."""


@dataclass(frozen=True, slots=True)
class Comparison:
    """One prompt decoded in every way.

    Attributes:
        category: the prompt's.
        runs: contender's name to what it did.
    """

    category: str
    runs: dict[str, Run]


def run_benchmark(
    language_model: LanguageModel,
    decoder: Decoder,
    prompts: Sequence[Prompt],
    *,
    max_new_tokens: int,
    track: Track = iter,
) -> dict[str, Any]:
    """Compare the ways of decoding and report it with the circumstances.

    The decoder's drafter lives on from prompt to prompt, as it does in use: it may draft from
    what it generated for earlier ones.

    Args:
        language_model: the model of all contenders.
        decoder: made for it, greedy.
        prompts: what to decode.
        max_new_tokens: most tokens for each prompt.
        track: shows progress.

    Returns:
        Values for JSON: `overall` and `categories` with the figures, and what they depend on;
        `skipped` counts the prompts that the model cannot take.

    Raises:
        InvalidPromptError: the model can take none of the prompts.
    """
    cases = fitting(language_model, decoder.target, prompts)
    if not cases:
        raise InvalidPromptError(f"the model can take none of the {len(prompts)} prompts")
    ways = contenders(language_model, decoder, max_new_tokens)
    return {
        **summarize(compare(language_model, ways, track(cases))),
        "skipped": len(prompts) - len(cases),
        **circumstances(language_model),
        "cost_curve": _curve(decoder.budget),
        "max_new_tokens": max_new_tokens,
        "generations": "warm: the drafter remembers its answers to earlier prompts of the run",
    }


def fitting(language_model: LanguageModel, target: Target, prompts: Iterable[Prompt]) -> list[Case]:
    """Return the prompts that the model can take, as tokens."""
    cases = []
    for prompt in prompts:
        tokens = language_model.encode(prompt.text)
        with suppress(InvalidPromptError):
            cases.append(Case(prompt.category, target.checked_prompt(tokens).tolist()))
    return cases


def compare(
    language_model: LanguageModel, ways: dict[str, Contender], cases: Iterable[Case]
) -> list[Comparison]:
    """Decode every case in every way, in an order that rotates from prompt to prompt."""
    for contender in ways.values():
        contender(language_model.encode(_WARM_UP_TEXT), remember=False)
    return [
        Comparison(case.category, _in_turn(ways, case.token_ids, number))
        for number, case in enumerate(cases)
    ]


def _in_turn(ways: dict[str, Contender], tokens: list[int], number: int) -> dict[str, Run]:
    names = list(ways)
    first = number % len(names)
    return {name: ways[name](tokens, remember=True) for name in [*names[first:], *names[:first]]}


def summarize(comparisons: list[Comparison]) -> dict[str, Any]:
    """Return the figures of all prompts (`overall`) and of each category (`categories`)."""
    categories: dict[str, list[Comparison]] = {}
    for comparison in comparisons:
        categories.setdefault(comparison.category, []).append(comparison)
    return {
        "overall": _figures(comparisons),
        "categories": {name: _figures(members) for name, members in categories.items()},
    }


def circumstances(language_model: LanguageModel) -> dict[str, Any]:
    """Return what a figure needs beside it: day, model, precision, versions and machine."""
    parameter = next(language_model.model.parameters())
    return {
        "date": datetime.now(UTC).date().isoformat(),
        "model": language_model.name,
        "dtype": str(parameter.dtype).removeprefix("torch."),
        "device": str(parameter.device),
        "versions": {
            "python": platform.python_version(),
            **{name: version(name) for name in ("foredraft", "torch", "transformers")},
        },
        "machine": {
            "architecture": platform.machine(),
            "cpu": _cpu_name(),
            "num_cpus": os.cpu_count(),
            "torch_threads": torch.get_num_threads(),
        },
    }


def _cpu_name() -> str:
    """Return the processor's name as the system knows it; empty where it does not."""
    with suppress(OSError):
        for line in _CPU_INFO.read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor()


def _curve(budget: Budget) -> dict[str, float]:
    """Return seconds by width, as measured at the start; nothing for budgets without costs."""
    if not isinstance(budget, MeasuredBudget):
        return {}
    curve = budget.curve
    return {str(width): s for width, s in zip(curve.widths, curve.seconds, strict=True)}


def _figures(comparisons: list[Comparison]) -> dict[str, Any]:
    """Return one category's figures; ratios are of seconds per token, sums over sums."""
    runs = {name: [c.runs[name] for c in comparisons] for name in comparisons[0].runs}
    pace = {name: _seconds_per_token(members) for name, members in runs.items()}
    total = Statistics()
    for run in runs[FOREDRAFT]:
        total.add(run.statistics)
    return {
        "num_prompts": len(comparisons),
        "speedup_over_plain": pace[PLAIN] / pace[FOREDRAFT],
        "speedup_over_prompt_lookup": pace[PROMPT_LOOKUP] / pace[FOREDRAFT],
        "prompt_lookup_speedup_over_plain": pace[PLAIN] / pace[PROMPT_LOOKUP],
        "mean_accepted_tokens": _tokens_per_pass(runs[FOREDRAFT]),
        "prompt_lookup_mean_accepted_tokens": _tokens_per_pass(runs[PROMPT_LOOKUP]),
        "identical": _num_identical(runs[FOREDRAFT], runs[PLAIN]),
        "prompt_lookup_identical": _num_identical(runs[PROMPT_LOOKUP], runs[PLAIN]),
        "tokens_per_second": {name: 1 / seconds for name, seconds in pace.items()},
        "num_tokens": {name: _num_tokens(members) for name, members in runs.items()},
        "num_passes": {name: sum(r.num_passes for r in members) for name, members in runs.items()},
        "foredraft": total.report(),
    }


def _num_tokens(runs: list[Run]) -> int:
    return sum(len(run.token_ids) for run in runs)


def _seconds_per_token(runs: list[Run]) -> float:
    return sum(run.seconds for run in runs) / _num_tokens(runs)


def _tokens_per_pass(runs: list[Run]) -> float:
    return _num_tokens(runs) / sum(run.num_passes for run in runs)


def _num_identical(runs: list[Run], plain: list[Run]) -> int:
    pairs = zip(runs, plain, strict=True)
    return sum(run.token_ids == reference.token_ids for run, reference in pairs)
