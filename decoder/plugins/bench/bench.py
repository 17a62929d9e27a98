"""Measures contenders side by side, on the same prompts in one run."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from functools import partial
from itertools import product
from typing import Any, Final, TypeVar

import torch

from decoder.budget.cost_store import describe_machine, versions
from decoder.budget.costs import CostSurface
from decoder.commands.prompts import Prompt
from decoder.errors import InvalidPromptError
from decoder.model.pretrained import LanguageModel
from decoder.model.target import Target
from decoder.observation import Watcher, counted
from decoder.plugins.bench.bench_report import in_words, summarize
from decoder.plugins.bench.exactness import ONE_BY_ONE, exactness
from decoder.plugins.contenders.contender import PLAIN, THEIRS, UNDRAFTED, LibraryContender, Run
from decoder.plugins.contenders.registry import DEFAULT, Lineup, Setting
from decoder.plugins.contenders.standings import Comparison, column_of, standings
from indexer.errors import TokenizerError

WARM_UP_TEXT: Final = "Count from one to ten."

_ROUNDS: Final = 2
"""Prompts in a group for each of its places, so that places are refilled as in continuous use."""

_FEW_GROUPS: Final = 4
"""Fewest groups for a useful interval. If larger groups are too few, a group has one prompt per
place."""

Case = TypeVar("Case")


@dataclass(frozen=True, slots=True)
class BenchPrompt:
    """A prompt that fits the model.

    Attributes:
        category: category of the prompt.
        token_ids: tokens of the prompt.
        prompt: the original prompt.
    """

    category: str
    token_ids: list[int]
    prompt: Prompt = field(default_factory=lambda: Prompt("", ""))


Group = Sequence[BenchPrompt]
"""Prompts that all contenders decode, one contender after another."""

Opened = Callable[[Setting], AbstractContextManager[Lineup]]
"""Opens fresh contenders for a setting; see `Contest.opened`."""


@dataclass(frozen=True, slots=True)
class BenchOptions:
    """How a benchmark is run.

    Attributes:
        max_new_tokens: most tokens for each prompt.
        repeat: number of rounds; the fastest run of each contender on a prompt counts. Each round
            starts with fresh drafters, so none of them drafts from its own answer to a prompt.
        warm: prompts to answer first, which gives drafters answers to draft from. Prompts that are
            also measured are left out.
        warm_limit: largest number of prompts from `warm`.
        both_turns: whether to answer the user's next message too, after the plain answer. This
            needs prompts that are decoded one by one.
        settings: settings of the contenders; settings that differ only in the seed are pooled.
        widths: numbers of prompts at a time; each is measured separately.
        is_judged: whether to compare outputs at the end with those of `model.generate` for each
            prompt alone. This needs float32 and greedy decoding, where rounding changes only ties.
    """

    max_new_tokens: int
    repeat: int = 1
    warm: Sequence[Prompt] = field(default=())
    warm_limit: int | None = None
    both_turns: bool = False
    settings: Sequence[Setting] = (Setting(),)
    widths: Sequence[int] = (1,)
    is_judged: bool = False


@dataclass(frozen=True, slots=True)
class Heat:
    """One measurement: a setting and a width, in separate rounds.

    Attributes:
        setting: setting of the contenders.
        parallel: number of prompts at a time.
    """

    setting: Setting
    parallel: int = 1

    @property
    def unit(self) -> str:
        """The unit that all contenders decode in turn: a prompt, or a group of prompts."""
        return "prompt" if self.parallel == 1 else "group"

    def __str__(self) -> str:
        words = in_words(self.setting.nodes, self.setting.temperature)
        if self.setting.temperature:
            words.append(f"seed {self.setting.seed}")
        if self.parallel > 1:
            words.append(f"{self.parallel} in parallel")
        return ", ".join(words)


@dataclass(frozen=True, slots=True)
class Round:
    """The result of one round of a heat over all groups of prompts, complete or not.

    Attributes:
        turns: number of turns of each group, in the order of decoding.
        num_refused: number of prompts that do not fit the model.
        warm: number of warm-up prompts, and of tokens in their answers.
        surface: costs of passes; `None` if they were not measured.
        comparisons: comparisons for each turn of the finished groups, in the order of decoding.
    """

    turns: Sequence[int]
    num_refused: int
    warm: dict[str, int]
    surface: CostSurface | None
    comparisons: list[Comparison] = field(default_factory=list)

    @property
    def num_done(self) -> int:
        """Number of groups that every contender has decoded."""
        return len({comparison.group for comparison in self.comparisons})

    @property
    def is_whole(self) -> bool:
        """Whether all groups are done."""
        return self.num_done == len(self.turns)

    @property
    def skipped(self) -> int:
        """Number of prompts that do not fit the model, plus missing turns of finished groups."""
        return self.num_refused + sum(self.turns[: self.num_done]) - len(self.comparisons)


def unwatched(_stage: str, _over: float, _told: str, /) -> None:
    """Show nothing; see `Watcher`."""


class Benchmark:
    """Compares contenders under each setting and at each width, and reports the circumstances.

    All contenders decode each group of prompts in turn. So the figures of a group are measured at
    about the same time. A group is one prompt if prompts are decoded one by one; otherwise it fills
    all places. The same drafters decode all groups, as in real use, so they may draft from their
    outputs for earlier groups.

    Args:
        language_model: the model of all contenders.
        opened: opens the contenders.
        prompts: the prompts to decode.
        options: options of the benchmark.
        watcher: called with the progress.
        plain: known outputs of `model.generate` for single prompts, by the prompts' tokens.
    """

    def __init__(  # noqa: PLR0913, PLR0917  (all but the first three are options)
        self,
        language_model: LanguageModel,
        opened: Opened,
        prompts: Sequence[Prompt],
        options: BenchOptions,
        watcher: Watcher = unwatched,
        plain: Mapping[tuple[int, ...], list[int]] | None = None,
    ) -> None:
        self._language_model = language_model
        self._opened = opened
        self._prompts = prompts
        self._options = options
        self._watcher = watcher
        self._known = dict(plain or {})
        self._target: Target | None = None
        self._cases: list[BenchPrompt] = []
        self._groups: dict[int, list[Group]] = {}
        self._rounds: dict[Heat, list[Round]] = {}
        self._plain: dict[tuple[int, ...], list[int]] = {}  # by tokens of the prompt
        self._where, self._unit = "", ""
        self._found: Round | None = None  # the current round
        self._is_over = False

    @property
    def has_measured(self) -> bool:
        """Whether there is anything to report."""
        return any(each.comparisons for rounds in self._rounds.values() for each in rounds)

    def run(self) -> None:
        """Decode all prompts in each round of each setting and width.

        After an exception such as Ctrl-C, the measurements so far can be reported.

        Raises:
            InvalidPromptError: too few prompts fit the model, even for the smallest width.
        """
        options = self._options
        heats = [Heat(setting, width) for setting in options.settings for width in options.widths]
        for (number, heat), turn in product(enumerate(heats, 1), range(options.repeat)):
            at = f" ({number} of {len(heats)})" if len(heats) > 1 else ""
            of_rounds = f", round {turn + 1} of {options.repeat}" if options.repeat > 1 else ""
            self._where, self._unit, self._found = f"{heat}{at}{of_rounds}", heat.unit, None
            with self._opened(heat.setting) as lineup:
                self._go_through(lineup, heat, turn)
        if self._is_exact:
            self._decode_alone()
        self._is_over = True

    def report(self) -> dict[str, Any]:
        """Return the measurements so far; at least one group must be measured.

        For each setting and width, only complete rounds count. If there are none, the finished
        groups of the first round count.

        Returns:
            JSON values. `settings` lists each setting with its `widths`. Each width has the figures
            of `standings` and the numbers of prompts and groups. `num_answers` is the number of
            answers in all rounds. For each contender, `identical` is the number of these that equal
            the answers of `compared_with`. `below_one` lists the ratios at which one of our
            contenders is slower. `exactness` says where outputs that should be equal differ, and by
            how much. `left_out` lists widths with too few prompts. `overall` and `categories` have
            our own decoder's figures under the first setting, if the default contenders are
            measured. `skipped` is the number of prompts that do not fit the model. After an
            interruption, `interrupted` is true and `interrupted_at` describes the current round:
            `where` in words, the numbers `done` and `of` (finished and all), the `unit` that they
            count, and whether the finished ones are `counted`. The other values are the
            circumstances of the figures.
        """
        options, rounds = self._options, self._counted()
        first, *_ = counted_rounds = next(iter(rounds.values()))
        comparisons = _fastest(counted_rounds)
        settings = [
            self._under(setting, members, rounds)
            for setting, members in pooled(dict.fromkeys(heat.setting for heat in rounds)).items()
        ]
        has_default = set(DEFAULT) <= comparisons[0].runs.keys()
        return {
            **(summarize(comparisons) if has_default else {}),
            "settings": settings,
            "below_one": _below_one(settings),
            "exactness": exactness(self._language_model, self._greedy(), self._plain),
            "left_out": [width for width in options.widths if self._groups.get(width) == []],
            "skipped": first.skipped,
            **self._interruption(len(first.turns)),
            **circumstances(self._language_model),
            "cost_curve": _curve(first.surface),
            "max_new_tokens": options.max_new_tokens,
            "repeat": options.repeat,
            "warm": first.warm,
            "generations": "warm: drafters remember their answers to earlier prompts of the run",
            "turns": "both" if options.both_turns else "first",
        }

    def _go_through(self, lineup: Lineup, heat: Heat, turn: int) -> None:
        """Run one round: answer warm-up prompts, then decode each group with all contenders."""
        groups = self._groups_of(lineup.target, heat.parallel)
        if not groups:
            return
        if lineup.target.pads_passes:  # capture passes before timing, if the device captures them
            longest = max(len(case.token_ids) for case in self._cases)
            lineup.target.prepare(longest + self._options.max_new_tokens, heat.parallel)
        warm = self._warm_up(lineup, heat)
        turns = [1 + len(group[0].prompt.later) if self._goes_on(group) else 1 for group in groups]
        num_refused = len(self._prompts) - len(self._cases)
        self._found = found = Round(turns, num_refused, warm, lineup.surface)
        self._rounds.setdefault(heat, []).append(found)
        stage = f"{self._where}, measuring"
        shown = self._shown(groups, stage, heat.unit, lambda: _standing(found.comparisons))
        for number, group in enumerate(shown):
            answered = list(self._turns(lineup, group, heat.parallel, turn + number))
            # All turns of a prompt are added at once. So after an interruption, the prompt counts
            # fully or not at all.
            found.comparisons.extend([replace(each, group=number) for each in answered])

    def _groups_of(self, target: Target, parallel: int) -> list[Group]:
        """Return the groups of a width; none if there are too few prompts.

        Raises:
            InvalidPromptError: there are too few prompts for any width.
        """
        widths = self._options.widths
        if self._target is None:
            self._target = target
            self._cases = self._fitting(target, self._prompts)
        if not self._cases and max(widths) == 1:
            raise InvalidPromptError(f"none of the {len(self._prompts)} prompts fits the model")
        if len(self._cases) < min(widths):
            raise InvalidPromptError(
                f"{min(widths)} in parallel need as many prompts, but of {len(self._prompts)} only "
                f"{len(self._cases)} fit the model, with room for the output"
            )
        if parallel not in self._groups:
            self._groups[parallel] = grouped(self._cases, parallel)
        return self._groups[parallel]

    def _fitting(self, target: Target, prompts: Iterable[Prompt]) -> list[BenchPrompt]:
        """Return the prompts that can be measured; a batch needs room for the whole output."""
        cases, wanted = fitting(self._language_model, target, prompts), self._options.max_new_tokens
        if max(self._options.widths) == 1:
            return cases
        return [each for each in cases if target.room(len(each.token_ids), wanted) == wanted]

    def _warm_up(self, lineup: Lineup, heat: Heat) -> dict[str, int]:
        """Let drafting contenders answer the warm-up prompts, and let all contenders decode once.

        Returns:
            The number of warm-up prompts, the number of tokens in one contender's answers, and the
            number of prompts that were left out because they are measured.
        """
        parallel, measured = heat.parallel, {(p.text.strip(), p.turns) for p in self._prompts}
        others = [p for p in self._options.warm if (p.text.strip(), p.turns) not in measured]
        cases = self._fitting(lineup.target, others)[: self._options.warm_limit]
        warming = [case.token_ids for case in cases]
        parts = [warming[at : at + parallel] for at in range(0, len(warming), parallel)]
        num_tokens = 0
        for part in self._shown(parts, f"{self._where}, warm-up", heat.unit):
            runs = [way(part, parallel, remember=True) for way in lineup.drafting.values()]
            num_tokens += len(runs[-1].token_ids) if runs else 0
        short = [self._language_model.encode(WARM_UP_TEXT)] * parallel
        # Drafting contenders get a short text, as they have already answered the warm-up prompts.
        for name, way in lineup.ways.items():
            prompts = short if name in lineup.drafting else [*warming, *short][:parallel]
            way(prompts, parallel, remember=False)
        return {
            "num_prompts": len(warming),
            "num_tokens": num_tokens,
            "left_out_as_measured": len(self._options.warm) - len(others),
        }

    def _turns(
        self, lineup: Lineup, group: Group, parallel: int, number: int
    ) -> Iterator[Comparison]:
        """Decode a group with all contenders, then the user's next messages after the plain answer.

        All contenders get the same prompts: the conversation continues with the answer of the
        contender that all outputs are compared with.
        """
        model = self._language_model
        while group:
            prompts = [case.token_ids for case in group]
            ways = {
                name: partial(way, prompts, parallel, remember=True)
                for name, way in lineup.ways.items()
            }
            runs = in_turn(ways, number)
            category = group[0].category if len(group) == 1 else ""
            yield Comparison(category, runs, asked=prompts)
            if not self._goes_on(group):
                return
            answer = runs[reference_of(runs)].token_ids
            said = str(model.tokenizer.decode(answer, skip_special_tokens=True))
            group = fitting(model, lineup.target, [group[0].prompt.answered(said)])
            number += 1

    def _goes_on(self, group: Group) -> bool:
        return self._options.both_turns and len(group) == 1 and bool(group[0].prompt.later)

    def _shown(
        self,
        cases: Sequence[Case],
        stage: str,
        unit: str,
        standing: Callable[[], str] = lambda: "",
    ) -> Iterator[Case]:
        """Yield prompts or groups, and report how many are done and the current figures."""

        def tell(number: int) -> None:
            done = f"{number} of {counted(len(cases), unit)}"
            self._watcher(stage, number / len(cases), ", ".join(filter(None, (done, standing()))))

        for number, case in enumerate(cases):
            tell(number)
            yield case
        if cases:
            tell(len(cases))

    def _decode_alone(self) -> None:
        """Decode each prompt alone without drafts, unless its output is known or measured."""
        greedy = self._greedy()
        measured = {
            tuple(prompt): output
            for width, each in greedy
            if width == 1 and PLAIN in each.runs
            for prompt, output in zip(each.asked, each.runs[PLAIN].outputs, strict=True)
        }
        alone = measured | self._known
        wanted = dict.fromkeys(tuple(prompt) for _, each in greedy for prompt in each.asked)
        self._plain = {prompt: alone[prompt] for prompt in wanted if prompt in alone}
        missing = [prompt for prompt in wanted if prompt not in alone]
        if missing and self._target is not None:
            self._where, self._found = "plain outputs, one prompt at a time", None
            plain = LibraryContender(
                self._language_model, self._target, self._options.max_new_tokens
            )
            for prompt in self._shown(missing, self._where, "prompt"):
                self._plain[prompt] = plain([list(prompt)], remember=False).token_ids

    @property
    def _is_exact(self) -> bool:
        """Whether outputs are compared, in a precision in which rounding can change only ties."""
        dtype = next(self._language_model.model.parameters()).dtype
        return self._options.is_judged and dtype in {torch.float32, torch.float64}

    def _greedy(self) -> list[tuple[int, Comparison]]:
        """Return all comparisons without sampling, of every round, with their widths."""
        return [
            (heat.parallel, comparison)
            for heat, rounds in self._rounds.items()
            if heat.setting.temperature == 0
            for each in rounds
            for comparison in each.comparisons
        ]

    def _counted(self) -> dict[Heat, list[Round]]:
        """Return the rounds that count: the complete rounds; if there are none, the first."""
        chosen = {
            heat: [each for each in rounds if each.is_whole] or rounds[:1]
            for heat, rounds in self._rounds.items()
        }
        return {heat: rounds for heat, rounds in chosen.items() if rounds[0].comparisons}

    def _under(
        self, setting: Setting, seeds: Sequence[Setting], rounds: dict[Heat, list[Round]]
    ) -> dict[str, Any]:
        """Return all figures of a setting, over its seeds."""
        heats = [heat for heat in rounds if heat.setting in seeds]
        names = rounds[heats[0]][0].comparisons[0].runs
        reference = reference_of(names, is_greedy=setting.temperature == 0)
        return {
            "nodes": setting.nodes,
            "temperature": setting.temperature,
            "num_seeds": len(seeds),
            "reference": reference,
            "widths": [
                self._at_width(members, rounds, reference)
                for width in self._options.widths
                if (members := [heat for heat in heats if heat.parallel == width])
            ],
        }

    def _at_width(
        self, heats: Sequence[Heat], rounds: dict[Heat, list[Round]], reference: str
    ) -> dict[str, Any]:
        """Return all contenders' figures for a setting and a width, over its seeds."""
        comparisons = [each for heat in heats for each in _fastest(rounds[heat])]
        decoded = [
            each for heat in heats for found in self._rounds[heat] for each in found.comparisons
        ]
        compared_with = reference if not self._options.is_judged else self._judged_by(heats[0])
        known = [
            (each, expected)
            for each in decoded
            if (expected := self._expected(compared_with, each))
        ]
        figures = standings(comparisons, reference)
        _count_identical(figures, known)
        for name, of_category in figures["categories"].items():
            found = [pair for pair in known if column_of(pair[0].category) == name]
            _count_identical(of_category, found)
        return {
            "parallel": heats[0].parallel,
            "num_prompts": sum({each.group: len(each.asked) for each in comparisons}.values()),
            "compared_with": compared_with if known else None,
            **figures,
        }

    def _judged_by(self, heat: Heat) -> str:
        """Return the contender to compare with: our own loop if rounding changes outputs."""
        return ONE_BY_ONE if self._is_exact and heat.setting.temperature == 0 else UNDRAFTED

    def _expected(self, compared_with: str, each: Comparison) -> list[list[int]]:
        """Return a group's expected outputs; empty if unknown."""
        if compared_with != ONE_BY_ONE:
            return each.runs[compared_with].outputs if compared_with in each.runs else []
        prompts = [tuple(prompt) for prompt in each.asked]
        is_known = all(prompt in self._plain for prompt in prompts)  # unknown after an interruption
        return [self._plain[prompt] for prompt in prompts] if is_known else []

    def _interruption(self, num_units: int) -> dict[str, Any]:
        """Return where the benchmark was interrupted, if it was."""
        if self._is_over:
            return {"interrupted": False}
        found = self._found
        rounds = [each for members in self._counted().values() for each in members]
        at = {
            "where": self._where,
            "unit": self._unit,
            "done": 0 if found is None else found.num_done,
            "of": num_units if found is None else len(found.turns),
            "counted": any(each is found for each in rounds),
        }
        return {"interrupted": True, "interrupted_at": at}


def grouped(cases: Sequence[BenchPrompt], parallel: int) -> list[Group]:
    """Return prompts in groups that fill all places; leftover prompts are dropped.

    A group has twice as many prompts as are decoded in parallel, if that leaves enough groups;
    otherwise it has just as many. If prompts are decoded one by one, each prompt is a group.
    """
    size = parallel * _ROUNDS
    if parallel == 1 or len(cases) // size < _FEW_GROUPS:
        size = parallel
    return [cases[start : start + size] for start in range(0, len(cases) - size + 1, size)]


def _count_identical(
    figures: dict[str, Any], known: Sequence[tuple[Comparison, list[list[int]]]]
) -> None:
    """Add the number of known outputs, and how many of each contender's outputs equal them."""
    figures["num_answers"] = sum(len(expected) for _, expected in known)
    for name, each in figures["contenders"].items():
        same = (
            output == other
            for comparison, expected in known
            for output, other in zip(comparison.runs[name].outputs, expected, strict=True)
        )
        each["identical"] = sum(same) if known else None


def reference_of(names: Iterable[str], *, is_greedy: bool = True) -> str:
    """Return the baseline for speed-up and outputs.

    With sampling, this is our own loop without drafts. It uses the same random numbers as our other
    contenders; transformers uses different ones.
    """
    order = (PLAIN, UNDRAFTED) if is_greedy else (UNDRAFTED, PLAIN)
    given = list(names)
    return next((name for name in order if name in given), given[0])


def _standing(comparisons: Sequence[Comparison]) -> str:
    """Return the last contender's pace so far; empty before the first group is done."""
    if not comparisons:
        return ""
    name = list(comparisons[0].runs)[-1]
    accounts = [comparison.runs[name].account for comparison in comparisons]
    seconds, tokens, steps, step_tokens = (sum(part) for part in zip(*accounts, strict=True))
    words = [f"{step_tokens / steps:.2f} tokens a pass"] if steps else []
    return f"{name} " + ", ".join([*words, f"{tokens / seconds:.1f} tokens/s"])


def fitting(
    language_model: LanguageModel, target: Target, prompts: Iterable[Prompt]
) -> list[BenchPrompt]:
    """Return the prompts that fit the model, as tokens."""
    cases = []
    for prompt in prompts:
        # A log may contain turns that this chat template refuses, such as tool turns.
        with suppress(InvalidPromptError, *((TokenizerError,) if prompt.turns else ())):
            tokens = target.checked_prompt(prompt.encoded(language_model)).tolist()
            cases.append(BenchPrompt(prompt.category, tokens, prompt))
    return cases


def circumstances(language_model: LanguageModel) -> dict[str, Any]:
    """Return the circumstances of figures: date, model, dtype, versions and machine."""
    parameter = next(language_model.model.parameters())
    return {
        "date": datetime.now(UTC).date().isoformat(),
        "model": language_model.name,
        "dtype": str(parameter.dtype).removeprefix("torch."),
        "device": str(parameter.device),
        "versions": versions(),
        "machine": describe_machine(),
    }


def fastest(rounds: Sequence[Comparison]) -> Comparison:
    """Merge several rounds of a group into one, with each contender's fastest run."""
    names, first = rounds[0].runs, rounds[0]
    runs = {
        name: min((r.runs[name] for r in rounds), key=lambda run: run.seconds) for name in names
    }
    return replace(first, runs=runs)


def _fastest(rounds: Sequence[Round]) -> list[Comparison]:
    return [fastest(same) for same in zip(*(each.comparisons for each in rounds), strict=True)]


def in_turn(ways: Mapping[str, Callable[[], Run]], number: int) -> dict[str, Run]:
    """Run all contenders in an order that rotates with `number`; return runs in the given order."""
    names = list(ways)
    first = number % len(names)
    runs = {name: ways[name]() for name in (*names[first:], *names[:first])}
    return {name: runs[name] for name in names}


def pooled(settings: Iterable[Setting]) -> dict[Setting, list[Setting]]:
    """Group settings that differ only in their seed."""
    pooled: dict[Setting, list[Setting]] = {}
    for setting in settings:
        pooled.setdefault(replace(setting, seed=0), []).append(setting)
    return pooled


def _below_one(settings: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the ratios at which our contenders are slower than plain or undrafted decoding."""
    return [
        {
            "nodes": setting["nodes"],
            "temperature": setting["temperature"],
            "parallel": width["parallel"],
            "contender": name,
            "over": base,
            "ratio": ratio,
        }
        for setting in settings
        for width in setting["widths"]
        for name, figures in width["contenders"].items()
        if name not in THEIRS
        for base, ratio in figures["over"].items()
        if ratio[0] < 1
    ]


def _curve(surface: CostSurface | None) -> dict[str, dict[str, float]]:
    """Return measured seconds by context and width; empty if not measured."""
    if surface is None:
        return {}
    return {
        str(context): {str(width): s for width, s in zip(surface.widths, row, strict=True)}
        for context, row in zip(surface.contexts, surface.seconds, strict=True)
    }
