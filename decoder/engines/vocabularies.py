"""Whether a drafter's tokens are those of the model at hand, told before anything is decoded."""

from contextlib import suppress
from logging import getLogger

from indexer.reader import Vocabulary
from retriever.client import RemoteDrafter
from retriever.drafter import Drafter
from retriever.errors import RetrieverError, VocabularyMismatchError

_log = getLogger(__name__)


def vocabulary_of_drafter(drafter: Drafter) -> Vocabulary | None:
    """Return the vocabulary that a drafter has tokens of; `None` where it does not say.

    A service is asked for its indexes; one that is away, or has none, says nothing.
    """
    stated = getattr(drafter, "vocabulary", None)  # as the embedded drafter does
    if isinstance(stated, Vocabulary):
        return stated
    if isinstance(drafter, RemoteDrafter):
        with suppress(RetrieverError):
            for index in drafter.list_indexes():
                return Vocabulary(index.vocabulary_size, index.vocabulary_fingerprint)
    return None


def checked_vocabulary_size(
    drafter: Drafter, model_vocabulary: int, own: Vocabulary | None = None
) -> int | None:
    """Return the size of the vocabulary that a drafter knows; `None` where nobody says.

    Args:
        drafter: whose tokens are compared.
        model_vocabulary: tokens that the model has embeddings for.
        own: of the model's tokenizer, where that is known.

    Raises:
        VocabularyMismatchError: the drafter is for another tokenizer.
    """
    theirs = vocabulary_of_drafter(drafter)
    if theirs is None:
        return None if own is None else own.size
    if own is not None and own.fingerprint != theirs.fingerprint:
        raise VocabularyMismatchError(
            f"drafts are for a tokenizer of {theirs.size} tokens ({theirs.fingerprint[:12]}…), "
            f"the model's has {own.size} ({own.fingerprint[:12]}…): "
            "draft from an index built with the model's own tokenizer"
        )
    if theirs.size > model_vocabulary:
        _log.warning(
            "drafts are for a tokenizer of %d tokens, but the model knows %d: it seems to be "
            "another tokenizer's, so drafts will hardly be accepted",
            theirs.size,
            model_vocabulary,
        )
    return theirs.size
