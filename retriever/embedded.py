"""The embedded drafter: databases, predictor and sessions in the caller's process."""

from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from threading import Lock
from typing import Final, NamedTuple, Self

import numpy as np
from numpy.typing import ArrayLike

from indexer.reader import Index, Vocabulary
from retriever.corpora import shared_vocabulary
from retriever.databases import Context, Databases
from retriever.drafter import DraftRequest, TokenIds
from retriever.errors import (
    InvalidRequestError,
    OutOfSequenceError,
    VocabularyMismatchError,
)
from retriever.explanation import Explanation
from retriever.generations import Generations
from retriever.kernels.layout import MAX_MATCH
from retriever.limits import (
    DEFAULT_DOCUMENTS,
    Limits,
    check_batch,
    check_documents,
    check_draft,
    check_length,
    check_session_name,
    check_tenant_name,
    checked_tokens,
)
from retriever.live import LiveCorpora
from retriever.log_store import Durability
from retriever.phrases import ListedPhrases
from retriever.pools import Pool, Pools
from retriever.predictor import Predictor
from retriever.provenance import Evidence, locate, trace_nodes
from retriever.sessions import Session, Sessions
from retriever.tree import DraftTree
from retriever.warmth.counts import WarmthCounts
from retriever.warmth.options import WarmthOptions
from retriever.warmth.sharing import SharedWarmth, check_warmth

DEFAULT_LIMITS: Final = Limits()
_NO_TOKENS: Final = np.empty(0, np.int32)


class _Step(NamedTuple):
    """A request that has been checked against its session."""

    session: Session
    new_tokens: TokenIds
    request: DraftRequest


class EmbeddedDrafter:
    """Drafts from the sequence itself, recent generations and indexes; a `Drafter`.

    Safe to call from any thread; drafts are made one after the other.

    Args:
        indexes: open indexes, all of one vocabulary; closed with the drafter.
        vocabulary: of the tokenizer whose tokens will come; an index of another is refused.
        limits: what is accepted at most.
        state: a directory that keeps outputs, so that a drafter that is opened on it later starts
            as warm as this one was; None to keep them in memory alone. One drafter at a time.
        durability: with "process", outputs survive the end of this process, however it comes;
            with "disk" that of the machine too, at the price of waiting for it in every `close`.
        phrases: what is listed to be written verbatim.
        refresh_s: look every so many seconds whether an index has changed, in a thread of our own,
            and draft from what it has become; 0 for never. `refresh` does so at once.
        predictor: what grows the trees, with room for `limits`; made here if None.
        warmth: where outputs are shared with other drafters of the same vocabulary, which learn
            from them as this one learns from theirs; None to share nothing.

    Raises:
        InvalidRequestError: the indexes are of different vocabularies, or a phrase is of another.
        StateError: `state` cannot be used.
        VocabularyMismatchError: `state` holds outputs of another tokenizer.
        WarmthError: `warmth` cannot be used; not if the server is away, for it may come.
    """

    def __init__(  # noqa: PLR0913  (all but the indexes are given by name)
        self,
        indexes: Sequence[Index] = (),
        *,
        vocabulary: Vocabulary | None = None,
        limits: Limits = DEFAULT_LIMITS,
        state: Path | None = None,
        durability: Durability = "process",
        phrases: ListedPhrases | None = None,
        refresh_s: float = 0.0,
        predictor: Predictor | None = None,
        warmth: WarmthOptions | None = None,
    ) -> None:
        check_warmth(warmth)
        self.limits = limits
        self.vocabulary = shared_vocabulary(indexes, vocabulary)
        self._phrases = phrases if phrases is not None else ListedPhrases(())
        _check_phrases(self._phrases, self.vocabulary)
        self._lock = Lock()
        self._sessions = Sessions(limits)
        self._live = LiveCorpora(indexes, self._sessions, self._lock)
        self._predictor = predictor or Predictor(limits.max_budget_nodes)
        self._fingerprint = self.vocabulary.fingerprint if self.vocabulary else ""
        self._pools = Pools.open(limits, state, self._fingerprint, durability)
        self._fingerprint = self._fingerprint or self._pools.fingerprint
        self._warmth = SharedWarmth.join(warmth, self._pools, self._lock, limits, self._forget)
        if self._fingerprint:
            self._warmth.start(self._fingerprint, self.vocabulary)
        self._pools.get("")  # whoever names no tenant does not wait for the log
        if refresh_s > 0:
            self._live.watch(refresh_s)

    @classmethod
    def open_indexes(  # noqa: PLR0913  (likewise)
        cls,
        paths: Iterable[Path | str],
        *,
        vocabulary: Vocabulary | None = None,
        limits: Limits = DEFAULT_LIMITS,
        state: Path | None = None,
        durability: Durability = "process",
        phrases: ListedPhrases | None = None,
        refresh_s: float = 0.0,
        warmth: WarmthOptions | None = None,
    ) -> Self:
        """Open the indexes at `paths` and draft from them; the rest is as for the constructor.

        Raises:
            indexer.errors.IndexerError: an index is missing, damaged or of another tokenizer.
            StateError: `state` cannot be used.
            VocabularyMismatchError: `state` holds outputs of another tokenizer.
            WarmthError: `warmth` cannot be used.
        """
        indexes: list[Index] = []
        try:
            indexes.extend(Index.open(path, vocabulary=vocabulary) for path in paths)
            return cls(
                indexes,
                vocabulary=vocabulary,
                limits=limits,
                state=state,
                durability=durability,
                phrases=phrases,
                refresh_s=refresh_s,
                warmth=warmth,
            )
        except BaseException:
            for index in indexes:
                index.close()
            raise

    @property
    def indexes(self) -> tuple[Index, ...]:
        """The indexes, as they are drafted from now."""
        return self._live.current.indexes

    @property
    def refresh_failures(self) -> int:
        """How often an index had changed, or was gone, and could not be opened again."""
        return self._live.failures

    @property
    def log_failures(self) -> int:
        """Outputs that could not be written to the state directory."""
        return self._pools.log_failures

    @property
    def warmth(self) -> WarmthCounts:
        """What became of the outputs that are shared with other drafters."""
        return self._warmth.counts

    def open(
        self, session: str, prompt: ArrayLike, *, remember: bool = True, tenant: str = ""
    ) -> None:
        """Begin a sequence; see `Drafter.open`.

        Args:
            session: a name that no open session has, of whatever tenant.
            prompt: integers[n], the tokens committed so far.
            remember: whether what is generated may serve later sequences of the tenant.
            tenant: whose outputs to draft from and to add to; no other tenant sees them.
        """
        check_session_name(session)
        tokens = self._checked(prompt)
        check_length(len(tokens), self.limits)
        pool = self._pool(tenant)
        opened = Session(self._databases(tokens, pool, remember=remember), len(tokens), remember)
        with self._lock:
            self._sessions.add(session, opened)

    def draft(self, requests: Sequence[DraftRequest]) -> list[DraftTree]:
        """Commit new tokens and draft for each sequence; see `Drafter.draft`.

        A step is checked as a whole first: where any request is refused, nothing is kept of any.
        """
        check_batch(requests, self.limits)
        with self._lock:
            steps = [self._step(request) for request in requests]
            for step in steps:  # all before any draft: what is learned from is the last draft
                self._predictor.commit(step.session.databases, step.new_tokens)
            return [
                self._draft(
                    step.session.databases, step.request.budget_nodes, step.request.min_probability
                )
                for step in steps
            ]

    def close(
        self, session: str, new_tokens: ArrayLike | None = None, *, remember: bool = True
    ) -> None:
        """End a sequence; see `Drafter.close`.

        With a state directory, what was generated is kept in it once this returns. Then it is
        shared, if that is wanted; nobody waits for it.

        Args:
            session: the name that it was opened with.
            new_tokens: integers[n], tokens committed since its last request.
            remember: false to keep nothing of it, whatever it was opened with.
        """
        tokens = _NO_TOKENS if new_tokens is None else self._checked(new_tokens)
        kept = None
        with self._lock:
            ended = self._sessions.get(session)
            check_length(len(ended.databases.context) + len(tokens), self.limits)
            self._predictor.commit(ended.databases, tokens)
            self._sessions.remove(session)
            if ended.remember and remember:
                context = ended.databases.context
                output = context.last(len(context) - ended.prompt_length)
                kept = self._pools.remember(ended.databases.pool, output)
        self._pools.commit()
        self._warmth.offer(kept)

    def draft_context(
        self,
        context: ArrayLike,
        budget_nodes: int,
        min_probability: float = 0.0,
        *,
        tenant: str = "",
    ) -> DraftTree:
        """Draft for a bare context, without a session.

        Args:
            context: integers[n], token ids, oldest first.
            budget_nodes: most nodes of the tree.
            min_probability: nodes less probable than this are left out.
            tenant: whose outputs to draft from.

        Raises:
            InvalidRequestError: the context, the budget or the tenant cannot be.
        """
        tokens = self._checked(context)
        check_length(len(tokens), self.limits)
        check_draft(budget_nodes, min_probability, self.limits)
        databases = self._databases(tokens, self._pool(tenant))
        with self._lock:
            return self._draft(databases, budget_nodes, min_probability)

    def explain(
        self,
        context: ArrayLike,
        budget_nodes: int,
        min_probability: float = 0.0,
        *,
        max_documents: int = DEFAULT_DOCUMENTS,
        tenant: str = "",
    ) -> Explanation:
        """Draft for a bare context as `draft_context` does, and tell what spoke for each node.

        Takes milliseconds; others draft meanwhile. Of recent outputs nothing is shown.

        Args:
            context: integers[n], token ids, oldest first.
            budget_nodes: most nodes of the tree.
            min_probability: nodes less probable than this are left out.
            max_documents: most documents to name for each node.
            tenant: whose outputs to draft from.

        Raises:
            InvalidRequestError: the context, a number or the tenant cannot be.
            ProvenanceError: an index is damaged.
        """
        check_documents(max_documents)
        tokens = self._checked(context)
        check_length(len(tokens), self.limits)
        check_draft(budget_nodes, min_probability, self.limits)
        databases = self._databases(tokens, self._pool(tenant))
        with self._lock:
            tree = self._draft(databases, budget_nodes, min_probability)
            evidence = Evidence.of(self._predictor, budget_nodes)
            indexes = self.indexes  # those that the draft is from, whatever comes meanwhile
        supports = trace_nodes(tree, databases, evidence)
        return Explanation(tree, tuple(locate(supports, indexes, max_documents)))

    def remember(self, output: ArrayLike, *, tenant: str = "") -> None:
        """Add the output of a sequence that was generated elsewhere to the generations.

        With a state directory, it is kept in it once this returns.
        """
        tokens = self._checked(output)
        pool = self._pool(tenant)
        with self._lock:
            kept = self._pools.remember(pool, tokens)
        self._pools.commit()
        self._warmth.offer(kept)

    def delete_tenant(self, tenant: str) -> None:
        """Forget all outputs of a tenant, in memory and in the state directory.

        What its open sessions have generated so far will not be remembered either. Where outputs
        are shared, they are removed from the server, and the other drafters told to do the same,
        as soon as it can be reached.

        Raises:
            StateError: the disk refuses; what is in memory is forgotten all the same.
        """
        check_tenant_name(tenant)
        try:
            self._forget(tenant, self._warmth.delete)
        finally:
            self._warmth.keep_position()

    def refresh(self) -> bool:
        """Draft from what the indexes are now; tell whether any has changed.

        An index that cannot be opened is drafted from as it was: it is counted in
        `refresh_failures`, the reason logged, and the next refresh tries again. Sessions go on;
        drafts are made meanwhile, until the new corpus is open and warm.
        """
        return self._live.refresh()

    def warm(self) -> None:
        """Compile or load all kernels now, so that no draft waits for it."""
        context = np.zeros(2 * MAX_MATCH, np.int32)
        nobody = Databases(Context(context), Pool("", Generations(0)), self._live.current.corpus)
        nobody.pool.generations.add(context)
        with self._lock:
            self._predictor.draft(nobody, 1, 0.0)
            self._predictor.commit(nobody, context[:1])
        self._phrases.warm()

    def check_vocabulary(self, fingerprint: str) -> None:
        """Refuse the tokens of another tokenizer.

        A drafter that was not told its vocabulary takes the first one named here, so that
        sequences of two tokenizers never share generations.

        Raises:
            VocabularyMismatchError: `fingerprint` is not empty and not that of our vocabulary.
        """
        with self._lock:
            if fingerprint and not self._fingerprint:
                self._fingerprint = fingerprint
                self._pools.name_vocabulary(fingerprint)
                self._warmth.start(fingerprint, self.vocabulary)
        if fingerprint and fingerprint != self._fingerprint:
            raise VocabularyMismatchError(
                f"drafts are for the tokenizer with the fingerprint {self._fingerprint[:12]}\u2026 "
                f"and not for {fingerprint[:12]}\u2026: "
                "use an index built with the model's own tokenizer"
            )

    def shut_down(self) -> None:
        """Close the indexes and the state directory; what was not shared yet has a second left."""
        self._warmth.shut_down()
        self._live.shut_down()
        self._pools.close()

    def _forget(self, tenant: str, tell: Callable[[str], None]) -> None:
        """Forget a tenant, and tell of it before anything that comes later is remembered."""
        with self._pools.deletion(tenant) as pool, self._lock:
            tell(tenant)
            if pool is not None:
                pool.clear()
                self._sessions.forget(pool)
            self._pools.delete_logged(tenant)

    def _checked(self, tokens: ArrayLike) -> TokenIds:
        return checked_tokens(tokens, self.vocabulary.size if self.vocabulary else None)

    def _pool(self, tenant: str) -> Pool:
        check_tenant_name(tenant)
        return self._pools.get(tenant)

    def _databases(self, prompt: TokenIds, pool: Pool, *, remember: bool = False) -> Databases:
        return Databases(
            Context(prompt),
            pool,
            self._live.current.corpus,
            learns=remember,
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

    def _draft(self, databases: Databases, budget: int, min_probability: float) -> DraftTree:
        databases.turn_to(self._live.current.corpus)
        return self._predictor.draft(databases, budget, min_probability)


def _check_phrases(phrases: ListedPhrases, vocabulary: Vocabulary | None) -> None:
    if vocabulary is not None and phrases.highest_token >= vocabulary.size:
        raise InvalidRequestError(
            f"a listed phrase holds the token id {phrases.highest_token}, which is outside the "
            f"vocabulary of {vocabulary.size}: list it as text, or with the index's tokenizer"
        )
