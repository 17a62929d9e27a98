"""What becomes of the fields that a request states, whatever engine carries them."""

from collections.abc import Callable, Sequence

import pytest


def check_drafts(
    accepted: Callable[..., int],
    truth: Sequence[int],
    caplog: pytest.LogCaptureFixture,
    *,
    most_tokens: int,
    vocabulary_size: int,
) -> int:
    """Check drafts of a request by its fields, and what is logged of those that are not followed.

    Args:
        accepted: decodes one prompt with fields, of the tenants a and b and with the vocabulary
            "aa…"; returns how many drafted tokens were accepted.
        truth: the output.
        caplog: of the test.
        most_tokens: that the engine verifies.
        vocabulary_size: of the model.

    Returns:
        How many are accepted without any evidence.
    """
    cold = accepted(remember=False)
    assert accepted(remember=False) == cold
    assert accepted(remember=False, predictions=truth) > cold
    assert accepted(tenant="a") == cold
    warm = accepted(tenant="a")
    assert warm > cold
    assert accepted(tenant="b") == cold
    assert accepted(tenant="a", drafts=False) == accepted(tenant="a", budget=0) == 0
    assert 0 < accepted(tenant="a", budget=1) < warm
    assert not caplog.messages
    assert accepted(tenant="a", budget=100) >= warm
    assert f"beyond the engine's {most_tokens}" in caplog.messages[-1]
    assert accepted(remember=False, predictions=[3, vocabulary_size]) == cold
    assert "they may be another tokenizer's" in caplog.messages[-1]
    assert accepted(remember=False, predictions=[3], vocabulary="b" * 64) == cold
    assert "is not the engine's" in caplog.messages[-1]
    return cold
