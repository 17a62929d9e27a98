"""Measuring ways of decoding side by side, on the same prompts in one run."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from functools import partial
from typing import Any, Final, TypeVar

from decoder.budget.cost_store import describe_machine, versions
from decoder.budget.costs import CostSurface
from decoder.commands.bench_report import in_words, summarize
from decoder.commands.prompts import Prompt
from decoder.contenders.contender import PLAIN, UNDRAFTED, Contender, Run
from decoder.contenders.registry import DEFAULT, Lineup, Setting
from decoder.contenders.standings import Comparison, standings
from decoder.errors import InvalidPromptError
from decoder.model.pretrained import LanguageModel
from decoder.model.target import Target
from decoder.observation import Watcher, counted
from indexer.errors import TokenizerError

WARM_UP_TEXT: Final = "Count from one to ten."


Case = TypeVar("Case")


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
        parallel: how many prompts at a time, for `ParallelBenchmark`; each is measured by itself.
    """

    max_new_tokens: int
    repeat: int = 1
    warm: Sequence[Prompt] = field(default=())
    warm_limit: int | None = None
    both_turns: bool = False
    settings: Sequence[Setting] = (Setting(),)
    parallel: Sequence[int] = ()


@dataclass(frozen=True, slots=True)
class Heat:
    """What is measured by itself, in rounds of its own.

    Attributes:
        setting: under what contenders meet.
        parallel: how many prompts at a time; `None` for one by one.
    """

    setting: Setting
    parallel: int | None = None


@dataclass(frozen=True, slots=True)
class Round:
    """What came of one heat, once through all prompts, or as far as it got.

    Attributes:
        turns: of each prompt that the model can take, or of each group of them, in the order in
            which they are decoded.
        num_refused: the prompts that it cannot take.
        warm: how many prompts were answered before, with how many tokens.
        surface: what passes cost; `None` where that was not measured.
        comparisons: one for each turn of the prompts that are done, which are the first ones.
    """

    turns: Sequence[int]
    num_refused: int
    warm: dict[str, int]
    surface: CostSurface | None
    comparisons: list[Comparison] = field(default_factory=list)

    @property
    def num_done(self) -> int:
        """Prompts that every contender has decoded."""
        return len({comparison.prompt for comparison in self.comparisons})

    @property
    def is_whole(self) -> bool:
        """Whether all of them are."""
        return self.num_done == len(self.turns)

    @property
    def skipped(self) -> int:
        """Prompts that the model cannot take, and further turns of those that are done."""
        return self.num_refused + sum(self.turns[: self.num_done]) - len(self.comparisons)


@dataclass(frozen=True, slots=True)
class Place:
    """A round of a benchmark, counted from 1.

    Attributes:
        heat: what is measured.
        number: of the heat.
        num_heats: all of them.
        round: of the heat.
        num_rounds: all of one heat.
    """

    heat: Heat
    number: int
    num_heats: int
    round: int
    num_rounds: int

    def __str__(self) -> str:
        setting, parallel = self.heat.setting, self.heat.parallel
        words = in_words(setting.nodes, setting.temperature)
        if setting.temperature:
            words.append(f"seed {setting.seed}")
        if parallel is not None:
            words.append(f"{parallel} in parallel")
        if self.num_heats > 1:
            words[-1] += f" ({self.number} of {self.num_heats})"
        if self.num_rounds > 1:
            words.append(f"round {self.round} of {self.num_rounds}")
        return ", ".join(words)


def unwatched(_stage: str, _over: float, _told: str, /) -> None:
    """Show nothing; see `Watcher`."""


class Benchmark:
    """Compares contenders under each setting, and reports it with the circumstances.

    Drafters are kept from prompt to prompt, as in use: they may draft from their outputs for
    earlier ones.

    Args:
        language_model: the model of all contenders.
        opened: gives the contenders.
        prompts: what to decode.
        options: how.
        watcher: is told of the progress.
    """

    _unit = "prompt"
    """What is decoded by all contenders in turn."""

    def __init__(
        self,
        language_model: LanguageModel,
        opened: Opened,
        prompts: Sequence[Prompt],
        options: BenchOptions,
        watcher: Watcher = unwatched,
    ) -> None:
        self._language_model = language_model
        self._opened = opened
        self._prompts = prompts
        self._options = options
        self._watcher = watcher
        self._rounds: dict[Heat, list[Round]] = {}
        self._where = ""
        self._found: Round | None = None  # of the round that is under way
        self._is_over = False

    @property
    def has_measured(self) -> bool:
        """Whether there is anything to report."""
        return any(each.comparisons for rounds in self._rounds.values() for each in rounds)

    def run(self) -> None:
        """Go through all prompts in each round of each setting.

        What was measured before an exception, as of Ctrl-C, can be reported.

        Raises:
            InvalidPromptError: the model can take none of the prompts.
        """
        heats = self._heats()
        for number, heat in enumerate(heats, 1):
            for turn in range(1, self._options.repeat + 1):
                place = Place(heat, number, len(heats), turn, self._options.repeat)
                self._where, self._found = str(place), None
                with self._opened(heat.setting) as lineup:
                    self._go_through(lineup, place)
        self._finish()
        self._is_over = True

    def report(self) -> dict[str, Any]:
        """Return what was measured until now, of at least one prompt.

        Of a setting whose rounds were all interrupted, the prompts count that were done; of others,
        whole rounds.

        Returns:
            Values for JSON: `settings`, with the figures of all contenders under each; `overall`
            and `categories`, our own decoder's under the first, where the default contenders are
            measured; and what they depend on. `skipped` counts the prompts that the model cannot
            take. Where not all was measured, `interrupted` is true and `interrupted_at` has the
            round that was under way: `where`, in words, `prompts` of `of_prompts` that were done,
            and whether these are `counted`.
        """
        rounds = self._counted()
        first = next(iter(rounds.values()))[0]
        reported = [
            _figures(setting, [fastest(rounds[Heat(each)]) for each in members])
            for setting, members in pooled(each.setting for each in rounds).items()
        ]
        comparisons = fastest(next(iter(rounds.values())))
        has_default = set(DEFAULT) <= comparisons[0].runs.keys()
        return {
            **(summarize(comparisons) if has_default else {}),
            "settings": reported,
            "skipped": first.skipped,
            **self._circumstances(first),
            "turns": "both" if self._options.both_turns else "first",
        }

    def _circumstances(self, first: Round) -> dict[str, Any]:
        """Return what figures depend on, and whether all was measured.

        Args:
            first: of the rounds.
        """
        return {
            **self._interruption(len(first.turns)),
            **circumstances(self._language_model),
            "cost_curve": _curve(first.surface),
            "max_new_tokens": self._options.max_new_tokens,
            "repeat": self._options.repeat,
            "warm": first.warm,
            "generations": "warm: drafters remember their answers to earlier prompts of the run",
        }

    def _heats(self) -> list[Heat]:
        return [Heat(setting) for setting in self._options.settings]

    def _go_through(self, lineup: Lineup, place: Place) -> None:
        """Go through all prompts once: answer those to warm with, then decode each in every way."""
        language_model, options = self._language_model, self._options
        cases = self._fitting(lineup.target, self._prompts)
        if not cases:
            raise InvalidPromptError(f"the model can take none of the {len(self._prompts)} prompts")
        self._prepare(lineup.target, cases, place)
        warm = self._warm_up(lineup, place)
        turns = [1 + len(case.prompt.later) if options.both_turns else 1 for case in cases]
        found = self._begun(place, turns, len(self._prompts) - len(cases), warm, lineup.surface)
        shown = self._shown(cases, f"{place}, measuring", lambda: _standing(found.comparisons))
        for number, case in enumerate(shown):
            answered = list(_turns(language_model, lineup, case, place.round - 1 + number, options))
            # All turns of a prompt at once: an interruption leaves it whole or out.
            found.comparisons.extend([replace(each, prompt=number) for each in answered])

    def _begun(
        self,
        place: Place,
        turns: Sequence[int],
        num_refused: int,
        warm: dict[str, int],
        surface: CostSurface | None,
    ) -> Round:
        """Return a round in which nothing is measured yet."""
        self._found = found = Round(turns, num_refused, warm, surface)
        self._rounds.setdefault(place.heat, []).append(found)
        return found

    def _prepare(self, target: Target, cases: Sequence[BenchPrompt], place: Place) -> None:
        """Have passes captured before any is timed, on a device where they are."""
        if target.pads_passes:
            longest = max(len(case.token_ids) for case in cases)
            num_tokens = longest + self._options.max_new_tokens
            target.prepare(num_tokens, place.heat.parallel or 1)

    def _finish(self) -> None:
        """Do what is left when all rounds are over."""

    def _fitting(self, target: Target, prompts: Iterable[Prompt]) -> list[BenchPrompt]:
        """Return the prompts that can be measured."""
        return fitting(self._language_model, target, prompts)

    def _warm_up(self, lineup: Lineup, place: Place) -> dict[str, int]:
        """Have all that draft answer prompts that are not measured, and all decode once.

        Returns:
            How many prompts, and the tokens of one contender's answers.
        """
        cases, left_out = self._warming(lineup.target)
        num_tokens = 0
        for case in self._shown(cases, f"{place}, warm-up"):
            answers = [way(case.token_ids, remember=True) for way in lineup.drafting.values()]
            num_tokens += len(answers[-1].token_ids) if answers else 0
        for contender in lineup.ways.values():
            contender(self._language_model.encode(WARM_UP_TEXT), remember=False)
        return warmed(cases, num_tokens, left_out)

    def _warming(self, target: Target) -> tuple[list[BenchPrompt], int]:
        """Return the prompts to warm with, and how many are left out as they are measured."""
        asked = {(prompt.text.strip(), prompt.turns) for prompt in self._prompts}
        others = [
            each for each in self._options.warm if (each.text.strip(), each.turns) not in asked
        ]
        cases = self._fitting(target, others)[: self._options.warm_limit]
        return cases, len(self._options.warm) - len(others)

    def _shown(
        self,
        cases: Sequence[Case],
        stage: str,
        standing: Callable[[], str] = lambda: "",
        unit: str = "prompt",
    ) -> Iterator[Case]:
        """Pass prompts or groups through, and tell how many are done and how it stands."""

        def tell(number: int) -> None:
            done = f"{number} of {counted(len(cases), unit)}"
            self._watcher(stage, number / len(cases), ", ".join(filter(None, (done, standing()))))

        for number, case in enumerate(cases):
            tell(number)
            yield case
        if cases:
            tell(len(cases))

    def _counted(self) -> dict[Heat, list[Round]]:
        """Return the rounds that count: whole ones, or what there is where none is whole."""
        chosen = {
            heat: [each for each in rounds if each.is_whole] or rounds[:1]
            for heat, rounds in self._rounds.items()
        }
        return {heat: rounds for heat, rounds in chosen.items() if rounds[0].comparisons}

    def _interruption(self, num_units: int) -> dict[str, Any]:
        """Return where not all was measured, if that is so."""
        if self._is_over:
            return {"interrupted": False}
        found = self._found
        rounds = [each for members in self._counted().values() for each in members]
        at = {
            "where": self._where,
            f"{self._unit}s": 0 if found is None else found.num_done,
            f"of_{self._unit}s": num_units if found is None else len(found.turns),
            "counted": any(each is found for each in rounds),
        }
        return {"interrupted": True, "interrupted_at": at}


def warmed(cases: Sequence[BenchPrompt], num_tokens: int, left_out: int) -> dict[str, int]:
    """Return what was answered beforehand, as a report says it."""
    return {
        "num_prompts": len(cases),
        "num_tokens": num_tokens,
        "left_out_as_measured": left_out,
    }


def run_benchmark(
    language_model: LanguageModel,
    opened: Opened,
    prompts: Sequence[Prompt],
    options: BenchOptions,
    watcher: Watcher = unwatched,
) -> dict[str, Any]:
    """Measure all of a benchmark, and return its report; see `Benchmark`.

    Raises:
        InvalidPromptError: the model can take none of the prompts.
    """
    benchmark = Benchmark(language_model, opened, prompts, options, watcher)
    benchmark.run()
    return benchmark.report()


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
        runs = in_turn(_decoding(lineup.ways, asked.token_ids), number + turn)
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


def _standing(comparisons: Sequence[Comparison]) -> str:
    """Return the last contender's accepted tokens of a pass so far; nothing before the first."""
    if not comparisons:
        return ""
    name = list(comparisons[0].runs)[-1]
    runs = [comparison.runs[name] for comparison in comparisons]
    steps = sum(max(run.num_passes - 1, 0) for run in runs)
    tokens = sum(max(len(run.token_ids) - 1, 0) for run in runs)
    return f"{name} {tokens / steps:.2f} tokens a pass" if steps else ""


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
        contender(language_model.encode(WARM_UP_TEXT), remember=False)
    comparisons = []
    for number, case in enumerate(cases):
        rounds = [
            in_turn(
                _decoding(ways, case.token_ids, remember=turn == repeat - 1),
                number * repeat + turn,
            )
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


def in_turn(ways: Mapping[str, Callable[[], Run]], number: int) -> dict[str, Run]:
    """Run all ways, in an order that rotates with the number; return runs in their own order."""
    names = list(ways)
    first = number % len(names)
    runs = {name: ways[name]() for name in (*names[first:], *names[:first])}
    return {name: runs[name] for name in names}


def _decoding(
    ways: Mapping[str, Contender], tokens: list[int], *, remember: bool = True
) -> dict[str, Callable[[], Run]]:
    return {name: partial(way, tokens, remember=remember) for name, way in ways.items()}


def _fastest_runs(rounds: Sequence[dict[str, Run]]) -> dict[str, Run]:
    return {
        name: min((runs[name] for runs in rounds), key=lambda run: run.seconds)
        for name in rounds[0]
    }


def pooled(settings: Iterable[Setting]) -> dict[Setting, list[Setting]]:
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
