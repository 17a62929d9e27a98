import json
import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import torch

from benchmarks.decoding import greedy_exactness
from decoder.model.pretrained import ModelOptions, Precision, load_model
from decoder.plugins.contenders import registry
from decoder.plugins.contenders.contender import OwnContender, Run
from decoder.plugins.contenders.prompt_lookup import PromptLookup
from decoder.plugins.speculators.eagle import eagle_head
from decoder.plugins.speculators.head_files import HeadTarget, save_head
from decoder.plugins.training.head_start import head_config
from decoder.sampling.verification import PassContext, accept_greedy
from decoder.sampling.walk import Acceptance
from indexer.tokenizer import CACHE_VARIABLE
from retriever.tree import ROOT, DraftTree, Source

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


def test_a_difference_is_found_where_it_is(
    command: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    decode = OwnContender.__call__

    def wrong(self: OwnContender, prompts: Sequence[list[int]], *, remember: bool) -> Run:
        run = decode(self, prompts, remember=remember)
        if not isinstance(self.decoder.drafter, PromptLookup):
            run.token_ids[2:] = [run.token_ids[2] ^ 1]
        return run

    monkeypatch.setattr(OwnContender, "__call__", wrong)
    options = ["--limit", "1", "--contender", "prompt-lookup", "--contender", "hd"]
    assert run(monkeypatch, *command, *options) == 1
    result = json.loads(capsys.readouterr().out)
    assert result["identical"] == 0
    assert result["identical_with"] == {"prompt-lookup": 1, "hd": 0}
    (found,) = result["different"]
    assert found["contender"] == "hd"
    assert found["position"] == 2
    assert found["best_tokens"][0] == found["plain"] != found["drafted"]
    assert found["gap"] > 0
    assert not found["is_tie"]


def head_for(model: Path, folder: Path) -> Path:
    """Write a head of random weights for a model."""
    language_model = load_model(ModelOptions(str(model), precision=Precision.FLOAT32))
    torch.manual_seed(4)
    head = eagle_head(head_config(language_model, language_model.vocabulary.size))
    target = HeadTarget.of(language_model.model, None, language_model.vocabulary)
    save_head(folder, head, target.origin())
    return folder


def keeping_what_heads_guess(tree: DraftTree, logits: torch.Tensor, _: PassContext) -> Acceptance:
    """Accept greedily, but a head's first guess whatever the target says."""
    guesses = np.flatnonzero((tree.sources == Source.MODEL) & (tree.parents == ROOT))
    if not len(guesses):
        return accept_greedy(tree, logits, _)
    return guesses[:1].astype(np.int32), int(logits[guesses[0] + 1].argmax())


def test_heads_and_draft_models_are_compared_and_what_is_wrong_with_one_is_found(
    command: list[str],
    tiny_model: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    head = str(head_for(tiny_model, tmp_path / "head"))
    command += ["--speculator", head, "--draft-model", str(tiny_model), "--nodes", "6"]
    assert run(monkeypatch, *command, "--contender", "all") == 0
    result = json.loads(capsys.readouterr().out)
    assert {"model", "speculator", "rasd", "foredraft"} <= set(result["contenders"])
    assert result["identical_with"] == dict.fromkeys(result["contenders"], len(PROMPTS))
    assert result["passes"]["model"] < result["passes"]["undrafted"]
    assert result["nodes_verified"]["speculator"] > 0
    assert f"speculator {head}" in result["drafter"]

    monkeypatch.setattr(registry, "accept_rule", lambda _: keeping_what_heads_guess)
    command[command.index("--output") + 1] = str(tmp_path / "wrong.jsonl")
    assert run(monkeypatch, *command, "--contender", "hd", "--contender", "speculator") == 1
    found = json.loads(capsys.readouterr().out)["identical_with"]
    assert found["hd"] == len(PROMPTS) > found["speculator"]
