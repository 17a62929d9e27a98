"""Running the decoder's commands in the process of a test."""

import re
import sys
from importlib import import_module
from pathlib import Path
from typing import NoReturn

import pytest

from foredraft.program import commands

WORTH = re.compile(r"[\d.]+x plain decoding on this machine|the speedup from drafts is not known")
"""How the last line begins: of passes of microseconds nobody knows if their costs still hold."""

PROMPT = "abcabc"


def run(monkeypatch: pytest.MonkeyPatch, name: str, *arguments: str) -> int:
    """Run a command in this process and return its exit status."""
    monkeypatch.setattr(sys, "argv", ["foredraft", name, *arguments])
    with pytest.raises(SystemExit) as stop:
        import_module(commands()[name].module).main()
    return int(stop.value.code or 0)


def never(*_: object) -> NoReturn:
    raise AssertionError("this is not to be called")


def generate(monkeypatch: pytest.MonkeyPatch, model: Path, *arguments: str) -> int:
    return run(monkeypatch, "generate", "--model", str(model), *arguments)


def bench(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> int:
    return run(monkeypatch, "bench", *arguments)
