import json
import sys
from pathlib import Path

import pytest

from benchmarks.decoding import greedy_exactness
from decoder.contenders.contender import PLAIN, OwnContender, Run
from decoder.contenders.prompt_lookup import PromptLookup
from decoder.contenders.registry import ENTRIES
from indexer.tokenizer import CACHE_VARIABLE

PROMPTS = ["a b c a b", "c c d", "b a b a", "d e d"]


@pytest.fixture
def command(tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    monkeypatch.setenv(CACHE_VARIABLE, "none")
    prompts = tmp_path / "prompts"
    prompts.write_text("\n".join(PROMPTS))
    options = ["--prompts", str(prompts), "--model", str(tiny_model), "--max-new-tokens", "12"]
    return [*options, "--output", str(tmp_path / "exact.jsonl")]


def run(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> int | str:
    monkeypatch.setattr(sys, "argv", ["greedy_exactness", *arguments])
    with pytest.raises(SystemExit) as stop:
        greedy_exactness.main()
    return stop.value.code or 0


def test_a_run_that_was_cut_short_is_gone_on_with(
    command: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    output = tmp_path / "exact.jsonl"
    assert run(monkeypatch, *command, "--limit", "3") == 0
    assert json.loads(capsys.readouterr().out)["identical"] == 3
    first = output.read_text().splitlines()
    output.write_text("\n".join([*first[:3], first[3][:20]]))
    assert run(monkeypatch, *command, "--resume") == 0
    result = json.loads(capsys.readouterr().out)
    assert result["prompts"] == result["identical"] == len(PROMPTS)
    assert result["dtype"] == "float32"
    assert result["machine"]["torch_threads"]
    lines = [json.loads(line) for line in output.read_text().splitlines()]
    assert [line["prompt"] for line in lines[1:]] == [0, 1, 2, 3]
    assert json.loads((tmp_path / "exact.summary.json").read_text()) == result


def test_a_file_of_another_run_is_not_gone_on_with(
    command: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert run(monkeypatch, *command, "--limit", "1") == 0
    assert "is there already" in str(run(monkeypatch, *command))
    other = [*command, "--resume", "--max-new-tokens", "5"]
    assert "belongs to another run" in str(run(monkeypatch, *other))


def test_a_difference_is_found_where_it_is(
    command: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    decode = OwnContender.__call__

    def wrong(self: OwnContender, prompt: list[int], *, remember: bool) -> Run:
        run = decode(self, prompt, remember=remember)
        if not isinstance(self.decoder.drafter, PromptLookup):
            run.token_ids[2:] = [run.token_ids[2] ^ 1]
        return run

    monkeypatch.setattr(OwnContender, "__call__", wrong)
    options = ["--limit", "1", "--contender", "prompt-lookup", "--contender", "hd"]
    assert run(monkeypatch, *command, *options) == 1
    result = json.loads(capsys.readouterr().out)
    assert result["identical"] == 0
    (found,) = result["different"]
    assert found["contender"] == "hd"
    assert found["position"] == 2
    assert found["best_tokens"][0] == found["plain"] != found["drafted"]
    assert found["gap"] > 0
    assert not found["is_tie"]


def test_all_contenders_that_have_something_to_draft_with_are_compared(
    command: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(monkeypatch, *command, "--contender", "all", "--nodes", "6") == 0
    result = json.loads(capsys.readouterr().out)
    assert result["identical"] == len(PROMPTS)
    drafting = [name for name, entry in ENTRIES.items() if not entry.needs and name != PLAIN]
    assert result["contenders"] == drafting
    assert result["passes"]["foredraft"] < result["passes"]["undrafted"]
