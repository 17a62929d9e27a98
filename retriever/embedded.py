"""The embedded drafter: databases, predictor and sessions in the caller's process."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from threading import Lock
from typing import Final, Self

import numpy as np
from numpy.typing import ArrayLike

from indexer.reader import Index, Vocabulary
from retriever.databases import Context, Corpus, Databases, Generations
from retriever.drafter import DraftRequest, TokenIds
from retriever.errors import (
    InvalidRequestError,
    OutOfSequenceError,
    VocabularyMismatchError,
)
from retriever.kernels.layout import MAX_MATCH
from retriever.limits import (
    Limits,
    check_batch,
    check_draft,
    check_length,
    check_session_name,
    checked_tokens,
)
from retriever.phrases import ListedPhrases
from retriever.predictor import Predictor
from retriever.sessions import Session, Sessions
from retriever.tree import DraftTree

DEFAULT_LIMITS: Final = Limits()
_NO_TOKENS: Final = np.empty(0, np.int32)


@dataclass(frozen=True, slots=True)
class _Step:
    """A request that has been checked against its session."""

    session: Session
    new_tokens: TokenIds
    request: DraftRequest = field(repr=False)


class EmbeddedDrafter:
    """Drafts from the sequence itself, recent generations and indexes; a `Drafter`.

    Safe to call from any thread; drafts are made one after the other.

    Args:
        indexes: open indexes, all of one vocabulary; closed with the drafter.
        vocabulary: of the tokenizer whose tokens will come; an index of another is refused.
        limits: what is accepted at most.
        phrases: what is listed to be written verbatim.

    Raises:
        InvalidRequestError: the indexes are of different vocabularies, or a phrase is of another.
    """

    def __init__(
        self,
        indexes: Sequence[Index] = (),
        *,
        vocabulary: Vocabulary | None = None,
        limits: Limits = DEFAULT_LIMITS,
        phrases: ListedPhrases | None = None,
    ) -> None:
        self.indexes = tuple(indexes)
        self.limits = limits
        self.vocabulary = _shared_vocabulary(self.indexes, vocabulary)
        self._phrases = phrases if phrases is not None else ListedPhrases(())
        _check_phrases(self._phrases, self.vocabulary)
        segments = [segment for index in self.indexes for segment in index.segments]
        self._corpus = Corpus(segments)
        self._generations = Generations(limits.generations_tokens)
        self._predictor = Predictor(limits.max_budget_nodes)
        self._fingerprint = self.vocabulary.fingerprint if self.vocabulary else ""
        self._sessions = Sessions(limits)
        self._lock = Lock()

    @classmethod
    def open_indexes(
        cls,
        paths: Iterable[Path | str],
        *,
        vocabulary: Vocabulary | None = None,
        limits: Limits = DEFAULT_LIMITS,
        phrases: ListedPhrases | None = None,
    ) -> Self:
        """Open the indexes at `paths` and draft from them.

        Raises:
            indexer.errors.IndexerError: an index is missing, damaged or of another tokenizer.
        """
        indexes: list[Index] = []
        try:
            indexes.extend(Index.open(path, vocabulary=vocabulary) for path in paths)
            return cls(indexes, vocabulary=vocabulary, limits=limits, phrases=phrases)
        except BaseException:
            for index in indexes:
                index.close()
            raise

    @property
    def num_sessions(self) -> int:
        """Sessions that are open."""
        return len(self._sessions)

    def open(self, session: str, prompt: ArrayLike, *, remember: bool = True) -> None:
        """Begin a sequence; see `Drafter.open`."""
        check_session_name(session)
        tokens = self._checked(prompt)
        check_length(len(tokens), self.limits)
        opened = Session(self._databases(tokens), len(tokens), remember)
        with self._lock:
            self._sessions.add(session, opened)

    def draft(self, requests: Sequence[DraftRequest]) -> list[DraftTree]:
        """Commit new tokens and draft for each sequence; see `Drafter.draft`.

        A step is checked as a whole first: where any request is refused, nothing is kept of any.
        """
        check_batch(requests, self.limits)
        with self._lock:
            steps = [self._step(request) for request in requests]
            return [self._draft(step) for step in steps]

    def close(self, session: str, new_tokens: ArrayLike | None = None) -> None:
        """End a sequence; see `Drafter.close`."""
        tokens = _NO_TOKENS if new_tokens is None else self._checked(new_tokens)
        with self._lock:
            ended = self._sessions.get(session)
            check_length(len(ended.databases.context) + len(tokens), self.limits)
            ended.databases.commit(tokens)
            self._sessions.remove(session)
            if ended.remember:
                context = ended.databases.context
                self._generations.add(context.last(len(context) - ended.prompt_length))

    def draft_context(
        self, context: ArrayLike, budget_nodes: int, min_probability: float = 0.0
    ) -> DraftTree:
        """Draft for a bare context, without a session.

        Args:
            context: integers[n], token ids, oldest first.
            budget_nodes: most nodes of the tree.
            min_probability: nodes less probable than this are left out.

        Raises:
            InvalidRequestError: the context or the budget cannot be.
        """
        tokens = self._checked(context)
        check_length(len(tokens), self.limits)
        check_draft(budget_nodes, min_probability, self.limits)
        databases = self._databases(tokens)
        with self._lock:
            return self._predictor.draft(databases, budget_nodes, min_probability)

    def remember(self, output: ArrayLike) -> None:
        """Add the output of a sequence that was generated elsewhere to the generations."""
        tokens = self._checked(output)
        with self._lock:
            self._generations.add(tokens)

    def warm(self) -> None:
        """Compile or load all kernels now, so that no draft waits for it."""
        context = np.zeros(2 * MAX_MATCH, np.int32)
        self.draft_context(context, budget_nodes=1)
        self._phrases.warm()

    def check_vocabulary(self, fingerprint: str) -> None:
        """Refuse the tokens of another tokenizer.

        A drafter that was not told its vocabulary takes the first one named here, so that
        sequences of two tokenizers never share generations.

        Raises:
            VocabularyMismatchError: `fingerprint` is not empty and not that of our vocabulary.
        """
        with self._lock:
            self._fingerprint = self._fingerprint or fingerprint
        if fingerprint and fingerprint != self._fingerprint:
            raise VocabularyMismatchError(
                f"drafts are for the tokenizer with the fingerprint {self._fingerprint[:12]}\u2026 "
                f"and not for {fingerprint[:12]}\u2026: "
                "use an index built with the model's own tokenizer"
            )

    def shut_down(self) -> None:
        """Close the indexes."""
        for index in self.indexes:
            index.close()

    def _checked(self, tokens: ArrayLike) -> TokenIds:
        return checked_tokens(tokens, self.vocabulary.size if self.vocabulary else None)

    def _databases(self, prompt: TokenIds) -> Databases:
        return Databases(
            Context(prompt),
            self._generations,
            self._corpus,
            phrases=self._phrases.cursor(prompt) if self._phrases else None,
        )

    def _step(self, request: DraftRequest) -> _Step:
        session = self._sessions.get(request.session)
        check_draft(request.budget_nodes, request.min_probability, self.limits)
        tokens = self._checked(request.new_tokens)
        known = len(session.databases.context)
        check_length(known + len(tokens), self.limits)
        if known + len(tokens) != request.length:
            raise OutOfSequenceError(
                f"session {request.session!r} has {known} tokens and the request brings "
                f"{len(tokens)}, but states a length of {request.length}: a step was lost or "
                "repeated; close the session and open it again"
            )
        return _Step(session, tokens, request)

    def _draft(self, step: _Step) -> DraftTree:
        step.session.databases.commit(step.new_tokens)
        return self._predictor.draft(
            step.session.databases, step.request.budget_nodes, step.request.min_probability
        )


def _shared_vocabulary(
    indexes: Sequence[Index], vocabulary: Vocabulary | None
) -> Vocabulary | None:
    for index in indexes:
        vocabulary = vocabulary or index.vocabulary
        if index.vocabulary.fingerprint != vocabulary.fingerprint:
            raise InvalidRequestError(
                f"index {index.path} is of another tokenizer than {indexes[0].path}: "
                "build both with the same --tokenizer"
            )
    return vocabulary


def _check_phrases(phrases: ListedPhrases, vocabulary: Vocabulary | None) -> None:
    if vocabulary is not None and phrases.highest_token >= vocabulary.size:
        raise InvalidRequestError(
            f"a listed phrase holds the token id {phrases.highest_token}, which is outside the "
            f"vocabulary of {vocabulary.size}: list it as text, or with the index's tokenizer"
        )
