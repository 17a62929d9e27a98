"""The embedded drafter: databases, predictor and sessions in the process, under one lock.

The lock is held for a step, for a commit, or for a slice of longer work. It is free during waits
for a disk, a server or a long prompt, except for the one write when the tokenizer becomes known.
"""

import math
import struct
import time
from collections.abc import Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from threading import Lock
from time import perf_counter
from typing import Final, NamedTuple, Self, TypeVar, Unpack

import numpy as np
from numpy.typing import ArrayLike

from indexer.reader import Index
from retriever.drafter import (
    ALONE,
    DraftRequest,
    Fate,
    Findings,
    FoundPage,
    Keeping,
    KinOptions,
    OfOneProcess,
    Prediction,
    TokenIds,
)
from retriever.errors import (
    LimitExceededError,
    OutOfSequenceError,
    RetrieverError,
    UnknownSessionError,
    VocabularyMismatchError,
)
from retriever.kernels.compiling import GROUPS
from retriever.kernels.entries import first_outside
from retriever.kernels.layout import BOUNDS
from retriever.limits import (
    DEFAULT_DOCUMENTS,
    DEFAULT_DURABILITY,
    Limits,
    check_documents,
    check_draft,
    check_fingerprint,
    check_length,
    check_outcomes,
    check_session_name,
    check_tenant_name,
    checked_tokens,
    out_of_memory,
    shown,
)
from retriever.log.pools import Pools
from retriever.predict.context import Context, context_bytes
from retriever.predict.databases import Databases
from retriever.predict.draft import Asked, Predictor, RefusedStepError
from retriever.predict.generations import Scope, session_origin
from retriever.predict.ledger import Charge, Ledger, with_ceilings
from retriever.predict.pool import Pool
from retriever.predict.predictions import Predictions, predictions_bytes
from retriever.predict.provenance import DraftedRows, locate, trace_nodes
from retriever.predict.running import FEWEST_TOKENS, RunningOutputs, running_bytes
from retriever.replication.replication_state import ReplicationCounts
from retriever.replication.sharing import Replication, check_replication
from retriever.sequences import (
    SessionKey,
    check_batch,
    check_step,
    checked_kin,
    checked_predictions,
)
from retriever.sessions.administration import Administration, Owned
from retriever.sessions.bindings import (
    NO_PHRASES,
    Bindings,
    BoundPaths,
    IndexOutcome,
    common_vocabulary,
)
from retriever.sessions.client_lives import Client, check_client
from retriever.sessions.cold_start import warm_drafts, width_of
from retriever.sessions.deletion import forget
from retriever.sessions.draft_counts import (
    Census,
    DraftCounts,
    TenantUses,
    census_of,
    resident_bytes,
)
from retriever.sessions.eviction import Eviction
from retriever.sessions.kept_findings import KeptFindings
from retriever.sessions.options import (
    DEFAULT_LIMITS,
    DrafterOptions,
    OpeningOptions,
    opened_indexes,
)
from retriever.sessions.refreshed_corpora import IndexState
from retriever.sessions.session_table import CheckedRequest, Session, Sessions
from retriever.tree import DraftTree, Explanation

_READING_BYTES: Final = 16
"""Memory of a token while a prompt is read: 4 in its message, 8 as it leaves that, 4 in a copy."""

_MOST_NAMED: Final = 4096  # tenants whose tokenizers are remembered: a megabyte

_TOKEN: Final = np.dtype(np.int32)
_NO_TOKENS: Final = np.empty(0, np.int32)
_DONE: Final = object()
_Result = TypeVar("_Result")


class LongCommit(NamedTuple):
    """A step whose tokens are charged and not committed: `EmbeddedDrafter.committing` does that.

    Attributes:
        step: the checked request.
    """

    step: CheckedRequest


class EmbeddedDrafter(OfOneProcess):
    """Drafts from the sequence itself, generations, listed phrases and indexes; a `Drafter`.

    Thread-safe; drafts run one after the other. A service, which interleaves the steps of its
    streams, calls the parts of `open`, `draft` and `close`: `prepare` and `begin`; `commit_each`
    and `draft_each`; `end` and `flush`. Those whose names end in -ing do long work in pieces, of a
    millisecond or two, and yield without the lock after each.

    Args:
        indexes: open indexes, all of one vocabulary; closed with the drafter.
        options: see `DrafterOptions`.

    Attributes:
        limits: as given.
        vocabulary: of the indexes, or as given.
        draft_counts: counts of drafts and their outcomes.
        uses: what each tenant has used, as far as a service counts it.
        administration: what an operator does with it while it runs.
        takes_groups: see `GroupDrafter`.
        takes_tenants: see `TenantDrafter`.

    Raises:
        InvalidRequestError: the indexes are of different vocabularies, or a phrase is of another.
        StateError: `state` cannot be used.
        VocabularyMismatchError: `state` holds outputs of another tokenizer.
        ReplicationError: `replication` cannot be used; a server that is down is no error.
    """

    takes_groups = True
    takes_tenants = True

    def __init__(
        self, indexes: Sequence[IndexState] = (), **options: Unpack[DrafterOptions]
    ) -> None:
        check_replication(options.get("replication"))
        phrases, bound = options.get("phrases") or NO_PHRASES, options.get("bound") or {}
        self.limits = with_ceilings(options.get("limits", DEFAULT_LIMITS))
        self.vocabulary = common_vocabulary(indexes, phrases, bound, options.get("vocabulary"))
        self.uses = TenantUses()
        self._base_bytes = 0
        self._lock = Lock()
        self._predictor = options.get("predictor") or Predictor(
            self.limits.max_budget_nodes, num_threads=options.get("threads", 1)
        )
        self.draft_counts = DraftCounts(self._predictor.counted)
        self._bound_steps()
        self._sessions = Sessions(self.limits, options.get("clock", time.monotonic))
        self._ledger = Ledger(self.limits.max_bytes, self.limits.max_tenant_bytes)
        self._bindings = Bindings(indexes, phrases, bound, self._sessions, self._lock)
        self._fingerprint = self.vocabulary.fingerprint if self.vocabulary else ""
        self._pools = Pools.open(
            self.limits,
            options.get("state"),
            self._fingerprint,
            options.get("durability", DEFAULT_DURABILITY),
            self._bindings.has_corpus,
            self._ledger,
        )
        self._findings = KeptFindings(self._pools, self._ledger, lambda: self.limits)
        self._ledger.evictor = self._eviction = Eviction(
            self._ledger, self._sessions, self._pools, self._findings, self._lock
        )
        self._named: dict[str, str] = {}  # fingerprints by tenant
        self._keeps_elsewhere = self._pools.is_logged or options.get("replication") is not None
        self._forget = partial(forget, self._sessions, self._pools, self._findings, self._lock)
        self._replication = Replication.join(
            options.get("replication"), self._pools, self._lock, self.limits, self._forget
        )
        self._fingerprint = self._fingerprint or self._pools.fingerprint
        if self._fingerprint:
            self._replication.start(self._fingerprint, self.vocabulary)
        self.administration = Administration(
            Owned(
                self._sessions,
                self._pools,
                self._findings,
                self._bindings,
                self._lock,
                remembering=self._begin_remembering,
                flush=self.flush,
                vocabulary=lambda: self.vocabulary,
                take_limits=self._take_limits,
                uses=self.uses,
                hold=options.get("hold_indexes", False),
            )
        )
        self._pools.get("")  # callers without a tenant do not wait for the log
        if (refresh_s := options.get("refresh_s", 0.0)) > 0:
            self._bindings.watch(refresh_s)

    @classmethod
    def open_indexes(
        cls,
        paths: Iterable[Path | str],
        *,
        bound: BoundPaths | None = None,
        **options: Unpack[OpeningOptions],
    ) -> Self:
        """Open the indexes at `paths` and draft from them; otherwise as the constructor.

        Raises:
            indexer.errors.IndexerError: an index is missing, damaged or of another tokenizer.
        """
        with opened_indexes(
            paths,
            bound,
            options.get("vocabulary"),
            hold=options.get("hold_indexes", False),
            skip_missing=options.get("skip_missing", False),
        ) as (indexes, tenants):
            return cls(indexes, bound=tenants, **options)

    def open(
        self,
        session: str,
        prompt: ArrayLike,
        *,
        remember: bool = True,
        tenant: str = "",
        predictions: Sequence[Prediction] = (),
        **kin: Unpack[KinOptions],
    ) -> None:
        """Begin a sequence; see `Drafter.open`.

        Drafts come from the tenant's own generations, never another's; the output is added to them
        if `remember`. They also come from `predictions`, see `PredictionDrafter`, in this session
        alone, and from the tenant's running sequences, see `GroupDrafter`.
        """
        stated = checked_kin(**kin) if kin else ALONE
        prepared = self.prepare(prompt, remember=remember, tenant=tenant, predictions=predictions)
        prepared.kin = stated
        self.begin(SessionKey("", session), prepared)

    def add_predictions(self, session: str, predictions: Sequence[Prediction]) -> None:
        """Add what a sequence is expected to contain; see `PredictionDrafter.add_predictions`."""
        _whole(self.adding_predictions(SessionKey("", session), predictions))

    def draft(self, requests: Sequence[DraftRequest]) -> list[DraftTree]:
        """Commit new tokens and draft for each sequence; see `Drafter.draft`.

        A step is checked as a whole first: if any request is refused, nothing is kept of the step.
        `commit_each` refuses requests one by one.
        """
        began = perf_counter()
        with self._lock:
            trees = self._step(requests)
            self.draft_counts.stepped(len(trees), perf_counter() - began)
        return trees

    def draft_ahead(
        self, requests: Sequence[DraftRequest], timeout_s: float = math.inf
    ) -> list[list[DraftTree]]:
        """Commit new tokens and draft for what may come; see `AheadDrafter.draft_ahead`.

        The sequences as they are are drafted for, too, for what came of the last draft is learned
        from. A step is checked as a whole first, as by `draft`.
        """
        check_batch(requests, self.limits)
        began, until_s = perf_counter(), time.monotonic() + timeout_s
        with self._lock:
            steps = [self._checked(request, "") for request in requests]
            self._step(requests)
        trees = [list(self.drafting_ahead(step, until_s)) for step in steps]
        self.count_step(len(steps), perf_counter() - began)
        return trees

    def close(
        self, session: str, new_tokens: ArrayLike | None = None, *, remember: bool = True
    ) -> None:
        """End a sequence; see `Drafter.close`.

        With a state directory, the output is on disk once this returns, if it is remembered.
        Replication follows without blocking.
        """
        self.end(SessionKey("", session), new_tokens, remember=remember)
        self.flush()

    def charge_reading(self, tenant: str, num_tokens: int, num_predicted: int = 0) -> Charge:
        """Take the memory of a prompt, and what reading it needs, before it waits for its turn.

        It is all taken at once: if those that wait held a part, none of them might find the rest.

        Args:
            tenant: whose prompt it is.
            num_tokens: of the prompt, or about as many.
            num_predicted: of predictions, or about as many.

        Returns:
            The charge, for `preparing`, which takes it over.

        Raises:
            LimitExceededError: there is no room for it, or the prompt is too long.
        """
        check_length(num_tokens, self.limits)
        needed = _READING_BYTES * (num_tokens + num_predicted) + context_bytes(num_tokens)
        return self._ledger.take(tenant, needed)

    def prepare(
        self,
        prompt: ArrayLike,
        *,
        remember: bool = True,
        tenant: str = "",
        predictions: Sequence[Prediction] = (),
    ) -> Session:
        """Return a session for `begin`: the part of `open` that is slow for a long prompt."""
        return _whole(
            self.preparing(prompt, remember=remember, tenant=tenant, predictions=predictions)
        )

    def preparing(
        self,
        prompt: ArrayLike,
        *,
        remember: bool = True,
        tenant: str = "",
        charge: Charge | None = None,
        predictions: Sequence[Prediction] = (),
    ) -> Generator[None, None, Session]:
        """Do as `prepare` does, in pieces; `charge` is that of `charge_reading`, if it was called.

        Raises:
            InvalidRequestError: the prompt, a prediction or the tenant is invalid.
            LimitExceededError: there is no room for it, or the prompt or a prediction is too long.
        """
        tokens = self._tokens(prompt)
        check_length(len(tokens), self.limits)
        expected = self._predictions(predictions) if predictions else []
        check_tenant_name(tenant)
        needed = context_bytes(len(tokens))
        try:
            charge = charge or self._ledger.take(tenant, needed)
            charge.ensure(needed)  # before the memory is
            context = yield from Context.reading(tokens, charge)
        except MemoryError as error:
            raise out_of_memory() from error
        predicted = (yield from self._reading(expected, tenant)) if expected else None
        pool, phrases = self._pool(tenant), self._bindings.phrases(tenant)
        cursor = phrases.cursor(tokens) if phrases else None
        corpus = self._bindings.corpus(tenant)
        databases = Databases(
            context, pool, corpus, learns=remember, phrases=cursor, predictions=predicted
        )
        return Session(databases, len(tokens), remember)

    def begin(self, key: SessionKey, prepared: Session) -> None:
        """Begin a sequence as `open` does, under a name that no open session has."""
        check_session_name(key.name)
        with self._lock:
            self._sessions.add(key, prepared)
            prepared.databases.turn_to(self._bindings.corpus(prepared.tenant))
            if prepared.kin is not ALONE:
                self._join(prepared)

    def adding_predictions(
        self, key: SessionKey, predictions: Sequence[Prediction]
    ) -> Generator[None, None, None]:
        """Do as `add_predictions` does, in pieces, and without the lock but for the last.

        Raises: as `PredictionDrafter.add_predictions`.
        """
        added = self._predictions(predictions)
        while True:
            with self._lock:
                session = self._sessions.get(key)
                known = session.databases.predictions
            before = [] if known is None else known.texts()
            expected = self._predictions([*before, *added])
            if len(expected) == len(before):
                return
            predicted = yield from self._reading(expected, session.tenant)
            with self._lock:
                if session.is_open and session.databases.predictions is known:
                    session.databases.expect(predicted)
                    return

    def commit_each(
        self, requests: Iterable[DraftRequest], namespace: str
    ) -> list[CheckedRequest | LongCommit | RetrieverError]:
        """Commit new tokens; return a step, or why it is refused, for each request in order.

        A refused request does not affect others. The caller has called `check_batch`, and does
        `committing` for commits that take longer than a piece of work.
        """
        committed: list[CheckedRequest | LongCommit | RetrieverError] = []
        with self._lock:
            for request in requests:
                try:
                    step = self._charged(request, namespace)
                except RetrieverError as error:
                    # Its frames hold this list, and so sessions that may have ended.
                    committed.append(error.with_traceback(None))
                    continue
                if step.session.databases.context.is_long(len(step.new_tokens)):
                    step.session.is_committing = True
                    committed.append(LongCommit(step))
                else:
                    self._predictor.commit(step.session.databases, step.new_tokens)
                    committed.append(step)
        return committed

    def committing(self, commit: LongCommit) -> Generator[None, None, CheckedRequest]:
        """Commit the tokens of a step in pieces; return the step.

        Meanwhile other requests of its session are refused. It can end, which ends the commit.

        Raises:
            UnknownSessionError: the session has ended meanwhile.
        """
        session, new_tokens, request, _ = commit.step
        try:
            with self._lock:
                self._predictor.note(session.databases, new_tokens)
            # Without the lock: no other call reads or writes the tokens of this session.
            for _ in session.databases.committing(new_tokens):
                if not session.is_open:
                    break
                yield
        finally:
            with self._lock:
                session.is_committing = False
                if not session.is_open:
                    session.databases.clear()  # it may have been while a piece was added
        if not session.is_open:
            raise UnknownSessionError(
                f"session {shown(request.session)} has ended while its tokens were noted"
            )
        return commit.step

    def withdraw(self, commit: LongCommit) -> None:
        """Give up a commit that `committing` has not begun: its session is as before."""
        session = commit.step.session
        with self._lock:
            session.is_committing = False
            if session.is_open:
                self._sessions.withdraw(session)

    def draft_each(self, steps: Iterable[CheckedRequest]) -> list[DraftTree]:
        """Draft for committed requests; also for sessions that have ended since."""
        with self._lock:
            return [self._draft(step) for step in steps]

    def drafting_ahead(
        self, step: CheckedRequest, until_s: float = math.inf
    ) -> Iterator[DraftTree]:
        """Draft for the outcomes of a committed request; yield without the lock after each.

        Ends at an outcome that cannot be answered: the time of `time.monotonic` is over, the
        sequence has gone on or has ended, or a database has no room or knows only what has come.
        """
        session, request = step.session, step.request
        for outcome in step.outcomes:
            if time.monotonic() >= until_s:
                return
            with self._lock:
                if not session.is_open or session.is_committing:
                    return
                databases = session.databases
                has_gone_on = len(databases.context) != request.length
                if has_gone_on or not databases.can_suppose(len(outcome)):
                    return
                databases.turn_to(self._bindings.corpus(session.tenant))
                tree = self._predictor.suppose(
                    databases, outcome, request.budget_nodes, request.min_probability
                )
            yield tree

    def count_step(self, num_drafts: int, seconds: float) -> None:
        """Count a step made by `commit_each` and `draft_each`."""
        with self._lock:
            self.draft_counts.stepped(num_drafts, seconds)

    def end(
        self, key: SessionKey, new_tokens: ArrayLike | None = None, *, remember: bool = True
    ) -> Fate:
        """End a sequence as `close` does, without waiting for the state directory: see `flush`.

        Returns:
            What becomes of its output; whether the disk took it is known after the next `flush`.
        """
        fate, pieces = self.ending(key, new_tokens, remember=remember)
        _whole(pieces)
        return fate

    def ending(
        self, key: SessionKey, new_tokens: ArrayLike | None = None, *, remember: bool = True
    ) -> tuple[Fate, Generator[None, None, None]]:
        """Do as `end` does; the iterator adds the output to the generations, in pieces."""
        tokens = _NO_TOKENS if new_tokens is None else self._tokens(new_tokens)
        with self._lock:
            ended = self._sessions.get(key)
            _check_not_committing(ended, key.name)
            check_length(len(ended.databases.context) + len(tokens), self.limits)
            self._sessions.remove(key)
            self._predictor.note(ended.databases, tokens)
            # Its tokens are not added to the sequence: nothing is drafted from that any more.
            if not (remember and ended.remember):
                return Fate(Keeping.NOTHING), self._locked(iter(()))
            fate, pieces = self._begin_remembering(key, ended, tokens)
        return fate, self._locked(pieces)

    def discard(self, ended: Iterable[tuple[SessionKey, Session]]) -> int:
        """End sessions that are still open, and keep nothing of them; return how many."""
        with self._lock:
            return self._sessions.discard(ended)

    def admit_client(self, tenant: str, client: Client) -> int:
        """Note that a client of a tenant calls; return how many sessions end by it.

        Those of its earlier incarnations end, and nothing is kept of them.

        Raises:
            InvalidRequestError: its name is invalid.
            StaleClientError: a later incarnation of it has called.
        """
        check_client(client)
        with self._lock:
            return self._sessions.admit(tenant, client)

    def end_idle(self) -> int:
        """End sessions idle for longer than `idle_session_s`; return how many."""
        with self._lock:
            return self._sessions.end_idle()

    def remember_open(self) -> int:
        """Remember the outputs of open sessions so far, and no later tokens; return how many."""
        with self._lock:
            remembered = [each for each in self._sessions.items() if each[1].remember]
            for key, session in remembered:
                self._remember(key, session)
                session.remember = False
        self.flush()
        return len(remembered)

    def remember(self, output: ArrayLike, *, tenant: str = "") -> None:
        """Add the output of a sequence generated elsewhere, and keep it as `close` does."""
        pool, tokens = self._pool(tenant), self._tokens(output)
        with self._lock:
            self._name_vocabulary(tenant)
            self._replication.hold(self._pools.remember(pool, tokens))
        self.flush()

    def flush(self) -> None:
        """Write remembered outputs to the state directory, then replicate them.

        Outputs that the disk refuses stay in memory: their fates (`end`) and `log_failures` tell.
        """
        with self._replication.publishing():
            self._pools.commit()

    def draft_context(
        self,
        context: ArrayLike,
        budget_nodes: int,
        min_probability: float = 0.0,
        *,
        tenant: str = "",
        predictions: Sequence[Prediction] = (),
    ) -> DraftTree:
        """Draft for a bare context, integers[n], oldest first, without a session.

        Nodes less probable than `min_probability` are left out. `predictions` are what is expected
        to follow, from the beginning of each.

        Raises:
            InvalidRequestError: the context, a prediction, the budget or the tenant is invalid.
        """
        check_draft(budget_nodes, min_probability, self.limits)
        prepared = self.prepare(context, remember=False, tenant=tenant, predictions=predictions)
        return self.draft_prepared(prepared, budget_nodes, min_probability)

    def draft_prepared(
        self, prepared: Session, budget_nodes: int, min_probability: float = 0.0
    ) -> DraftTree:
        """Draft for a context that `prepare` has read."""
        check_draft(budget_nodes, min_probability, self.limits)
        began = perf_counter()
        with self._lock:
            tree = self._grow(prepared.databases, budget_nodes, min_probability)
            self.draft_counts.drafted_bare(perf_counter() - began)
        return tree

    def load(self, tenant: str) -> Pool:
        """Load a tenant's outputs, if they are not in memory; they stay while the pool is held.

        Raises:
            InvalidRequestError: the tenant's name is invalid.
        """
        return self._pool(tenant)

    def explain(  # noqa: PLR0913  (the last three are options)
        self,
        context: ArrayLike,
        budget_nodes: int,
        min_probability: float = 0.0,
        *,
        max_documents: int = DEFAULT_DOCUMENTS,
        tenant: str = "",
        predictions: Sequence[Prediction] = (),
    ) -> Explanation:
        """Draft as `draft_context` does, with the evidence for each node; takes milliseconds.

        At most `max_documents` are named for each. Generations are not shown.

        Raises:
            InvalidRequestError: the context, a prediction, a number or the tenant is invalid.
            ProvenanceError: an index is damaged.
        """
        check_documents(max_documents)
        check_draft(budget_nodes, min_probability, self.limits)
        prepared = self.prepare(context, remember=False, tenant=tenant, predictions=predictions)
        return _whole(self.explaining(prepared, budget_nodes, min_probability, max_documents))

    def explaining(
        self, prepared: Session, budget_nodes: int, min_probability: float, max_documents: int
    ) -> Generator[None, None, Explanation]:
        """Do as `explain` does, in pieces, for a context that `prepare` has read."""
        check_documents(max_documents)
        check_draft(budget_nodes, min_probability, self.limits)
        with self._lock:
            tree = self._grow(prepared.databases, budget_nodes, min_probability)
            evidence = DraftedRows.of(self._predictor, budget_nodes)
            indexes = self.indexes_of(prepared.tenant)  # of this draft, even after a refresh
        yield
        supports = []
        for support in trace_nodes(tree, prepared.databases, evidence):
            supports.append(support)
            yield
        nodes = []
        for node in locate(supports, indexes, max_documents):
            nodes.append(node)
            yield
        return Explanation(tree, tuple(nodes))

    def share_findings(self, model: str, findings: Findings, *, tenant: str = "") -> None:
        """Keep what a decoder's model found likely, for a later run or the tenant's others.

        It is neither drafted from nor checked here: wrong findings cost drafts of the tenant's
        decoders, and never change an output. See `FindingsStore.share_findings`.

        Raises:
            InvalidRequestError: they cannot be findings.
            NotPossibleError: none are kept here.
            LimitExceededError: there is no room for them.
            StorageError: the disk refuses.
        """
        check_tenant_name(tenant)
        size = self.vocabulary.size if self.vocabulary else None
        self._findings.share(tenant, model, findings, size)
        with self._lock:
            self._name_vocabulary(tenant)

    def fetch_findings(self, model: str, before: int = 0, *, tenant: str = "") -> FoundPage:
        """Return a page of what a tenant's decoders found likely; see `FindingsStore`."""
        check_tenant_name(tenant)
        return self._findings.fetch(tenant, model, before)

    def delete_tenant(self, tenant: str) -> None:
        """Delete a tenant's outputs and what its decoders found likely, in memory and on disk.

        Open sessions do not remember what they have generated so far either. Replicated outputs are
        deleted on the server and by the other drafters as soon as the server can be reached.

        Raises:
            StorageError: the disk refuses; the data in memory is deleted anyway.
        """
        check_tenant_name(tenant)
        self._delete(Scope(tenant))

    def delete_session(self, key: SessionKey, *, tenant: str = "") -> None:
        """Delete the outputs of sessions of a name, as `delete_tenant` does.

        An open one is ended. The tenant's learned weights stay: they hold no tokens. What its
        decoders found likely goes as a whole: which session it is from is not known.
        """
        check_session_name(key.name)
        check_tenant_name(tenant)
        with self._lock, suppress(UnknownSessionError):
            self._sessions.remove(key).databases.clear()
        self._delete(Scope(tenant, session_origin(key.name)))

    def check_vocabulary(self, fingerprint: str, tenant: str = "") -> None:
        """Refuse the tokens of another tokenizer.

        Without a vocabulary of the drafter's own, a tenant's is the first that it names, as long as
        it has open sessions or outputs in memory, so that no client locks out other tenants. A
        state directory and replication are for one: that of the first output that is kept there,
        which is the drafter's from then on.

        Raises:
            VocabularyMismatchError: `fingerprint` is neither empty nor this drafter's.
            InvalidRequestError: it is not a fingerprint.
        """
        if not fingerprint:
            return
        check_fingerprint(fingerprint)
        expected = self._fingerprint
        if not expected:
            with self._lock:
                expected = self._named.get(tenant, "")
                if fingerprint != expected and not self._holds_anything_of(tenant):
                    expected = self._named[tenant] = fingerprint
                    if len(self._named) > _MOST_NAMED:
                        del self._named[next(iter(self._named))]
        if fingerprint != expected:
            raise VocabularyMismatchError(
                f"drafts are for the tokenizer with the fingerprint {expected[:12]}\u2026 "
                f"and not for {fingerprint[:12]}\u2026: "
                "use an index built with the model's own tokenizer"
            )

    def _holds_anything_of(self, tenant: str) -> bool:
        pool = self._pools.find(tenant)
        has_outputs = pool is not None and pool.generations.num_tokens > 0
        return has_outputs or tenant in self._sessions.tenants

    def _name_vocabulary(self, tenant: str) -> None:
        """Take a tenant's tokenizer for what is kept on disk or replicated, if none was known."""
        fingerprint = self._named.get(tenant, "")
        if self._fingerprint or not fingerprint or not self._keeps_elsewhere:
            return
        self._fingerprint = fingerprint
        self._pools.name_vocabulary(fingerprint)
        self._replication.start(fingerprint, self.vocabulary)

    def refresh(self) -> bool:
        """Switch to the indexes' latest snapshots once these are warm; return whether any changed.

        An index that cannot be opened stays at its old snapshot: that is counted in
        `refresh_failures` and logged, and the next refresh retries.
        """
        return self._bindings.refresh()

    def warm(self) -> None:
        """Compile or load now what a first draft needs, so that none waits for it.

        What groups, predictions, listed phrases and drafts ahead need besides is compiled when the
        first of them comes.
        """
        warm_drafts(self.token_widths)
        self._bindings.warm()
        self._base_bytes = 0
        self._base_bytes = resident_bytes()[0] - self.census().memory_bytes

    def shut_down(self) -> None:
        """Replicate queued outputs for at most a second; close the indexes and the state."""
        self.flush()
        self._replication.shut_down()
        self._bindings.shut_down()
        self._pools.close()

    @property
    def token_widths(self) -> set[int]:
        """Bytes of a token in what tenants draft from: each needs kernels of its own."""
        return set(map(width_of, self._bindings.corpora_of_all()))

    @property
    def indexes(self) -> tuple[Index, ...]:
        """The shared indexes in their current snapshots."""
        return self.indexes_of("")

    @property
    def missing_indexes(self) -> list[Path]:
        """Indexes that some tenant is to draft from and that cannot be opened."""
        return self._bindings.missing

    @property
    def index_outcomes(self) -> list[IndexOutcome]:
        """What came of the nodes that indexes proposed, by the indexes drafted from together."""
        return self._bindings.outcomes

    def indexes_of(self, tenant: str) -> tuple[Index, ...]:
        """Return a tenant's indexes in their current snapshots."""
        return self._bindings.corpora(tenant).current.indexes

    def is_loaded(self, tenant: str) -> bool:
        """Return whether a tenant's generations are in memory: loading them is slow."""
        return tenant in self._pools

    @property
    def num_sessions(self) -> int:
        """Number of open sessions."""
        return len(self._sessions)

    @property
    def refresh_failures(self) -> int:
        """Failed attempts to open a changed or missing index."""
        return self._bindings.failures

    @property
    def is_logged(self) -> bool:
        """Whether there is a state directory."""
        return self._pools.is_logged

    @property
    def log_failures(self) -> int:
        """Outputs that could not be written to the state directory."""
        return self._pools.log_failures

    @property
    def replication(self) -> ReplicationCounts:
        """Counts of replicated outputs."""
        return self._replication.counts

    def census(self) -> Census:
        """Count what is in memory now, with short pauses so that drafts are not held up."""
        with self._lock:
            sessions = self._sessions.all()
        census = census_of(sessions, self._pools.all(), self._ledger, self._lock)
        return replace(
            census,
            recycled_bytes=self._findings.num_bytes,
            base_bytes=self._base_bytes + resident_bytes()[1],
        )

    @property
    def evictions(self) -> Mapping[str, int]:
        """How often what has made room: `pools`, `generations`, `sessions`."""
        return self._eviction.counts

    def _delete(self, scope: Scope) -> None:
        """Delete the data of a scope, here and in the other drafters."""
        try:
            self._forget(scope, self._replication.delete)
        finally:
            self._replication.keep_position()

    def _join(self, session: Session) -> None:
        """Have a session serve its group; where there is no room for it, it does not."""
        pool = session.databases.pool
        if session.kin.group and pool.running is None and GROUPS.are_wanted():
            with suppress(LimitExceededError):
                least = running_bytes(FEWEST_TOKENS)
                charge = self._ledger.take(pool.tenant, least, is_locked=True)
                pool.running = RunningOutputs(charge)
        session.databases.join(session.kin, is_shared=session.remember)

    # Called without the lock.

    def _locked(self, pieces: Iterator[None]) -> Generator[None, None, None]:
        """Do each piece of work with the lock held."""
        while True:
            with self._lock:
                if next(pieces, _DONE) is _DONE:
                    return
            yield

    def _tokens(self, tokens: ArrayLike) -> TokenIds:
        """Return int32[n], a copy: the caller's array may change.

        Raises:
            InvalidRequestError: they are no integers of the vocabulary in one dimension.
        """
        if type(tokens) is np.ndarray and tokens.dtype is _TOKEN and tokens.ndim == 1:
            copied = tokens.copy()
            if first_outside(copied, self._predictor.bounds[BOUNDS.VOCABULARY]) < 0:
                return copied
        return checked_tokens(tokens, self.vocabulary.size if self.vocabulary else None)

    def _predictions(self, predictions: Iterable[Prediction]) -> list[Prediction]:
        size = self.vocabulary.size if self.vocabulary else None
        return checked_predictions(predictions, size, self.limits)

    def _reading(
        self, expected: Sequence[Prediction], tenant: str
    ) -> Generator[None, None, Predictions]:
        """Return checked predictions as a database, in pieces."""
        num_tokens = sum(len(each.tokens) for each in expected)
        charge = self._ledger.take(tenant, predictions_bytes(num_tokens, len(expected)))
        try:
            return (yield from Predictions.reading(expected, charge))
        except MemoryError as error:
            raise out_of_memory() from error

    def _pool(self, tenant: str) -> Pool:
        check_tenant_name(tenant)
        return self._pools.get(tenant)

    # Called with the lock held.

    def _checked(self, request: DraftRequest, namespace: str) -> CheckedRequest:
        session = self._sessions.get(SessionKey(namespace, request.session))
        _check_not_committing(session, request.session)
        check_draft(request.budget_nodes, request.min_probability, self.limits)
        outcomes: list[TokenIds] = []
        if request.outcomes:
            check_outcomes([len(outcome) for outcome in request.outcomes], self.limits)
            outcomes = [self._tokens(outcome) for outcome in request.outcomes]
        tokens = self._tokens(request.new_tokens)
        num_known = len(session.databases.context)
        check_length(num_known + len(tokens), self.limits)
        check_step(request, num_known, len(tokens))
        return CheckedRequest(session, tokens, request, outcomes)

    def _charged(self, request: DraftRequest, namespace: str = "") -> CheckedRequest:
        """Check a request, and take the memory for its tokens."""
        step = self._checked(request, namespace)
        step.session.databases.context.make_room(len(step.new_tokens))
        return step

    def _step(self, requests: Sequence[DraftRequest]) -> list[DraftTree]:
        """Do a step, whose numbers the kernel checks; it is refused as a whole or not at all."""
        if len(requests) > 1:
            check_batch(requests, self.limits)
        try:
            if len(requests) == 1:
                return [self._predictor.step(self._asked(requests[0]))]
            return self._predictor.step_all([self._asked(request) for request in requests])
        except (RefusedStepError, struct.error, TypeError) as error:
            check_batch(requests, self.limits)
            place = error.place if isinstance(error, RefusedStepError) else 0
            self._checked(requests[place], "")  # these tell why
            raise

    def _asked(self, request: DraftRequest) -> Asked:
        """Return what the predictor is asked, unchecked but for tokens that are no int32[n]."""
        name, tokens, length, budget, min_probability, _ = request
        session = self._sessions.get(("", name))  # type: ignore[arg-type]  # it is made faster
        if session.is_committing:
            _check_not_committing(session, name)
        if type(tokens) is not np.ndarray or tokens.dtype is not _TOKEN or tokens.ndim != 1:
            tokens = self._tokens(tokens)
        return Asked(session.databases, tokens, length, budget, min_probability)

    def _draft(self, step: CheckedRequest) -> DraftTree:
        request, session = step.request, step.session
        if session.is_committing:  # of another step, which is written without the lock
            return DraftTree.empty()
        return self._grow(session.databases, request.budget_nodes, request.min_probability)

    def _grow(self, databases: Databases, budget: int, min_probability: float) -> DraftTree:
        databases.turn_to(self._bindings.corpus(databases.pool.tenant))
        return self._predictor.draft(databases, budget, min_probability)

    def _begin_remembering(
        self, key: SessionKey, ended: Session, tokens: TokenIds = _NO_TOKENS
    ) -> tuple[Fate, Iterator[None]]:
        """Return what becomes of an ended session's output, and the pieces in which it is added."""
        context = ended.databases.context
        output = np.concatenate((context.last(len(context) - ended.prompt_length), tokens))
        if len(output):
            self._name_vocabulary(ended.tenant)
        version = ended.kin.policy_version or 0
        entry, pieces = self._pools.remembering(ended.databases.pool, output, key.name, version)
        self._replication.hold(entry)
        return entry.fate if entry is not None else Fate(Keeping.NOTHING), pieces

    def _take_limits(self, limits: Limits) -> None:
        self.limits = self._sessions.limits = limits = with_ceilings(limits)
        self._ledger.max_bytes, self._ledger.max_tenant_bytes = (
            limits.max_bytes,
            limits.max_tenant_bytes,
        )
        self._pools.take_limits(limits)
        self._bound_steps()

    def _bound_steps(self) -> None:
        """Have the predictor check steps against the limits and the vocabulary."""
        bounds, limits = self._predictor.bounds, self.limits
        most = min(limits.max_budget_nodes, limits.max_step_nodes)
        bounds[BOUNDS.NODES] = most if limits.max_batch > 0 else -1
        bounds[BOUNDS.TOKENS] = limits.max_sequence_tokens
        if self.vocabulary is not None:
            bounds[BOUNDS.VOCABULARY] = self.vocabulary.size

    def _remember(self, key: SessionKey, session: Session) -> None:
        """Add a session's output to the generations, if it is to be remembered."""
        if not session.remember:
            return
        context = session.databases.context
        output = context.last(len(context) - session.prompt_length)
        if len(output):
            self._name_vocabulary(session.tenant)
        version, pool = session.kin.policy_version or 0, session.databases.pool
        self._replication.hold(self._pools.remember(pool, output, key.name, version))


def _whole(pieces: Generator[None, None, _Result]) -> _Result:
    """Do all pieces of work, and let other threads have the lock between them."""
    while True:
        try:
            next(pieces)
        except StopIteration as done:
            result: _Result = done.value
            return result
        time.sleep(0)


def _check_not_committing(session: Session, name: str) -> None:
    """Refuse a second request of a session while its tokens are being noted.

    Raises:
        OutOfSequenceError: they are.
    """
    if session.is_committing:
        raise OutOfSequenceError(
            f"the tokens of another step of session {shown(name)} are being noted: send one step "
            "of a session after the other"
        )
