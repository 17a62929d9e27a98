"""A sample of the sweep over all architectures, and what it keeps."""

import json
from pathlib import Path

import pytest
import torch
import typer
from transformers import GenerationMixin
from typer.testing import CliRunner

from decoder.errors import UnsupportedModelError
from decoder.model import target as target_module
from decoder.model.compatibility import Capability, Compatibility
from decoder.model.target import Target
from decoder.model.tree_rows import TreeRows
from tests.decoder.model.test_capability_check import siblings_visible
from tests.oracles.exactness import architecture_check, architectures as command
from tests.oracles.exactness.architecture_check import REFUSED, UNABLE, Finding, examined
from tests.oracles.exactness.hostile_drafts import right
from tests.oracles.exactness.tiny_models import architectures, tiny_model
from tests.suite_parts import draws_all_cases

ROOT = Path(__file__).parents[3]
KEPT = ROOT / "benchmarks/results/decoding/2026-11-26-architectures.json"
PAGE = ROOT / "docs/reference/architectures.md"

SAMPLE = {
    "llama": "trees",
    "roberta": "trees",  # counts positions from 2 where it is not told them
    "gemma3n_text": "trees",  # layers share the keys of earlier ones
    "gemma4_text": "trees",
    "gemma4_unified_text": "trees",  # both directions, but for pictures alone
    "moshi": "trees",  # its window is in its cache alone
    "deepseek_v32": "chains",  # writes to the mask of a single row, too
    "gpt_neo": "chains",
    "roformer": "chains",
    "bamba": "plain",
    "minimax": "plain",
    "openai-gpt": "plain",
    "xlm": "plain",
    "xlnet": "plain",
    "cpmant": "plain",
    "reformer": "plain",  # reads several sequences in chunks only
}
FEW = ("roberta", "moshi", "deepseek_v32", "bamba")
"""Each special in another way; what is most common is the model of all other tests."""


@pytest.fixture(autouse=True)
def _short_outputs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Decode less by default: windows of eight are crossed, or behind, all the same."""
    if not draws_all_cases():
        monkeypatch.setattr(architecture_check, "LENGTHS", ((3, 18), (30, 8)))


@pytest.fixture
def _right_drafts_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(architecture_check, "HOSTILE", {"right": right})


@pytest.mark.seeds
@pytest.mark.parametrize("architecture", SAMPLE if draws_all_cases() else FEW)
def test_hostile_drafts_leave_the_output_as_it_is(architecture: str) -> None:
    found = examined(architecture)
    assert found.verifies == SAMPLE[architecture]
    assert found.differences == []
    assert found.is_sound
    assert found.distinct > 1
    assert (found.tokens_per_pass > 2) == (found.verifies != "plain")
    assert bool(found.reason) == (found.verifies != "trees")


@pytest.mark.usefixtures("_right_drafts_alone")
def test_a_planted_error_shows_in_the_outputs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(TreeRows, "of", siblings_visible)
    monkeypatch.setattr(Target, "_check", lambda *_: None)
    found = examined("llama")
    assert found.verifies == "trees"
    assert any("right drafts" in each for each in found.differences)
    assert not found.is_sound


@pytest.mark.parametrize("claimed", [Capability.CHAINS, Capability.PLAIN])
def test_a_false_reason_is_found(claimed: Capability, monkeypatch: pytest.MonkeyPatch) -> None:
    false = Compatibility(claimed, "it is said so")
    monkeypatch.setattr(target_module, "compatibility_of", lambda _: false)
    found = examined("llama")
    assert (found.verifies, found.reason) == (claimed.name.lower(), "it is said so")
    assert found.differences == []
    assert not found.is_sound


def test_a_model_whose_generate_fails_is_told_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    def failing(*_: object, **__: object) -> None:
        raise ValueError("no such thing")

    monkeypatch.setattr(GenerationMixin, "generate", failing)
    found = examined("llama")
    assert (found.verifies, found.reason) == (UNABLE, "no such thing")
    assert found.is_sound


def test_a_model_without_a_cache_is_refused_by_name() -> None:
    found = examined("blt")
    assert found.verifies == UNABLE
    assert found.differences == []
    with pytest.raises(UnsupportedModelError, match="BltForCausalLM: transformers makes no cache"):
        Target(tiny_model("blt"))


@pytest.mark.usefixtures("_right_drafts_alone")
def test_windows_are_crossed_and_outputs_change() -> None:
    model = tiny_model("gemma3_text")
    assert model.config.sliding_window == 8
    assert set(model.config.layer_types) == {"sliding_attention", "full_attention"}
    assert model.dtype is torch.float32
    assert examined("gemma3_text").distinct > 8


def test_the_command_goes_on_with_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    examinations: list[str] = []

    def found_of(architecture: str, limit_s: float) -> Finding:
        examinations.append(architecture)
        assert limit_s > 0
        return Finding(architecture, "Model", REFUSED, "it says", beyond="it fails")

    monkeypatch.setattr(command, "found_of", found_of)
    monkeypatch.setattr(command, "_get_ready", lambda: None)
    output, page = tmp_path / "found.json", tmp_path / "page.md"
    app = typer.Typer()
    app.command()(command.main)

    def run(*options: str) -> str:
        arguments = ["--output", str(output), "--page", str(page), *options]
        result = CliRunner().invoke(app, arguments)
        assert result.exit_code == 0, result.output
        return result.output

    assert "1 architectures: {'refused': 1}" in run("--only", "gpt2")
    assert "2 architectures" in run("--resume", "--only", "gpt2", "--only", "opt")
    assert examinations == ["gpt2", "gpt2", "opt"]
    run("--resume")
    assert sorted(examinations[3:]) == sorted(set(architectures()) - {"gpt2", "opt"})
    assert "| it says | " in page.read_text()
    assert "`opt`" in page.read_text()


@pytest.mark.filterwarnings("ignore:This process:DeprecationWarning")  # threads of other tests
def test_an_examination_that_takes_too_long_is_ended() -> None:
    found = command.found_of("llama", 0.0)
    assert (found.verifies, found.reason) == (command.TOO_LONG, "not done after 0 s")
    assert not found.is_sound


def test_the_kept_table_is_whole_and_no_output_differs() -> None:
    kept = json.loads(KEPT.read_text())
    assert kept["different"] == []
    assert kept["doubtful"] == ["recurrent_gemma"]  # its state lies in its modules: one at a time
    assert PAGE.read_text() == command.page(kept)
    if kept["transformers"] == command.summary([])["transformers"]:
        assert {row["architecture"] for row in kept["found"]} == set(architectures())
    found = {row["architecture"]: row["verifies"] for row in kept["found"]}
    assert {name: found[name] for name in SAMPLE} == SAMPLE
