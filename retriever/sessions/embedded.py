"""The embedded drafter: databases, predictor and sessions in the caller's process."""

import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from threading import Lock
from time import perf_counter
from typing import Final, NamedTuple, Self, Unpack

import numpy as np
from numpy.typing import ArrayLike

from indexer.reader import Index, Vocabulary
from retriever.drafter import DraftRequest, TokenIds
from retriever.errors import (
    InvalidRequestError,
    OutOfSequenceError,
    RetrieverError,
    UnknownSessionError,
    VocabularyMismatchError,
)
from retriever.explanation import Explanation
from retriever.limits import (
    DEFAULT_DOCUMENTS,
    Limits,
    check_batch,
    check_documents,
    check_draft,
    check_fingerprint,
    check_length,
    check_session_name,
    check_tenant_name,
    checked_tokens,
)
from retriever.predict.databases import Context, Corpus, Databases
from retriever.predict.generations import Scope, session_origin
from retriever.predict.phrases import ListedPhrases
from retriever.predict.pool import Pool
from retriever.predict.predictor import Predictor
from retriever.predict.provenance import Evidence, locate, trace_nodes
from retriever.replication.replicated_records import ReplicationCounts
from retriever.replication.sharing import NoReplication, Replication, check_replication
from retriever.sessions.bindings import NO_PHRASES, Bindings, BoundPaths
from retriever.sessions.live_corpora import LiveCorpora, shared_vocabulary, warm_kernels
from retriever.sessions.options import (
    DEFAULT_LIMITS,
    DrafterOptions,
    OpeningOptions,
    opened_indexes,
)
from retriever.sessions.pools import Pools
from retriever.sessions.session_table import Session, SessionKey, Sessions
from retriever.sessions.tally import Tally
from retriever.tree import DraftTree


class Sources:
    """The databases of every tenant.

    Args:
        pools: recent outputs.
        live: indexes and listed phrases.
        vocabulary: of the tokens; None where it is not known.
        limits: what is accepted at most.
    """

    def __init__(
        self, pools: Pools, live: Bindings, vocabulary: Vocabulary | None, limits: Limits
    ) -> None:
        self._pools = pools
        self._live = live
        self._vocabulary_size = vocabulary.size if vocabulary else None
        self._limits = limits

    def databases(self, prompt: ArrayLike, tenant: str, *, remember: bool = False) -> Databases:
        """Return what a sequence that begins with integers[n] is drafted from.

        Raises:
            InvalidRequestError: the tokens or the tenant cannot be.
        """
        tokens = self.checked(prompt)
        check_length(len(tokens), self._limits)
        pool = self.pool(tenant)
        phrases = self._live.phrases(tenant)
        return Databases(
            Context(tokens),
            pool,
            self.corpus(tenant),
            learns=remember,
            phrases=phrases.cursor(tokens) if phrases else None,
        )

    def corpus(self, tenant: str) -> Corpus:
        """Return the corpus that a tenant drafts from now."""
        return self._live.corpora(tenant).current.corpus

    def pool(self, tenant: str) -> Pool:
        """Return the recent outputs of a tenant, from the log where they are not in memory."""
        check_tenant_name(tenant)
        return self._pools.get(tenant)

    def checked(self, tokens: ArrayLike) -> TokenIds:
        """Return int32[n], having checked that they are tokens of the vocabulary."""
        return checked_tokens(tokens, self._vocabulary_size)


_BETWEEN_PAUSES: Final = 256
_PAUSE_S: Final = 1e-4


@dataclass(frozen=True, slots=True)
class Census:
    """What a drafter holds.

    Attributes:
        sessions: how many are open, by tenant.
        session_tokens: tokens of their sequences.
        session_bytes: memory of the sequences.
        tenants: tenants whose recent outputs are in memory.
        generations_tokens: tokens of these outputs, and one for the end of each.
        generations_bytes: memory of the outputs.
    """

    sessions: Mapping[str, int]
    session_tokens: int
    session_bytes: int
    tenants: int
    generations_tokens: int
    generations_bytes: int


NOTHING_HELD: Final = Census({}, 0, 0, 0, 0, 0)
"""The census of a drafter that is not open yet."""


def census_of(sessions: Sequence[Session], pools: Sequence[Pool], lock: Lock) -> Census:
    """Return what these are together.

    Pauses now and then, so that whoever drafts meanwhile gets the interpreter.

    Args:
        sessions: some that were open a moment ago.
        pools: what is in memory.
        lock: held while a pool is used.
    """
    by_tenant: Counter[str] = Counter()
    num_tokens = num_bytes = 0
    for begin in range(0, len(sessions), _BETWEEN_PAUSES):
        for session in sessions[begin : begin + _BETWEEN_PAUSES]:
            databases = session.databases
            by_tenant[databases.pool.tenant] += 1
            num_tokens += len(databases.context)
            num_bytes += databases.context.num_bytes
        time.sleep(_PAUSE_S)
    return Census(
        sessions=by_tenant,
        session_tokens=num_tokens,
        session_bytes=num_bytes,
        tenants=len(pools),
        generations_tokens=sum(_tokens_of(pool, lock) for pool in pools),
        generations_bytes=sum(pool.generations.num_bytes for pool in pools),
    )


def _tokens_of(pool: Pool, lock: Lock) -> int:
    with lock:
        return pool.generations.num_tokens


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


_NO_TOKENS: Final = np.empty(0, np.int32)


class Sequences:
    """Begins and ends the sessions of a drafter. Safe to call from any thread.

    Args:
        sessions: those that are open.
        steps: what commits to them.
        sources: what they are drafted from.
        pools: where outputs are remembered.
        replication: where they are shared.
        lock: held while any of them is used.
        limits: what is accepted at most.
    """

    def __init__(  # noqa: PLR0913  (what a drafter consists of)
        self,
        sessions: Sessions,
        steps: Steps,
        sources: Sources,
        pools: Pools,
        replication: NoReplication,
        *,
        lock: Lock,
        limits: Limits,
    ) -> None:
        self._sessions = sessions
        self._steps = steps
        self._sources = sources
        self._pools = pools
        self._replication = replication
        self._lock = lock
        self._limits = limits

    def prepare(self, prompt: ArrayLike, *, remember: bool, tenant: str) -> Session:
        """Return a session for `begin`."""
        databases = self._sources.databases(prompt, tenant, remember=remember)
        return Session(databases, len(databases.context), remember)

    def begin(self, key: SessionKey, prepared: Session) -> None:
        """Open a session under a name that no open one has."""
        check_session_name(key.name)
        with self._lock:
            self._sessions.add(key, prepared)

    def end(self, key: SessionKey, new_tokens: ArrayLike | None, *, remember: bool) -> None:
        """Commit the last tokens of a session, end it, and remember what it generated."""
        tokens = _NO_TOKENS if new_tokens is None else self._sources.checked(new_tokens)
        with self._lock:
            ended = self._sessions.get(key)
            check_length(len(ended.databases.context) + len(tokens), self._limits)
            self._sessions.remove(key)  # before it grows by tokens that were not charged
            self._steps.commit(ended, tokens)
            if remember:
                self._remember_session(key, ended)

    def remember_open(self) -> int:
        """Remember what open sessions generated so far, and nothing more of them; count them."""
        with self._lock:
            remembered = [each for each in self._sessions.items() if each[1].remember]
            for key, session in remembered:
                self._remember_session(key, session)
                session.remember = False
        return len(remembered)

    def discard(self, ended: Iterable[tuple[SessionKey, Session]]) -> int:
        """End sessions, if they are open still, and keep nothing of them; return how many."""
        with self._lock:
            return self._sessions.discard(ended)

    def end_idle(self) -> int:
        """End the sessions that have been idle for too long; return how many."""
        with self._lock:
            return self._sessions.end_idle()

    def remember(self, output: ArrayLike, pool: Pool) -> None:
        """Remember the output of a sequence that was generated elsewhere."""
        tokens = self._sources.checked(output)
        with self._lock:
            self._replication.hold(self._pools.remember(pool, tokens))

    def flush(self) -> None:
        """Keep on disk what was remembered, and then share it."""
        held = self._replication.held()
        self._pools.commit()
        for entry in held:
            self._replication.offer(entry)

    def _remember_session(self, key: SessionKey, ended: Session) -> None:
        """Remember what a session has generated, if it may be; the caller holds the lock."""
        if ended.remember:
            context = ended.databases.context
            output = context.last(len(context) - ended.prompt_length)
            self._replication.hold(self._pools.remember(ended.databases.pool, output, key.name))


class BareContexts:
    """Drafts for contexts that come whole. Safe to call from any thread.

    Args:
        sources: what is drafted from.
        live: the indexes among it.
        predictor: what grows the trees.
        tally: of what is drafted.
        lock: held while any of them is used.
        limits: what is accepted at most.
    """

    def __init__(  # noqa: PLR0913  (what a drafter consists of)
        self,
        sources: Sources,
        live: Bindings,
        predictor: Predictor,
        tally: Tally,
        *,
        lock: Lock,
        limits: Limits,
    ) -> None:
        self._sources = sources
        self._live = live
        self._predictor = predictor
        self._tally = tally
        self._lock = lock
        self._limits = limits

    def draft(
        self, context: ArrayLike, budget_nodes: int, min_probability: float, tenant: str
    ) -> DraftTree:
        """Draft for integers[n]; see `EmbeddedDrafter.draft_context`."""
        check_draft(budget_nodes, min_probability, self._limits)
        databases = self._sources.databases(context, tenant)
        began = perf_counter()
        with self._lock:
            tree = self._draft(databases, budget_nodes, min_probability)
            self._tally.drafted_bare(perf_counter() - began)
        return tree

    def explain(
        self,
        context: ArrayLike,
        budget_nodes: int,
        min_probability: float,
        max_documents: int,
        tenant: str,
    ) -> Explanation:
        """Draft for integers[n] and tell what for; see `EmbeddedDrafter.explain`."""
        check_documents(max_documents)
        check_draft(budget_nodes, min_probability, self._limits)
        databases = self._sources.databases(context, tenant)
        with self._lock:
            tree = self._draft(databases, budget_nodes, min_probability)
            evidence = Evidence.of(self._predictor, budget_nodes)
            # Those that the draft is from, whatever comes meanwhile.
            indexes = self._live.corpora(tenant).current.indexes
        supports = trace_nodes(tree, databases, evidence)
        return Explanation(tree, tuple(locate(supports, indexes, max_documents)))

    def _draft(self, databases: Databases, budget: int, min_probability: float) -> DraftTree:
        databases.turn_to(self._sources.corpus(databases.pool.tenant))
        return self._predictor.draft(databases, budget, min_probability)


_DONE: Final = object()


class Deletion:
    """Deletes what is of a scope. Safe to call from any thread.

    Args:
        sessions: those that are open.
        pools: recent outputs, and their log.
        lock: held while either is used.

    Attributes:
        replication: what tells the other drafters.
    """

    def __init__(self, sessions: Sessions, pools: Pools, lock: Lock) -> None:
        self._sessions = sessions
        self._pools = pools
        self._lock = lock
        self.replication = NoReplication()

    def tenant(self, tenant: str) -> None:
        """Delete what a tenant has; see `EmbeddedDrafter.delete_tenant`."""
        check_tenant_name(tenant)
        self._delete(Scope(tenant))

    def session(self, key: SessionKey, tenant: str) -> None:
        """Delete what came of sessions of a name; see `EmbeddedDrafter.delete_session`."""
        check_session_name(key.name)
        check_tenant_name(tenant)
        with self._lock, suppress(UnknownSessionError):
            self._sessions.remove(key).databases.context.clear()
        self._delete(Scope(tenant, session_origin(key.name)))

    def forget(self, scope: Scope, tell: Callable[[Scope], None]) -> None:
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

    def _delete(self, scope: Scope) -> None:
        """Forget what is of a scope, and let the other drafters do so."""
        try:
            self.forget(scope, self.replication.delete)
        finally:
            self.replication.keep_position()

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


class VocabularyGuard:
    """Knows the tokenizer of a drafter, and refuses the tokens of another.

    Args:
        vocabulary: of the drafter; None while it is not known.
        pools: whose log states the tokenizer.
        replication: what shares outputs, of one tokenizer only: begun here.
        lock: held while the tokenizer is settled.
    """

    def __init__(
        self, vocabulary: Vocabulary | None, pools: Pools, replication: NoReplication, lock: Lock
    ) -> None:
        self._vocabulary = vocabulary
        self._pools = pools
        self._replication = replication
        self._lock = lock
        self._fingerprint = vocabulary.fingerprint if vocabulary else pools.fingerprint
        if self._fingerprint:
            replication.start(self._fingerprint, vocabulary)

    def check(self, fingerprint: str) -> None:
        """Refuse another tokenizer; see `EmbeddedDrafter.check_vocabulary`."""
        if fingerprint:
            check_fingerprint(fingerprint)
        with self._lock:
            if fingerprint and not self._fingerprint:
                self._fingerprint = fingerprint
                self._pools.name_vocabulary(fingerprint)
                self._replication.start(fingerprint, self._vocabulary)
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


@dataclass(frozen=True, slots=True)
class Parts:
    """What a drafter consists of; each part says what it is for."""

    limits: Limits
    vocabulary: Vocabulary | None
    lock: Lock
    tally: Tally
    sessions: Sessions
    live: Bindings
    predictor: Predictor
    steps: Steps
    pools: Pools
    replication: NoReplication
    vocabularies: VocabularyGuard
    sources: Sources
    sequences: Sequences
    bare: BareContexts
    deletion: Deletion


def assemble(indexes: Sequence[Index], options: DrafterOptions) -> Parts:
    """Make the parts of a drafter, open its state, and load what everybody drafts from.

    Raises:
        RetrieverError: as for `EmbeddedDrafter`.
    """
    check_replication(options.get("replication"))
    vocabulary = _checked_vocabulary(indexes, options)
    limits = options.get("limits", DEFAULT_LIMITS)
    lock, tally, sessions = Lock(), Tally(), Sessions(limits)
    predictor = options.get("predictor") or Predictor(limits.max_budget_nodes)
    live_corpora = partial(LiveCorpora, sessions=sessions, lock=lock)
    live = Bindings(
        live_corpora(indexes),
        options.get("phrases") or NO_PHRASES,
        options.get("bound") or {},
        live_corpora,
    )
    size = vocabulary.size if vocabulary else None
    steps = Steps(
        *(sessions, predictor, live, lock), limits=limits, tally=tally, vocabulary_size=size
    )
    fingerprint = vocabulary.fingerprint if vocabulary else ""
    durability = options.get("durability", "process")
    pools = Pools.open(limits, options.get("state"), fingerprint, durability, live.has_corpus)
    deletion = Deletion(sessions, pools, lock)
    replication = Replication.join(options.get("replication"), pools, lock, limits, deletion.forget)
    deletion.replication = replication
    sources = Sources(pools, live, vocabulary, limits)
    parts = Parts(
        *(limits, vocabulary, lock, tally, sessions, live, predictor, steps, pools, replication),
        vocabularies=VocabularyGuard(vocabulary, pools, replication, lock),
        sources=sources,
        sequences=Sequences(
            *(sessions, steps, sources, pools, replication), lock=lock, limits=limits
        ),
        bare=BareContexts(sources, live, predictor, tally, lock=lock, limits=limits),
        deletion=deletion,
    )
    pools.get("")  # whoever names no tenant does not wait for the log
    return parts


def _checked_vocabulary(indexes: Sequence[Index], options: DrafterOptions) -> Vocabulary | None:
    """Return the one vocabulary of all indexes, having checked the listed phrases against it."""
    vocabulary = shared_vocabulary(indexes, options.get("vocabulary"))
    for each in (options.get("bound") or {}).values():
        vocabulary = shared_vocabulary(each.indexes or (), vocabulary)
        check_phrases(each.phrases or NO_PHRASES, vocabulary)
    check_phrases(options.get("phrases") or NO_PHRASES, vocabulary)
    return vocabulary


class EmbeddedDrafter:
    """Drafts from the sequence itself, recent generations and indexes; a `Drafter`.

    Safe to call from any thread; drafts are made one after the other.

    Args:
        indexes: open indexes, all of one vocabulary; closed with the drafter.
        options: see `DrafterOptions`.

    Attributes:
        limits: as given.
        vocabulary: of the indexes, or as given.
        tally: what was drafted, and what became of it.
        steps: makes the steps of sessions, one by one where that is wanted.

    Raises:
        InvalidRequestError: the indexes are of different vocabularies, or a phrase is of another.
        StateError: `state` cannot be used.
        VocabularyMismatchError: `state` holds outputs of another tokenizer.
        ReplicationError: `replication` cannot be used; not if the server is away, for it may come.
    """

    def __init__(self, indexes: Sequence[Index] = (), **options: Unpack[DrafterOptions]) -> None:
        parts = assemble(indexes, options)
        self.limits, self.vocabulary = parts.limits, parts.vocabulary
        self.tally, self.steps = parts.tally, parts.steps
        self._lock, self._sessions, self._pools = parts.lock, parts.sessions, parts.pools
        self._live, self._predictor, self._replication = (
            parts.live,
            parts.predictor,
            parts.replication,
        )
        self._sources, self._sequences, self._bare = parts.sources, parts.sequences, parts.bare
        self._deletion, self._vocabularies = parts.deletion, parts.vocabularies
        if (refresh_s := options.get("refresh_s", 0.0)) > 0:
            self._live.watch(refresh_s)

    @classmethod
    def open_indexes(
        cls,
        paths: Iterable[Path | str],
        *,
        bound: BoundPaths | None = None,
        **options: Unpack[OpeningOptions],
    ) -> Self:
        """Open the indexes at `paths` and draft from them; the rest is as for the constructor.

        Raises:
            indexer.errors.IndexerError: an index is missing, damaged or of another tokenizer.
        """
        with opened_indexes(paths, bound, options.get("vocabulary")) as (indexes, tenants):
            return cls(indexes, bound=tenants, **options)

    def open(
        self, session: str, prompt: ArrayLike, *, remember: bool = True, tenant: str = ""
    ) -> None:
        """Begin a sequence; see `Drafter.open`.

        It is drafted from outputs of the tenant, which no other sees; and what is generated is
        added to them, unless it is not to `remember`.
        """
        self.begin(SessionKey("", session), self.prepare(prompt, remember=remember, tenant=tenant))

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

        With a state directory, what was generated is kept in it once this returns, unless it is
        not to `remember`. Then it is shared, if that is wanted; nobody waits for it.
        """
        self.end(SessionKey("", session), new_tokens, remember=remember)
        self.flush()

    def prepare(self, prompt: ArrayLike, *, remember: bool = True, tenant: str = "") -> Session:
        """Return a session for `begin`: the part of `open` that takes long for a long prompt."""
        return self._sequences.prepare(prompt, remember=remember, tenant=tenant)

    def begin(self, key: SessionKey, prepared: Session) -> None:
        """Begin a sequence as `open` does, under a name that no open session has."""
        self._sequences.begin(key, prepared)

    def end(
        self, key: SessionKey, new_tokens: ArrayLike | None = None, *, remember: bool = True
    ) -> None:
        """End a sequence as `close` does, without waiting for the state directory: see `flush`."""
        self._sequences.end(key, new_tokens, remember=remember)

    def remember_open(self) -> int:
        """Keep what open sessions generated so far, and nothing more of them; return how many."""
        num_remembered = self._sequences.remember_open()
        self.flush()
        return num_remembered

    def flush(self) -> None:
        """Keep in the state directory what was generated in ended sequences, and then share it."""
        self._sequences.flush()

    def discard(self, ended: Iterable[tuple[SessionKey, Session]]) -> int:
        """End sessions, if they are open still, and keep nothing of them; return how many."""
        return self._sequences.discard(ended)

    def end_idle(self) -> int:
        """End the sessions that have been idle for too long; return how many."""
        return self._sequences.end_idle()

    def draft_context(
        self,
        context: ArrayLike,
        budget_nodes: int,
        min_probability: float = 0.0,
        *,
        tenant: str = "",
    ) -> DraftTree:
        """Draft for a bare context, integers[n], oldest first, without a session.

        Nodes less probable than `min_probability` are left out.

        Raises:
            InvalidRequestError: the context, the budget or the tenant cannot be.
        """
        return self._bare.draft(context, budget_nodes, min_probability, tenant)

    def explain(
        self,
        context: ArrayLike,
        budget_nodes: int,
        min_probability: float = 0.0,
        *,
        max_documents: int = DEFAULT_DOCUMENTS,
        tenant: str = "",
    ) -> Explanation:
        """Draft as `draft_context` does, and name what spoke for each node, in milliseconds.

        At most `max_documents` are named for each. Of recent outputs nothing is shown.

        Raises:
            InvalidRequestError: the context, a number or the tenant cannot be.
            ProvenanceError: an index is damaged.
        """
        return self._bare.explain(context, budget_nodes, min_probability, max_documents, tenant)

    def remember(self, output: ArrayLike, *, tenant: str = "") -> None:
        """Add the output of a sequence generated elsewhere, and keep it as `close` does."""
        self._sequences.remember(output, self._sources.pool(tenant))
        self.flush()

    def delete_tenant(self, tenant: str) -> None:
        """Forget all outputs of a tenant, in memory and in the state directory.

        What its open sessions have generated so far will not be remembered either. Where outputs
        are shared, they are removed from the server, and the other drafters told to do the same,
        as soon as it can be reached.

        Raises:
            StateError: the disk refuses; what is in memory is forgotten all the same.
        """
        self._deletion.tenant(tenant)

    def delete_session(self, key: SessionKey, *, tenant: str = "") -> None:
        """Forget what sessions of a name have generated, as `delete_tenant` does.

        One that is open ends. What the tenant's weights learned stays: it names no token.
        """
        self._deletion.session(key, tenant)

    def refresh(self) -> bool:
        """Draft from what the indexes are now, once it is open and warm; tell whether any changed.

        An index that cannot be opened is drafted from as it was: it is counted in
        `refresh_failures`, the reason logged, and the next refresh tries again.
        """
        return self._live.refresh()

    def warm(self) -> None:
        """Compile or load all kernels now, so that no draft waits for it."""
        warm_kernels(self._predictor, self._sources.corpus(""), self._lock)
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
        self._vocabularies.check(fingerprint)

    def shut_down(self) -> None:
        """Close the indexes and the state directory; what was not shared yet has a second left."""
        self.flush()
        self._replication.shut_down()
        self._live.shut_down()
        self._pools.close()

    @property
    def indexes(self) -> tuple[Index, ...]:
        """The indexes that are shared, as they are drafted from now."""
        return self.indexes_of("")

    def indexes_of(self, tenant: str) -> tuple[Index, ...]:
        """Return the indexes that a tenant drafts from, as they are now."""
        return self._live.corpora(tenant).current.indexes

    def is_loaded(self, tenant: str) -> bool:
        """Tell whether a tenant's recent outputs are in memory: loading them takes long."""
        return tenant in self._pools

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

    @property
    def replication(self) -> ReplicationCounts:
        """What became of the outputs that are shared with other drafters."""
        return self._replication.counts

    def census(self) -> Census:
        """Count what is held now, without keeping drafts waiting for longer than a moment."""
        with self._lock:
            sessions = self._sessions.all()
        return census_of(sessions, self._pools.all(), self._lock)
