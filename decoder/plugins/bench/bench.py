"""Measuring ways of decoding side by side, on the same prompts in one run."""

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
"""Prompts of a group for each place: so places are filled again, as where requests keep coming."""

_FEW_GROUPS: Final = 4
"""Of fewer there is no interval worth its name: a group then has one prompt for each place."""

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


Group = Sequence[BenchPrompt]
"""Prompts that all contenders decode in turn."""

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
        both_turns: whether what the user says next is asked, too, behind the plain answer, of
            prompts that are decoded one by one.
        settings: under what contenders meet; those that differ in their seed are counted together.
        widths: how many prompts at a time; each is measured by itself.
        is_judged: whether outputs are to be compared with those of `model.generate` for each prompt
            alone, at the end, where rounding leaves them the same: in float32 and greedily.
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
    """What is measured by itself, in rounds of its own.

    Attributes:
        setting: under what contenders meet.
        parallel: how many prompts at a time.
    """

    setting: Setting
    parallel: int = 1

    @property
    def unit(self) -> str:
        """What all contenders decode in turn."""
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
    """What came of one heat, once through all groups of prompts, or as far as it got.

    Attributes:
        turns: of each group, in the order in which they are decoded.
        num_refused: the prompts that the model cannot take.
        warm: how many prompts were answered before, with how many tokens.
        surface: what passes cost; `None` where that was not measured.
        comparisons: one for each turn of the groups that are done, which are the first ones.
    """

    turns: Sequence[int]
    num_refused: int
    warm: dict[str, int]
    surface: CostSurface | None
    comparisons: list[Comparison] = field(default_factory=list)

    @property
    def num_done(self) -> int:
        """Groups that every contender has decoded."""
        return len({comparison.group for comparison in self.comparisons})

    @property
    def is_whole(self) -> bool:
        """Whether all of them are."""
        return self.num_done == len(self.turns)

    @property
    def skipped(self) -> int:
        """Prompts that the model cannot take, and further turns of those that are done."""
        return self.num_refused + sum(self.turns[: self.num_done]) - len(self.comparisons)


def unwatched(_stage: str, _over: float, _told: str, /) -> None:
    """Show nothing; see `Watcher`."""


class Benchmark:
    """Compares contenders under each setting and at each width, and reports the circumstances.

    Prompts come in groups, which all contenders decode in turn, so that a ratio of a group is of
    the same minute: one prompt where they are decoded one by one, else enough to fill all places.
    Drafters are kept from group to group, as in use: they may draft from their outputs for earlier
    ones.

    Args:
        language_model: the model of all contenders.
        opened: gives the contenders.
        prompts: what to decode.
        options: how.
        watcher: is told of the progress.
        plain: what `model.generate` writes for prompts alone, by their tokens, where that is known.
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
        self._plain: dict[tuple[int, ...], list[int]] = {}  # of prompts alone, by their tokens
        self._where, self._unit = "", ""
        self._found: Round | None = None  # of the round that is under way
        self._is_over = False

    @property
    def has_measured(self) -> bool:
        """Whether there is anything to report."""
        return any(each.comparisons for rounds in self._rounds.values() for each in rounds)

    def run(self) -> None:
        """Go through all prompts in each round of each setting and width.

        What was measured before an exception, as of Ctrl-C, can be reported.

        Raises:
            InvalidPromptError: the model takes too few of the prompts for every width.
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
        """Return what was measured until now, of at least one group.

        Of a setting and width whose rounds were all interrupted, the groups count that were done;
        of others, whole rounds.

        Returns:
            Values for JSON. `settings` has each with its `widths`: the figures of `standings`, how
            many prompts and groups there were, and of `num_answers`, those of all rounds, how many
            of each contender are `identical` to those of `compared_with`. `below_one` are ratios in
            which a contender of ours loses; `exactness` says where outputs that are to be the same
            differ, and by how much; `left_out` are widths for which there were too few prompts.
            `overall` and `categories` are our own decoder's figures under the first setting, where
            the default contenders are measured. `skipped` counts the prompts that the model cannot
            take. Where not all was measured, `interrupted` is true and `interrupted_at` has the
            round that was under way: `where`, in words, how many of a `unit` were `done` `of` how
            many, and whether these are `counted`. The rest is what figures depend on.
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
        """Go through all groups once: answer what to warm with, then decode each in every way."""
        groups = self._groups_of(lineup.target, heat.parallel)
        if not groups:
            return
        if lineup.target.pads_passes:  # captured before any is timed, on a device where they are
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
            # All turns of a prompt at once: an interruption leaves it whole or out.
            found.comparisons.extend([replace(each, group=number) for each in answered])

    def _groups_of(self, target: Target, parallel: int) -> list[Group]:
        """Return the groups of a width, none where there are too few prompts.

        Raises:
            InvalidPromptError: there are too few for every width.
        """
        widths = self._options.widths
        if self._target is None:
            self._target = target
            self._cases = self._fitting(target, self._prompts)
        if not self._cases and max(widths) == 1:
            raise InvalidPromptError(f"the model can take none of the {len(self._prompts)} prompts")
        if len(self._cases) < min(widths):
            raise InvalidPromptError(
                f"{min(widths)} in parallel need as many prompts: of {len(self._prompts)} the "
                f"model takes {len(self._cases)}, with room for the output"
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
        """Have all that draft answer prompts that are not measured, and all decode once.

        Returns:
            How many prompts, and the tokens of one contender's answers.
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
        # Prompts to warm with are not for those that draft: they have answered them already.
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
        """Decode a group in every way, and what the user says next behind the plain answer.

        All contenders are asked the same: the conversation goes on from the answer of the one that
        outputs are compared with.
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
        """Pass prompts or groups through, and tell how many are done and how it stands."""

        def tell(number: int) -> None:
            done = f"{number} of {counted(len(cases), unit)}"
            self._watcher(stage, number / len(cases), ", ".join(filter(None, (done, standing()))))

        for number, case in enumerate(cases):
            tell(number)
            yield case
        if cases:
            tell(len(cases))

    def _decode_alone(self) -> None:
        """Have each prompt alone decoded plainly, where that is not known or measured."""
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
        """Whether outputs are judged, and rounding leaves all but ties as they are."""
        dtype = next(self._language_model.model.parameters()).dtype
        return self._options.is_judged and dtype in {torch.float32, torch.float64}

    def _greedy(self) -> list[tuple[int, Comparison]]:
        """Return all that was decoded without sampling, in every round, with its width."""
        return [
            (heat.parallel, comparison)
            for heat, rounds in self._rounds.items()
            if heat.setting.temperature == 0
            for each in rounds
            for comparison in each.comparisons
        ]

    def _counted(self) -> dict[Heat, list[Round]]:
        """Return the rounds that count: whole ones, or what there is where none is whole."""
        chosen = {
            heat: [each for each in rounds if each.is_whole] or rounds[:1]
            for heat, rounds in self._rounds.items()
        }
        return {heat: rounds for heat, rounds in chosen.items() if rounds[0].comparisons}

    def _under(
        self, setting: Setting, seeds: Sequence[Setting], rounds: dict[Heat, list[Round]]
    ) -> dict[str, Any]:
        """Return all figures under a setting, over its seeds."""
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
        """Return all contenders' figures under a setting at a width, over its seeds."""
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
        """Return what outputs are compared with: our own loop, where rounding changes them."""
        return ONE_BY_ONE if self._is_exact and heat.setting.temperature == 0 else UNDRAFTED

    def _expected(self, compared_with: str, each: Comparison) -> list[list[int]]:
        """Return what a group's outputs are to be; empty where that is not known."""
        if compared_with != ONE_BY_ONE:
            return each.runs[compared_with].outputs if compared_with in each.runs else []
        prompts = [tuple(prompt) for prompt in each.asked]
        is_known = all(prompt in self._plain for prompt in prompts)  # or interrupted before
        return [self._plain[prompt] for prompt in prompts] if is_known else []

    def _interruption(self, num_units: int) -> dict[str, Any]:
        """Return where not all was measured, if that is so."""
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
    """Return prompts in groups that fill all places; those that are left over are left out.

    A group has twice as many prompts as are decoded in parallel where that leaves some groups, else
    as many; of those that are decoded one by one, each is a group.
    """
    size = parallel * _ROUNDS
    if parallel == 1 or len(cases) // size < _FEW_GROUPS:
        size = parallel
    return [cases[start : start + size] for start in range(0, len(cases) - size + 1, size)]


def _count_identical(
    figures: dict[str, Any], known: Sequence[tuple[Comparison, list[list[int]]]]
) -> None:
    """Add to figures how many outputs are known, and how many of each contender are the same."""
    figures["num_answers"] = sum(len(expected) for _, expected in known)
    for name, each in figures["contenders"].items():
        same = (
            output == other
            for comparison, expected in known
            for output, other in zip(comparison.runs[name].outputs, expected, strict=True)
        )
        each["identical"] = sum(same) if known else None


def reference_of(names: Iterable[str], *, is_greedy: bool = True) -> str:
    """Return the contender that speed-up is over and outputs are compared with.

    Where tokens are sampled, that is our own loop without drafts: it draws with the same numbers
    as all of ours do, and transformers with others.
    """
    order = (PLAIN, UNDRAFTED) if is_greedy else (UNDRAFTED, PLAIN)
    given = list(names)
    return next((name for name in order if name in given), given[0])


def _standing(comparisons: Sequence[Comparison]) -> str:
    """Return the last contender's pace so far; nothing before the first group is done."""
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
    """Return the prompts that the model can take, as tokens."""
    cases = []
    for prompt in prompts:
        # A log may hold turns that this template refuses, such as a tool's.
        with suppress(InvalidPromptError, *((TokenizerError,) if prompt.turns else ())):
            tokens = target.checked_prompt(prompt.encoded(language_model)).tolist()
            cases.append(BenchPrompt(prompt.category, tokens, prompt))
    return cases


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


def fastest(rounds: Sequence[Comparison]) -> Comparison:
    """Return what several rounds made of a group as one, of each contender's fastest runs."""
    names, first = rounds[0].runs, rounds[0]
    runs = {
        name: min((r.runs[name] for r in rounds), key=lambda run: run.seconds) for name in names
    }
    return replace(first, runs=runs)


def _fastest(rounds: Sequence[Round]) -> list[Comparison]:
    return [fastest(same) for same in zip(*(each.comparisons for each in rounds), strict=True)]


def in_turn(ways: Mapping[str, Callable[[], Run]], number: int) -> dict[str, Run]:
    """Run all ways, in an order that rotates with the number; return runs in their own order."""
    names = list(ways)
    first = number % len(names)
    runs = {name: ways[name]() for name in (*names[first:], *names[:first])}
    return {name: runs[name] for name in names}


def pooled(settings: Iterable[Setting]) -> dict[Setting, list[Setting]]:
    """Return settings that differ in their seed under one of them."""
    pooled: dict[Setting, list[Setting]] = {}
    for setting in settings:
        pooled.setdefault(replace(setting, seed=0), []).append(setting)
    return pooled


def _below_one(settings: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return where ours are slower than plain generation or than decoding without drafts."""
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
    """Return seconds by context and width, as measured; nothing where they were not."""
    if surface is None:
        return {}
    return {
        str(context): {str(width): s for width, s in zip(surface.widths, row, strict=True)}
        for context, row in zip(surface.contexts, surface.seconds, strict=True)
    }
