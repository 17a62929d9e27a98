"""The command for machines with CUDA: it skips without one, and its parts run on any device."""

import json
import re
import sys
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.decoding import commit_cost
from benchmarks.gpu import device_measuring as gpu, missing
from decoder.drafters.following import NoDrafter
from decoder.plugins.contenders.contender import OwnContender, Run
from indexer.tokenizer import CACHE_VARIABLE

PROMPTS = ["a b c a b", "c c d", "b a b a", "d e d", "e d e d e"]


def run(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> int | str:
    monkeypatch.setattr(sys, "argv", ["gpu", *arguments])
    with pytest.raises(SystemExit) as stop:
        gpu.main()
    return stop.value.code or 0


def test_packages_that_are_not_there_or_too_old_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    assert missing.missing_packages() == []
    versions = {"transformers": "5.17.0", "lmdb": None}

    def version(name: str) -> str:
        found = versions.get(name, "99")
        if found is None:
            raise PackageNotFoundError(name)
        return found

    monkeypatch.setattr(missing, "version", version)
    named = missing.missing_packages()
    assert any(each.startswith("lmdb") for each in named)
    assert any(each.startswith("transformers>=5.2") for each in named)
    assert not any(each.startswith("torch") for each in named)


@pytest.fixture
def command(tiny_model: Path, tmp_path: Path) -> list[str]:
    (tmp_path / "prompts").write_text("\n".join(PROMPTS))
    options = ["--model", str(tiny_model), "--prompts", str(tmp_path / "prompts")]
    return [*options, "--device", "cpu", "--rounds", "2", "--max-new-tokens", "12"]


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


@pytest.mark.usefixtures("_small")
def test_all_parts_run_and_are_kept_with_a_report(
    command: list[str], tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    output = tmp_path / "results" / "cpu.json"
    options = ["--output", str(output), "--draft-model", str(tiny_model)]
    assert run(monkeypatch, *command, *options, "--parallel", "1", "--parallel", "2") == 0
    result: dict[str, Any] = json.loads(output.read_text())
    assert result["device"] == {"name": "cpu"}
    assert result["machine"]["num_cpus"]
    exact = result["exactness"]
    assert exact["prompts"] == exact["identical"] == 5
    assert set(exact["parallel"]["identical"]["2"].values()) == {4}
    assert exact["parallel"]["different"] == []
    rows = [(row["context"], row["width"]) for row in result["commit-cost"]["rows"]]
    assert rows == [(context, width) for context in (64, 128) for width in commit_cost.WIDTHS]
    assert len(result["cost-curve"]["milliseconds"]) == len(result["cost-curve"]["contexts"])
    assert result["bench"]["overall"]["speedup_over_undrafted"] > 0
    (setting,) = result["parallel"]["settings"]
    assert [width["parallel"] for width in setting["widths"]] == [1, 2]
    text = output.with_suffix(".md").read_text()
    sections = re.findall(r"^## (\w+)", text, re.MULTILINE)
    assert sections == ["Exactness", "In", "One", "Passes", "Verifying"]
    plots = re.findall(r"!\[.*\]\((.*)\)", text)
    assert plots == [f"cpu-{part}.svg" for part in ("parallel", "bench", "cost-curve")]
    assert all("</svg>" in (output.parent / plot).read_text() for plot in plots)


@pytest.mark.usefixtures("_small")
def test_a_wrong_output_in_parallel_fails_the_command(
    command: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    decode = OwnContender.__call__

    def wrong(
        self: OwnContender, prompts: Sequence[list[int]], parallel: int = 1, *, remember: bool
    ) -> Run:
        run = decode(self, prompts, parallel, remember=remember)
        if parallel == 2 and not isinstance(self.decoder.drafter, NoDrafter):
            run.token_ids[0] ^= 1
        return run

    monkeypatch.setattr(OwnContender, "__call__", wrong)
    output = tmp_path / "result.json"
    command += ["--output", str(output), "--only", "exactness", "--parallel", "2"]
    assert run(monkeypatch, *command) == 1
    exact = json.loads(output.read_text())["exactness"]
    assert exact["identical"] == 5  # one by one all is right
    assert {each["contender"] for each in exact["parallel"]["different"]} == {"foredraft"}
    assert "DIFFERENT: foredraft, 2 in parallel" in output.with_suffix(".md").read_text()
