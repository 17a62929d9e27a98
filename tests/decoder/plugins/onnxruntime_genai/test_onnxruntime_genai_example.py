"""The example runs where the engine is installed."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("onnxruntime_genai", reason="an extra: `make test-engine-onnxruntime-genai`")

from tests.decoder.plugins.onnxruntime_genai import paged_model

ROOT = Path(__file__).parents[4]


def test_the_example_generates_what_the_model_does(tmp_path: Path) -> None:
    table = paged_model.write_model(tmp_path)
    example = ROOT / "examples" / "onnxruntime_genai_generate.py"
    prompt = [7, 11, 13, 7, 11, 13]
    done = subprocess.run(
        [sys.executable, example, tmp_path, " ".join(map(str, prompt)), "--tokens"],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=True,
    )
    text, counts = done.stdout.rstrip().split("\n")
    assert [int(token) for token in text.split()] == paged_model.expected(table, prompt, 64)
    assert counts.endswith("drafted tokens accepted")
