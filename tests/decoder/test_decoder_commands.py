import gzip
import io
import json
import sys
from pathlib import Path

import pytest

from decoder.__main__ import main
from decoder.errors import PromptFileError
from decoder.models import ModelOptions, load_model
from decoder.prompts import Prompt, read_prompts
from tests.decoder.decoding import plainly

PROMPT = "abcabc"


def run(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> int:
    """Run the command line in this process and return its exit status."""
    monkeypatch.setattr(sys, "argv", ["decoder", *arguments])
    with pytest.raises(SystemExit) as stop:
        main()
    return int(stop.value.code or 0)


def generate(monkeypatch: pytest.MonkeyPatch, model: Path, *arguments: str) -> int:
    return run(monkeypatch, "generate", "--model", str(model), *arguments)


def test_generate_prints_what_the_model_generates(
    model_directory: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    language_model = load_model(ModelOptions(str(model_directory)))
    expected = plainly(language_model.model, language_model.encode(PROMPT), 20, 0)
    arguments = ("--prompt", PROMPT, "--max-new-tokens", "20")
    assert generate(monkeypatch, model_directory, *arguments, "--json") == 0
    report = json.loads(capsys.readouterr().out)
    assert report["token_ids"] == expected
    assert generate(monkeypatch, model_directory, *arguments) == 0
    output = capsys.readouterr()
    assert output.out == report["text"] + "\n"
    assert "tokens/s" in output.err


def test_generate_reads_standard_input(
    model_directory: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    texts = []
    for given in (["--prompt", PROMPT], []):
        monkeypatch.setattr(sys, "stdin", io.StringIO(PROMPT))
        generate(monkeypatch, model_directory, "--max-new-tokens", "5", *given)
        texts.append(capsys.readouterr().out)
    assert texts[0] == texts[1]


def test_sampling_is_repeatable_by_seed(
    model_directory: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    outputs = []
    for seed in ("1", "1", "2"):
        arguments = ("--prompt", PROMPT, "--max-new-tokens", "30", "--temperature", "2")
        generate(monkeypatch, model_directory, *arguments, "--seed", seed, "--json")
        outputs.append(json.loads(capsys.readouterr().out)["token_ids"])
    assert outputs[0] == outputs[1] != outputs[2]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--prompt", ""], "prompt is empty"),
        (["--prompt", "x" * 128], "limit is 128"),
        (["--prompt", PROMPT, "--index", "a", "--server", "b"], "exclude each other"),
        (["--prompt", PROMPT, "--index", "no-such-index"], "no-such-index"),
        (["--prompt", PROMPT, "--device", "nowhere"], "nowhere"),
    ],
)
def test_bad_input_is_answered_in_one_line(
    model_directory: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    arguments: list[str],
    message: str,
) -> None:
    assert generate(monkeypatch, model_directory, *arguments) == 1
    error = capsys.readouterr().err
    assert error.startswith("error: ")
    assert message in error
    assert error.count("\n") == 1


def test_an_unknown_model_is_answered_in_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ("--model", "./no-such-model", "--prompt", PROMPT)
    assert run(monkeypatch, "generate", *arguments) == 1
    assert "no-such-model" in capsys.readouterr().err


def test_an_unreachable_server_costs_drafts_only(
    model_directory: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ("--prompt", PROMPT, "--max-new-tokens", "8", "--json")
    generate(monkeypatch, model_directory, *arguments)
    plain = json.loads(capsys.readouterr().out)
    generate(monkeypatch, model_directory, *arguments, "--server", "127.0.0.1:1")
    alone = json.loads(capsys.readouterr().out)
    assert alone["token_ids"] == plain["token_ids"]
    assert alone["num_failures"] > 0


@pytest.fixture
def questions(tmp_path: Path) -> Path:
    path = tmp_path / "questions.jsonl.gz"
    rows = [
        {"question_id": number, "category": category, "turns": [f"{category} {number}", "more"]}
        for category in ("poems", "sums")
        for number in range(3)
    ]
    path.write_bytes(gzip.compress("\n".join(map(json.dumps, rows)).encode()))
    return path


def test_bench_reports_figures_by_category(
    model_directory: Path,
    questions: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    arguments = ["--model", str(model_directory), "--prompts", str(questions)]
    arguments += ["--max-new-tokens", "16", "--limit", "4"]
    assert run(monkeypatch, "bench", *arguments, "--json") == 0
    report = json.loads(capsys.readouterr().out)
    assert set(report["categories"]) == {"poems", "sums"}
    for figures in [report["overall"], *report["categories"].values()]:
        assert figures["identical"] == figures["num_prompts"]
        assert figures["speedup_over_plain"] > 0
        assert figures["speedup_over_prompt_lookup"] > 0
        assert figures["mean_accepted_tokens"] >= 1
        assert figures["num_passes"]["plain"] == figures["num_tokens"]["plain"]
    assert report["overall"]["num_prompts"] == 4
    assert report["dtype"] == "float32"
    assert report["machine"]["torch_threads"] == 2
    assert run(monkeypatch, "bench", *arguments) == 0
    assert "overall" in capsys.readouterr().out


def test_limits_are_spread_evenly_over_categories(questions: Path) -> None:
    texts = [prompt.text for prompt in read_prompts(questions, 4)]
    assert texts == ["poems 0", "sums 0", "poems 1", "sums 1"]
    assert len(read_prompts(questions)) == 6


def test_plain_lines_are_prompts(tmp_path: Path) -> None:
    path = tmp_path / "prompts.txt"
    path.write_text("one\n\ntwo\n")
    assert read_prompts(path) == [Prompt("prompts", "one"), Prompt("prompts", "two")]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "no prompt"),
        (b"\xff\xfe", "cannot read"),
        (b'{"category": "x"', ":1: expected"),
        (b'{"category": "x"}', ":1: expected"),
        (b'fine\n{"category": "x", "turns": []}', ":2: expected"),
        (b'{"category": 3, "turns": ["text"]}', "must be texts"),
        (b'{"category": "x", "turns": [" "]}', "must be texts"),
    ],
)
def test_malformed_prompt_files_are_refused(tmp_path: Path, content: bytes, message: str) -> None:
    path = tmp_path / "prompts"
    path.write_bytes(content)
    with pytest.raises(PromptFileError, match=message):
        read_prompts(path)


def test_missing_and_broken_files_are_refused(tmp_path: Path) -> None:
    broken = tmp_path / "broken.gz"
    broken.write_bytes(b"not gzip")
    for path in (broken, tmp_path / "missing"):
        with pytest.raises(PromptFileError, match=path.name):
            read_prompts(path)
