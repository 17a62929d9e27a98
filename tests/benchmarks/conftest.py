"""Small indexes and models, made on the spot; commands run in this process."""

import runpy
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from tests.benchmarks.drafting import IndexMaker, index_maker
from tests.suite_parts import PARTS

END = "<end>"
FOLDER = Path(__file__).parent


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """All tests of this folder are of the part `bench`, but for those of another part."""
    for item in items:
        if FOLDER in item.path.parents and not any(map(item.get_closest_marker, PARTS)):
            item.add_marker("bench")


@dataclass(frozen=True)
class Ended:
    """How a command ended, and what it printed; an error's message ends `stderr`."""

    status: int
    stdout: str
    stderr: str


Runner = Callable[..., Ended]


def run_apart(module: str, *arguments: object) -> Ended:
    """Run a command that starts processes or threads of its own, in a process."""
    command = [sys.executable, "-m", module, *map(str, arguments)]
    done = subprocess.run(
        command, cwd=FOLDER.parents[1], capture_output=True, text=True, check=False
    )
    return Ended(done.returncode, done.stdout, done.stderr)


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Runner:
    """`run(MODULE, *arguments)` does what `python -m MODULE` does, without a process of its own."""

    def command(module: str, *arguments: object) -> Ended:
        monkeypatch.setattr(sys, "argv", [module, *map(str, arguments)])
        monkeypatch.delitem(sys.modules, module, raising=False)
        code: int | str = 0
        try:
            runpy.run_module(module, run_name="__main__", alter_sys=True)
        except SystemExit as ended:
            code = ended.code or 0
        printed = capfd.readouterr()
        if isinstance(code, str):
            return Ended(1, printed.out, f"{printed.err}{code}\n")
        return Ended(code, printed.out, printed.err)

    return command


@pytest.fixture
def make_index(tmp_path: Path) -> IndexMaker:
    return index_maker(tmp_path / "index")


@pytest.fixture
def tiny_model(tmp_path: Path) -> Path:
    """A model and a tokenizer of eight words on disk."""
    words = {word: number for number, word in enumerate([END, *"abcdefgh"])}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token=END))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    torch.manual_seed(3)
    config = LlamaConfig(
        hidden_size=32,
        intermediate_size=64,
        num_attention_heads=4,
        num_key_value_heads=2,
        num_hidden_layers=2,
        initializer_range=0.4,
        vocab_size=len(words),
        max_position_embeddings=128,
        eos_token_id=0,
    )
    directory = tmp_path / "model"
    LlamaForCausalLM(config).save_pretrained(directory)
    fast: Any = PreTrainedTokenizerFast
    fast(tokenizer_object=tokenizer, eos_token=END).save_pretrained(directory)
    return directory
