import json
import os
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import ArrayLike

from decoder.assembly import DrafterSettings, assemble
from decoder.commands import main
from decoder.commands.bench import Benchmark, BenchOptions, Opened, run_benchmark
from decoder.commands.bench_report import notes_of, summarize, table_of, time_per_step
from decoder.commands.prompts import Prompt, read_prompts
from decoder.contenders.contender import (
    FOREDRAFT,
    PLAIN,
    PROMPT_LOOKUP,
    UNDRAFTED,
    Contender,
    OwnContender,
    Run,
    contenders,
)
from decoder.contenders.registry import DEFAULT, ENTRIES, Contest, Lineup, Setting
from decoder.contenders.standings import Comparison
from decoder.model.pretrained import LanguageModel
from decoder.model.target import Target
from decoder.observation import Statistics
from indexer.launch import INTERRUPTED, TERMINATED
from indexer.reader import Vocabulary
from retriever.sessions.embedded import EmbeddedDrafter
from tests.decoder.commands.command_line import bench
from tests.decoder.decoding import tree_of

pytestmark = pytest.mark.usefixtures("costs_of_earlier_tests")

UNREPETITIVE = Path(__file__).parents[3] / "benchmarks" / "prompts" / "unrepetitive.txt"


class Watched(EmbeddedDrafter):
    """Notes which prompts began a sequence, and whether the answer was to be remembered."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        super().__init__(vocabulary=vocabulary)
        self.opened: list[tuple[list[int], bool]] = []

    def open(
        self, session: str, prompt: ArrayLike, *, remember: bool = True, **options: Any
    ) -> None:
        self.opened.append((np.asarray(prompt).tolist(), remember))
        super().open(session, prompt, remember=remember, **options)


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

    measured = [Prompt("a", "abc"), Prompt("b", "bcd")]
    warm = [Prompt("a", " abc "), Prompt("c", "cde"), Prompt("c", "def"), Prompt("c", "efg")]
    report = run_benchmark(
        language_model,
        opened,
        measured,
        BenchOptions(max_new_tokens=6, repeat=3, warm=warm, warm_limit=2),
    )
    assert report["warm"]["num_prompts"] == 2
    assert 2 <= report["warm"]["num_tokens"] <= 12
    assert report["warm"]["left_out_as_measured"] == 1
    expected = [language_model.encode(text) for text in ("cde", "def", "abc", "bcd")]
    assert len(made) == 3
    for drafter in made:
        assert [prompt for prompt, remember in drafter.opened if remember] == expected
    assert report["overall"]["num_prompts"] == report["overall"]["identical"] == 2


def test_the_table_tells_where_time_goes(language_model: LanguageModel) -> None:
    contest = Contest(language_model, DEFAULT, DrafterSettings(), 6)
    options = BenchOptions(max_new_tokens=6, warm=[Prompt("c", "cde")])
    report = run_benchmark(language_model, contest.opened, [Prompt("a", "abc")], options)
    table = table_of({**report, "drafter": "context"})
    assert "a plain one" in str(table.caption)
    assert "undrafted: our own loop" in str(table.caption)
    assert "warmed with 1 prompt, " in str(table.caption)
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


def test_so_many_prompts_of_each_category(questions: Path) -> None:
    prompts = read_prompts(questions, per_category=2)
    assert sorted(prompt.category for prompt in prompts) == ["poems"] * 2 + ["sums"] * 2
    assert len(read_prompts(questions, 3, 2)) == 3


def test_the_prompts_chosen_not_to_repeat_can_be_read() -> None:
    prompts = read_prompts(UNREPETITIVE)
    assert len({prompt.text for prompt in prompts}) == len(prompts) >= 10


def test_the_command_warms_repeats_and_keeps_what_it_measured(
    model_directory: Path,
    questions: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    arguments = ["--model", str(model_directory), "--prompts", str(questions), "--json"]
    arguments += ["--max-new-tokens", "4", "--per-category", "1", "--repeat", "2"]
    arguments += ["--warm", str(questions), "--warm-limit", "3"]
    arguments += ["--cost-cache", str(tmp_path / "costs")]
    monkeypatch.setattr(sys, "argv", ["decoder", "bench", *arguments])
    with pytest.raises(SystemExit) as stop:
        main()
    assert not stop.value.code
    report = json.loads(capsys.readouterr().out)
    assert report["overall"]["num_prompts"] == report["repeat"] == 2
    assert report["warm"]["num_prompts"] == 3
    assert report["warm"]["left_out_as_measured"] == 2
    kept = sorted(path.name.partition("-")[0] for path in (tmp_path / "costs").iterdir())
    assert kept == ["check", "cost"]


@pytest.fixture
def small(model_directory: Path, questions: Path) -> list[str]:
    options = ["--model", str(model_directory), "--prompts", str(questions)]
    return [*options, "--max-new-tokens", "8", "--limit", "2"]


def test_contenders_meet_under_every_setting(
    small: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    plot = tmp_path / "standings.svg"
    options = [*small, "--contender", "prompt-lookup", "--contender", FOREDRAFT, "--nodes", "4"]
    options += ["--temperature", "0", "--temperature", "0.8", "--seed", "1", "--seed", "2"]
    assert bench(monkeypatch, *options, "--turns", "both", "--plot", str(plot), "--json") == 0
    report = json.loads(capsys.readouterr().out)
    assert "overall" not in report
    assert report["turns"] == "both"
    assert report["cost_curve"] == {}
    greedy, sampled = report["settings"]
    assert (greedy["nodes"], greedy["temperature"], greedy["num_seeds"]) == (4, 0, 1)
    assert (sampled["nodes"], sampled["temperature"], sampled["num_seeds"]) == (4, 0.8, 2)
    assert (greedy["reference"], sampled["reference"]) == ("plain", "undrafted")
    assert greedy["overall"]["num_answers"] == 4  # two turns each
    assert sampled["overall"]["num_answers"] == 8  # and two seeds
    for setting in (greedy, sampled):
        for name in ("undrafted", "prompt-lookup", FOREDRAFT):
            figures = setting["overall"]["contenders"][name]
            assert figures["identical"] == setting["overall"]["num_answers"]
            assert figures["speedup"][1] <= figures["speedup"][0] <= figures["speedup"][2]
    assert "</svg>" in plot.read_text()


def test_the_second_turn_is_asked_behind_the_plain_answer(
    language_model: LanguageModel,
) -> None:
    asked: dict[str, list[list[int]]] = {PLAIN: [], FOREDRAFT: []}

    def way(name: str, answer: list[int]) -> Contender:
        def decode(prompt: list[int], *, remember: bool) -> Run:  # noqa: ARG001  keeps nothing
            asked[name].append(prompt)
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
    report = run_benchmark(language_model, opened, [prompt], options)
    expected = [prompt.encoded(language_model), prompt.answered("yes").encoded(language_model)]
    for prompts in asked.values():
        assert prompts[1:] == expected  # the first is to warm up
    assert report["settings"][0]["overall"]["num_answers"] == 2
    assert report["skipped"] == 1  # the third is longer than the model takes


class Scripted:
    """Two contenders whose n-th run of all takes n seconds and two passes for three tokens.

    Args:
        language_model: whose target fits prompts.
        before: is called with the number of each run before it, from 1.
    """

    def __init__(
        self, language_model: LanguageModel, before: Callable[[int], object] = lambda _: None
    ) -> None:
        self._before = before
        self._target = Target(language_model.model, verdicts=None)
        self._answer = language_model.tokenizer.encode("yes")
        self._number = 0

    def opened(self) -> Opened:
        @contextmanager
        def lineup(_: Setting) -> Iterator[Lineup]:
            yield Lineup(dict.fromkeys((PLAIN, FOREDRAFT), self._run), self._target, None)

        return lineup

    def _run(self, prompt: list[int], *, remember: bool) -> Run:  # noqa: ARG002  keeps nothing
        self._number += 1
        self._before(self._number)
        return Run(self._answer, float(self._number), 2)


def interrupting(at: int) -> Callable[[int], None]:
    """Stand for Ctrl-C during the run of a number."""

    def before(number: int) -> None:
        if number == at:
            raise KeyboardInterrupt

    return before


TWO_NODES = (Setting(4), Setting(8, 0.5, 1))
THREE = [Prompt("a", "abc"), Prompt("b", "bcd"), Prompt("b", "cde")]


# A round is two runs to warm up, and two for each prompt.
@pytest.mark.parametrize(
    ("at", "settings", "repeat", "prompts", "where", "done", "counted"),
    [
        (5, TWO_NODES, 1, [1], "4 nodes (1 of 2)", 1, True),
        (8, TWO_NODES, 1, [2], "4 nodes (1 of 2)", 2, True),
        (9, TWO_NODES, 1, [3], "8 nodes, temperature 0.5, seed 1 (2 of 2)", 0, False),
        (12, TWO_NODES, 1, [3], "8 nodes, temperature 0.5, seed 1 (2 of 2)", 0, False),
        (16, TWO_NODES, 1, [3, 2], "8 nodes, temperature 0.5, seed 1 (2 of 2)", 2, True),
        (7, [Setting()], 2, [2], "as many nodes as pay, round 1 of 2", 2, True),
        (16, [Setting()], 2, [3], "as many nodes as pay, round 2 of 2", 2, False),
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
    contest = Scripted(language_model, interrupting(at))
    options = BenchOptions(8, repeat, settings=settings)
    benchmark = Benchmark(language_model, contest.opened(), THREE, options)
    with pytest.raises(KeyboardInterrupt):
        benchmark.run()
    assert benchmark.has_measured
    report = json.loads(json.dumps(benchmark.report()))
    assert [each["overall"]["num_prompts"] for each in report["settings"]] == prompts
    assert report["interrupted"] is True
    at_report = {"where": where, "prompts": done, "of_prompts": 3, "counted": counted}
    assert report["interrupted_at"] == at_report
    assert report["skipped"] == 0
    speed = report["settings"][0]["overall"]["contenders"][FOREDRAFT]["tokens_per_second"]
    seconds = (4, 5, 8)[: prompts[0]]  # of its runs in the first round; who begins rotates
    assert speed == pytest.approx(3 * len(seconds) / sum(seconds))
    (line,) = [note for note in notes_of(report) if note.startswith("interrupted")]
    assert line.startswith(f"interrupted: {where}, {done} of 3 prompts")
    assert ("left out" in line) == (done > 0 and not counted)


@pytest.mark.parametrize("at", [1, 2, 4])
def test_an_interruption_before_the_first_prompt_is_done_leaves_nothing(
    at: int, language_model: LanguageModel
) -> None:
    contest = Scripted(language_model, interrupting(at))
    benchmark = Benchmark(language_model, contest.opened(), THREE, BenchOptions(8))
    with pytest.raises(KeyboardInterrupt):
        benchmark.run()
    assert not benchmark.has_measured


def test_a_conversation_that_is_interrupted_is_left_out_with_all_its_turns(
    language_model: LanguageModel,
) -> None:
    prompts = [Prompt("a", "abc", later=("so", "b" * 200)), Prompt("a", "bcd", later=("so",))]
    contest = Scripted(language_model, interrupting(9))  # the second turn of the second prompt
    options = BenchOptions(8, both_turns=True)
    benchmark = Benchmark(language_model, contest.opened(), prompts, options)
    with pytest.raises(KeyboardInterrupt):
        benchmark.run()
    report = benchmark.report()
    assert report["settings"][0]["overall"]["num_prompts"] == 1
    assert report["settings"][0]["overall"]["num_answers"] == 2
    assert report["skipped"] == 1  # the third turn of the first prompt, which is too long


def test_a_whole_benchmark_is_not_called_interrupted(language_model: LanguageModel) -> None:
    contest = Scripted(language_model)
    report = run_benchmark(language_model, contest.opened(), THREE, BenchOptions(8))
    assert report["interrupted"] is False
    assert "interrupted_at" not in report
    assert not [note for note in notes_of(report) if "interrupted" in note]


def test_progress_says_where_a_benchmark_is_and_how_it_stands(
    language_model: LanguageModel,
) -> None:
    told: list[tuple[str, float, str]] = []
    options = BenchOptions(8, repeat=2, warm=[Prompt("c", "efg")], settings=[Setting(4)])
    run_benchmark(
        language_model,
        Scripted(language_model).opened(),
        THREE[:2],
        options,
        lambda *words: told.append(words),
    )
    stands = "foredraft 2.00 tokens a pass"
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


def signalling(
    monkeypatch: pytest.MonkeyPatch, at: int, number: signal.Signals
) -> Callable[[], None]:
    """Have a run of our own contenders send a signal; return a check that it did."""
    decode, count = OwnContender.__call__, 0

    def run(self: OwnContender, prompt: list[int], *, remember: bool) -> Run:
        nonlocal count
        count += 1
        if count == at:
            os.kill(os.getpid(), number)
        return decode(self, prompt, remember=remember)

    def check() -> None:
        assert count == at

    monkeypatch.setattr(OwnContender, "__call__", run)
    return check


@pytest.fixture
def _ctrl_c() -> Iterator[None]:
    """Have Ctrl-C raise as in a terminal: who starts us may ignore it."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        yield
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    finally:
        signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("_ctrl_c")
@pytest.mark.parametrize(
    ("number", "status"), [(signal.SIGINT, INTERRUPTED), (signal.SIGTERM, TERMINATED)]
)
def test_a_signal_ends_the_command_with_a_report(
    number: signal.Signals,
    status: int,
    small: list[str],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    check = signalling(monkeypatch, 6, number)  # behind two to warm up and two of a prompt
    is_json = number == signal.SIGINT
    assert bench(monkeypatch, *small, *(["--json"] if is_json else [])) == status
    check()
    said = capsys.readouterr()
    where = "as many nodes as pay"
    if is_json:
        report = json.loads(said.out)
        assert report["overall"]["num_prompts"] == 1
        at = {"where": where, "prompts": 1, "of_prompts": 2, "counted": True}
        assert report["interrupted_at"] == at
    else:
        words = " ".join(said.out.split())
        assert f"interrupted: {where}, 1 of 2 prompts" in words
        assert "a plain one" in words
    # Standard error is no terminal here: progress is lines.
    assert f"{where}, measuring, 0%, 0 of 2 prompts\n" in said.err
    assert f"{where}, measuring, 50%, 1 of 2 prompts, foredraft " in said.err


@pytest.mark.usefixtures("_ctrl_c")
def test_ctrl_c_before_anything_is_measured_ends_the_command_without_a_report(
    small: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    check = signalling(monkeypatch, 3, signal.SIGINT)
    assert bench(monkeypatch, *small, "--json") == INTERRUPTED
    check()
    assert not capsys.readouterr().out


def test_the_tables_of_contenders_are_laid_out_as_papers_have_them(
    small: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    options = ["--contender", FOREDRAFT, "--contender", "undrafted", "--over", "prompt-lookup"]
    assert bench(monkeypatch, *small, *options) == 0
    shown = capsys.readouterr().out
    for part in ("as many nodes as pay; 2 prompts", "speed-up,", "accepted tokens,", "poems"):
        assert part in shown
    assert "over undrafted" in shown
    assert "over prompt-lookup, as many nodes as pay" in shown
    assert "90%: intervals by bootstrap" in shown
    assert "plain" not in shown


def test_all_contenders_are_listed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert bench(monkeypatch, "--contenders") == 0
    shown = capsys.readouterr().out
    for name, entry in ENTRIES.items():
        line = next(line for line in shown.splitlines() if f" {name} " in line)
        assert entry.summary in line
        assert entry.paper in line


@pytest.mark.parametrize(
    ("options", "told"),
    [
        (["--contender", "eagle"], "--contender eagle: there is none of this name"),
        (["--contender", "model"], "give it --draft-model"),
        (["--nodes", "300"], "--nodes must be 0 to 256"),
        (["--seed", "3"], "--seed has no effect at temperature 0"),
        (["--temperature", "-1"], "temperature must be 0"),
        (["--plot", "figure.pdf"], "a plot is drawn as .png or .svg"),
        (["--state", "kept", "--nodes", "4", "--nodes", "8"], "--state and --server keep answers"),
        (["--server", "127.0.0.1:1", "--repeat", "2"], "--state and --server keep answers"),
        (
            ["--server", "127.0.0.1:1", "--contender", "foredraft", "--over", "foredraft-tables"],
            "would show the answers of foredraft to foredraft-tables",
        ),
    ],
)
def test_what_cannot_be_measured_is_refused_before_a_model_is_loaded(
    options: list[str],
    told: str,
    questions: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    missing = ["--model", "nowhere", "--prompts", str(questions)]
    assert bench(monkeypatch, *missing, *options) == 1
    assert told in " ".join(capsys.readouterr().err.split())
