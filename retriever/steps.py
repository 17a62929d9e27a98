"""Steps of decoding: tokens are committed to sessions, and what comes next is drafted."""

from collections.abc import Iterable, Sequence
from threading import Lock
from time import perf_counter
from typing import NamedTuple

from retriever.bindings import Bindings
from retriever.drafter import DraftRequest, TokenIds
from retriever.errors import OutOfSequenceError, RetrieverError
from retriever.limits import Limits, check_batch, check_draft, check_length, checked_tokens
from retriever.predictor import Predictor
from retriever.sessions import Session, SessionKey, Sessions
from retriever.tally import Tally
from retriever.tree import DraftTree


class Step(NamedTuple):
    """A request that has been checked against its session.

    Attributes:
        session: whose sequence it is.
        new_tokens: int32[n], inside the vocabulary.
        request: as it came.
    """

    session: Session
    new_tokens: TokenIds
    request: DraftRequest


class Steps:
    """Makes the steps of sessions; safe to call from any thread.

    Args:
        sessions: whose steps they are.
        predictor: what grows the trees.
        live: what is drafted from.
        lock: held while any of them is used.
        limits: what is accepted at most.
        tally: of what is drafted and what became of it.
        vocabulary_size: token ids must be below it; None where it is not known.
    """

    def __init__(  # noqa: PLR0913  (what a drafter consists of)
        self,
        sessions: Sessions,
        predictor: Predictor,
        live: Bindings,
        lock: Lock,
        *,
        limits: Limits,
        tally: Tally,
        vocabulary_size: int | None,
    ) -> None:
        self._sessions = sessions
        self._predictor = predictor
        self._live = live
        self._lock = lock
        self._limits = limits
        self._tally = tally
        self._vocabulary_size = vocabulary_size

    def make(self, requests: Sequence[DraftRequest], namespace: str) -> list[DraftTree]:
        """Commit and draft; where any request is refused, nothing is kept of any.

        Raises:
            RetrieverError: the first that a request is refused with.
        """
        check_batch(requests, self._limits)
        began = perf_counter()
        with self._lock:
            steps = [self._checked(request, namespace) for request in requests]
            self._charge(steps)
            for step in steps:  # all before any draft: what is learned from is the last draft
                self.commit(step.session, step.new_tokens)
            trees = [self._draft(step) for step in steps]
            self._tally.stepped(len(steps), perf_counter() - began)
        return trees

    def commit_each(
        self, requests: Iterable[DraftRequest], namespace: str
    ) -> list[Step | RetrieverError]:
        """Commit new tokens; return a step, or why it is refused, for each request in order.

        What is refused to one costs no other. The caller has called `check_batch`.
        """
        with self._lock:
            return [self._commit(request, namespace) for request in requests]

    def draft_each(self, steps: Iterable[Step]) -> list[DraftTree]:
        """Draft for steps that were committed; a session that has ended meanwhile gets a tree."""
        with self._lock:
            return [self._draft(step) for step in steps]

    def count(self, num_drafts: int, seconds: float) -> None:
        """Count a step that `commit_each` and `draft_each` have made bit by bit."""
        with self._lock:
            self._tally.stepped(num_drafts, seconds)

    def commit(self, session: Session, new_tokens: TokenIds) -> None:
        """Commit int32[n], tokens that were checked, and count what they make of the last draft.

        The caller holds the lock.
        """
        if session.drafted is not None:
            self._tally.committed(session.drafted, new_tokens)
            session.drafted = None
        self._predictor.commit(session.databases, new_tokens)

    def _commit(self, request: DraftRequest, namespace: str) -> Step | RetrieverError:
        try:
            step = self._checked(request, namespace)
            self._sessions.charge(step.session, len(step.new_tokens))
        except RetrieverError as error:
            return error
        self.commit(step.session, step.new_tokens)
        return step

    def _charge(self, steps: Sequence[Step]) -> None:
        """Count the tokens of all steps, or of none."""
        charged: list[Step] = []
        try:
            for step in steps:
                self._sessions.charge(step.session, len(step.new_tokens))
                charged.append(step)
        except RetrieverError:
            for step in charged:
                self._sessions.charge(step.session, -len(step.new_tokens))
            raise

    def _checked(self, request: DraftRequest, namespace: str) -> Step:
        session = self._sessions.get(SessionKey(namespace, request.session))
        check_draft(request.budget_nodes, request.min_probability, self._limits)
        tokens = checked_tokens(request.new_tokens, self._vocabulary_size)
        known = len(session.databases.context)
        check_length(known + len(tokens), self._limits)
        if known + len(tokens) != request.length:
            raise OutOfSequenceError(
                f"session {request.session!r} has {known} tokens and the request brings "
                f"{len(tokens)}, but states a length of {request.length}: a step was lost or "
                "repeated; close the session and open it again"
            )
        return Step(session, tokens, request)

    def _draft(self, step: Step) -> DraftTree:
        databases = step.session.databases
        databases.turn_to(self._live.corpora(step.session.tenant).current.corpus)
        tree = self._predictor.draft(
            databases, step.request.budget_nodes, step.request.min_probability
        )
        step.session.drafted = tree
        return tree
