"""Measuring ways of decoding side by side where many prompts are decoded in parallel."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

import torch

from decoder.commands.bench import (
    WARM_UP_TEXT,
    Benchmark,
    BenchOptions,
    BenchPrompt,
    Heat,
    Opened,
    Place,
    fastest,
    in_turn,
    pooled,
    unwatched,
    warmed,
)
from decoder.commands.plain_comparison import Outputs, differences
from decoder.commands.prompts import Prompt
from decoder.contenders.contender import (
    PLAIN,
    UNDRAFTED,
    LibraryContender,
    ParallelContender,
    Run,
)
from decoder.contenders.registry import Lineup, Setting
from decoder.contenders.standings import Comparison, parallel_standings
from decoder.errors import ContradictoryOptionsError, InvalidPromptError
from decoder.model.pretrained import LanguageModel
from decoder.model.target import Target
from decoder.observation import Watcher

_ROUNDS: Final = 2
"""Prompts of a group for each place: so places are filled again, as where requests keep coming."""

_FEW_GROUPS: Final = 4
"""Of fewer there is no interval worth its name: a group then has one prompt for each place."""

ONE_BY_ONE: Final = "model.generate, one prompt at a time"
"""What outputs are compared with where they are to be the same."""


@dataclass(frozen=True, slots=True)
class Group:
    """Prompts that all contenders decode in turn.

    Attributes:
        numbers: of the prompts, in their order among those that can be measured.
        prompts: their tokens.
    """

    numbers: Sequence[int]
    prompts: Sequence[list[int]]


class ParallelBenchmark(Benchmark):
    """Compares contenders at several widths, each with so many prompts in parallel.

    Prompts come in groups, which all contenders decode in turn; a ratio of a group is of the same
    minute. For each width drafters begin having seen nothing, and answer the prompts to warm with
    at that width. In float32 and greedily, every output is compared with that of `model.generate`
    for the prompt alone, at the end.

    Args:
        language_model: the model of all contenders.
        opened: gives the contenders, all of which take many prompts.
        prompts: what to decode.
        options: how; of questions with several turns the first is asked.
        watcher: is told of the progress.
        plain: what `model.generate` writes for prompts alone, by their tokens, where that is known.
    """

    _unit = "group"

    def __init__(
        self,
        language_model: LanguageModel,
        opened: Opened,
        prompts: Sequence[Prompt],
        options: BenchOptions,
        watcher: Watcher = unwatched,
        plain: Mapping[tuple[int, ...], list[int]] | None = None,
    ) -> None:
        super().__init__(language_model, opened, prompts, options, watcher)
        self._known = dict(plain or {})
        self._target: Target | None = None
        self._cases: list[BenchPrompt] = []
        self._groups: dict[int, list[Group]] = {}
        self._plain: dict[int, list[int]] = {}  # outputs of prompts by their number

    def report(self) -> dict[str, Any]:
        """Return what was measured until now, of at least one group.

        Returns:
            Values for JSON: `settings`, each with its `widths`, and of those the figures of
            `parallel_standings`, with `num_answers` and, by contender, how many are `identical` to
            those of `compared_with`; `below_one`, the ratios in which a contender of ours loses;
            `exactness`, where outputs are to be the same: where they differ and by how much; and
            what they depend on, as in `Benchmark.report`. `left_out` are widths for which there
            were too few prompts.
        """
        rounds = self._counted()
        first = next(iter(rounds.values()))[0]
        settings = [
            {
                "nodes": setting.nodes,
                "temperature": setting.temperature,
                "num_seeds": len(members),
                "widths": [
                    self._figures(heats, rounds)
                    for parallel in self._options.parallel
                    if (heats := [heat for heat in rounds if _is_of(heat, members, parallel)])
                ],
            }
            for setting, members in pooled(dict.fromkeys(heat.setting for heat in rounds)).items()
        ]
        return {
            "settings": settings,
            "below_one": _below_one(settings),
            "exactness": self._exactness(),
            "left_out": [n for n in self._options.parallel if self._groups.get(n) == []],
            "skipped": first.num_refused,
            **self._circumstances(first),
        }

    def _heats(self) -> list[Heat]:
        return [
            Heat(setting, parallel)
            for setting in self._options.settings
            for parallel in self._options.parallel
        ]

    def _fitting(self, target: Target, prompts: Iterable[Prompt]) -> list[BenchPrompt]:
        """Return prompts that leave room for a whole answer: a batch ends at the same length."""
        wanted = self._options.max_new_tokens
        cases = super()._fitting(target, prompts)
        return [each for each in cases if target.room(len(each.token_ids), wanted) == wanted]

    def _go_through(self, lineup: Lineup, place: Place) -> None:
        """Go through all groups once, each decoded in every way."""
        groups = self._groups_of(lineup, place)
        if not groups:
            return
        parallel, ways = place.heat.parallel or 1, _taking_many(lineup)
        self._prepare(lineup.target, self._cases, place)
        warm = self._warm_up(lineup, place)
        refused = len(self._prompts) - len(self._cases)
        found = self._begun(place, [1] * len(groups), refused, warm, lineup.surface)
        shown = self._shown(groups, f"{place}, measuring", lambda: _standing(found), self._unit)
        for number, group in enumerate(shown):
            decoding = _decoding(ways, group.prompts, parallel, remember=True)
            runs = in_turn(decoding, place.round - 1 + number)
            found.comparisons.append(Comparison("", runs, number))

    def _groups_of(self, lineup: Lineup, place: Place) -> list[Group]:
        """Return the groups of a width, none where there are too few prompts.

        Raises:
            InvalidPromptError: there are too few for every width.
        """
        if self._target is None:
            self._target = lineup.target
            self._cases = self._fitting(lineup.target, self._prompts)
        if len(self._cases) < min(self._options.parallel):
            raise InvalidPromptError(
                f"{min(self._options.parallel)} in parallel need as many prompts: of "
                f"{len(self._prompts)} the model takes {len(self._cases)}, with room for the output"
            )
        parallel = place.heat.parallel or 1
        if parallel not in self._groups:
            self._groups[parallel] = grouped([each.token_ids for each in self._cases], parallel)
        return self._groups[parallel]

    def _warm_up(self, lineup: Lineup, place: Place) -> dict[str, int]:
        """Have all that draft answer prompts that are not measured, and all decode at the width."""
        parallel, ways = place.heat.parallel or 1, _taking_many(lineup)
        cases, left_out = self._warming(lineup.target)
        tokens = [case.token_ids for case in cases]
        parts = [tokens[at : at + parallel] for at in range(0, len(tokens), parallel)]
        drafting = {name: way for name, way in ways.items() if name in lineup.drafting}
        num_tokens = 0
        for part in self._shown(parts, f"{place}, warm-up", unit=self._unit):
            runs = [run() for run in _decoding(drafting, part, parallel, remember=True).values()]
            num_tokens += len(runs[-1].token_ids) if runs else 0
        text = self._language_model.encode(WARM_UP_TEXT)
        filled = [*tokens, *[text] * parallel][:parallel]
        # Prompts to warm with are not for those that draft: they have answered them already.
        for name, way in ways.items():
            prompts = [text] * parallel if name in drafting else filled
            way.decode_many(prompts, parallel, remember=False)
        return warmed(cases, num_tokens, left_out)

    def _finish(self) -> None:
        """Have each prompt alone decoded plainly, where outputs are to be the same."""
        if not self._is_exact:
            return
        alone = self._measured_alone()
        wanted = {
            number
            for heat, rounds in self._rounds.items()
            if heat.setting.temperature == 0 and any(each.comparisons for each in rounds)
            for group in self._groups[heat.parallel or 1]
            for number in group.numbers
        }
        self._plain = {number: alone[number] for number in wanted & alone.keys()}
        missing = sorted(wanted - alone.keys())
        if missing and self._target is not None:
            self._where, self._found = "plain outputs, one prompt at a time", None
            plain = LibraryContender(
                self._language_model, self._target, self._options.max_new_tokens
            )
            for number in self._shown(missing, self._where):
                run = plain(self._cases[number].token_ids, remember=False)
                self._plain[number] = run.token_ids

    def _measured_alone(self) -> dict[int, list[int]]:
        """Return what plain generation wrote for prompts, where that is known or was measured."""
        measured = {
            number: output
            for heat, numbers, runs in self._decoded()
            if heat.parallel == 1 and heat.setting.temperature == 0 and PLAIN in runs
            for number, output in zip(numbers, runs[PLAIN].outputs, strict=True)
        }
        return measured | {
            number: self._known[tokens]
            for number, case in enumerate(self._cases)
            if (tokens := tuple(case.token_ids)) in self._known
        }

    @property
    def _is_exact(self) -> bool:
        """Whether rounding leaves all but ties as they are."""
        dtype = next(self._language_model.model.parameters()).dtype
        return dtype in {torch.float32, torch.float64}

    def _decoded(self) -> Iterator[tuple[Heat, Sequence[int], dict[str, Run]]]:
        """Yield what contenders did with each group, in every round, and the prompts' numbers."""
        for heat, rounds in self._rounds.items():
            groups = self._groups[heat.parallel or 1]
            for each in rounds:
                for comparison in each.comparisons:
                    yield heat, groups[comparison.prompt].numbers, comparison.runs

    def _figures(self, heats: Sequence[Heat], rounds: dict[Heat, Any]) -> dict[str, Any]:
        """Return all contenders' figures at a width, over seeds."""
        comparisons = [each for heat in heats for each in fastest(rounds[heat])]
        parallel = heats[0].parallel or 1
        groups = self._groups[parallel]
        standings = parallel_standings(comparisons)
        compared_with, num_answers, identical = self._identical(heats)
        for name, figures in standings["contenders"].items():
            figures["identical"] = None if identical is None else identical[name]
        measured = {each.prompt for each in comparisons}
        return {
            "parallel": parallel,
            "num_prompts": sum(len(groups[number].numbers) for number in measured),
            "num_answers": num_answers,
            "compared_with": compared_with,
            **standings,
        }

    def _identical(self, heats: Sequence[Heat]) -> tuple[str | None, int, dict[str, int] | None]:
        """Return what outputs of a width are compared with, how many, and how many are the same."""
        found = [(numbers, runs) for heat, numbers, runs in self._decoded() if heat in heats]
        counts = dict.fromkeys(found[0][1], 0)
        is_alone = self._is_exact and heats[0].setting.temperature == 0
        if not is_alone and UNDRAFTED not in counts:
            return None, 0, None
        num_answers = 0
        for numbers, runs in found:
            if is_alone and not all(number in self._plain for number in numbers):
                continue  # interrupted before
            expected = (
                [self._plain[number] for number in numbers] if is_alone else runs[UNDRAFTED].outputs
            )
            num_answers += len(expected)
            for name, run in runs.items():
                same = zip(run.outputs, expected, strict=True)
                counts[name] += sum(output == other for output, other in same)
        if not num_answers:
            return None, 0, None
        return ONE_BY_ONE if is_alone else UNDRAFTED, num_answers, counts

    def _exactness(self) -> dict[str, Any] | None:
        """Return where greedy outputs are not those of each prompt alone; `None` if rounded."""
        if not self._is_exact or not self._plain:
            return None
        seen: dict[tuple[int, int, str, tuple[int, ...]], Outputs] = {}
        num_answers = 0
        for heat, numbers, runs in self._decoded():
            if heat.setting.temperature:
                continue
            for name, run in runs.items():
                for number, output in zip(numbers, run.outputs, strict=True):
                    if number not in self._plain:
                        continue
                    num_answers += 1
                    if output != self._plain[number]:
                        pair = Outputs(self._cases[number].token_ids, self._plain[number], output)
                        seen[number, heat.parallel or 1, name, tuple(output)] = pair
        parted = differences(self._language_model, seen.values())
        return {
            "compared_with": ONE_BY_ONE,
            "num_answers": num_answers,
            "num_prompts": len(self._plain),
            "different": [
                {"prompt": number, "parallel": parallel, "contender": name, **found.as_json()}
                for (number, parallel, name, _), found in zip(seen, parted, strict=True)
                if found is not None
            ],
        }


def grouped(prompts: Sequence[list[int]], parallel: int) -> list[Group]:
    """Return prompts in groups that fill all places; those that are left over are left out.

    A group has twice as many prompts as are decoded in parallel where that leaves some groups, else
    as many.
    """
    size = parallel * _ROUNDS
    if len(prompts) // size < _FEW_GROUPS:
        size = parallel
    return [
        Group(range(start, start + size), prompts[start : start + size])
        for start in range(0, len(prompts) - size + 1, size)
    ]


def wrong_outputs(report: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the outputs of our own in a report that are wrong: not even a tie explains them."""
    different = (report["exactness"] or {"different": []})["different"]
    return [each for each in different if not each["is_tie"] and each["contender"] != PLAIN]


def _taking_many(lineup: Lineup) -> dict[str, ParallelContender]:
    """Return the contenders of a line-up, all of which take several prompts at a time.

    Raises:
        ContradictoryOptionsError: one does not.
    """
    ways: dict[str, ParallelContender] = {}
    for name, way in lineup.ways.items():
        if not isinstance(way, ParallelContender):
            raise ContradictoryOptionsError(f"{name} decodes one prompt at a time")
        ways[name] = way
    return ways


def _decoding(
    ways: dict[str, ParallelContender],
    prompts: Sequence[list[int]],
    parallel: int,
    *,
    remember: bool,
) -> dict[str, Callable[[], Run]]:
    return {
        name: partial(way.decode_many, prompts, parallel, remember=remember)
        for name, way in ways.items()
    }


def _is_of(heat: Heat, settings: Sequence[Setting], parallel: int) -> bool:
    """Return whether a heat is one of some settings, which are counted together, at a width."""
    return heat.parallel == parallel and heat.setting in settings


def _standing(found: Any) -> str:
    """Return the last contender's tokens per second so far; nothing before the first."""
    if not found.comparisons:
        return ""
    name = list(found.comparisons[0].runs)[-1]
    runs = [comparison.runs[name] for comparison in found.comparisons]
    pace = sum(len(run.token_ids) for run in runs) / sum(run.seconds for run in runs)
    return f"{name} {pace:.1f} tokens/s"


def _below_one(settings: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return where ours are slower than plain batches or than decoding without drafts."""
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
        if name != PLAIN
        for base, ratio in figures["over"].items()
        if ratio[0] < 1
    ]
