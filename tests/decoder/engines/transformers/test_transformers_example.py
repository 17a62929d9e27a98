"""The example of docs/how-to/engines.md runs as a user would run it."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from decoder.model.pretrained import ModelOptions, load_model
from tests.decoder.engines.transformers.generating import generated
from tests.retriever.conftest import start_service, stop_service

ROOT = Path(__file__).parents[4]
PROMPT = "the the the"
NUM_TOKENS = 32


def run_example(model_directory: Path, *options: str) -> str:
    return subprocess.run(
        [
            sys.executable,
            "examples/transformers_generate.py",
            str(model_directory),
            PROMPT,
            f"--max-new-tokens={NUM_TOKENS}",
            *options,
        ],
        capture_output=True,
        check=True,
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    ).stdout.decode()


@pytest.mark.programs
def test_the_example_prints_what_the_model_writes_with_either_drafter(
    model_directory: Path,
) -> None:
    language_model = load_model(ModelOptions(str(model_directory)))
    prompt = language_model.tokenizer.encode(PROMPT)
    ids = generated(language_model.model, prompt, max_new_tokens=NUM_TOKENS)[0, len(prompt) :]
    text = str(language_model.tokenizer.decode(ids))
    process, address = start_service("--address", "127.0.0.1:0")
    try:
        outputs = [
            run_example(model_directory),
            run_example(model_directory, "--server", address),
        ]
    finally:
        stop_service(process)
    for output in outputs:
        assert output.startswith(text)
        assert f"{NUM_TOKENS} tokens" in output
