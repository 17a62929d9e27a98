"""Requests that an engine names, and a drafter that errs."""

from collections.abc import Sequence

import numpy as np
import pytest

from decoder.engines.named_sequences import NamedSequence, NamedSequences
from retriever.drafter import DraftRequest
from retriever.tree import DraftTree
from tests.engines.scripted import ScriptedDrafter


def test_no_session_is_left_open_after_an_error_that_nobody_expected(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    drafter = ScriptedDrafter(lambda tokens, n: tokens[-1:] * n)
    sequences = NamedSequences(drafter, 64)
    row = NamedSequence(np.array([1, 2, 3], np.int32), 2, 4)
    assert len(sequences.draft({7: row})[7]) == 4
    assert len(drafter.sessions) == 1

    def err(_: Sequence[DraftRequest]) -> list[DraftTree]:
        raise RuntimeError("a fault of the drafter's")

    with monkeypatch.context() as patched:
        patched.setattr(drafter, "draft", err)
        later = NamedSequence(np.array([1, 2, 3, 3], np.int32), 2, 4)
        assert len(sequences.draft({7: later})[7]) == 0
    assert len(drafter.sessions) == 0
    assert len(sequences.draft({7: later})[7]) == 4
    assert sequences.num_failures == 1
