"""Contenders that answer wrongly."""

from collections.abc import Sequence

import pytest

from decoder.drafters.following import NoDrafter
from decoder.plugins.contenders.contender import OwnContender, Run


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
