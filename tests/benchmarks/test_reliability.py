import json
from pathlib import Path

import numpy as np
import pytest
import typer
from typer.testing import CliRunner

from benchmarks.reliability import main
from retriever.replay.reliability_report import Reliability
from retriever.tree import DraftTree


@pytest.fixture
def run() -> "Runner":
    app = typer.Typer()
    app.command()(main)
    return Runner(app)


class Runner:
    def __init__(self, app: typer.Typer) -> None:
        self._app = app

    def __call__(self, *arguments: object) -> tuple[int, str]:
        result = CliRunner().invoke(self._app, list(map(str, arguments)))
        return result.exit_code, result.output


def report(path: Path) -> Path:
    calibration = Reliability()
    calibration.add(DraftTree.checked([1, 2], [-1, 0], [0.9, 0.5], [1, 1]), np.array([0]))
    path.write_text(json.dumps({"calibration": calibration.as_json()}))
    return path


def test_reports_are_drawn(tmp_path: Path, run: Runner) -> None:
    drawn = tmp_path / "drawn.png"
    one, other = report(tmp_path / "a.json"), report(tmp_path / "b.json")
    assert run(f"one={one}", f"other={other}", "--output", drawn) == (0, f"{drawn}\n")
    assert drawn.read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize("text", ["{}", "[]", "", '{"calibration": 1}', '{"calibration": {}}'])
def test_other_files_are_refused(tmp_path: Path, run: Runner, text: str) -> None:
    other = tmp_path / "other.json"
    other.write_text(text)
    code, said = run(f"one={other}", "--output", tmp_path / "drawn.png")
    assert code == 1
    assert "has no calibration" in said


@pytest.mark.parametrize("argument", ["nothing", "a=", "=b"])
def test_reports_need_name_and_file(run: Runner, argument: str) -> None:
    code, said = run(argument)
    assert code == 1
    assert "NAME=FILE" in said


def test_missing_folder_is_a_clear_error(tmp_path: Path, run: Runner) -> None:
    one = report(tmp_path / "a.json")
    code, said = run(f"one={one}", "--output", tmp_path / "missing" / "drawn.png")
    assert code == 1
    assert "cannot be written" in said
