"""Measuring ways of decoding side by side, on the same prompts in one run."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from typing import Any

from decoder.budget.cost_store import describe_machine, versions
from decoder.budget.costs import CostSurface
from decoder.commands.bench_report import summarize
from decoder.commands.prompts import Prompt
from decoder.contenders.contender import PLAIN, UNDRAFTED, Contender, Run
from decoder.contenders.registry import DEFAULT, Lineup, Setting
from decoder.contenders.standings import Comparison, standings
from decoder.errors import InvalidPromptError
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
        prompt: what it was made of.
    """

    category: str
    token_ids: list[int]
    prompt: Prompt = field(default_factory=lambda: Prompt("", ""))


Track = Callable[[Sequence[BenchPrompt]], Iterable[BenchPrompt]]
"""Passes cases through one by one and shows how far it is."""

Opened = Callable[[Setting], AbstractContextManager[Lineup]]
"""Gives contenders that have seen nothing, for a setting; see `Contest.opened`."""


@dataclass(frozen=True, slots=True)
class BenchOptions:
    """How a benchmark is run.

    Attributes:
        max_new_tokens: most tokens for each prompt.
        repeat: rounds, the fastest run of each contender on a prompt counts. Each begins with
            drafters that have seen nothing, so that none drafts from its answer to a prompt.
        warm: prompts that are answered beforehand, so that drafters have answers to draft from.
            Those that are measured, too, are left out.
        warm_limit: most of them, the others left out.
        both_turns: whether what the user says next is asked, too, behind the plain answer.
        settings: under what contenders meet; those that differ in their seed are counted together.
    """

    max_new_tokens: int
    repeat: int = 1
    warm: Sequence[Prompt] = field(default=())
    warm_limit: int | None = None
    both_turns: bool = False
    settings: Sequence[Setting] = (Setting(),)


@dataclass(frozen=True, slots=True)
class Round:
    """What came of one setting, once through all prompts.

    Attributes:
        comparisons: one for each prompt, and for each turn.
        skipped: prompts and turns that the model cannot take.
        warm: how many prompts were answered before, with how many tokens.
        surface: what passes cost; `None` where that was not measured.
    """

    comparisons: list[Comparison]
    skipped: int
    warm: dict[str, int]
    surface: CostSurface | None


def run_benchmark(
    language_model: LanguageModel,
    opened: Opened,
    prompts: Sequence[Prompt],
    options: BenchOptions,
    track: Track = iter,
) -> dict[str, Any]:
    """Compare contenders under each setting and report it with the circumstances.

    Drafters are kept from prompt to prompt, as in use: they may draft from their outputs for
    earlier ones.

    Args:
        language_model: the model of all contenders.
        opened: gives the contenders.
        prompts: what to decode.
        options: how.
        track: shows progress.

    Returns:
        Values for JSON: `settings`, with the figures of all contenders under each; `overall` and
        `categories`, our own decoder's under the first, where the default contenders are measured;
        and what they depend on. `skipped` counts the prompts that the model cannot take.

    Raises:
        InvalidPromptError: the model can take none of the prompts.
    """
    rounds: dict[Setting, list[Round]] = {}
    for setting in options.settings:
        for number in range(options.repeat):
            with opened(setting) as lineup:
                found = run_round(language_model, lineup, prompts, options, number, track)
            rounds.setdefault(setting, []).append(found)
    first = next(iter(rounds.values()))[0]
    reported = [
        _figures(setting, [fastest(rounds[each]) for each in members])
        for setting, members in _pooled(rounds).items()
    ]
    comparisons = fastest(next(iter(rounds.values())))
    has_default = set(DEFAULT) <= comparisons[0].runs.keys()
    return {
        **(summarize(comparisons) if has_default else {}),
        "settings": reported,
        "skipped": first.skipped,
        **circumstances(language_model),
        "cost_curve": _curve(first.surface),
        "max_new_tokens": options.max_new_tokens,
        "repeat": options.repeat,
        "turns": "both" if options.both_turns else "first",
        "warm": first.warm,
        "generations": "warm: drafters remember their answers to earlier prompts of the run",
    }


def run_round(
    language_model: LanguageModel,
    lineup: Lineup,
    prompts: Sequence[Prompt],
    options: BenchOptions,
    number: int = 0,
    track: Track = iter,
) -> Round:
    """Go through all prompts once: answer those to warm with, then decode each in every way.

    Args:
        language_model: the model of all contenders.
        lineup: the contenders.
        prompts: what to decode.
        options: how.
        number: of the round; who begins rotates with it.
        track: shows progress.

    Raises:
        InvalidPromptError: the model can take none of the prompts.
    """
    cases = fitting(language_model, lineup.target, prompts)
    if not cases:
        raise InvalidPromptError(f"the model can take none of the {len(prompts)} prompts")
    warm = warm_up(language_model, lineup, prompts, options, track)
    for contender in lineup.ways.values():
        contender(language_model.encode(_WARM_UP_TEXT), remember=False)
    comparisons, skipped = list[Comparison](), len(prompts) - len(cases)
    for place, case in enumerate(track(cases)):
        turns = list(_turns(language_model, lineup, case, number + place, options))
        for comparison in turns:
            comparisons.append(replace(comparison, prompt=place))
        wanted = 1 + len(case.prompt.later) if options.both_turns else 1
        skipped += wanted - len(turns)
    return Round(comparisons, skipped, warm, lineup.surface)


def _turns(
    language_model: LanguageModel,
    lineup: Lineup,
    case: BenchPrompt,
    number: int,
    options: BenchOptions,
) -> Iterator[Comparison]:
    """Decode a prompt in every way, and what the user says next behind the plain answer.

    All contenders are asked the same: the conversation goes on from the answer of the one that
    outputs are compared with.
    """
    asked: BenchPrompt | None = case
    turn = 0
    while asked is not None:
        runs = _in_turn(lineup.ways, asked.token_ids, number + turn)
        yield Comparison(asked.category, runs, turn=turn)
        prompt, asked, turn = asked.prompt, None, turn + 1
        if options.both_turns and prompt.later:
            answer = runs[reference_of(runs)].token_ids
            said = str(language_model.tokenizer.decode(answer, skip_special_tokens=True))
            following = fitting(language_model, lineup.target, [prompt.answered(said)])
            asked = following[0] if following else None


def reference_of(names: Iterable[str], *, is_greedy: bool = True) -> str:
    """Return the contender that speed-up is over and outputs are compared with.

    Where tokens are sampled, that is our own loop without drafts: it draws with the same numbers
    as all of ours do, and transformers with others.
    """
    order = (PLAIN, UNDRAFTED) if is_greedy else (UNDRAFTED, PLAIN)
    given = list(names)
    return next((name for name in order if name in given), given[0])


def fitting(
    language_model: LanguageModel, target: Target, prompts: Iterable[Prompt]
) -> list[BenchPrompt]:
    """Return the prompts that the model can take, as tokens."""
    cases = []
    for prompt in prompts:
        # A log may hold turns that this template refuses, such as a tool's.
        with suppress(InvalidPromptError, *((TokenizerError,) if prompt.turns else ())):
            tokens = target.checked_prompt(prompt.encoded(language_model)).tolist()
            cases.append(BenchPrompt(prompt.category, tokens, prompt))
    return cases


def warm_up(
    language_model: LanguageModel,
    lineup: Lineup,
    measured: Sequence[Prompt],
    options: BenchOptions,
    track: Track = iter,
) -> dict[str, int]:
    """Have all that draft answer prompts that are not measured; return how many, and their tokens.

    The tokens are those of one contender.
    """
    asked = {(prompt.text.strip(), prompt.turns) for prompt in measured}
    others = [each for each in options.warm if (each.text.strip(), each.turns) not in asked]
    cases = fitting(language_model, lineup.target, others)[: options.warm_limit]
    num_tokens = 0
    for case in track(cases):
        answers = [way(case.token_ids, remember=True) for way in lineup.drafting.values()]
        num_tokens += len(answers[-1].token_ids) if answers else 0
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
    alone, so that no way drafts from an answer to the same prompt; what a target's logits taught
    is kept all the same.
    """
    for contender in ways.values():
        contender(language_model.encode(_WARM_UP_TEXT), remember=False)
    comparisons = []
    for number, case in enumerate(cases):
        rounds = [
            _in_turn(ways, case.token_ids, number * repeat + turn, remember=turn == repeat - 1)
            for turn in range(repeat)
        ]
        comparisons.append(Comparison(case.category, _fastest_runs(rounds), number))
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


def fastest(rounds: Sequence[Round]) -> list[Comparison]:
    """Return comparisons of several rounds as one, of each contender's fastest runs."""
    return [
        replace(same[0], runs=_fastest_runs([each.runs for each in same]))
        for same in zip(*(each.comparisons for each in rounds), strict=True)
    ]


def _in_turn(
    ways: Mapping[str, Contender], tokens: list[int], number: int, *, remember: bool = True
) -> dict[str, Run]:
    names = list(ways)
    first = number % len(names)
    order = [*names[first:], *names[:first]]
    runs = {name: ways[name](tokens, remember=remember) for name in order}
    return {name: runs[name] for name in names}


def _fastest_runs(rounds: Sequence[dict[str, Run]]) -> dict[str, Run]:
    return {
        name: min((runs[name] for runs in rounds), key=lambda run: run.seconds)
        for name in rounds[0]
    }


def _pooled(settings: Iterable[Setting]) -> dict[Setting, list[Setting]]:
    """Return settings that differ in their seed under one of them."""
    pooled: dict[Setting, list[Setting]] = {}
    for setting in settings:
        pooled.setdefault(replace(setting, seed=0), []).append(setting)
    return pooled


def _figures(setting: Setting, seeds: Sequence[list[Comparison]]) -> dict[str, Any]:
    """Return all contenders' figures under a setting, over its seeds."""
    comparisons = [comparison for each in seeds for comparison in each]
    is_greedy = setting.temperature == 0
    reference = reference_of(comparisons[0].runs, is_greedy=is_greedy)
    return {
        "nodes": setting.nodes,
        "temperature": setting.temperature,
        "num_seeds": len(seeds),
        **standings(comparisons, reference),
    }


def _curve(surface: CostSurface | None) -> dict[str, dict[str, float]]:
    """Return seconds by context and width, as measured; nothing where they were not."""
    if surface is None:
        return {}
    return {
        str(context): {str(width): s for width, s in zip(surface.widths, row, strict=True)}
        for context, row in zip(surface.contexts, surface.seconds, strict=True)
    }
