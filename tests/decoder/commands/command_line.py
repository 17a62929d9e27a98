"""Running the decoder's commands in the process of a test."""

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

import pytest

from decoder.commands import main
from decoder.contenders.contender import OwnContender, Run
from decoder.drafters.following import NoDrafter

PROMPT = "abcabc"


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


def bench(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> int:
    return run(monkeypatch, "bench", *arguments)


def flipping(monkeypatch: pytest.MonkeyPatch, at: int) -> None:
    """Have ours write another token in the second output of a batch, where it drafts."""
    decode = OwnContender.__call__

    def wrong(
        self: OwnContender, prompts: Sequence[list[int]], parallel: int = 1, *, remember: bool
    ) -> Run:
        run = decode(self, prompts, parallel, remember=remember)
        if parallel == 2 and not isinstance(self.decoder.drafter, NoDrafter):
            run.token_ids[run.lengths[0] + at] ^= 1
        return run

    monkeypatch.setattr(OwnContender, "__call__", wrong)
