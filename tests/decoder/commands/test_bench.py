import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import ArrayLike

from decoder.assembly import DrafterSettings, assemble
from decoder.commands import main
from decoder.commands.bench import BenchOptions, run_benchmark
from decoder.commands.bench_report import summarize, table_of, time_per_step
from decoder.commands.prompts import Prompt, read_prompts
from decoder.contenders.contender import (
    FOREDRAFT,
    PLAIN,
    PROMPT_LOOKUP,
    UNDRAFTED,
    Contender,
    Run,
    contenders,
)
from decoder.contenders.registry import DEFAULT, ENTRIES, Contest, Lineup, Setting
from decoder.contenders.standings import Comparison
from decoder.model.pretrained import LanguageModel, ModelOptions, load_model
from decoder.observation import Statistics
from indexer.reader import Vocabulary
from retriever.sessions.embedded import EmbeddedDrafter
from tests.decoder.decoding import tree_of

UNREPETITIVE = Path(__file__).parents[3] / "benchmarks" / "prompts" / "unrepetitive.txt"


class Watched(EmbeddedDrafter):
    """Notes which prompts began a sequence, and whether the answer was to be remembered."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        super().__init__(vocabulary=vocabulary)
        self.opened: list[tuple[list[int], bool]] = []

    def open(
        self, session: str, prompt: ArrayLike, *, remember: bool = True, tenant: str = ""
    ) -> None:
        self.opened.append((np.asarray(prompt).tolist(), remember))
        super().open(session, prompt, remember=remember, tenant=tenant)


@pytest.fixture(scope="module")
def language_model(model_directory: Path) -> LanguageModel:
    return load_model(ModelOptions(str(model_directory)))


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
    assert len(list((tmp_path / "costs").iterdir())) == 1


def bench(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> int | str:
    monkeypatch.setattr(sys, "argv", ["decoder", "bench", *arguments])
    with pytest.raises(SystemExit) as stop:
        main()
    return stop.value.code or 0


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
    options = [*small, "--contender", "hd", "--contender", "recycling", "--nodes", "4"]
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
        for name in ("undrafted", "hd", "recycling"):
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


def test_the_tables_of_contenders_are_laid_out_as_papers_have_them(
    small: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    options = ["--contender", "rest", "--contender", "undrafted", "--over", "hd"]
    assert bench(monkeypatch, *small, *options) == 0
    shown = capsys.readouterr().out
    for part in ("as many nodes as pay; 2 prompts", "speed-up,", "accepted tokens,", "poems"):
        assert part in shown
    assert "over undrafted" in shown
    assert "over hd, as many nodes as pay" in shown
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
