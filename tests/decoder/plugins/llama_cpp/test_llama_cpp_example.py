"""The example runs where the engine is installed."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("llama_cpp", reason="an extra: `make test-engine-llama-cpp`")

from tests.decoder.plugins.llama_cpp import tiny_model

ROOT = Path(__file__).parents[4]


def test_the_example_generates_and_tells_what_was_accepted(tmp_path: Path) -> None:
    model = tmp_path / "tiny.gguf"
    tiny_model.write_model(model)
    example = ROOT / "examples" / "llama_cpp_generate.py"
    done = subprocess.run(
        [sys.executable, example, model, "once upon", "--max-new-tokens", "40"],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.rstrip().endswith("drafted tokens accepted")
