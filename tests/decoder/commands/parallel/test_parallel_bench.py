"""Prompts in parallel: what is compared, what is reported, and what is refused."""

import json
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from decoder.assembly import DrafterSettings
from decoder.commands import plain_comparison
from decoder.commands.bench import BenchOptions, Opened, run_benchmark
from decoder.commands.parallel.parallel_bench import (
    ONE_BY_ONE,
    ParallelBenchmark,
    grouped,
    wrong_outputs,
)
from decoder.commands.parallel.parallel_report import conclusions_of, draw_widths, rows_of
from decoder.commands.prompts import Prompt
from decoder.contenders.contender import (
    FOREDRAFT,
    PLAIN,
    UNDRAFTED,
    LibraryContender,
    OwnContender,
    Run,
)
from decoder.contenders.registry import TABLES, Contest, Lineup, Setting
from decoder.drafters.following import NoDrafter
from decoder.errors import InvalidPromptError
from decoder.model import target as target_module
from decoder.model.graphs import Output
from decoder.model.passes import Read, Reading
from decoder.model.pretrained import LanguageModel, ModelOptions, Precision, load_model
from decoder.model.target import Target
from indexer.launch import INTERRUPTED
from tests.decoder.commands.command_line import bench

pytestmark = pytest.mark.usefixtures("costs_of_earlier_tests")

TEXTS = ["abc", "one two one two", "x", "ab ab ab ab", "zzz", "so it goes so it goes", "q", "abc d"]
PROMPTS = [Prompt("a", text) for text in TEXTS]
FOUR = PROMPTS[:4]
WAYS = (PLAIN, UNDRAFTED, FOREDRAFT)


@pytest.fixture(scope="module")
def rounded(model_directory: Path) -> LanguageModel:
    """In half precision, so that outputs are not compared with what the model would write."""
    return load_model(ModelOptions(str(model_directory), precision=Precision.BFLOAT16))


def measured(
    language_model: LanguageModel,
    widths: Sequence[int],
    *,
    names: Sequence[str] = WAYS,
    prompts: Sequence[Prompt] = PROMPTS,
    **options: Any,
) -> dict[str, Any]:
    contest = Contest(language_model, names, DrafterSettings(), 8)
    chosen = BenchOptions(8, parallel=widths, **options)
    benchmark = ParallelBenchmark(language_model, contest.opened, prompts, chosen)
    benchmark.run()
    report: dict[str, Any] = json.loads(json.dumps(benchmark.report()))
    return {**report, "drafter": "context"}


def test_groups_fill_all_places_twice_where_that_leaves_enough_of_them() -> None:
    prompts = [[number] for number in range(17)]
    assert [list(group.numbers) for group in grouped(prompts, 2)] == [
        [0, 1, 2, 3],
        [4, 5, 6, 7],
        [8, 9, 10, 11],
        [12, 13, 14, 15],
    ]
    assert [len(group.prompts) for group in grouped(prompts, 3)] == [3] * 5
    assert [list(group.numbers) for group in grouped(prompts, 17)] == [list(range(17))]
    assert not grouped(prompts, 18)


def test_every_way_writes_at_every_width_what_each_prompt_has_alone(
    language_model: LanguageModel,
) -> None:
    """Prompts of several lengths, some of which stop: batches are padded, places are filled."""
    report = measured(language_model, [3, 1, 2], warm=[Prompt("a", "warm me"), PROMPTS[0]])
    (setting,) = report["settings"]
    assert [width["parallel"] for width in setting["widths"]] == [3, 1, 2]
    assert [width["num_prompts"] for width in setting["widths"]] == [6, 8, 8]
    assert [width["num_groups"] for width in setting["widths"]] == [2, 4, 4]
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
    contest = Contest(language_model, WAYS, DrafterSettings(), 8)
    run_benchmark(language_model, contest.opened, PROMPTS[:2], BenchOptions(8))
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
    contest = Contest(language_model, [FOREDRAFT], DrafterSettings(), 8)
    with contest.opened(Setting(4)) as lineup:
        counted.clear()
        way = lineup.ways[FOREDRAFT]
        assert isinstance(way, OwnContender)
        run = way.decode_many([language_model.encode(text) for text in TEXTS], 3, remember=True)
    verifying = [served for served in counted if served]
    assert max(verifying) == 3
    assert len(run.steps) == len(verifying)
    assert run.statistics.widths.total() == sum(verifying)
    spent = sum(step.draft_s + step.target_s + step.host_s for step in run.steps)
    assert 0 < spent < run.seconds


def flipping(monkeypatch: pytest.MonkeyPatch, at: int) -> None:
    """Have ours write another token in the second output of a batch, where it drafts."""
    decode = OwnContender.decode_many

    def wrong(
        self: OwnContender, prompts: Sequence[list[int]], parallel: int, *, remember: bool
    ) -> Run:
        run = decode(self, prompts, parallel, remember=remember)
        if parallel == 2 and not isinstance(self.decoder.drafter, NoDrafter):
            run.token_ids[run.lengths[0] + at] ^= 1
        return run

    monkeypatch.setattr(OwnContender, "decode_many", wrong)


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
    monkeypatch.setattr(plain_comparison, "TIE", 1e9)
    report = measured(language_model, [2], prompts=FOUR)
    assert len(report["exactness"]["different"]) == 2
    assert not wrong_outputs(report)
    assert "2 differ, 2 of them where two logits tie" in conclusions_of(report)[-1]


def test_plain_batches_that_go_wrong_are_told_apart_from_ours(
    language_model: LanguageModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    decode = LibraryContender.decode_many

    def cut(
        self: LibraryContender, prompts: Sequence[list[int]], parallel: int, *, remember: bool
    ) -> Run:
        run = decode(self, prompts, parallel, remember=remember)
        first = [output[0] for output in run.outputs]
        return replace(run, token_ids=first, num_passes=len(first), lengths=(1,) * len(first))

    monkeypatch.setattr(LibraryContender, "decode_many", cut)
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
    """Ways whose groups take given seconds, for two tokens a prompt.

    Args:
        language_model: whose target fits prompts.
        seconds: of each way, by the number of its group; a call to warm up comes before them.
        before: is called before each run.
    """

    def __init__(
        self,
        language_model: LanguageModel,
        seconds: dict[str, list[float]],
        before: Callable[[], object] = lambda: None,
    ) -> None:
        self._target = Target(language_model.model, verdicts=None)
        self._seconds = seconds
        self._before = before

    def opened(self) -> Opened:
        @contextmanager
        def lineup(_: Setting) -> Iterator[Lineup]:
            ways: Any = {
                name: ScriptedWay(iter([1.0, *seconds]), self._before)
                for name, seconds in self._seconds.items()
            }
            yield Lineup(ways, self._target, None)

        return lineup


class ScriptedWay:
    def __init__(self, seconds: Iterator[float], before: Callable[[], object]) -> None:
        self._seconds = seconds
        self._before = before

    def __call__(self, prompt: list[int], *, remember: bool) -> Run:
        return self.decode_many([prompt], 1, remember=remember)

    def decode_many(
        self,
        prompts: Sequence[list[int]],
        parallel: int,  # noqa: ARG002  as scripted
        *,
        remember: bool,  # noqa: ARG002  keeps nothing
    ) -> Run:
        self._before()
        num_tokens = 2 * len(prompts)
        lengths = [2] * len(prompts)
        return Run([7] * num_tokens, next(self._seconds), num_tokens, lengths=lengths)


def scripted(
    language_model: LanguageModel, seconds: dict[str, list[float]], **options: Any
) -> ParallelBenchmark:
    chosen = BenchOptions(8, parallel=[2], **options)
    opened = Scripted(language_model, seconds).opened()
    return ParallelBenchmark(language_model, opened, PROMPTS, chosen)


def test_ratios_are_sums_over_sums_with_intervals_over_groups(rounded: LanguageModel) -> None:
    seconds = {
        PLAIN: [1.0, 1.0, 1.0, 1.0],
        UNDRAFTED: [2.0, 2.0, 2.0, 2.0],
        FOREDRAFT: [0.5, 1.0, 2.0, 4.0],
    }
    benchmark = scripted(rounded, seconds)
    benchmark.run()
    report = {**json.loads(json.dumps(benchmark.report())), "drafter": "none"}
    (width,) = report["settings"][0]["widths"]
    drafted, undrafted = width["contenders"][FOREDRAFT], width["contenders"][UNDRAFTED]
    assert drafted["tokens_per_second"] == pytest.approx(16 / 7.5)
    ratio, low, high = drafted["over"][PLAIN]
    assert ratio == pytest.approx(4 / 7.5)
    assert 4 / 16 <= low < 0.4 < ratio < 0.9 < high <= 2
    assert drafted["median_over"] == pytest.approx({PLAIN: 0.75, UNDRAFTED: 1.5})
    assert undrafted["over"] == {PLAIN: pytest.approx([0.5, 0.5, 0.5])}
    assert drafted["accepted_tokens"] == pytest.approx([1, 1, 1])
    lost = [(each["contender"], each["over"]) for each in report["below_one"]]
    assert lost == [(UNDRAFTED, PLAIN), (FOREDRAFT, PLAIN)]
    said = conclusions_of(report)
    assert said[0].startswith("slower: undrafted, 2 in parallel: 0.50 [0.50, 0.50] times plain")
    assert "has 1 in it" not in said[0]
    assert said[1].endswith("times plain batches, the interval has 1 in it")
    assert said[2].startswith("uncertain: foredraft, 2 in parallel: 1.07 [")
    assert len(said) == 3
    headings, rows = rows_of(report["settings"][0])
    assert rows[2][: headings.index("accepted")][:3] == ["2", "foredraft", "2.1"]


def test_the_fastest_of_all_rounds_counts(rounded: LanguageModel) -> None:
    used: list[list[float]] = [[9.0, 1.0, 9.0, 1.0], [1.0, 9.0, 1.0, 9.0]]
    drawn = iter(used)

    @contextmanager
    def opened(_: Setting) -> Iterator[Lineup]:
        seconds = {UNDRAFTED: [4.0] * 4, FOREDRAFT: next(drawn)}
        with Scripted(rounded, seconds).opened()(Setting()) as lineup:
            yield lineup

    chosen = BenchOptions(8, repeat=2, parallel=[2])
    benchmark = ParallelBenchmark(rounded, opened, PROMPTS, chosen)
    benchmark.run()
    width = benchmark.report()["settings"][0]["widths"][0]
    assert width["contenders"][FOREDRAFT]["over"][UNDRAFTED] == pytest.approx([4, 4, 4])
    assert width["num_answers"] == 16


def test_of_one_group_there_is_no_interval(language_model: LanguageModel) -> None:
    report = measured(language_model, [5, 3], prompts=PROMPTS[:5])
    for width in report["settings"][0]["widths"]:
        assert width["num_groups"] == 1
        assert width["contenders"][FOREDRAFT]["over"][PLAIN][1:] == [None, None]
    _, rows = rows_of(report["settings"][0])
    assert re.fullmatch(r"\d+\.\d\d", rows[2][3])
    assert all(line.endswith("one group alone") for line in conclusions_of(report)[:3])


def test_an_interruption_leaves_whole_groups(rounded: LanguageModel) -> None:
    calls = iter(range(100))

    def before() -> None:
        if next(calls) == 2 + 2 * 2 + 1:  # warming, two groups, and one way of the third
            raise KeyboardInterrupt

    seconds = {UNDRAFTED: [1.0] * 4, FOREDRAFT: [0.5] * 4}
    chosen = BenchOptions(8, parallel=[2, 4])
    opened = Scripted(rounded, seconds, before).opened()
    benchmark = ParallelBenchmark(rounded, opened, PROMPTS, chosen)
    with pytest.raises(KeyboardInterrupt):
        benchmark.run()
    report = {**json.loads(json.dumps(benchmark.report())), "drafter": "none"}
    (width,) = report["settings"][0]["widths"]
    assert (width["num_groups"], width["num_prompts"]) == (2, 4)
    where = "as many nodes as pay, 2 in parallel (1 of 2)"
    at = {"where": where, "groups": 2, "of_groups": 4, "counted": True}
    assert report["interrupted_at"] == at


def test_an_interrupted_seed_leaves_what_the_others_measured(rounded: LanguageModel) -> None:
    calls = iter(range(1000))

    def before() -> None:
        if next(calls) == 3 * (2 + 2 * 4) - 2:  # the last group of the first width of the last seed
            raise KeyboardInterrupt

    seconds = {UNDRAFTED: [1.0] * 4, FOREDRAFT: [0.5] * 4}
    settings = [Setting(4, 0.5, 1), Setting(4, 0.5, 2)]
    chosen = BenchOptions(8, parallel=[2, 1], settings=settings)
    opened = Scripted(rounded, seconds, before).opened()
    benchmark = ParallelBenchmark(rounded, opened, PROMPTS, chosen)
    with pytest.raises(KeyboardInterrupt):
        benchmark.run()
    (setting,) = benchmark.report()["settings"]
    assert [width["parallel"] for width in setting["widths"]] == [2, 1]
    assert [width["num_answers"] for width in setting["widths"]] == [8 + 6, 8]


def test_what_is_known_of_prompts_alone_is_what_outputs_are_compared_with(
    language_model: LanguageModel,
) -> None:
    known = {tuple(language_model.encode(TEXTS[3])): [1, 2, 3]}
    contest = Contest(language_model, WAYS, DrafterSettings(), 8)
    options = BenchOptions(8, parallel=[1])
    benchmark = ParallelBenchmark(language_model, contest.opened, FOUR, options, plain=known)
    benchmark.run()
    different = benchmark.report()["exactness"]["different"]
    assert [(each["prompt"], each["contender"]) for each in different] == [(3, way) for way in WAYS]


def test_prompts_without_room_for_the_whole_output_are_left_out(
    language_model: LanguageModel,
) -> None:
    long = [Prompt("a", "b" * 121), Prompt("a", "c" * 300)]  # the model's limit is 128
    report = measured(language_model, [2, 5], prompts=[*FOUR, *long])
    assert report["skipped"] == 2
    assert report["left_out"] == [5]
    assert [width["parallel"] for width in report["settings"][0]["widths"]] == [2]
    with pytest.raises(InvalidPromptError, match=r"5 in parallel need as many prompts: of 6 .* 4"):
        measured(language_model, [5, 6], prompts=[*FOUR, *long])


@pytest.fixture
def small(model_directory: Path, tmp_path: Path) -> list[str]:
    path = tmp_path / "prompts"
    path.write_text("\n".join(TEXTS[:4]))
    options = ["--model", str(model_directory), "--prompts", str(path), "--max-new-tokens", "6"]
    return [*options, "--parallel", "1", "--parallel", "2", "--parallel", "2"]


def test_the_command_compares_with_and_without_a_draft_model_and_draws(
    small: list[str],
    model_directory: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    plot = tmp_path / "plot.png"
    options = ["--draft-model", str(model_directory), "--plot", str(plot), "--json"]
    assert bench(monkeypatch, *small, *options, "--nodes", "4") == 0
    report = json.loads(capsys.readouterr().out)
    (setting,) = report["settings"]
    assert [width["parallel"] for width in setting["widths"]] == [1, 2]
    for width in setting["widths"]:
        assert list(width["contenders"]) == [PLAIN, UNDRAFTED, TABLES, FOREDRAFT]
    # A draft model that is the model itself is always right.
    accepted = setting["widths"][1]["contenders"][FOREDRAFT]["accepted_tokens"][0]
    assert accepted > setting["widths"][1]["contenders"][TABLES]["accepted_tokens"][0]
    assert plot.read_bytes().startswith(b"\x89PNG")


def test_the_table_says_first_where_ours_lose(
    small: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    decode = OwnContender.decode_many

    def slower(*given: Any, **options: Any) -> Run:
        run = decode(*given, **options)
        return replace(run, seconds=20 * run.seconds)

    monkeypatch.setattr(OwnContender, "decode_many", slower)
    assert bench(monkeypatch, *small, "--over", "foredraft-retrieval") == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("slower")
    text = "\n".join(lines)
    assert text.index("compared with model.generate") < text.index("x plain batches")
    assert "over foredraft-retrieval" in text
    assert "1: 4 prompts in 4 groups, 2: 4 prompts in 2 groups" in text


def test_a_wrong_output_fails_the_command(
    small: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    flipping(monkeypatch, at=2)
    assert bench(monkeypatch, *small) == 1
    assert "DIFFERENT: foredraft, 2 in parallel, prompt 1, token 2" in capsys.readouterr().out


def test_plots_have_a_line_for_each_way_and_a_bar_for_each_step(
    language_model: LanguageModel, tmp_path: Path
) -> None:
    prompts = PROMPTS[:2]
    report = measured(language_model, [1, 2], prompts=prompts, settings=[Setting(4), Setting(8)])
    draw_widths(report, tmp_path / "plot.svg")
    shown = (tmp_path / "plot.svg").read_text()
    for words in ("tokens per second", "plain batches", "4 nodes", "8 nodes", "2, foredraft"):
        assert f"<!-- {words} -->" in shown
    assert "<!-- 2, plain -->" not in shown


def test_ctrl_c_ends_the_command_with_what_was_measured(
    small: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    decode, calls = OwnContender.decode_many, iter(range(100))

    def run(
        self: OwnContender, prompts: Sequence[list[int]], parallel: int, *, remember: bool
    ) -> Run:
        if next(calls) == 5:
            raise KeyboardInterrupt
        return decode(self, prompts, parallel, remember=remember)

    monkeypatch.setattr(OwnContender, "decode_many", run)
    assert bench(monkeypatch, *small, "--json") == INTERRUPTED
    report = json.loads(capsys.readouterr().out)
    assert report["interrupted_at"]["groups"] == 1
    assert report["exactness"] is None


@pytest.mark.parametrize(
    ("options", "told"),
    [
        (["--parallel", "0"], "--parallel must be 1 or more"),
        (
            ["--parallel", "2", "--contender", "transformers-lookup"],
            "--contender transformers-lookup decodes one prompt at a time",
        ),
        (["--parallel", "2", "--turns", "both"], "--turns both and --parallel exclude each other"),
        (["--parallel", "9"], "--parallel 9 needs as many prompts, and there are 8"),
        (
            ["--parallel", "2", "--parallel", "4", "--state", "kept"],
            "--state and --server keep answers",
        ),
        (["--parallel", "2", "--plot", "plot.pdf"], "--plot plot.pdf: a plot is drawn as"),
    ],
)
def test_what_cannot_be_measured_in_parallel_is_refused_before_a_model_is_loaded(
    options: list[str],
    told: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    path = tmp_path / "prompts"
    path.write_text("\n".join(TEXTS))
    assert bench(monkeypatch, "--model", "nowhere", "--prompts", str(path), *options) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"error: {told}")


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_cuda_that_is_not_there_is_refused_in_a_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    options = ["--model", "nowhere", "--prompts", "nothing", "--parallel", "2"]
    assert bench(monkeypatch, *options, "--device", "cuda") == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("error: --device cuda: there is no CUDA here")
