import json
import os
import signal
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
import pytest
from safetensors.torch import save_file

from decoder.errors import TeachingTextError
from decoder.model.pretrained import LanguageModel
from decoder.plugins.speculators.head_files import HeadTarget, load_head
from decoder.plugins.training import fused_gain, taught_store, train_command
from decoder.plugins.training.lessons import Lesson
from indexer.launch import INTERRUPTED
from retriever.log.generations_log import GenerationsLog
from retriever.predict.generations import Output
from retriever.predict.pool import Entry
from tests.decoder.commands.command_line import never, run
from tests.decoder.plugins.training.teaching import StepClock

QUICK = ("--minutes", "0.1", "--tokens", "2500", "--draft-vocabulary", "64")


@pytest.fixture
def texts(tmp_path: Path) -> Path:
    path = tmp_path / "prompts.txt"
    path.write_text("".join(f"question {number}\n" for number in range(60)))
    return path


def train(monkeypatch: pytest.MonkeyPatch, model: Path, output: Path, *arguments: str) -> int:
    shared = ("--model", str(model), "--output", str(output))
    return run(monkeypatch, "train", *shared, *QUICK, *arguments)


@pytest.mark.training
def test_a_head_is_trained_and_reported(  # noqa: PLR0913, PLR0917  fixtures
    clock: StepClock,
    model_directory: Path,
    language_model: LanguageModel,
    texts: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(train_command, "MAX_PROMPTS", 2)
    monkeypatch.setattr(fused_gain, "MAX_NEW_TOKENS", 16)
    monkeypatch.setattr(fused_gain, "time", clock)
    output = tmp_path / "head"
    assert train(monkeypatch, model_directory, output, "--from", str(texts), "--json") == 0
    found = json.loads(capsys.readouterr().out)
    assert found["head"] == str(output)
    assert found["taught_tokens"] == found["own_tokens"] >= 2000
    assert found["held_out_prompts"] > 0
    assert len(found["after_training"]["top_4_by_depth"]) == 4
    assert [each["nodes"] for each in found["fused"]] == [5, 16, 32, 64]
    for each in found["fused"]:
        assert 1 <= each["prompts"] <= min(found["held_out_prompts"], 2)
        value, low, high = each["ratio"]
        both = each["tokens_per_pass_with"][0] / each["tokens_per_pass_without"][0]
        assert value == pytest.approx(both)
        assert low <= value <= high
        assert each["draft_ms"] > 0
        assert each["draft_share_of_pass"] == each["draft_ms"] / each["pass_ms"]
    target = HeadTarget.of(language_model.model, None, language_model.vocabulary)
    assert load_head(output, target).origin.trained_on == ("prompts.txt",)
    assert train(monkeypatch, model_directory, output, "--from", str(texts)) == 0
    said = capsys.readouterr().out
    assert "held-out tokens predicted" in said
    assert "tokens per pass of held-out prompts" in said
    assert f"foredraft generate --speculator {output}" in said.replace("\n", "")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((), "there are no texts: give --from or --state"),
        (("--from", "{texts}", "--tenant", "a"), "--tenant needs --state"),
        (("--state", "{missing}"), "there is no state directory"),
        (("--from", "{missing}"), "there is no such file"),
        (("--from", "{texts}", "--index", "{missing}"), "there is no index at"),
        (
            ("--from", "{texts}", "--no-gain", "--index", "i"),
            "--index has no effect with --no-gain",
        ),
        (("--from", "{texts}", "--limit", "3"), "3 different prompts and outputs are too few"),
    ],
)
def test_what_cannot_be_taught_is_told(  # noqa: PLR0913, PLR0917  fixtures
    arguments: tuple[str, ...],
    message: str,
    model_directory: Path,
    texts: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    named = [each.format(texts=texts, missing=tmp_path / "missing") for each in arguments]
    assert train(monkeypatch, model_directory, tmp_path / "head", *named) == 1
    assert message in " ".join(capsys.readouterr().err.split())
    assert not (tmp_path / "missing").exists()


@pytest.mark.usefixtures("clock")
def test_a_head_of_outputs_alone_is_not_compared_and_that_is_said(
    model_directory: Path,
    language_model: LanguageModel,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    log = GenerationsLog(tmp_path / "state", language_model.vocabulary.fingerprint)
    rng = np.random.default_rng(0)
    for _ in range(60):
        log.append(Entry("", Output(rng.integers(1, 250, 50).astype(np.int32), time.time())))
    log.close()
    monkeypatch.setattr(train_command, "fused_gains", never)
    of_state = ("--state", str(tmp_path / "state"))
    output = tmp_path / "head"
    assert train(monkeypatch, model_directory, output, *of_state) == 0
    assert "held-out outputs were stored without their prompts" in capsys.readouterr().out
    assert train(monkeypatch, model_directory, output, *of_state, "--no-gain", "--json") == 0
    assert json.loads(capsys.readouterr().out)["fused"] is None


def test_an_output_folder_must_be_named(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(monkeypatch, "train") == 2
    assert "--output" in capsys.readouterr().err
    assert run(monkeypatch, "train", "--help") == 0
    assert "--state" in capsys.readouterr().out


def test_outputs_of_another_tenant_are_not_read(
    model_directory: Path,
    language_model: LanguageModel,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    state = tmp_path / "state"
    rng = np.random.default_rng(0)
    outputs = {tenant: rng.integers(1, 250, 40).astype(np.int32) for tenant in ("ours", "theirs")}
    log = GenerationsLog(state, language_model.vocabulary.fingerprint)
    for tenant, output in outputs.items():
        log.append(Entry(tenant, Output(output, time.time())))
    log.close()
    read: list[list[list[int]]] = []

    def note(_model: LanguageModel, lessons: Sequence[Lesson], *_: object) -> NoReturn:
        read.append([each.output.tolist() for each in lessons])
        raise TeachingTextError("that was all")

    monkeypatch.setattr(train_command, "Course", note)
    for named in (["--tenant", "ours"], []):
        of_state = ("--state", str(state), *named)
        assert train(monkeypatch, model_directory, tmp_path / "head", *of_state) == 1
    assert read == [[outputs["ours"].tolist()], []]


def test_a_full_disk_is_one_line(
    model_directory: Path,
    texts: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(taught_store, "save_file", full)
    assert train(monkeypatch, model_directory, tmp_path / "head", "--from", str(texts)) == 1
    error = capsys.readouterr().err.splitlines()[-1]
    assert error.startswith("error: ")
    assert "No space left on device" in error


def test_ctrl_c_says_that_the_same_command_goes_on(
    model_directory: Path,
    texts: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """It comes while the first answers are written, which are kept."""

    def interrupted(*arguments: Any) -> None:
        save_file(*arguments)
        os.kill(os.getpid(), signal.SIGINT)

    monkeypatch.setattr(taught_store, "save_file", interrupted)
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        status = train(monkeypatch, model_directory, tmp_path / "head", "--from", str(texts))
    finally:
        signal.signal(signal.SIGINT, before)
    errors = capsys.readouterr().err
    assert status == INTERRUPTED, errors
    assert "Traceback" not in errors
    assert "interrupted: run the same command to resume" in errors.splitlines()
    assert list((tmp_path / "head.training").glob("*/*.safetensors"))
    assert not (tmp_path / "head").exists()
