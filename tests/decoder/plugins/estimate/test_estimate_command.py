"""`foredraft estimate` as a user types it."""

import gzip
import json
import re
from pathlib import Path

import pytest

from indexer.build import build_from_texts
from tests.decoder.commands.command_line import run

pytestmark = pytest.mark.plugin("decoder.plugins.contenders")


@pytest.fixture
def log(tmp_path: Path) -> Path:
    """Twelve records of two kinds: outputs that repeat, and outputs that never do."""
    rows = []
    for number in range(6):
        repeating = list(range(50, 70)) * 3
        novel = list(range(1000 * number + 100, 1000 * number + 160))
        rows += [
            {"category": "edits", "prompt_ids": [1, 2, number], "output_ids": repeating},
            {"category": "poems", "prompt_ids": [3, 4, number], "output_ids": novel},
        ]
    path = tmp_path / "log.jsonl.gz"
    with gzip.open(path, "wt") as file:
        file.writelines(json.dumps(row) + "\n" for row in rows)
    return path


def test_it_answers_in_the_last_line_and_states_what_it_assumes(
    log: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(monkeypatch, "estimate", str(log), "--budget", "8") == 0
    shown = capsys.readouterr().out
    last = shown.splitlines()[-1]
    said = re.match(
        r"foredraft: at most ([\d.]+) times plain decoding with .*, for one sequence at a time "
        r"\(([\d.]+) times for 32 in a pass\), computed for 8b-h100 without the engine's "
        r"own time, not measured: "
        r"`--model M` measures your model; \d+ outputs are few: more outputs may change the "
        r"verdict; it won't help with poems \(",
        last,
    )
    assert said, last
    alone, crowded = map(float, said.groups())
    assert alone > crowded
    assert run(monkeypatch, "estimate", str(log), "--budget", "8", "--batch", "2") == 0
    last = capsys.readouterr().out.splitlines()[-1]
    assert ", for 2 sequences in a pass, computed for " in last
    for told in ("tokens per step", "speed-up", "prompt-lookup", "data sheet"):
        assert told in shown


def test_values_are_json_and_the_costs_are_those_of_a_file(
    log: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    dear = tmp_path / "dear.json"
    dear.write_text(json.dumps({"widths": [1, 2, 5], "seconds": [1, 2.01, 5.04]}))
    plot = tmp_path / "plot.svg"
    arguments = ["--costs", str(dear), "--budget", "4", "--json", "--by", "none", "--limit", "5"]
    assert run(monkeypatch, "estimate", str(log), *arguments, "--plot", str(plot)) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["verdict"].startswith("it won't help: ")
    assert report["helps"] is False
    assert (report["is_bound"], report["crowded"]) == (False, None)
    plain = report["plain"]["all"]
    assert (plain["records"], plain["tokens"], plain["pass_s"]) == (5, 5 * 59, 5 * 59)
    fixed = next(o for o in report["outcomes"] if (o["drafter"], o["nodes"]) == ("foredraft", 4))
    figures = fixed["kinds"]["all"]
    assert figures["tokens_per_step"] == figures["tokens"] / figures["steps"]
    assert figures["speedup"] == plain["pass_s"] / (figures["pass_s"] + figures["draft_s"])
    assert plot.read_text().startswith("<?xml")


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["--costs", "a.json", "--model", "b"], "--model and --costs exclude each other"),
        (["--model", "b", "--batch", "2"], "--batch needs --roofline"),
        (["--roofline", "9b-abacus"], "choose from 1b-h100, "),
        (["--budget", "0"], "--budget must be from 1 to 256"),
        (["--budget", "257"], "--budget must be from 1 to 256"),
        (["--costs", "none.json"], "none.json cannot be read"),
        (["--plot", "plot.pdf"], ".png or .svg"),
        (["--by", "tier"], "no such field"),
        (["--index", "none"], "none"),
    ],
)
def test_what_cannot_be_done_is_said_in_a_line(
    arguments: list[str],
    told: str,
    log: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert run(monkeypatch, "estimate", str(log), *arguments) == 1
    shown = capsys.readouterr().err.splitlines()
    assert shown[-1].startswith("error: ")
    assert told in shown[-1]


@pytest.mark.parametrize("content", ["", "no log\n", '{"a": 1}\n', "[1]\n", '{"prompt": "p"}\n'])
def test_what_is_no_log_is_said_with_its_place(
    content: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    path = tmp_path / "log.jsonl"
    path.write_text(content)
    assert run(monkeypatch, "estimate", str(path)) == 1
    shown = capsys.readouterr().err
    assert shown.startswith("error: ")
    assert str(path) in shown


def test_a_log_of_conversations_is_replayed_turn_by_turn_on_measured_passes(
    tmp_path: Path,
    model_directory: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    said = [("user", "abcd"), ("assistant", "bcdbcd"), ("user", "dcb"), ("assistant", "cdcdcd")]
    messages = [{"role": role, "content": content} for role, content in said]
    path = tmp_path / "chats.json"
    other = [{"role": "user", "content": "badc"}, messages[1]]
    path.write_text(json.dumps([{"messages": messages, "model": "m"}, {"messages": other}]))
    measuring = ["--model", str(model_directory), "--cost-cache", "none"]
    arguments = [*measuring, "--budget", "4", "--json"]
    assert run(monkeypatch, "estimate", str(path), *arguments) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["kinds"] == {"field": "model", "names": ["m", "others"]}
    assert report["plain"]["m"]["records"] == 2
    assert report["plain"]["others"]["records"] == 1
    assert any("measured on this machine" in line for line in report["assumptions"])


def test_no_more_is_read_of_a_log_than_is_replayed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    row = json.dumps({"prompt_ids": [1], "output_ids": [2, 3, 2, 3, 2, 3]})
    path = tmp_path / "log.jsonl"
    short = json.dumps({"prompt_ids": [1], "output_ids": [2]})
    path.write_text(f"{row}\n{row}\nno record\n{short}\n{row[:30]}")
    arguments = ["estimate", str(path), "--budget", "2", "--limit"]
    assert run(monkeypatch, *arguments, "2") == 0
    assert "skipped" not in capsys.readouterr().err
    assert run(monkeypatch, *arguments, "9") == 0
    out, err = capsys.readouterr()
    assert f"skipped: 2 not JSON (first: {path}:3; " in err
    assert "- 3 outputs of 13 tokens; 1 have fewer than two: nothing to draft\n" in out


def test_texts_are_read_by_the_tokenizer_of_the_index(
    tmp_path: Path,
    model_directory: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    log, index = tmp_path / "log.jsonl", tmp_path / "x"
    log.write_text(json.dumps({"prompt": "abc", "output": "abcabcabc"}) + "\n")
    build_from_texts([("a", "dcba" * 9)], index, str(model_directory))
    arguments = ["estimate", str(log), "--index", str(index), "--budget", "2", "--json"]
    assert run(monkeypatch, *arguments) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["plain"]["all"]["tokens"] == len("abcabcabc") - 1
