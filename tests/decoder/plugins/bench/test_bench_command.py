"""The command `bench`: what it prints, keeps and draws, and what it refuses."""

import json
import os
import signal
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from datetime import UTC, date, datetime
from pathlib import Path
from typing import Any

import pytest
import torch

from decoder.commands.prompts import read_prompts
from decoder.plugins.contenders.contender import FOREDRAFT, PLAIN, UNDRAFTED, OwnContender, Run
from decoder.plugins.contenders.registry import ENTRIES, TABLES
from indexer.launch import INTERRUPTED, TERMINATED
from tests.decoder.commands.command_line import bench
from tests.decoder.plugins.bench.wrong_answers import flipping

pytestmark = pytest.mark.usefixtures("costs_of_earlier_tests")

UNREPETITIVE = Path(__file__).parents[4] / "benchmarks" / "prompts" / "unrepetitive.txt"


def test_so_many_prompts_of_each_category(questions: Path) -> None:
    prompts = read_prompts(questions, per_category=2)
    assert sorted(prompt.category for prompt in prompts) == ["poems"] * 2 + ["sums"] * 2
    assert len(read_prompts(questions, 3, 2)) == 3


def test_the_prompts_chosen_not_to_repeat_can_be_read() -> None:
    prompts = read_prompts(UNREPETITIVE)
    assert len({prompt.text for prompt in prompts}) == len(prompts) >= 10


@pytest.mark.programs
def test_bench_reports_figures_by_category(
    model_directory: Path,
    questions: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    arguments = ["--model", str(model_directory), "--prompts", str(questions)]
    arguments += ["--max-new-tokens", "16", "--limit", "4"]
    assert bench(monkeypatch, *arguments, "--json") == 0
    report = json.loads(capsys.readouterr().out)
    assert set(report["categories"]) == {"poems", "sums"}
    for figures in [report["overall"], *report["categories"].values()]:
        assert figures["identical"] == figures["num_prompts"]
        assert figures["speedup_over_plain"] > 0
        assert figures["undrafted_identical"] == figures["num_prompts"]
        for other in ("plain", "prompt_lookup", "undrafted"):
            assert figures[f"speedup_over_{other}"] > 0
            assert figures[f"median_speedup_over_{other}"] > 0
        assert figures["tokens_per_step"] >= 1
        assert figures["num_passes"]["plain"] == figures["num_tokens"]["plain"]
    assert report["overall"]["num_prompts"] == 4
    assert report["dtype"] == "float32"
    assert report["machine"]["torch_threads"] == torch.get_num_threads()
    assert isinstance(report["machine"]["cpu"], str)
    assert abs((datetime.now(UTC).date() - date.fromisoformat(report["date"])).days) <= 1
    assert report["skipped"] == 0
    assert bench(monkeypatch, *arguments) == 0
    assert "overall" in capsys.readouterr().out


@pytest.mark.bench
def test_prompts_that_do_not_fit_are_skipped_and_counted(
    model_directory: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    prompts = tmp_path / "prompts"
    prompts.write_text(f"{'a' * 120}\n{'b' * 128}\nabc\n")
    arguments = ["--model", str(model_directory), "--prompts", str(prompts)]
    arguments += ["--max-new-tokens", "16"]
    assert bench(monkeypatch, *arguments, "--json") == 0
    report = json.loads(capsys.readouterr().out)
    assert report["skipped"] == 1
    assert report["overall"]["num_prompts"] == report["overall"]["identical"] == 2
    assert report["overall"]["prompt_lookup_identical"] == 2
    assert len(set(report["overall"]["num_tokens"].values())) == 1
    assert bench(monkeypatch, *arguments) == 0
    assert "skipped because they do not fit the model: 1" in capsys.readouterr().out
    prompts.write_text("b" * 128)
    assert bench(monkeypatch, *arguments) == 1
    assert "none of the 1 prompts" in capsys.readouterr().err


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
    assert bench(monkeypatch, *arguments) == 0
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


@pytest.mark.bench
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
    (one,), (other,) = greedy["widths"], sampled["widths"]
    assert one["num_answers"] == 4  # two turns each
    assert other["num_answers"] == 8  # and two seeds
    for width in (one, other):
        for name in ("undrafted", "prompt-lookup", FOREDRAFT):
            figures = width["contenders"][name]
            assert figures["identical"] == width["num_answers"]
            for column in width["categories"].values():
                assert column["contenders"][name]["identical"] == column["num_answers"] > 0
            assert figures["speedup"][1] <= figures["speedup"][0] <= figures["speedup"][2]
    assert "</svg>" in plot.read_text()


def signalling(
    monkeypatch: pytest.MonkeyPatch, at: int, number: signal.Signals
) -> Callable[[], None]:
    """Have a run of our own contenders send a signal; return a check that it did."""
    decode, count = OwnContender.__call__, 0

    def run(
        self: OwnContender, prompts: Sequence[list[int]], parallel: int = 1, *, remember: bool
    ) -> Run:
        nonlocal count
        count += 1
        if count == at:
            os.kill(os.getpid(), number)
        return decode(self, prompts, parallel, remember=remember)

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
    where = "as many nodes as pay off"
    if is_json:
        report = json.loads(said.out)
        assert report["overall"]["num_prompts"] == 1
        at = {"where": where, "unit": "prompt", "done": 1, "of": 2, "counted": True}
        assert report["interrupted_at"] == at
    else:
        words = " ".join(said.out.split())
        assert f"interrupted: {where}, 1 of 2 prompts" in words
        assert "plain step: " in words
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
    for part in (
        "as many nodes as pay off; 2 prompts",
        "speed-up over",
        "accepted tokens,",
        "poems",
    ):
        assert part in shown
    assert "over undrafted" in shown
    assert "over prompt-lookup, as many nodes as pay off" in shown
    assert "[]: 90% bootstrap intervals" in shown
    assert "x plain" not in shown


def test_all_contenders_are_listed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert bench(monkeypatch, "--contenders") == 0
    shown = capsys.readouterr().out
    for name, entry in ENTRIES.items():
        line = next(line for line in shown.splitlines() if f" {name} " in line)
        assert entry.summary in line
        assert entry.paper in line


@pytest.fixture
def in_parallel(model_directory: Path, tmp_path: Path) -> list[str]:
    path = tmp_path / "prompts"
    path.write_text("abc\none two one two\nx\nab ab ab ab\n")
    options = ["--model", str(model_directory), "--prompts", str(path), "--max-new-tokens", "6"]
    return [*options, "--parallel", "1", "--parallel", "2", "--parallel", "2"]


@pytest.mark.bench
def test_the_command_compares_with_and_without_a_draft_model_and_draws(
    in_parallel: list[str],
    model_directory: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    plot = tmp_path / "plot.png"
    options = ["--draft-model", str(model_directory), "--plot", str(plot), "--json"]
    assert bench(monkeypatch, *in_parallel, *options, "--nodes", "4") == 0
    report = json.loads(capsys.readouterr().out)
    (setting,) = report["settings"]
    assert [width["parallel"] for width in setting["widths"]] == [1, 2]
    for width in setting["widths"]:
        assert list(width["contenders"]) == [PLAIN, UNDRAFTED, TABLES, FOREDRAFT]
    # A draft model that is the model itself is always right.
    accepted = setting["widths"][1]["contenders"][FOREDRAFT]["accepted_tokens"][0]
    assert accepted > setting["widths"][1]["contenders"][TABLES]["accepted_tokens"][0]
    assert plot.read_bytes().startswith(b"\x89PNG")


@pytest.mark.bench
def test_the_table_says_first_where_ours_lose(
    in_parallel: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    decode = OwnContender.__call__

    def slower(*given: Any, **options: Any) -> Run:
        run = decode(*given, **options)
        return replace(run, seconds=20 * run.seconds)

    monkeypatch.setattr(OwnContender, "__call__", slower)
    assert bench(monkeypatch, *in_parallel, "--over", "foredraft-retrieval") == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("slower")
    text = "\n".join(lines)
    assert text.index("compared with model.generate") < text.index("x plain")
    assert "over foredraft-retrieval" in text
    assert "1: 4 prompts in 4 groups, 2: 4 prompts in 2 groups" in text


def test_a_wrong_output_fails_the_command(
    in_parallel: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    flipping(monkeypatch, at=2)
    assert bench(monkeypatch, *in_parallel) == 1
    assert "DIFFERENT: foredraft, 2 in parallel, prompt 1, token 2" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("options", "told"),
    [
        (["--contender", "eagle"], "--contender eagle: there is no such contender"),
        (["--contender", "model"], "give --draft-model"),
        (["--nodes", "300"], "--nodes must be 0 to 256"),
        (["--seed", "3"], "--seed has no effect at temperature 0"),
        (["--temperature", "-1"], "temperature must be 0"),
        (["--plot", "figure.pdf"], "a plot is drawn as .png or .svg"),
        (["--state", "kept", "--nodes", "4", "--nodes", "8"], "--state and --server store answers"),
        (["--server", "127.0.0.1:1", "--repeat", "2"], "--state and --server store answers"),
        (
            ["--server", "127.0.0.1:1", "--contender", "foredraft", "--over", "foredraft-tables"],
            "would show the answers of foredraft to foredraft-tables",
        ),
        (["--parallel", "0"], "--parallel must be 1 or more"),
        (
            ["--parallel", "2", "--contender", "transformers-lookup"],
            "--contender transformers-lookup decodes one prompt at a time",
        ),
        (["--parallel", "2", "--turns", "both"], "--turns both and --parallel exclude each other"),
        (["--parallel", "9"], "--parallel 9 needs as many prompts, but there are 6"),
        (
            ["--parallel", "2", "--parallel", "4", "--state", "kept"],
            "--state and --server store answers",
        ),
        (["--parallel", "2", "--plot", "plot.pdf"], "--plot plot.pdf: a plot is drawn as"),
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
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("error: ")
    assert told in line


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_cuda_that_is_not_there_is_refused_in_a_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    options = ["--model", "nowhere", "--prompts", "nothing", "--parallel", "2"]
    assert bench(monkeypatch, *options, "--device", "cuda") == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("error: --device cuda: there is no CUDA here")
