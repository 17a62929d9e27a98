"""What is wrong is said before decoding; afterwards nothing stops it."""

import logging
from typing import Any

import pytest
from transformers import PreTrainedTokenizerBase

from decoder.engines import contract, engine_options
from decoder.engines.transformers.custom_generate import Foredraft
from decoder.engines.transformers.requests import TESTED
from indexer.reader import Vocabulary
from indexer.tokenizer import vocabulary_of
from retriever.drafter import DEFAULT, SequenceOptions, TokenIds
from retriever.errors import UnknownSessionError, VocabularyMismatchError
from retriever.sessions.embedded import EmbeddedDrafter
from tests.decoder.decoding import (
    VOCABULARY,
    ScriptedDrafter,
    nothing,
    plainly,
    prompt_of,
    tiny_llama,
)
from tests.decoder.engines.transformers.generating import NEW_TOKENS, foredraft, generated


class RestartedForAnotherTokenizer(ScriptedDrafter):
    """Forgets its session after some drafts, and takes it back only from another tokenizer."""

    def open(self, session: str, prompt: TokenIds, options: SequenceOptions = DEFAULT) -> None:
        if self.num_drafts:
            raise VocabularyMismatchError("drafts are for another tokenizer")
        super().open(session, prompt, options)

    def draft(self, requests: Any) -> Any:
        if self.num_drafts == 3:
            raise UnknownSessionError(requests[0].session)
        return super().draft(requests)


def test_a_drafter_of_another_tokenizer_is_refused(
    byte_tokenizer: PreTrainedTokenizerBase,
) -> None:
    other = EmbeddedDrafter(vocabulary=Vocabulary(VOCABULARY, "ab" * 32))
    with pytest.raises(VocabularyMismatchError, match="with the model's own tokenizer"):
        Foredraft(tiny_llama(), other, tokenizer=byte_tokenizer)
    own = EmbeddedDrafter(vocabulary=vocabulary_of(byte_tokenizer))
    Foredraft(tiny_llama(), own, tokenizer=byte_tokenizer)


@pytest.mark.parametrize("size", [VOCABULARY // 2, VOCABULARY * 2])
def test_tokens_that_one_side_does_not_know_cost_drafts_alone(
    size: int, caplog: pytest.LogCaptureFixture
) -> None:
    model, prompt = tiny_llama(), [4, 5, 6]
    drafter = EmbeddedDrafter(vocabulary=Vocabulary(size, "ab" * 32))
    drafter.remember([size - 1, size - 2] * 20)
    truth = plainly(model, prompt, NEW_TOKENS)
    assert max(truth) >= VOCABULARY // 2
    for _ in range(2):
        output = generated(model, prompt, custom_generate=foredraft(model, drafter))
        assert output.tolist() == [prompt + truth]
    assert f"tokenizer of {size} tokens, but the model has {VOCABULARY}" in caplog.text


def test_a_drafter_that_comes_back_for_another_tokenizer_costs_drafts_alone() -> None:
    model, prompt = tiny_llama(), prompt_of(12)
    drafter = RestartedForAnotherTokenizer(nothing)
    output = generated(model, prompt, custom_generate=foredraft(model, drafter))
    assert output.tolist() == [prompt + plainly(model, prompt, NEW_TOKENS)]
    assert drafter.num_drafts == 3


def test_another_version_is_told_of_once_and_used(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(contract, "version", lambda _: "9.0")
    model, prompt = tiny_llama(), prompt_of(12)
    for _ in range(2):
        plugin = foredraft(model, ScriptedDrafter(nothing))
        output = generated(model, prompt, custom_generate=plugin)
        assert output.tolist() == [prompt + plainly(model, prompt, NEW_TOKENS)]
    told = [each for each in caplog.records if each.name == engine_options.__name__]
    assert len(told) == 1
    assert told[0].levelno == logging.WARNING
    assert f"transformers {TESTED}, and this is 9.0" in told[0].message
