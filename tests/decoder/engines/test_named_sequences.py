"""Requests that an engine names, and a drafter that errs."""

from collections.abc import Sequence

import numpy as np
import pytest

from decoder.engines.named_sequences import NamedSequence, NamedSequences
from decoder.engines.request_fields import RequestFields
from retriever.drafter import DraftRequest
from retriever.sessions.embedded import EmbeddedDrafter
from retriever.tree import DraftTree
from tests.decoder.engines.scripted import ScriptedDrafter


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


def continued(sequences: NamedSequences, name: int, fields: RequestFields) -> list[int]:
    """Return the draft of a request that has repeated a text once."""
    text = list(range(5, 25))
    row = NamedSequence(np.array([*text, *text[:8]], np.int32), 4, 8, fields)
    tokens: list[int] = sequences.draft({name: row})[name].token_ids.tolist()
    return tokens


def test_a_name_that_is_given_to_another_request_begins_anew() -> None:
    sequences, alone = (NamedSequences(EmbeddedDrafter(), 64) for _ in range(2))
    text, other = list(range(5, 25)), list(range(40, 60))
    sequences.draft({1: NamedSequence(np.array(text[:12], np.int32), 4, 8)})
    row = NamedSequence(np.array([*other, *other[:6]], np.int32), 4, 8)
    drafted = sequences.draft({1: row})[1].token_ids.tolist()
    assert drafted == alone.draft({1: row})[1].token_ids.tolist() == other[6:14]


def test_each_request_is_drafted_for_as_it_states() -> None:
    drafter = EmbeddedDrafter()
    sequences = NamedSequences(drafter, 64)
    whole = continued(sequences, 1, RequestFields())
    assert whole == list(range(13, 21))
    assert continued(sequences, 2, RequestFields(budget=3)) == whole[:3]
    assert continued(sequences, 3, RequestFields(budget=100)) == whole
    held = len(sequences)
    assert continued(sequences, 4, RequestFields(budget=0)) == []
    assert continued(sequences, 5, RequestFields(drafts=False)) == []
    assert len(sequences) == held + 1  # of the last the drafter is told nothing


def test_what_one_tenant_or_an_unremembered_request_wrote_is_drafted_for_no_other() -> None:
    sequences = NamedSequences(EmbeddedDrafter(), 64)
    output = list(range(30, 50))

    def drafted(name: int, fields: RequestFields) -> list[int]:
        """Return the draft of a request that begins like an earlier output."""
        row = NamedSequence(np.array([1, *output[:6]], np.int32), 1, 8, fields)
        tokens: list[int] = sequences.draft({name: row})[name].token_ids.tolist()
        sequences.end(name)
        return tokens

    def write(name: int, fields: RequestFields) -> None:
        sequences.draft({name: NamedSequence(np.array([1], np.int32), 1, 8, fields)})
        sequences.end(name, np.array([1, *output], np.int32))

    write(1, RequestFields(remember=False))
    assert drafted(2, RequestFields(remember=False)) == []
    write(3, RequestFields(tenant="a"))
    assert drafted(4, RequestFields(tenant="b")) == []
    assert drafted(5, RequestFields()) == []
    assert drafted(6, RequestFields(tenant="a")) == output[6:14]
