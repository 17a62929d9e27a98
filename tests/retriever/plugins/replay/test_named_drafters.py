"""`foredraft replay --drafter` drafts by a rule of this checkout, or of a module that is named."""

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from retriever.plugins.replay.replay_cli import app

TRACE = {"prompt_ids": [9, 2, 3, 4, 5, 6], "output_ids": [2, 3, 4, 5, 6, 7]}


@pytest.fixture
def traces(tmp_path: Path) -> Path:
    path = tmp_path / "traces.jsonl"
    path.write_text(json.dumps(TRACE) + "\n")
    return path


def replay(*arguments: object) -> Any:
    return CliRunner().invoke(app, ["replay", *map(str, arguments)])


def test_replay_drafts_by_the_rule_that_is_named(traces: Path) -> None:
    done = replay(traces, "--drafter", "prompt-lookup", "--budget", 8, "--json")
    assert done.exit_code == 0, done.output
    assert json.loads(done.stdout)["steps"] == 2


def test_unknown_names_are_listed(traces: Path) -> None:
    done = replay(traces, "--drafter", "none")
    assert done.exit_code == 1
    assert "no drafter 'none': choose from foredraft, prompt-lookup, rest" in done.stderr


@pytest.mark.parametrize("module", ["no.such.module", "json", "."])
def test_module_without_drafters_is_a_clear_error(traces: Path, module: str) -> None:
    done = replay(traces, "--drafter", f"{module}:hd")
    assert done.exit_code == 1
    assert "MODULE:NAME of a module" in done.stderr


def test_a_module_of_the_current_folder_may_have_a_rule(
    traces: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    code = "from decoder.plugins.contenders.drafting_rules import DRAFTERS as KNOWN\n"
    tmp_path.joinpath("my_rules.py").write_text(
        code + "DRAFTERS = {'mine': KNOWN['prompt-lookup']}\n"
    )
    monkeypatch.chdir(tmp_path)
    done = replay(traces, "--drafter", "my_rules:mine", "--json")
    assert done.exit_code == 0, done.output
    assert json.loads(done.stdout)["steps"] == 2
