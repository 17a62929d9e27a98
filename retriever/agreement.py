"""That all servers of a corpus are of one vocabulary."""

from threading import Lock

from retriever.errors import VocabularyMismatchError


class Agreement:
    """The vocabulary that all shards are of: the one stated, or that of the first to answer.

    Args:
        fingerprint: of the tokenizer at hand; empty if it is not known.
    """

    def __init__(self, fingerprint: str) -> None:
        self.fingerprint = fingerprint
        self._whose = "the tokenizer at hand"
        self._lock = Lock()

    def check(self, address: str, fingerprint: str) -> None:
        """Compare the vocabulary of a shard.

        Raises:
            VocabularyMismatchError: it is another one.
        """
        with self._lock:
            if not self.fingerprint:
                self.fingerprint, self._whose = fingerprint, f"shard {address}"
        if fingerprint != self.fingerprint:
            raise VocabularyMismatchError(
                f"shard {address} is of another vocabulary (fingerprint {fingerprint[:12]}\u2026) "
                f"than {self._whose} ({self.fingerprint[:12]}\u2026): "
                "build all shards with the model's own --tokenizer"
            )
