"""Benchmarks, one by one and in parallel: what is compared and what is reported."""

import json
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import ArrayLike

from decoder.assembly import assemble
from decoder.commands.prompts import Prompt
from decoder.drafters.options import DraftOptions
from decoder.errors import InvalidPromptError
from decoder.model import target as target_module
from decoder.model.graphs import Output
from decoder.model.passes import Read, Reading
from decoder.model.pretrained import LanguageModel, ModelOptions, Precision, load_model
from decoder.model.target import Target
from decoder.observation import Statistics, Watcher
from decoder.plugins.bench import exactness
from decoder.plugins.bench.bench import Benchmark, BenchOptions, BenchPrompt, grouped, unwatched
from decoder.plugins.bench.bench_report import (
    conclusions_of,
    draw,
    notes_of,
    rows_of,
    summarize,
    table_of,
    time_per_step,
)
from decoder.plugins.bench.exactness import ONE_BY_ONE, wrong_outputs
from decoder.plugins.contenders.contender import (
    FOREDRAFT,
    PLAIN,
    PROMPT_LOOKUP,
    UNDRAFTED,
    Contender,
    LibraryContender,
    Run,
    contenders,
)
from decoder.plugins.contenders.registry import DEFAULT, Contest, Lineup, Setting
from decoder.plugins.contenders.standings import Comparison
from indexer.reader import Vocabulary
from retriever.drafter import SequenceOptions
from retriever.sessions.embedded import EmbeddedDrafter
from tests.decoder.decoding import tree_of
from tests.decoder.plugins.bench.wrong_answers import flipping

# The command in `test_bench_command` goes through all of it by default.
pytestmark = [pytest.mark.bench, pytest.mark.usefixtures("costs_of_earlier_tests")]

TEXTS = ["abc", "one two one two", "x", "ab ab ab ab", "zzz", "so it goes so it goes", "q", "abc d"]
PROMPTS = [Prompt("a", text) for text in TEXTS]
FOUR = PROMPTS[:4]
THREE = [Prompt("a", "abc"), Prompt("b", "bcd"), Prompt("b", "cde")]
WAYS = (PLAIN, UNDRAFTED, FOREDRAFT)
TWO_NODES = (Setting(4), Setting(8, 0.5, 1))


@pytest.fixture(scope="module")
def rounded(model_directory: Path) -> LanguageModel:
    """In half precision, so that outputs are not compared with what the model would write."""
    return load_model(ModelOptions(str(model_directory), precision=Precision.BFLOAT16))


def report_of(benchmark: Benchmark, *, is_interrupted: bool = False) -> dict[str, Any]:
    """Run a benchmark; return its report as JSON has it."""
    if is_interrupted:
        with pytest.raises(KeyboardInterrupt):
            benchmark.run()
    else:
        benchmark.run()
    report: dict[str, Any] = json.loads(json.dumps(benchmark.report()))
    return {**report, "drafter": "context"}


def measured(
    language_model: LanguageModel,
    widths: Sequence[int] = (1,),
    *,
    names: Sequence[str] = WAYS,
    prompts: Sequence[Prompt] = PROMPTS,
    plain: dict[tuple[int, ...], list[int]] | None = None,
    **options: Any,
) -> dict[str, Any]:
    """Return the report of contenders, whose outputs are judged."""
    contest = Contest(language_model, names, DraftOptions(), 8)
    chosen = BenchOptions(8, widths=widths, is_judged=True, **options)
    return report_of(Benchmark(language_model, contest.opened, prompts, chosen, plain=plain))


REMEMBERED = SequenceOptions()


class Watched(EmbeddedDrafter):
    """Notes which prompts began a sequence, and whether the answer was to be remembered."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        super().__init__(vocabulary=vocabulary)
        self.opened: list[tuple[list[int], bool]] = []

    def open(self, session: str, prompt: ArrayLike, options: SequenceOptions = REMEMBERED) -> None:
        self.opened.append((np.asarray(prompt).tolist(), options.remember))
        super().open(session, prompt, options)


def test_warm_answers_and_repeats_never_show_a_measured_answer(
    language_model: LanguageModel,
) -> None:
    """Each round begins with a drafter that has seen nothing but the answers to warm with."""
    made: list[Watched] = []

    @contextmanager
    def opened(_: Setting) -> Iterator[Lineup]:
        made.append(Watched(language_model.vocabulary))
        decoder = assemble(language_model, made[-1])
        yield Lineup(contenders(language_model, decoder, 6), decoder.target, None)

    prompts = [Prompt("a", "abc"), Prompt("b", "bcd")]
    warm = [Prompt("a", " abc "), Prompt("c", "cde"), Prompt("c", "def"), Prompt("c", "efg")]
    options = BenchOptions(max_new_tokens=6, repeat=3, warm=warm, warm_limit=2)
    report = report_of(Benchmark(language_model, opened, prompts, options))
    assert report["warm"]["num_prompts"] == 2
    assert 2 <= report["warm"]["num_tokens"] <= 12
    assert report["warm"]["left_out_as_measured"] == 1
    expected = [language_model.encode(text) for text in ("cde", "def", "abc", "bcd")]
    assert len(made) == 3
    for drafter in made:
        assert [prompt for prompt, remember in drafter.opened if remember] == expected
    assert report["overall"]["num_prompts"] == report["overall"]["identical"] == 2


def test_the_table_tells_where_time_goes(language_model: LanguageModel) -> None:
    warm, prompts = [Prompt("c", "cde")], [Prompt("a", "abc")]
    report = measured(language_model, names=DEFAULT, prompts=prompts, warm=warm)
    table = table_of(report)
    assert "plain step: " in str(table.caption)
    assert "undrafted: our own loop" in str(table.caption)
    assert "warm-up: 1 prompt, " in str(table.caption)
    assert report["overall"]["foredraft"]["widths"]


def run_of(seconds: float, num_tokens: int = 10) -> Run:
    return Run([1] * num_tokens, seconds, num_tokens)


def test_ratios_are_sums_over_sums_and_medians_those_of_prompts() -> None:
    names = (PLAIN, PROMPT_LOOKUP, UNDRAFTED)
    comparisons = [
        Comparison("a", {**{name: run_of(seconds) for name in names}, FOREDRAFT: run_of(1.0)})
        for seconds in (1.0, 2.0, 9.0)
    ]
    overall = summarize(comparisons)["overall"]
    assert overall["speedup_over_plain"] == pytest.approx(4.0)
    assert overall["median_speedup_over_plain"] == pytest.approx(2.0)
    assert overall["speedup_over_undrafted"] == pytest.approx(4.0)
    assert overall["time_per_step"] == {}


def test_time_per_step_leaves_the_prompt_out() -> None:
    nothing, path = tree_of([]), tree_of([]).path_to(-1)
    drafted, undrafted = Statistics(), Statistics()
    for statistics, extra in ((drafted, 0.2), (undrafted, 0.0)):
        for _ in range(5):  # the prompt's pass and four more
            statistics.record(nothing, path, 1)
        statistics.prompt_s, statistics.target_s = 7.0, 11.0
        statistics.draft_s, statistics.total_s = extra, 11.4 + extra
    times = time_per_step(drafted, undrafted)
    assert times["plain_step_ms"] == pytest.approx(1100)
    assert times["ms"] == pytest.approx({"target": 1000, "draft": 50, "host": 100})
    assert times["share_of_plain_step"]["host"] == pytest.approx(1 / 11)
    assert drafted.report()["widths"] == {"0": 4}


def test_groups_fill_all_places_twice_where_that_leaves_enough_of_them() -> None:
    cases = [BenchPrompt("", [number]) for number in range(17)]
    assert grouped(cases, 2) == [cases[:4], cases[4:8], cases[8:12], cases[12:16]]
    assert [len(group) for group in grouped(cases, 3)] == [3] * 5
    assert grouped(cases, 17) == [cases]
    assert not grouped(cases, 18)
    assert grouped(cases, 1) == [[case] for case in cases]


def test_every_way_writes_at_every_width_what_each_prompt_has_alone(
    language_model: LanguageModel,
) -> None:
    """Prompts of several lengths, some of which stop: batches are padded, places are filled."""
    report = measured(language_model, [3, 1, 2], warm=[Prompt("a", "warm me"), PROMPTS[0]])
    (setting,) = report["settings"]
    assert [width["parallel"] for width in setting["widths"]] == [3, 1, 2]
    assert [width["num_prompts"] for width in setting["widths"]] == [6, 8, 8]
    assert [width["num_groups"] for width in setting["widths"]] == [2, 8, 4]
    for width in setting["widths"]:
        assert width["compared_with"] == ONE_BY_ONE
        assert list(width["contenders"]) == list(WAYS)
        for figures in width["contenders"].values():
            assert figures["identical"] == width["num_answers"] == width["num_prompts"]
            assert figures["num_tokens"] == width["contenders"][PLAIN]["num_tokens"]
        drafted, undrafted = width["contenders"][FOREDRAFT], width["contenders"][UNDRAFTED]
        assert set(drafted["step_ms"]) == {"target", "draft", "host"}
        assert drafted["step_ms"]["target"] > 0
        assert undrafted["nodes_per_step"] == 0
        assert undrafted["accepted_tokens"][0] == 1
        assert 1 <= undrafted["sequences_per_step"] <= width["parallel"]
        for over, (ratio, low, high) in drafted["over"].items():
            assert low <= ratio <= high, over
    assert report["warm"]["num_prompts"] == report["warm"]["left_out_as_measured"] == 1
    assert report["exactness"]["num_prompts"] == 8
    assert report["exactness"]["num_answers"] == 3 * (6 + 8 + 8)
    assert report["exactness"]["different"] == []
    assert not wrong_outputs(report)
    assert report["interrupted"] is False
    assert "all are the same" in conclusions_of(report)[-1]


def test_no_pass_is_captured_while_it_is_timed(
    language_model: LanguageModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    captured: list[object] = []
    marks: list[tuple[int, int]] = []
    prepare = Target.prepare

    def noting(self: Target, num_tokens: int, num_places: int = 1) -> None:
        began = len(captured)
        prepare(self, num_tokens, num_places)
        marks.append((began, len(captured)))

    def capture(function: Callable[[], Output]) -> Callable[[], Output]:
        captured.append(function)
        return function

    monkeypatch.setattr(Target, "prepare", noting)
    monkeypatch.setattr(target_module, "capture_on", lambda _: lambda: capture)
    report = measured(language_model, [2, 3], prompts=FOUR)
    assert not wrong_outputs(report)
    [(began, first), (again, second)] = marks  # once for a width
    assert began < first == again < second == len(captured)
    measured(language_model, prompts=PROMPTS[:2])
    assert marks[2][0] < marks[2][1] == len(captured)


def test_steps_are_the_passes_that_verified_and_sequences_those_that_they_served(
    language_model: LanguageModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    counted: list[int] = []
    read = Target.read

    def counting(self: Target, readings: Sequence[Reading]) -> list[Read]:
        counted.append(sum(reading.tree is not None for reading in readings))
        return read(self, readings)

    monkeypatch.setattr(Target, "read", counting)
    contest = Contest(language_model, [FOREDRAFT], DraftOptions(), 8)
    with contest.opened(Setting(4)) as lineup:
        counted.clear()
        way = lineup.ways[FOREDRAFT]
        run = way([language_model.encode(text) for text in TEXTS], 3, remember=True)
    verifying = [served for served in counted if served]
    assert max(verifying) == 3
    assert len(run.steps) == len(verifying)
    assert run.statistics.widths.total() == sum(verifying)
    spent = sum(step.draft_s + step.target_s + step.host_s for step in run.steps)
    assert 0 < spent < run.seconds


def test_a_wrong_output_is_reported_with_its_place(
    language_model: LanguageModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    flipping(monkeypatch, at=1)
    report = measured(language_model, [1, 2], prompts=FOUR)
    one, two = report["settings"][0]["widths"]
    assert one["contenders"][FOREDRAFT]["identical"] == one["num_answers"]
    assert two["contenders"][FOREDRAFT]["identical"] == two["num_answers"] - 2
    assert two["contenders"][UNDRAFTED]["identical"] == two["num_answers"]
    different = report["exactness"]["different"]
    assert [each["prompt"] for each in different] == [1, 3]
    for each in different:
        assert (each["parallel"], each["contender"], each["position"]) == (2, FOREDRAFT, 1)
        assert each["drafted"] == each["plain"] ^ 1
        assert each["best_tokens"][0] == each["plain"]
    assert wrong_outputs(report) == different
    said = conclusions_of(report)
    assert sum(line.startswith("DIFFERENT: foredraft, 2 in parallel") for line in said) == 2


def test_a_tie_is_reported_and_is_no_error(
    language_model: LanguageModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    flipping(monkeypatch, at=0)
    monkeypatch.setattr(exactness, "TIE", 1e9)
    report = measured(language_model, [2], prompts=FOUR)
    assert len(report["exactness"]["different"]) == 2
    assert not wrong_outputs(report)
    assert "2 differ, 2 of them where two logits tie" in conclusions_of(report)[-1]


def test_plain_batches_that_go_wrong_are_told_apart_from_ours(
    language_model: LanguageModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    decode = LibraryContender.__call__

    def cut(
        self: LibraryContender, prompts: Sequence[list[int]], parallel: int = 1, *, remember: bool
    ) -> Run:
        run = decode(self, prompts, parallel, remember=remember)
        if parallel == 1:
            return run
        first = [output[0] for output in run.outputs]
        return replace(run, token_ids=first, num_passes=len(first), lengths=(1,) * len(first))

    monkeypatch.setattr(LibraryContender, "__call__", cut)
    report = measured(language_model, [2], prompts=FOUR)
    plain = report["settings"][0]["widths"][0]["contenders"][PLAIN]
    assert plain["identical"] < 4
    assert {each["contender"] for each in report["exactness"]["different"]} == {PLAIN}
    assert not wrong_outputs(report)


def test_in_half_precision_outputs_are_those_of_the_same_loop_and_no_error(
    rounded: LanguageModel,
) -> None:
    report = measured(rounded, [2], prompts=FOUR)
    (width,) = report["settings"][0]["widths"]
    assert report["exactness"] is None
    assert width["compared_with"] == UNDRAFTED
    assert width["contenders"][UNDRAFTED]["identical"] == width["num_answers"] == 4
    (alone,) = measured(rounded, [2], names=[PLAIN], prompts=FOUR)["settings"]
    assert alone["widths"][0]["compared_with"] is None


def test_seeds_are_counted_together_and_draw_what_undrafted_draws(
    language_model: LanguageModel,
) -> None:
    settings = [Setting(4), Setting(4, 0.9, 1), Setting(4, 0.9, 2)]
    report = measured(language_model, [1, 2], prompts=FOUR[1:3], settings=settings, repeat=2)
    greedy, sampled = report["settings"]
    assert (greedy["num_seeds"], sampled["num_seeds"]) == (1, 2)
    for width in sampled["widths"]:
        assert width["compared_with"] == UNDRAFTED
        assert width["num_answers"] == 4 * width["num_prompts"]  # two seeds, two rounds
        assert width["contenders"][FOREDRAFT]["identical"] == width["num_answers"]
    for width in greedy["widths"]:
        assert width["num_answers"] == 2 * width["num_prompts"]
        assert width["compared_with"] == ONE_BY_ONE


class Scripted:
    """Contenders that answer each prompt with three tokens of two passes, in given seconds.

    Args:
        language_model: whose target fits prompts.
        seconds: of each way's groups in each round, those of a call to warm up left out; `None`
            where the n-th call of all takes n seconds.
        before: is called with the number of each call before it, from 1.
    """

    def __init__(
        self,
        language_model: LanguageModel,
        seconds: dict[str, list[float]] | None = None,
        before: Callable[[int], object] = lambda _: None,
    ) -> None:
        self._target = Target(language_model.model, verdicts=None)
        self._answer = language_model.tokenizer.encode("yes")
        self._seconds = seconds
        self._before = before
        self._calls = count(1)

    @contextmanager
    def opened(self, _: Setting) -> Iterator[Lineup]:
        names = self._seconds or (PLAIN, FOREDRAFT)
        yield Lineup({name: self._way(name) for name in names}, self._target, None)

    def _way(self, name: str) -> Contender:
        scripted = None if self._seconds is None else iter([1.0, *self._seconds[name]])

        def decode(prompts: Sequence[list[int]], parallel: int = 1, *, remember: bool) -> Run:  # noqa: ARG001  as scripted
            number = next(self._calls)
            self._before(number)
            seconds = float(number) if scripted is None else next(scripted)
            lengths = [len(self._answer)] * len(prompts)
            return Run(self._answer * len(prompts), seconds, 2 * len(prompts), lengths=lengths)

        return decode


def scripted(
    contest: Scripted,
    language_model: LanguageModel,
    prompts: Sequence[Prompt] = PROMPTS,
    watcher: Watcher = unwatched,
    **options: Any,
) -> Benchmark:
    return Benchmark(language_model, contest.opened, prompts, BenchOptions(8, **options), watcher)


def interrupting(at: int) -> Callable[[int], None]:
    """Stand for Ctrl-C during the call of a number."""

    def before(number: int) -> None:
        if number == at:
            raise KeyboardInterrupt

    return before


def test_the_second_turn_is_asked_behind_the_plain_answer(
    language_model: LanguageModel,
) -> None:
    asked: dict[str, list[list[int]]] = {PLAIN: [], FOREDRAFT: []}

    def way(name: str, answer: list[int]) -> Contender:
        def decode(prompts: Sequence[list[int]], parallel: int = 1, *, remember: bool) -> Run:  # noqa: ARG001  keeps nothing
            asked[name].extend(prompts)
            return Run(answer, 1.0, len(answer))

        return decode

    @contextmanager
    def opened(_: Setting) -> Iterator[Lineup]:
        decoder = assemble(language_model, Watched(language_model.vocabulary))
        said, other = (language_model.tokenizer.encode(text) for text in ("yes", "no"))
        ways = {PLAIN: way(PLAIN, said), FOREDRAFT: way(FOREDRAFT, other)}
        yield Lineup(ways, decoder.target, None)

    prompt = Prompt("a", "why", later=("so", "b" * 200))
    options = BenchOptions(8, both_turns=True)
    report = report_of(Benchmark(language_model, opened, [prompt], options))
    expected = [prompt.encoded(language_model), prompt.answered("yes").encoded(language_model)]
    for prompts in asked.values():
        assert prompts[1:] == expected  # the first is to warm up
    assert report["settings"][0]["widths"][0]["num_answers"] == 2
    assert report["skipped"] == 1  # the third is longer than the model takes


# A round is two runs to warm up, and two for each prompt.
@pytest.mark.parametrize(
    ("at", "settings", "repeat", "prompts", "where", "done", "counted"),
    [
        (5, TWO_NODES, 1, [1], "4 nodes (1 of 2)", 1, True),
        (8, TWO_NODES, 1, [2], "4 nodes (1 of 2)", 2, True),
        (9, TWO_NODES, 1, [3], "8 nodes, temperature 0.5, seed 1 (2 of 2)", 0, False),
        (12, TWO_NODES, 1, [3], "8 nodes, temperature 0.5, seed 1 (2 of 2)", 0, False),
        (16, TWO_NODES, 1, [3, 2], "8 nodes, temperature 0.5, seed 1 (2 of 2)", 2, True),
        (7, [Setting()], 2, [2], "as many nodes as pay off, round 1 of 2", 2, True),
        (16, [Setting()], 2, [3], "as many nodes as pay off, round 2 of 2", 2, False),
    ],
)
def test_an_interruption_leaves_what_was_measured(  # noqa: PLR0913, PLR0917  parameters
    at: int,
    settings: Sequence[Setting],
    repeat: int,
    prompts: list[int],
    where: str,
    done: int,
    counted: bool,  # noqa: FBT001  a parameter of the test
    language_model: LanguageModel,
) -> None:
    """Of the setting under way those prompts count that all contenders decoded.

    Where a round of it is whole, that alone does.
    """
    contest = Scripted(language_model, before=interrupting(at))
    benchmark = scripted(contest, language_model, THREE, repeat=repeat, settings=settings)
    report = report_of(benchmark, is_interrupted=True)
    assert benchmark.has_measured
    assert [each["widths"][0]["num_prompts"] for each in report["settings"]] == prompts
    assert report["interrupted"] is True
    told = {"where": where, "unit": "prompt", "done": done, "of": 3, "counted": counted}
    assert report["interrupted_at"] == told
    assert report["skipped"] == 0
    speed = report["settings"][0]["widths"][0]["contenders"][FOREDRAFT]["tokens_per_second"]
    seconds = (4, 5, 8)[: prompts[0]]  # of its runs in the first round; who begins rotates
    assert speed == pytest.approx(3 * len(seconds) / sum(seconds))
    (line,) = [note for note in notes_of(report) if note.startswith("interrupted")]
    assert line.startswith(f"interrupted: {where}, {done} of 3 prompts")
    assert ("left out" in line) == (done > 0 and not counted)


@pytest.mark.parametrize("at", [1, 2, 4])
def test_an_interruption_before_the_first_prompt_is_done_leaves_nothing(
    at: int, language_model: LanguageModel
) -> None:
    contest = Scripted(language_model, before=interrupting(at))
    benchmark = scripted(contest, language_model, THREE)
    with pytest.raises(KeyboardInterrupt):
        benchmark.run()
    assert not benchmark.has_measured


def test_a_conversation_that_is_interrupted_is_left_out_with_all_its_turns(
    language_model: LanguageModel,
) -> None:
    prompts = [Prompt("a", "abc", later=("so", "b" * 200)), Prompt("a", "bcd", later=("so",))]
    contest = Scripted(language_model, before=interrupting(9))  # second prompt, second turn
    benchmark = scripted(contest, language_model, prompts, both_turns=True)
    report = report_of(benchmark, is_interrupted=True)
    (width,) = report["settings"][0]["widths"]
    assert (width["num_prompts"], width["num_answers"]) == (1, 2)
    assert report["skipped"] == 1  # the third turn of the first prompt, which is too long


def test_a_whole_benchmark_is_not_called_interrupted(language_model: LanguageModel) -> None:
    report = report_of(scripted(Scripted(language_model), language_model, THREE))
    assert report["interrupted"] is False
    assert "interrupted_at" not in report
    assert not [note for note in notes_of(report) if "interrupted" in note]


def test_progress_says_where_a_benchmark_is_and_how_it_stands(
    language_model: LanguageModel,
) -> None:
    told: list[tuple[str, float, str]] = []
    options: dict[str, Any] = {"warm": [Prompt("c", "efg")], "settings": [Setting(4)], "repeat": 2}
    contest = Scripted(language_model, {PLAIN: [1.0] * 2, FOREDRAFT: [0.5] * 2})
    watch = lambda *words: told.append(words)  # noqa: E731  short
    scripted(contest, language_model, THREE[:2], watch, **options).run()
    stands = "foredraft 2.00 tokens a pass, 6.0 tokens/s"
    assert told == [
        said
        for number in ("1", "2")
        for said in (
            (f"4 nodes, round {number} of 2, warm-up", 0.0, "0 of 1 prompt"),
            (f"4 nodes, round {number} of 2, warm-up", 1.0, "1 of 1 prompt"),
            (f"4 nodes, round {number} of 2, measuring", 0.0, "0 of 2 prompts"),
            (f"4 nodes, round {number} of 2, measuring", 0.5, f"1 of 2 prompts, {stands}"),
            (f"4 nodes, round {number} of 2, measuring", 1.0, f"2 of 2 prompts, {stands}"),
        )
    ]


def test_ratios_are_sums_over_sums_with_intervals_over_groups(rounded: LanguageModel) -> None:
    seconds = {
        PLAIN: [1.0, 1.0, 1.0, 1.0],
        UNDRAFTED: [2.0, 2.0, 2.0, 2.0],
        FOREDRAFT: [0.5, 1.0, 2.0, 4.0],
    }
    report = report_of(scripted(Scripted(rounded, seconds), rounded, widths=[2], is_judged=True))
    (width,) = report["settings"][0]["widths"]
    drafted, undrafted = width["contenders"][FOREDRAFT], width["contenders"][UNDRAFTED]
    assert drafted["tokens_per_second"] == pytest.approx(24 / 7.5)
    ratio, low, high = drafted["over"][PLAIN]
    assert ratio == pytest.approx(4 / 7.5)
    assert 4 / 16 <= low < 0.4 < ratio < 0.9 < high <= 2
    assert drafted["median_over"] == pytest.approx({PLAIN: 0.75, UNDRAFTED: 1.5})
    assert undrafted["over"] == {PLAIN: pytest.approx([0.5, 0.5, 0.5])}
    assert drafted["accepted_tokens"] == pytest.approx([2, 2, 2])
    lost = [(each["contender"], each["over"]) for each in report["below_one"]]
    assert lost == [(UNDRAFTED, PLAIN), (FOREDRAFT, PLAIN)]
    said = conclusions_of(report)
    assert said[0].startswith("slower: undrafted, 2 in parallel: 0.50 [0.50, 0.50] times plain")
    assert "includes 1" not in said[0]
    assert said[1].endswith("times plain batches, the interval includes 1")
    assert said[2].startswith("uncertain: foredraft, 2 in parallel: 1.07 [")
    assert len(said) == 3
    headings, rows = rows_of(report["settings"][0])
    assert rows[2][: headings.index("accepted")][:3] == ["2", "foredraft", "3.2"]


def test_the_fastest_of_all_rounds_counts(rounded: LanguageModel) -> None:
    drawn = iter([[9.0, 1.0, 9.0, 1.0], [1.0, 9.0, 1.0, 9.0]])

    @contextmanager
    def opened(_: Setting) -> Iterator[Lineup]:
        seconds = {UNDRAFTED: [4.0] * 4, FOREDRAFT: next(drawn)}
        with Scripted(rounded, seconds).opened(Setting()) as lineup:
            yield lineup

    options = BenchOptions(8, repeat=2, widths=[2])
    (width,) = report_of(Benchmark(rounded, opened, PROMPTS, options))["settings"][0]["widths"]
    assert width["contenders"][FOREDRAFT]["over"][UNDRAFTED] == pytest.approx([4, 4, 4])
    assert width["num_answers"] == 16


def test_of_one_group_there_is_no_interval(language_model: LanguageModel) -> None:
    report = measured(language_model, [5, 3], prompts=PROMPTS[:5])
    for width in report["settings"][0]["widths"]:
        assert width["num_groups"] == 1
        assert width["contenders"][FOREDRAFT]["over"][PLAIN][1:] == [None, None]
    _, rows = rows_of(report["settings"][0])
    assert re.fullmatch(r"\d+\.\d\d", rows[2][3])
    assert all(line.endswith("only one group") for line in conclusions_of(report)[:3])


def test_an_interruption_leaves_whole_groups(rounded: LanguageModel) -> None:
    seconds = {UNDRAFTED: [1.0] * 4, FOREDRAFT: [0.5] * 4}
    at = 2 + 2 * 2 + 2  # warming, two groups, and one way of the third
    contest = Scripted(rounded, seconds, interrupting(at))
    benchmark = scripted(contest, rounded, widths=[2, 4], is_judged=True)
    report = report_of(benchmark, is_interrupted=True)
    (width,) = report["settings"][0]["widths"]
    assert (width["num_groups"], width["num_prompts"]) == (2, 4)
    where = "as many nodes as pay off, 2 in parallel (1 of 2)"
    told = {"where": where, "unit": "group", "done": 2, "of": 4, "counted": True}
    assert report["interrupted_at"] == told
    assert report["exactness"] is None


def test_an_interrupted_seed_leaves_what_the_others_measured(rounded: LanguageModel) -> None:
    seconds = {UNDRAFTED: [1.0] * 8, FOREDRAFT: [0.5] * 8}
    at = (
        (2 + 2 * 4) + (2 + 2 * 2) + 2 + 2 * 3 + 2
    )  # the last group of the first width of the last seed
    options: dict[str, Any] = {"settings": [Setting(4, 0.5, 1), Setting(4, 0.5, 2)]}
    contest = Scripted(rounded, seconds, interrupting(at))
    benchmark = scripted(contest, rounded, widths=[2, 3], is_judged=True, **options)
    (setting,) = report_of(benchmark, is_interrupted=True)["settings"]
    assert [width["parallel"] for width in setting["widths"]] == [2, 3]
    assert [width["num_answers"] for width in setting["widths"]] == [8 + 6, 6]


def test_what_is_known_of_prompts_alone_is_what_outputs_are_compared_with(
    language_model: LanguageModel,
) -> None:
    known = {tuple(language_model.encode(TEXTS[3])): [1, 2, 3]}
    report = measured(language_model, prompts=FOUR, plain=known)
    different = report["exactness"]["different"]
    assert [(each["prompt"], each["contender"]) for each in different] == [(3, way) for way in WAYS]


def test_plain_outputs_that_are_interrupted_judge_those_that_have_them(
    language_model: LanguageModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    decode, calls = LibraryContender.__call__, count(1)

    def interrupted(
        self: LibraryContender, prompts: Sequence[list[int]], parallel: int = 1, *, remember: bool
    ) -> Run:
        if next(calls) == 3:
            raise KeyboardInterrupt
        return decode(self, prompts, parallel, remember=remember)

    monkeypatch.setattr(LibraryContender, "__call__", interrupted)
    contest = Contest(language_model, WAYS[1:], DraftOptions(), 8)
    options = BenchOptions(8, is_judged=True)
    benchmark = Benchmark(language_model, contest.opened, FOUR, options)
    report = report_of(benchmark, is_interrupted=True)
    (width,) = report["settings"][0]["widths"]
    assert (width["num_prompts"], width["num_answers"]) == (4, 2)
    assert report["exactness"]["num_prompts"] == 2
    assert report["exactness"]["num_answers"] == 4
    assert report["interrupted_at"]["where"] == "plain outputs, one prompt at a time"


def test_prompts_without_room_for_the_whole_output_are_left_out(
    language_model: LanguageModel,
) -> None:
    long = [Prompt("a", "b" * 121), Prompt("a", "c" * 300)]  # the model's limit is 128
    report = measured(language_model, [2, 5], prompts=[*FOUR, *long])
    assert report["skipped"] == 2
    assert report["left_out"] == [5]
    assert [width["parallel"] for width in report["settings"][0]["widths"]] == [2]
    with pytest.raises(InvalidPromptError, match=r"5 in parallel need as many .* but of 6 .* 4"):
        measured(language_model, [5, 6], prompts=[*FOUR, *long])


def test_plots_have_a_line_for_each_way_and_a_bar_for_each_step(
    language_model: LanguageModel, tmp_path: Path
) -> None:
    prompts = PROMPTS[:2]
    report = measured(language_model, [1, 2], prompts=prompts, settings=[Setting(4), Setting(8)])
    draw(report, tmp_path / "plot.svg")
    shown = (tmp_path / "plot.svg").read_text()
    for words in ("tokens per second", "plain batches", "4 nodes", "8 nodes", "2, foredraft"):
        assert f"<!-- {words} -->" in shown
    assert "<!-- 2, plain -->" not in shown
