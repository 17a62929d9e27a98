"""The command for machines with CUDA: it skips without one, and its parts run on any device."""

import json
import re
import subprocess
import sys
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from benchmarks.decoding import commit_cost
from benchmarks.gpu import device_measuring as gpu
from benchmarks.gpu import missing
from decoder.contenders.contender import OwnContender, Run
from decoder.drafters.following import NoDrafter
from decoder.errors import PlotError
from indexer.tokenizer import CACHE_VARIABLE

PROMPTS = ["a b c a b", "c c d", "b a b a", "d e d", "e d e d e"]


def run(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> int | str:
    monkeypatch.setattr(sys, "argv", ["gpu", *arguments])
    with pytest.raises(SystemExit) as stop:
        gpu.main()
    return stop.value.code or 0


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


@pytest.mark.programs
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
    assert exact["parallel"]["answers"] == {"1": 5, "2": 4}
    assert set(exact["parallel"]["identical"]["2"]) == {
        "undrafted",
        "foredraft-tables",
        "foredraft",
    }
    assert set(exact["parallel"]["identical"]["2"].values()) == {4}
    assert exact["parallel"]["different"] == []
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
    (setting,) = result["parallel"]["settings"]
    assert [width["parallel"] for width in setting["widths"]] == [1, 2]
    assert list(setting["widths"][1]["contenders"]) == [
        "plain",
        "undrafted",
        "foredraft-tables",
        "foredraft",
    ]
    text = output.with_suffix(".md").read_text()
    sections = re.findall(r"^## (\w+)", text, re.MULTILINE)
    assert sections == ["Exactness", "In", "One", "Passes", "Verifying"]
    plots = re.findall(r"!\[.*\]\((.*)\)", text)
    assert plots == [f"cpu-{part}.svg" for part in ("parallel", "bench", "cost-curve")]
    assert all("</svg>" in (output.parent / plot).read_text() for plot in plots)


@pytest.mark.usefixtures("_small")
def test_what_was_measured_is_kept_when_a_later_part_fails(
    command: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def failing(_: gpu.Plan) -> dict[str, Any]:
        raise OSError("lost the device")

    monkeypatch.setitem(gpu.MEASURES, gpu.Part.BENCH, failing)
    output = tmp_path / "result.json"
    parts = ["--output", str(output), "--only", "cost-curve", "--only", "bench"]
    assert run(monkeypatch, *command, *parts) == "error: lost the device"
    result = json.loads(output.read_text())
    assert "cost-curve" in result
    assert "bench" not in result
    assert "## Passes" in output.with_suffix(".md").read_text()


@pytest.mark.usefixtures("_small")
def test_parts_are_added_to_those_of_the_same_run_alone(
    command: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def without_plots() -> Any:
        raise PlotError("--plot: matplotlib is missing: install it")

    monkeypatch.setitem(gpu.MEASURES, gpu.Part.COMMIT_COST, lambda _: {"rows": [{"context": 64}]})
    monkeypatch.setattr("benchmarks.gpu.device_report.draw_widths", lambda *_: without_plots())
    output = tmp_path / "result.json"
    command += ["--output", str(output), "--add", "--parallel", "2"]
    assert run(monkeypatch, *command, "--only", "commit-cost") == 0
    assert run(monkeypatch, *command, "--only", "parallel") == 0
    result = json.loads(output.read_text())
    assert result["commit-cost"]["rows"] == [{"context": 64}]
    assert result["parallel"]["settings"]
    text = output.with_suffix(".md").read_text()
    assert "No plot: matplotlib is missing: install it" in text
    told = str(run(monkeypatch, *command, "--only", "parallel", "--limit", "4"))
    assert "has another num_prompts, 5: name another file" in told


@pytest.mark.usefixtures("_small")
def test_a_wrong_output_in_parallel_fails_the_command(
    command: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    decode = OwnContender.decode_many

    def wrong(
        self: OwnContender, prompts: Sequence[list[int]], parallel: int, *, remember: bool
    ) -> Run:
        run = decode(self, prompts, parallel, remember=remember)
        if not isinstance(self.decoder.drafter, NoDrafter):
            run.token_ids[0] ^= 1
        return run

    monkeypatch.setattr(OwnContender, "decode_many", wrong)
    output = tmp_path / "result.json"
    command += ["--output", str(output), "--only", "exactness", "--parallel", "2"]
    assert run(monkeypatch, *command) == 1
    exact = json.loads(output.read_text())["exactness"]
    assert exact["identical"] == 5  # one by one all is right
    assert {each["contender"] for each in exact["parallel"]["different"]} == {"foredraft"}
    assert "DIFFERENT: foredraft, 2 in parallel" in output.with_suffix(".md").read_text()


def test_weights_in_parts_are_taken_and_what_was_not_brought_is_named(
    tiny_model: Path,
    command: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    folder = tmp_path / "parts"
    model = AutoModelForCausalLM.from_pretrained(tiny_model)
    model.save_pretrained(folder, max_shard_size="20KB")
    AutoTokenizer.from_pretrained(tiny_model).save_pretrained(folder)
    parts = sorted(path.name for path in folder.glob("*.safetensors"))
    assert len(parts) > 2
    assert missing.missing_files(str(folder)) == []
    assert missing.missing_files(str(tiny_model)) == []
    assert missing.missing_files("a/hub-id") == []
    (folder / parts[1]).unlink()
    (folder / "tokenizer.json").unlink()
    command[1] = str(folder)
    told = run(monkeypatch, *command)
    assert told == (
        f"error: {folder} lacks tokenizer.json, {parts[1]}: bring them to that folder first"
    )
    (folder / "model.safetensors.index.json").unlink()
    expected = ["tokenizer.json", "model.safetensors.index.json", parts[1]]
    assert missing.missing_files(str(folder)) == expected
    (tmp_path / "empty").mkdir()
    expected = ["config.json", "tokenizer.json", "model.safetensors"]
    assert missing.missing_files(str(tmp_path / "empty")) == expected


def test_packages_that_a_bare_machine_lacks_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    assert not [each for each in missing.missing_packages() if each.startswith("torch")]

    def version(name: str) -> str:
        raise PackageNotFoundError(name)

    monkeypatch.setattr(missing, "version", version)
    named = missing.missing_packages()
    assert {"torch>=2.6", "numba>=0.61", "numpy>=1.26", "matplotlib>=3.9"} <= set(named)
    assert not [each for each in named if each.startswith("foredraft")]
    before = sum("python_version < '3.14'" in each for each in named)
    assert before == (sys.version_info < (3, 14))


@pytest.mark.programs
def test_without_torch_the_command_says_what_to_install(tmp_path: Path) -> None:
    (tmp_path / "torch.py").write_text("raise ModuleNotFoundError('gone', name='torch')")
    root = Path(__file__).parents[2]
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.gpu", "--prompts", "none"],
        cwd=root,
        env={"PYTHONPATH": str(tmp_path), "PATH": ""},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 1
    (line,) = done.stderr.splitlines()
    assert line == "error: missing on this machine: torch: install them first"


def test_prompts_that_are_not_named_are_asked_for(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(monkeypatch, "--device", "cpu") == 2
    assert "--prompts" in capsys.readouterr().err
