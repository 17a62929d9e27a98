"""One drafter, one tokenizer: whose tokens it has is settled once."""

from threading import Lock

from indexer.reader import Vocabulary
from retriever.errors import InvalidRequestError, VocabularyMismatchError
from retriever.limits import check_fingerprint
from retriever.phrases import ListedPhrases
from retriever.pools import Pools
from retriever.warmth.sharing import NoWarmth


class VocabularyGuard:
    """Knows the tokenizer of a drafter, and refuses the tokens of another.

    Args:
        vocabulary: of the drafter; None while it is not known.
        pools: whose log states the tokenizer.
        warmth: what shares outputs, of one tokenizer only: begun here.
        lock: held while the tokenizer is settled.
    """

    def __init__(
        self, vocabulary: Vocabulary | None, pools: Pools, warmth: NoWarmth, lock: Lock
    ) -> None:
        self._vocabulary = vocabulary
        self._pools = pools
        self._warmth = warmth
        self._lock = lock
        self._fingerprint = vocabulary.fingerprint if vocabulary else pools.fingerprint
        if self._fingerprint:
            warmth.start(self._fingerprint, vocabulary)

    def check(self, fingerprint: str) -> None:
        """Refuse another tokenizer; see `EmbeddedDrafter.check_vocabulary`."""
        if fingerprint:
            check_fingerprint(fingerprint)
        with self._lock:
            if fingerprint and not self._fingerprint:
                self._fingerprint = fingerprint
                self._pools.name_vocabulary(fingerprint)
                self._warmth.start(fingerprint, self._vocabulary)
        if fingerprint and fingerprint != self._fingerprint:
            raise VocabularyMismatchError(
                f"drafts are for the tokenizer with the fingerprint {self._fingerprint[:12]}\u2026 "
                f"and not for {fingerprint[:12]}\u2026: "
                "use an index built with the model's own tokenizer"
            )


def check_phrases(phrases: ListedPhrases, vocabulary: Vocabulary | None) -> None:
    """Refuse listed phrases with tokens that the vocabulary does not have.

    Raises:
        InvalidRequestError: there is one.
    """
    if vocabulary is not None and phrases.highest_token >= vocabulary.size:
        raise InvalidRequestError(
            f"a listed phrase holds the token id {phrases.highest_token}, which is outside the "
            f"vocabulary of {vocabulary.size}: list it as text, or with the index's tokenizer"
        )
