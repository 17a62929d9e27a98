"""Running the decoder's commands in the process of a test."""

import sys
from pathlib import Path
from typing import NoReturn

import pytest

from decoder.commands import main
from indexer.tokenizer import CACHE_VARIABLE

PROMPT = "abcabc"


@pytest.fixture(scope="module")
def kept_costs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("costs")


@pytest.fixture(autouse=True)
def costs_of_earlier_tests(
    _no_costs_from_other_runs: None, kept_costs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Measure what passes cost once for a module that imports this."""
    monkeypatch.setenv(CACHE_VARIABLE, str(kept_costs))


def run(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> int:
    """Run the command line in this process and return its exit status."""
    monkeypatch.setattr(sys, "argv", ["decoder", *arguments])
    with pytest.raises(SystemExit) as stop:
        main()
    return int(stop.value.code or 0)


def never(*_: object) -> NoReturn:
    raise AssertionError("this is not to be called")


def generate(monkeypatch: pytest.MonkeyPatch, model: Path, *arguments: str) -> int:
    return run(monkeypatch, "generate", "--model", str(model), *arguments)
