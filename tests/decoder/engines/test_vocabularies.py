"""A drafter of another tokenizer is found before anything is decoded."""

import logging
from collections.abc import Iterator

import pytest

from decoder.engines.engine_options import checked_vocabulary_size, vocabulary_of_drafter
from indexer.reader import Vocabulary
from retriever.client.strict import RemoteDrafter
from retriever.errors import VocabularyMismatchError
from retriever.sessions.embedded import EmbeddedDrafter
from tests.decoder.decoding import ScriptedDrafter, nothing

OURS = Vocabulary(50, "ab" * 32)
OTHER = Vocabulary(50, "cd" * 32)


@pytest.fixture
def drafter() -> Iterator[EmbeddedDrafter]:
    embedded = EmbeddedDrafter(vocabulary=OURS)
    yield embedded
    embedded.shut_down()


def test_another_tokenizer_is_refused_and_the_same_is_not(drafter: EmbeddedDrafter) -> None:
    assert checked_vocabulary_size(drafter, 64, OURS) == 50
    assert checked_vocabulary_size(drafter, 64) == 50
    with pytest.raises(VocabularyMismatchError, match="built with the model's own tokenizer"):
        checked_vocabulary_size(drafter, 64, OTHER)


def test_a_vocabulary_that_the_model_cannot_have_is_told_of(
    drafter: EmbeddedDrafter, caplog: pytest.LogCaptureFixture
) -> None:
    assert checked_vocabulary_size(drafter, 40) == 50
    [record] = caplog.records
    assert record.levelno == logging.WARNING
    assert "seems to be another tokenizer" in record.message


def test_who_does_not_say_is_believed() -> None:
    with RemoteDrafter("127.0.0.1:1", timeout_s=0.2) as away:
        assert vocabulary_of_drafter(away) is None
    assert checked_vocabulary_size(ScriptedDrafter(nothing), 40) is None
    assert checked_vocabulary_size(ScriptedDrafter(nothing), 64, OURS) == 50
