"""Answers that end early keep what is there."""

import os
import signal
from collections.abc import Callable, Sequence
from typing import Any

import pytest

from decoder.commands.generate import (
    Answer,
    AnswerOptions,
    FinishReason,
    Interruption,
    Task,
    answer,
    answer_many,
)
from decoder.loop import Decoder
from decoder.model.passes import Read, Reading
from decoder.model.pretrained import LanguageModel
from decoder.observation import ObservedPass
from decoder.stopping import StopStrings, plain_text
from indexer.launch import TERMINATED
from retriever.drafter import DraftRequest
from retriever.errors import InvalidRequestError
from retriever.tree import DraftTree
from tests.decoder.decoding import ScriptedDrafter, decoder_with, nothing, plainly

PROMPT = "abcabc"
NEW_TOKENS = 40


@pytest.fixture(scope="module")
def truth(language_model: LanguageModel) -> list[int]:
    return plainly(language_model.model, language_model.encode(PROMPT), NEW_TOKENS)


def answered(
    language_model: LanguageModel,
    decoder: Decoder,
    stops: tuple[str, ...] = (),
    interruption: Interruption | None = None,
    **watching: Any,
) -> Answer:
    task = Task(language_model.encode(PROMPT), **watching)
    options = AnswerOptions(NEW_TOKENS, StopStrings(stops))
    return answer(decoder, language_model, task, options, interruption or Interruption())


def check_part(
    result: Answer, language_model: LanguageModel, truth: list[int], drafter: ScriptedDrafter
) -> None:
    """What there is of an answer is right, and the drafter was told the same."""
    assert result.token_ids == truth[: len(result.token_ids)]
    assert result.text == plain_text(language_model.tokenizer, result.token_ids)
    assert drafter.closed == [language_model.encode(PROMPT) + result.token_ids]
    assert result.statistics.num_tokens == len(result.token_ids)


def test_an_answer_says_why_it_ended(language_model: LanguageModel, truth: list[int]) -> None:
    decoder = decoder_with(language_model.model, ScriptedDrafter(nothing))
    whole = answered(language_model, decoder)
    assert whole.finish_reason is FinishReason.LENGTH
    pairs = [whole.text[at : at + 2] for at in range(4, len(whole.text))]
    stop = next(each for each in pairs if each.isascii())
    stopped = answered(language_model, decoder, (stop,))
    assert (stopped.finish_reason, stopped.stop_string) == (FinishReason.STOP, stop)
    assert stopped.text == whole.text[: whole.text.index(stop)]
    assert stopped.report()["stop_string"] == stop
    last = max(set(truth), key=truth.index)
    by_token = answered(
        language_model,
        decoder_with(language_model.model, ScriptedDrafter(nothing), stop_ids=[last]),
    )
    assert by_token.finish_reason is FinishReason.STOP
    assert by_token.token_ids == truth[: truth.index(last) + 1]


def test_an_error_while_generating_keeps_the_text_so_far(
    language_model: LanguageModel, truth: list[int]
) -> None:
    class Refusing(ScriptedDrafter):
        def draft(self, requests: Sequence[DraftRequest]) -> list[DraftTree]:
            if requests[0].length > len(language_model.encode(PROMPT)) + 5:
                raise InvalidRequestError("out of order")
            return super().draft(requests)

    drafter = Refusing(nothing)
    shown: list[str] = []
    result = answered(
        language_model, decoder_with(language_model.model, drafter), on_text=shown.append
    )
    assert len(result.token_ids) == 6
    assert result.finish_reason is FinishReason.ERROR
    assert result.report()["error"] == "out of order"
    assert "".join(shown) == result.text
    check_part(result, language_model, truth, drafter)


def interrupting(after: int, number: int = signal.SIGINT) -> Callable[[str], None]:
    """Send a signal, that of Ctrl-C, when so many pieces of text were shown."""
    shown: list[str] = []

    def show(piece: str) -> None:
        shown.append(piece)
        if len(shown) == after:
            os.kill(os.getpid(), number)

    return show


@pytest.mark.parametrize("after", [1, 2, 7])
def test_ctrl_c_ends_an_answer_between_two_passes(
    after: int, language_model: LanguageModel, truth: list[int]
) -> None:
    drafter = ScriptedDrafter(nothing)
    interruption = Interruption()
    before = signal.getsignal(signal.SIGINT)
    with interruption.handled():
        result = answered(
            language_model,
            decoder_with(language_model.model, drafter),
            on_text=interrupting(after),
            interruption=interruption,
        )
    assert signal.getsignal(signal.SIGINT) is before
    assert result.finish_reason is FinishReason.INTERRUPTED
    assert len(result.token_ids) == after
    check_part(result, language_model, truth, drafter)


def test_ctrl_c_ends_the_prompts_pass_at_once(
    language_model: LanguageModel, truth: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    drafter = ScriptedDrafter(nothing)
    decoder = decoder_with(language_model.model, drafter)
    monkeypatch.setattr(decoder.target, "read", lambda _: os.kill(os.getpid(), signal.SIGINT))
    interruption = Interruption()
    with interruption.handled():
        result = answered(language_model, decoder, interruption=interruption)
    assert result.finish_reason is FinishReason.INTERRUPTED
    assert not result.token_ids
    check_part(result, language_model, truth, drafter)


def test_a_request_to_terminate_ends_an_answer_in_the_same_way(
    language_model: LanguageModel, truth: list[int]
) -> None:
    drafter = ScriptedDrafter(nothing)
    interruption = Interruption()
    before = signal.getsignal(signal.SIGTERM)
    with interruption.handled():
        result = answered(
            language_model,
            decoder_with(language_model.model, drafter),
            on_text=interrupting(2, signal.SIGTERM),
            interruption=interruption,
        )
    assert signal.getsignal(signal.SIGTERM) is before
    assert (result.finish_reason, len(result.token_ids)) == (FinishReason.INTERRUPTED, 2)
    assert interruption.status == TERMINATED
    check_part(result, language_model, truth, drafter)


def test_ctrl_c_keeps_what_there_is_of_all_answers(
    language_model: LanguageModel, truth: list[int]
) -> None:
    interruption = Interruption()
    num_passes = 0

    def observe(_: object) -> None:
        nonlocal num_passes
        num_passes += 1
        if num_passes == 9:
            interruption.is_requested = True

    drafter = ScriptedDrafter(nothing)
    decoder = decoder_with(language_model.model, drafter)
    tasks = [Task(language_model.encode(PROMPT), observer=observe) for _ in range(5)]
    options = AnswerOptions(NEW_TOKENS)
    results = dict(answer_many(decoder, language_model, tasks, options, 3, interruption))
    assert results.keys() == {0, 1, 2}
    for result in results.values():
        assert result.finish_reason is FinishReason.INTERRUPTED
        assert 0 < len(result.token_ids) < NEW_TOKENS
        assert result.token_ids == truth[: len(result.token_ids)]
        assert result.text
    assert not drafter.open_sessions


def test_an_answer_is_given_once_its_last_pass_was_observed(language_model: LanguageModel) -> None:
    """Of the second, the observer fails at that very pass."""
    passes: list[list[int]] = [[], [], []]

    def observing(number: int) -> Callable[[ObservedPass], None]:
        def observe(step: ObservedPass) -> None:
            passes[number] += step.tokens
            if number == 1 and len(passes[number]) == 5:
                raise InvalidRequestError("the last one")

        return observe

    decoder = decoder_with(language_model.model, ScriptedDrafter(nothing))
    prompt = language_model.encode(PROMPT)
    tasks = [Task(prompt, observer=observing(number)) for number in range(3)]
    answers = answer_many(decoder, language_model, tasks, AnswerOptions(5), 2, Interruption())
    for number, result in answers:
        assert passes[number] == result.token_ids
        assert len(result.token_ids) == 5
        assert str(result.error or "") == ("the last one" if number == 1 else "")


def test_an_error_that_ends_the_decoding_is_that_of_all_that_are_left(
    language_model: LanguageModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    decoder = decoder_with(language_model.model, ScriptedDrafter(nothing))
    read, calls = decoder.target.read, iter(range(99))

    def failing(readings: Sequence[Reading]) -> list[Read]:
        if next(calls) == 4:
            raise RuntimeError("broken")
        return read(readings)

    monkeypatch.setattr(decoder.target, "read", failing)
    tasks = [Task(language_model.encode(PROMPT)) for _ in range(3)]
    options = AnswerOptions(NEW_TOKENS)
    results = dict(answer_many(decoder, language_model, tasks, options, 2, Interruption()))
    assert [str(result.error) for result in results.values()] == ["broken"] * 3
    assert [bool(result.token_ids) for result in results.values()] == [True, True, False]


def test_what_cannot_wait_ends_with_the_status_of_its_signal() -> None:
    for number, expected in ((signal.SIGINT, KeyboardInterrupt), (signal.SIGTERM, SystemExit)):
        interruption = Interruption()
        with pytest.raises(expected), interruption.handled():
            os.kill(os.getpid(), number)
    assert interruption.status == TERMINATED
