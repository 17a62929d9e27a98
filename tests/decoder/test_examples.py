"""The examples of the documentation run."""

import re
import runpy
from pathlib import Path
from typing import Any

import pytest

DOCS = Path(__file__).parents[2] / "docs"


@pytest.mark.programs
@pytest.mark.filterwarnings("ignore:.past_key_values. is deprecated:FutureWarning")
def test_the_examples_of_generating_run(
    model_directory: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "path" / "to").mkdir(parents=True)
    (tmp_path / "path" / "to" / "model").symlink_to(model_directory)
    monkeypatch.chdir(tmp_path)
    names = run("how-to/generating.md", num_blocks=8)
    assert names["foredraft"].statistics.num_tokens > 0


def run(page: str, num_blocks: int) -> dict[str, Any]:
    """Run all blocks of a page, of which there are so many at least; return its names."""
    text = (DOCS / page).read_text(encoding="utf-8")
    blocks = re.findall(r"^```python\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
    assert len(blocks) == text.count("```python") >= num_blocks
    names: dict[str, Any] = {"__name__": "examples"}
    for number, block in enumerate(blocks, 1):
        exec(compile(block, f"{page}, block {number}", "exec"), names)  # noqa: S102  ours
    return names


def test_rollouts_of_the_example_are_checked(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.argv", ["rollouts", "--steps", "3", "--tokens", "12"])
    runpy.run_path(str(DOCS.parent / "examples" / "rollouts.py"), run_name="__main__")
    printed = capsys.readouterr().out
    assert "all 3 greedy answers with drafts equal the model's own answers" in printed
