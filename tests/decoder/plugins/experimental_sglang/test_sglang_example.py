"""The engine itself, with a model, where there is a GPU to run it on."""

import json
import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[4]
PROMPTS = [
    "one two three four five six seven eight nine ten one two three four five six",
    "def add(a, b):\n    return a + b\n\ndef subtract(a, b):\n",
    "List the months of the year, twice.",
]


def is_runnable() -> bool:
    """Whether SGLang is there with its kernels, and a GPU for them."""
    if find_spec("sglang") is None or find_spec("sgl_kernel") is None:
        return False
    import torch  # noqa: PLC0415  (not where the engine is absent)

    return torch.cuda.is_available()


def written(model: Path, *options: str) -> list[str]:
    command = [sys.executable, "examples/sglang_generate.py", str(model), *PROMPTS, *options]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        command, capture_output=True, text=True, check=True, cwd=ROOT, env=environment
    )
    lines = [line for line in done.stdout.splitlines() if line.startswith('"')]
    return [json.JSONDecoder().raw_decode(line)[0] for line in lines]


@pytest.mark.skipif(not is_runnable(), reason="needs a GPU and SGLang with its kernels")
def test_the_engine_writes_with_our_drafts_what_it_writes_without(tmp_path: Path) -> None:
    from tests.decoder.engines.smollm2 import save_smollm2  # noqa: PLC0415  (loads a model library)

    model = save_smollm2(tmp_path / "model")
    plain = written(model, "--plain")
    assert len(plain) == len(PROMPTS)
    assert written(model) == plain
