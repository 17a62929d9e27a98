"""The examples of the documentation run."""

import re
from pathlib import Path
from typing import Any

import pytest

DOCS = Path(__file__).parents[2] / "docs"


def test_the_examples_of_plugging_in_run(
    model_directory: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "path" / "to").mkdir(parents=True)
    (tmp_path / "path" / "to" / "model").symlink_to(model_directory)
    monkeypatch.chdir(tmp_path)
    text = (DOCS / "how-to" / "plugging-in.md").read_text(encoding="utf-8")
    blocks = re.findall(r"^```python\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
    assert len(blocks) == text.count("```") // 2 >= 8
    names: dict[str, Any] = {"__name__": "examples"}
    for number, block in enumerate(blocks, 1):
        exec(compile(block, f"plugging-in.md, block {number}", "exec"), names)  # noqa: S102  ours
    assert names["foredraft"].statistics.num_tokens > 0
