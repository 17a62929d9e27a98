"""The command for machines with CUDA: it skips without one, and its parts run on any device."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks import gpu
from benchmarks.decoding import commit_cost
from indexer.tokenizer import CACHE_VARIABLE

PROMPTS = ["a b c a b", "c c d", "b a b a", "d e d"]


def run(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> int | str:
    monkeypatch.setattr(sys, "argv", ["gpu", *arguments])
    with pytest.raises(SystemExit) as stop:
        gpu.main()
    return stop.value.code or 0


@pytest.fixture
def _small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(CACHE_VARIABLE, "none")
    monkeypatch.setattr(commit_cost, "LAYERS", 2)
    monkeypatch.setattr(commit_cost, "CONTEXTS", (64, 128))
    monkeypatch.setattr(commit_cost, "VOCABULARY", 96)
    torch.set_num_threads(1)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_without_cuda_it_says_so_and_skips(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(gpu, "MEASURES", {})
    assert run(monkeypatch) == 0
    assert capsys.readouterr().out == "skipped: no CUDA device here, nothing was measured\n"


@pytest.mark.programs
@pytest.mark.usefixtures("_small")
def test_all_parts_run_and_are_kept(
    tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "prompts").write_text("\n".join(PROMPTS))
    output = tmp_path / "results" / "cpu.json"
    options = ["--model", str(tiny_model), "--prompts", str(tmp_path / "prompts")]
    options += ["--device", "cpu", "--output", str(output), "--rounds", "2"]
    assert run(monkeypatch, *options, "--limit", "3", "--max-new-tokens", "12") == 0
    result: dict[str, Any] = json.loads(output.read_text())
    assert result["device"] == {"name": "cpu"}
    assert result["machine"]["num_cpus"]
    assert result["exactness"]["prompts"] == result["exactness"]["identical"] == 3
    rows = [(row["context"], row["width"]) for row in result["commit-cost"]["rows"]]
    assert rows == [(context, width) for context in (64, 128) for width in commit_cost.WIDTHS]
    curve = result["cost-curve"]
    assert curve["widths"][:4] == [1, 2, 4, 8]
    assert [len(row) for row in curve["milliseconds"]] == [len(curve["widths"])] * len(
        curve["contexts"]
    )
    overall = result["bench"]["overall"]
    assert overall["tokens_per_second"].keys() == {
        "plain",
        "prompt_lookup",
        "undrafted",
        "foredraft",
    }
    assert overall["speedup_over_undrafted"] > 0


@pytest.mark.usefixtures("_small")
def test_what_was_measured_is_kept_when_a_later_part_fails(
    tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def failing(_: gpu.Plan) -> dict[str, Any]:
        raise OSError("lost the device")

    (tmp_path / "prompts").write_text(PROMPTS[0])
    monkeypatch.setitem(gpu.MEASURES, gpu.Part.BENCH, failing)
    output = tmp_path / "result.json"
    options = ["--model", str(tiny_model), "--prompts", str(tmp_path / "prompts")]
    options += ["--device", "cpu", "--output", str(output)]
    parts = ["--only", "cost-curve", "--only", "bench"]
    assert run(monkeypatch, *options, *parts) == "error: lost the device"
    result = json.loads(output.read_text())
    assert "cost-curve" in result
    assert "bench" not in result


def test_prompts_that_are_not_named_are_asked_for(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(monkeypatch, "--device", "cpu") == 2
    assert "--prompts" in capsys.readouterr().err
