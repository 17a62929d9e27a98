"""The embedded drafter: databases, predictor and sessions in the caller's process."""

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from threading import Lock
from time import perf_counter
from typing import Final, Self

import numpy as np
from numpy.typing import ArrayLike

from indexer.reader import Index, Vocabulary
from retriever.bindings import NO_PHRASES, Bindings, Bound, BoundPaths
from retriever.census import Census, census_of
from retriever.corpora import shared_vocabulary
from retriever.databases import Context, Corpus, Databases
from retriever.drafter import DraftRequest, TokenIds
from retriever.errors import (
    InvalidRequestError,
    UnknownSessionError,
    VocabularyMismatchError,
)
from retriever.explanation import Explanation
from retriever.generations import Generations
from retriever.kernels.compiling import tell_compiling
from retriever.kernels.entries import grow_tree
from retriever.kernels.layout import MAX_MATCH
from retriever.limits import (
    DEFAULT_DOCUMENTS,
    Limits,
    check_documents,
    check_draft,
    check_fingerprint,
    check_length,
    check_session_name,
    check_tenant_name,
    checked_tokens,
)
from retriever.live import LiveCorpora
from retriever.log_store import Durability
from retriever.phrases import ListedPhrases
from retriever.pools import Pool, Pools, Scope, session_origin
from retriever.predictor import Predictor
from retriever.provenance import Evidence, locate, trace_nodes
from retriever.sessions import Session, SessionKey, Sessions
from retriever.steps import Steps
from retriever.tally import Tally
from retriever.tree import DraftTree
from retriever.warmth.counts import WarmthCounts
from retriever.warmth.options import WarmthOptions
from retriever.warmth.sharing import SharedWarmth, check_warmth

DEFAULT_LIMITS: Final = Limits()
_NO_TOKENS: Final = np.empty(0, np.int32)
_DONE: Final = object()


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
        bound: what tenants draft from in the place of the indexes and phrases that are shared;
            their indexes are closed with the drafter, too.
        warmth: where outputs are shared with other drafters of the same vocabulary, which learn
            from them as this one learns from theirs; None to share nothing.

    Attributes:
        limits: as given.
        vocabulary: of the indexes, or as given.
        tally: what was drafted, and what became of it.

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
        bound: Mapping[str, Bound] | None = None,
        warmth: WarmthOptions | None = None,
    ) -> None:
        check_warmth(warmth)
        self.limits = limits
        self.vocabulary = shared_vocabulary(indexes, vocabulary)
        phrases = phrases if phrases is not None else NO_PHRASES
        bound = bound or {}
        for each in bound.values():
            self.vocabulary = shared_vocabulary(each.indexes or (), self.vocabulary)
            _check_phrases(each.phrases or NO_PHRASES, self.vocabulary)
        _check_phrases(phrases, self.vocabulary)
        self._lock = Lock()
        self.tally = Tally()
        self._sessions = Sessions(limits)
        live = partial(LiveCorpora, sessions=self._sessions, lock=self._lock)
        self._live = Bindings(live(indexes), phrases, bound, live)
        self._predictor = predictor or Predictor(limits.max_budget_nodes)
        self.steps = Steps(
            self._sessions,
            self._predictor,
            self._live,
            self._lock,
            limits=limits,
            tally=self.tally,
            vocabulary_size=self.vocabulary.size if self.vocabulary else None,
        )
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
        bound: BoundPaths | None = None,
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
        opened: list[Index] = []
        shared = list(paths)
        try:
            indexes.extend(Index.open(path, vocabulary=vocabulary) for path in shared)
            tenants = (bound or BoundPaths()).opened(shared, vocabulary, opened)
            return cls(
                indexes,
                vocabulary=vocabulary,
                limits=limits,
                state=state,
                durability=durability,
                phrases=phrases,
                refresh_s=refresh_s,
                bound=tenants,
                warmth=warmth,
            )
        except BaseException:
            for index in (*indexes, *opened):
                index.close()
            raise

    @property
    def indexes(self) -> tuple[Index, ...]:
        """The indexes that are shared, as they are drafted from now."""
        return self.indexes_of("")

    def indexes_of(self, tenant: str) -> tuple[Index, ...]:
        """Return the indexes that a tenant drafts from, as they are now."""
        return self._live.corpora(tenant).current.indexes

    @property
    def refresh_failures(self) -> int:
        """How often an index had changed, or was gone, and could not be opened again."""
        return self._live.failures

    @property
    def log_failures(self) -> int:
        """Outputs that could not be written to the state directory."""
        return self._pools.log_failures

    @property
    def num_sessions(self) -> int:
        """Sessions that are open."""
        return len(self._sessions)

    def census(self) -> Census:
        """Count what is held now, without keeping drafts waiting for longer than a moment."""
        with self._lock:
            sessions = self._sessions.all()
        return census_of(sessions, [(pool, self._tokens_of(pool)) for pool in self._pools.all()])

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
        opened = self.prepare(prompt, remember=remember, tenant=tenant)
        self.begin(SessionKey("", session), opened)

    def prepare(self, prompt: ArrayLike, *, remember: bool = True, tenant: str = "") -> Session:
        """Return a session for `begin`: the part of `open` that takes long for a long prompt."""
        tokens = self._checked(prompt)
        check_length(len(tokens), self.limits)
        databases = self._databases(tokens, self._pool(tenant), remember=remember)
        return Session(databases, len(tokens), remember)

    def begin(self, key: SessionKey, prepared: Session) -> None:
        """Begin a sequence as `open` does, under a name that no open session has."""
        check_session_name(key.name)
        with self._lock:
            self._sessions.add(key, prepared)

    def is_loaded(self, tenant: str) -> bool:
        """Tell whether a tenant's recent outputs are in memory: loading them takes long."""
        return tenant in self._pools

    def draft(self, requests: Sequence[DraftRequest]) -> list[DraftTree]:
        """Commit new tokens and draft for each sequence; see `Drafter.draft`.

        A step is checked as a whole first: where any request is refused, nothing is kept of any.
        To have one refused without the others, and to give way between drafts, see `steps`.
        """
        return self.steps.make(requests, "")

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
        self.end(SessionKey("", session), new_tokens, remember=remember)
        self.flush()

    def end(
        self, key: SessionKey, new_tokens: ArrayLike | None = None, *, remember: bool = True
    ) -> None:
        """End a sequence as `close` does, without waiting for the state directory: see `flush`."""
        tokens = _NO_TOKENS if new_tokens is None else self._checked(new_tokens)
        with self._lock:
            ended = self._sessions.get(key)
            check_length(len(ended.databases.context) + len(tokens), self.limits)
            self._sessions.remove(key)  # with the tokens that were counted
            self.steps.commit(ended, tokens)
            if ended.remember and remember:
                context = ended.databases.context
                output = context.last(len(context) - ended.prompt_length)
                self._warmth.hold(self._pools.remember(ended.databases.pool, output, key.name))

    def flush(self) -> None:
        """Keep in the state directory, if there is one, what was generated in ended sequences.

        Then it is shared, if that is wanted; nobody waits for it.
        """
        held = self._warmth.held()
        self._pools.commit()
        for entry in held:
            self._warmth.offer(entry)

    def discard(self, ended: Iterable[tuple[SessionKey, Session]]) -> int:
        """End sessions, if they are open still, and keep nothing of them; return how many."""
        with self._lock:
            return self._sessions.discard(ended)

    def end_idle(self) -> int:
        """End the sessions that have been idle for too long; return how many."""
        with self._lock:
            return self._sessions.end_idle()

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
        began = perf_counter()
        with self._lock:
            tree = self._draft(databases, budget_nodes, min_probability)
            self.tally.drafted_bare(perf_counter() - began)
        return tree

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
            indexes = self.indexes_of(
                tenant
            )  # those that the draft is from, whatever comes meanwhile
        supports = trace_nodes(tree, databases, evidence)
        return Explanation(tree, tuple(locate(supports, indexes, max_documents)))

    def remember(self, output: ArrayLike, *, tenant: str = "") -> None:
        """Add the output of a sequence that was generated elsewhere to the generations.

        With a state directory, it is kept in it once this returns.
        """
        tokens = self._checked(output)
        pool = self._pool(tenant)
        with self._lock:
            self._warmth.hold(self._pools.remember(pool, tokens))
        self.flush()

    def delete_tenant(self, tenant: str) -> None:
        """Forget all outputs of a tenant, in memory and in the state directory.

        What its open sessions have generated so far will not be remembered either. Where outputs
        are shared, they are removed from the server, and the other drafters told to do the same,
        as soon as it can be reached.

        Raises:
            StateError: the disk refuses; what is in memory is forgotten all the same.
        """
        check_tenant_name(tenant)
        self._delete(Scope(tenant))

    def delete_session(self, key: SessionKey, *, tenant: str = "") -> None:
        """Forget what sessions of a name have generated, in memory and in the state directory.

        One that is open ends. What the tenant's weights learned stays: it names no token. Other
        drafters do the same where outputs are shared, as for `delete_tenant`.

        Raises:
            StateError: the disk refuses; what is in memory is forgotten all the same.
        """
        check_session_name(key.name)
        check_tenant_name(tenant)
        with self._lock, suppress(UnknownSessionError):
            self._sessions.remove(key).databases.context.clear()
        self._delete(Scope(tenant, session_origin(key.name)))

    def refresh(self) -> bool:
        """Draft from what the indexes are now; tell whether any has changed.

        An index that cannot be opened is drafted from as it was: it is counted in
        `refresh_failures`, the reason logged, and the next refresh tries again. Sessions go on;
        drafts are made meanwhile, until the new corpus is open and warm.
        """
        return self._live.refresh()

    def warm(self) -> None:
        """Compile or load all kernels now, so that no draft waits for it."""
        tell_compiling(grow_tree)
        context = np.zeros(2 * MAX_MATCH, np.int32)
        nobody = Databases(Context(context), Pool("", Generations(0)), self._corpus(""))
        nobody.pool.generations.add(context)
        with self._lock:
            self._predictor.draft(nobody, 1, 0.0)
            self._predictor.commit(nobody, context[:1])
        self._live.warm()
        self.tally.warm()

    def check_vocabulary(self, fingerprint: str) -> None:
        """Refuse the tokens of another tokenizer.

        A drafter that was not told its vocabulary takes the first one named here, so that
        sequences of two tokenizers never share generations.

        Raises:
            VocabularyMismatchError: `fingerprint` is not empty and not that of our vocabulary.
            InvalidRequestError: it is no fingerprint.
        """
        if fingerprint:
            check_fingerprint(fingerprint)
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
        self.flush()
        self._warmth.shut_down()
        self._live.shut_down()
        self._pools.close()

    def _delete(self, scope: Scope) -> None:
        """Forget what is of a scope, and let the other drafters do so."""
        try:
            self._forget(scope, self._warmth.delete)
        finally:
            self._warmth.keep_position()

    def _forget(self, scope: Scope, tell: Callable[[Scope], None]) -> None:
        """Forget what is of a scope, and tell of it before anything that comes later is learned.

        While the disk is waited for, others draft.
        """
        with self._pools.deletion(scope.tenant) as pool:
            ended = self._sessions_of(scope)
            with self._lock:
                tell(scope)
                self._sessions.wipe(ended)
                rest = self._emptying(pool, scope)
                is_done = next(rest, _DONE) is _DONE
            while not is_done:
                time.sleep(0)  # others may draft
                with self._lock:
                    is_done = next(rest, _DONE) is _DONE
            if not scope.origin:
                self._pools.let_go(scope.tenant)
            self._pools.delete_logged(scope)

    def _sessions_of(self, scope: Scope) -> list[tuple[SessionKey, Session]]:
        """Return the open sessions of an origin: those of a whole tenant go on."""
        if not scope.origin:
            return []
        with self._lock:
            sessions = self._sessions.of(scope.tenant)
        return [each for each in sessions if session_origin(each[0].name) == scope.origin]

    def _emptying(self, pool: Pool | None, scope: Scope) -> Iterator[None]:
        """Empty a pool of what is of a scope, which is gone with the first step."""
        if pool is None:
            return
        if scope.origin:
            yield from pool.forgetting(scope.origin)
        else:
            pool.clear()
            self._sessions.forget(pool)

    def _checked(self, tokens: ArrayLike) -> TokenIds:
        return checked_tokens(tokens, self.vocabulary.size if self.vocabulary else None)

    def _tokens_of(self, pool: Pool) -> int:
        with self._lock:
            return pool.generations.num_tokens

    def _pool(self, tenant: str) -> Pool:
        check_tenant_name(tenant)
        return self._pools.get(tenant)

    def _databases(self, prompt: TokenIds, pool: Pool, *, remember: bool = False) -> Databases:
        phrases = self._live.phrases(pool.tenant)
        return Databases(
            Context(prompt),
            pool,
            self._corpus(pool.tenant),
            learns=remember,
            phrases=phrases.cursor(prompt) if phrases else None,
        )

    def _corpus(self, tenant: str) -> Corpus:
        return self._live.corpora(tenant).current.corpus

    def _draft(self, databases: Databases, budget: int, min_probability: float) -> DraftTree:
        databases.turn_to(self._corpus(databases.pool.tenant))
        return self._predictor.draft(databases, budget, min_probability)


def _check_phrases(phrases: ListedPhrases, vocabulary: Vocabulary | None) -> None:
    if vocabulary is not None and phrases.highest_token >= vocabulary.size:
        raise InvalidRequestError(
            f"a listed phrase holds the token id {phrases.highest_token}, which is outside the "
            f"vocabulary of {vocabulary.size}: list it as text, or with the index's tokenizer"
        )
