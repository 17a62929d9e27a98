"""Measuring this decoder against transformers' own plain generation and prompt lookup."""

from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any

from decoder.budget.budget import Budget, MeasuredBudget
from decoder.budget.cost_store import describe_machine, versions
from decoder.commands.bench_report import Comparison, summarize
from decoder.commands.prompts import Prompt
from decoder.contenders.contender import Contender, Run, contenders
from decoder.errors import InvalidPromptError
from decoder.loop import Decoder
from decoder.model.pretrained import LanguageModel
from decoder.model.target import Target
from indexer.errors import TokenizerError

_WARM_UP_TEXT = "Count from one to ten."


@dataclass(frozen=True, slots=True)
class BenchPrompt:
    """A prompt that the model can take.

    Attributes:
        category: the prompt's.
        token_ids: its tokens.
    """

    category: str
    token_ids: list[int]


Track = Callable[[Sequence[BenchPrompt]], Iterable[BenchPrompt]]
"""Passes cases through one by one and shows how far it is."""


@dataclass(frozen=True, slots=True)
class BenchOptions:
    """How a benchmark is run.

    Attributes:
        max_new_tokens: most tokens for each prompt.
        repeat: rounds of each prompt; the fastest run of each way counts.
        warm: prompts that are answered beforehand, so that the drafter has generations to draft
            from. Those that are measured, too, are left out.
        warm_limit: most of them, the others left out.
    """

    max_new_tokens: int
    repeat: int = 1
    warm: Sequence[Prompt] = field(default=())
    warm_limit: int | None = None


def run_benchmark(
    language_model: LanguageModel,
    decoder: Decoder,
    prompts: Sequence[Prompt],
    options: BenchOptions,
    track: Track = iter,
) -> dict[str, Any]:
    """Compare the ways of decoding and report it with the circumstances.

    The decoder's drafter is kept from prompt to prompt, as in use: it may draft from its outputs
    for earlier ones.

    Args:
        language_model: the model of all contenders.
        decoder: made for it, greedy.
        prompts: what to decode.
        options: how.
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
    warm = warm_up(language_model, decoder, prompts, options, track)
    ways = contenders(language_model, decoder, options.max_new_tokens)
    return {
        **summarize(compare(language_model, ways, track(cases), options.repeat)),
        "skipped": len(prompts) - len(cases),
        **circumstances(language_model),
        "cost_curve": _curve(decoder.budget),
        "max_new_tokens": options.max_new_tokens,
        "repeat": options.repeat,
        "warm": warm,
        "generations": "warm: the drafter remembers its answers to earlier prompts of the run",
    }


def fitting(
    language_model: LanguageModel, target: Target, prompts: Iterable[Prompt]
) -> list[BenchPrompt]:
    """Return the prompts that the model can take, as tokens."""
    cases = []
    for prompt in prompts:
        # A log may hold turns that this template refuses, such as a tool's.
        with suppress(InvalidPromptError, *((TokenizerError,) if prompt.turns else ())):
            tokens = prompt.encoded(language_model)
            cases.append(BenchPrompt(prompt.category, target.checked_prompt(tokens).tolist()))
    return cases


def warm_up(
    language_model: LanguageModel,
    decoder: Decoder,
    measured: Sequence[Prompt],
    options: BenchOptions,
    track: Track = iter,
) -> dict[str, int]:
    """Answer prompts that are not measured, and return how many and with how many tokens."""
    asked = {(prompt.text.strip(), prompt.turns) for prompt in measured}
    others = [each for each in options.warm if (each.text.strip(), each.turns) not in asked]
    cases = fitting(language_model, decoder.target, others)[: options.warm_limit]
    num_tokens = sum(
        len(tokens)
        for case in track(cases)
        for tokens in decoder.generate(case.token_ids, options.max_new_tokens)
    )
    left_out = len(options.warm) - len(others)
    return {"num_prompts": len(cases), "num_tokens": num_tokens, "left_out_as_measured": left_out}


def compare(
    language_model: LanguageModel,
    ways: dict[str, Contender],
    cases: Iterable[BenchPrompt],
    repeat: int = 1,
) -> list[Comparison]:
    """Decode every case in every way, in an order that rotates from round to round.

    Of several rounds the fastest run of each way is kept. Answers are remembered in the last
    alone, so that no way drafts from an answer to the same prompt.
    """
    for contender in ways.values():
        contender(language_model.encode(_WARM_UP_TEXT), remember=False)
    comparisons = []
    for number, case in enumerate(cases):
        rounds = [
            _in_turn(ways, case.token_ids, number * repeat + turn, remember=turn == repeat - 1)
            for turn in range(repeat)
        ]
        comparisons.append(Comparison(case.category, _fastest(rounds)))
    return comparisons


def circumstances(language_model: LanguageModel) -> dict[str, Any]:
    """Return the circumstances of figures: day, model, precision, versions and machine."""
    parameter = next(language_model.model.parameters())
    return {
        "date": datetime.now(UTC).date().isoformat(),
        "model": language_model.name,
        "dtype": str(parameter.dtype).removeprefix("torch."),
        "device": str(parameter.device),
        "versions": versions(),
        "machine": describe_machine(),
    }


def _in_turn(
    ways: dict[str, Contender], tokens: list[int], number: int, *, remember: bool
) -> dict[str, Run]:
    names = list(ways)
    first = number % len(names)
    order = [*names[first:], *names[:first]]
    return {name: ways[name](tokens, remember=remember) for name in order}


def _fastest(rounds: list[dict[str, Run]]) -> dict[str, Run]:
    return {
        name: min((runs[name] for runs in rounds), key=lambda run: run.seconds)
        for name in rounds[0]
    }


def _curve(budget: Budget) -> dict[str, dict[str, float]]:
    """Return seconds by context and width, as measured; nothing for budgets without costs."""
    if not isinstance(budget, MeasuredBudget):
        return {}
    surface = budget.costs.surface
    return {
        str(context): {str(width): s for width, s in zip(surface.widths, row, strict=True)}
        for context, row in zip(surface.contexts, surface.seconds, strict=True)
    }
