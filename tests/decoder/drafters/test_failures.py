"""Drafters that fail, refuse or err cost drafts, never tokens."""

import time
from collections.abc import Callable, Sequence
from typing import NoReturn

import numpy as np
import pytest

from decoder.drafters.following import NoDrafter
from retriever.drafter import DEFAULT, DraftRequest, SequenceOptions, TokenIds
from retriever.errors import (
    DrafterUnavailableError,
    InvalidRequestError,
    LimitExceededError,
    RetrieverError,
)
from retriever.limits import Limits
from retriever.sessions.embedded import EmbeddedDrafter
from retriever.tree import ROOT, DraftTree, Source
from tests.decoder.decoding import (
    VOCABULARY,
    Guess,
    ScriptedDrafter,
    decoded,
    decoder_with,
    nothing,
    oracle,
    plainly,
    tiny_llama,
)
from tests.decoder.drafters.drafted_chains import refusing

NEW_TOKENS = 30


class Unreliable(ScriptedDrafter):
    """Fails at the calls whose numbers are given; a failed draft loses its session."""

    def __init__(self, guess: Guess, failing: Sequence[int]) -> None:
        super().__init__(guess)
        self._failing = set(failing)
        self._lost: set[str] = set()
        self._num_calls = 0

    def open(self, session: str, prompt: TokenIds, options: SequenceOptions = DEFAULT) -> None:
        self._fail_in_turn()
        super().open(session, prompt, options)

    def draft(self, requests: Sequence[DraftRequest]) -> list[DraftTree]:
        lost = requests[0].session in self._lost
        self._lost.add(requests[0].session)
        self._fail_in_turn()
        if lost:
            raise DrafterUnavailableError("lost")
        self._lost.remove(requests[0].session)
        return super().draft(requests)

    def close(self, session: str, new_tokens: TokenIds | None = None) -> None:
        self._fail_in_turn()
        super().close(session, new_tokens)

    def _fail_in_turn(self) -> None:
        self._num_calls += 1
        if self._num_calls in self._failing:
            raise DrafterUnavailableError("out of reach")


@pytest.mark.parametrize("failing", [[1], [2], [4], [2, 3, 4, 5], range(3, 40, 3), range(1, 1000)])
def test_a_failing_drafter_costs_drafts_only(failing: Sequence[int], prompt: list[int]) -> None:
    model = tiny_llama()
    expected = plainly(model, prompt, NEW_TOKENS)
    drafter = Unreliable(oracle(prompt + expected, 8), failing)
    generation = decoder_with(model, drafter).generate(prompt, NEW_TOKENS)
    assert [token for step in generation for token in step] == expected
    assert generation.statistics.num_failures >= 1


def test_a_drafter_is_asked_again_after_a_failure(prompt: list[int]) -> None:
    model = tiny_llama()
    truth = prompt + plainly(model, prompt, NEW_TOKENS)
    drafter = Unreliable(oracle(truth, 8), [3])
    generation = decoder_with(model, drafter).generate(prompt, NEW_TOKENS)
    list(generation)
    assert drafter.num_drafts > 2
    assert drafter.closed[-1] == truth


def hanging(_tokens: list[int], _budget: int) -> NoReturn:
    """Fail like a server that does not answer: late."""
    time.sleep(0.05)
    raise DrafterUnavailableError("no answer")


def test_a_drafter_that_hangs_is_left_alone_for_a_while(prompt: list[int]) -> None:
    model = tiny_llama()
    drafter = ScriptedDrafter(hanging)
    generation = decoder_with(model, drafter).generate(prompt, NEW_TOKENS)
    list(generation)
    assert drafter.num_drafts <= 2
    assert generation.statistics.num_failures >= NEW_TOKENS - 3


def test_a_refused_request_surfaces_and_the_session_is_closed(prompt: list[int]) -> None:
    drafter = ScriptedDrafter(refusing)
    decoder = decoder_with(tiny_llama(), drafter)
    with pytest.raises(InvalidRequestError, match="at fault"):
        decoded(decoder, prompt, NEW_TOKENS)
    assert not drafter.open_sessions
    assert len(drafter.closed) == 1


class SlowToFail(ScriptedDrafter):
    """Like a server that cannot be reached: it says so late."""

    def open(self, *_: object, **__: object) -> None:
        time.sleep(0.2)
        raise DrafterUnavailableError("no answer")


def test_the_next_sequence_does_not_wait_for_a_drafter_that_just_hung(prompt: list[int]) -> None:
    decoder = decoder_with(tiny_llama(), SlowToFail(nothing))
    first, second = (decoder.generate(prompt, 3) for _ in range(2))
    list(first)
    list(second)
    assert first.statistics.draft_s >= 0.2
    assert second.statistics.draft_s < 0.2
    assert second.statistics.num_failures > 0


class Refusing(ScriptedDrafter):
    """Refuses to close."""

    def close(self, *_: object) -> None:
        raise InvalidRequestError("cannot close")


def test_a_failing_close_does_not_hide_the_first_error(prompt: list[int]) -> None:
    with pytest.raises(InvalidRequestError, match="at fault"):
        decoded(decoder_with(tiny_llama(), Refusing(refusing)), prompt, NEW_TOKENS)


def test_a_refused_close_surfaces(prompt: list[int]) -> None:
    with pytest.raises(InvalidRequestError, match="cannot close"):
        decoded(decoder_with(tiny_llama(), Refusing(nothing)), prompt, NEW_TOKENS)


def full(_tokens: list[int], _budget: int) -> NoReturn:
    raise LimitExceededError("too many sessions")


def raising(error: RetrieverError) -> Callable[..., None]:
    def fail(*_: object, **__: object) -> None:
        raise error

    return fail


def test_a_drafter_beyond_its_limits_costs_drafts_only(
    prompt: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    model = tiny_llama()
    expected = plainly(model, prompt, NEW_TOKENS)
    full_at_open = ScriptedDrafter(nothing)
    monkeypatch.setattr(full_at_open, "open", raising(LimitExceededError("too many sessions")))
    for drafter in (full_at_open, ScriptedDrafter(full)):
        generation = decoder_with(model, drafter).generate(prompt, NEW_TOKENS)
        assert [token for step in generation for token in step] == expected
        assert generation.statistics.num_failures >= 1


def test_a_drafter_full_of_sessions_costs_drafts_only(prompt: list[int]) -> None:
    model = tiny_llama()
    drafter = EmbeddedDrafter(limits=Limits(max_sessions=1))
    drafter.open("another", np.array(prompt, np.int32))
    generation = decoder_with(model, drafter).generate(prompt, NEW_TOKENS)
    expected = plainly(model, prompt, NEW_TOKENS)
    assert [token for step in generation for token in step] == expected
    assert generation.statistics.num_failures >= 1


def test_a_sequence_beyond_the_drafters_limit_leaves_no_session_behind(prompt: list[int]) -> None:
    model = tiny_llama()
    drafter = EmbeddedDrafter(limits=Limits(max_sequence_tokens=len(prompt) + 2))
    decoder = decoder_with(model, drafter)
    for count in (3, NEW_TOKENS):
        assert decoded(decoder, prompt, count) == plainly(model, prompt, count)
        assert len(drafter.state.sessions) == 0


@pytest.mark.parametrize("token", [VOCABULARY, 2**31 - 1, -1])
def test_drafted_tokens_outside_the_vocabulary_are_dropped(token: int, prompt: list[int]) -> None:
    def guess(_tokens: list[int], _budget: int) -> DraftTree:
        return DraftTree(
            np.array([5, token], np.int32),
            np.array([ROOT, 0], np.int32),
            np.array([0.9, 0.8], np.float32),
            np.array([Source.CORPUS] * 2, np.uint8),
        )

    model = tiny_llama()
    generation = decoder_with(model, ScriptedDrafter(guess)).generate(prompt, NEW_TOKENS)
    expected = plainly(model, prompt, NEW_TOKENS)
    assert [token for step in generation for token in step] == expected
    assert generation.statistics.num_failures >= 1
    assert generation.statistics.num_drafted == 0


class Silent(NoDrafter):
    """Answers no request at all."""

    def draft(self, requests: Sequence[DraftRequest]) -> list[DraftTree]:
        assert requests
        return []


def test_too_few_trees_cost_drafts_only(prompt: list[int]) -> None:
    model = tiny_llama()
    generation = decoder_with(model, Silent()).generate(prompt, NEW_TOKENS)
    expected = plainly(model, prompt, NEW_TOKENS)
    assert [token for step in generation for token in step] == expected
    assert generation.statistics.num_failures >= 1
