"""The state of a drafter: databases, predictor and sessions in the process, under one lock.

The lock is held for a step, for a commit, or for a slice of longer work. It is free during waits
for a disk, a server or a long prompt, except for the one write when the tokenizer becomes known.
"""

import math
import struct
import time
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from threading import Lock
from time import perf_counter
from typing import Any, Final, Unpack

import numpy as np
from numpy.typing import ArrayLike

from retriever.drafter import (
    DEFAULT,
    NO_TOKENS,
    DraftRequest,
    Findings,
    FoundPage,
    Prediction,
    SaveStatus,
    Saving,
    SequenceOptions,
    TokenIds,
)
from retriever.errors import LimitExceededError, OutOfSequenceError, UnknownSessionError
from retriever.kernels.compiling import GROUPS
from retriever.kernels.entries import first_outside
from retriever.kernels.layout import BOUNDS
from retriever.limits import (
    DEFAULT_DURABILITY,
    Limits,
    check_draft,
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
from retriever.predict.databases import Databases, finish_list
from retriever.predict.draft import Asked, Predictor, RefusedStepError
from retriever.predict.generations import Scope, session_origin
from retriever.predict.ledger import Charge, Ledger, with_ceilings
from retriever.predict.pool import Pool
from retriever.predict.predictions import Predictions, predictions_bytes
from retriever.predict.running import FEWEST_TOKENS, RunningOutputs, running_bytes
from retriever.sequences import (
    SessionKey,
    check_batch,
    check_stated_length,
    check_step,
    checked_options,
    checked_predictions,
)
from retriever.sessions.bindings import NO_PHRASES, Bindings, common_vocabulary
from retriever.sessions.cold_start import width_of
from retriever.sessions.deletion import forget
from retriever.sessions.draft_counts import (
    Census,
    DraftCounts,
    TenantUses,
    census_of,
    resident_bytes,
)
from retriever.sessions.drafter_plugins import Plugins, findings_of
from retriever.sessions.eviction import Eviction
from retriever.sessions.kept_grammars import KeptGrammars
from retriever.sessions.options import DEFAULT_LIMITS, DrafterOptions
from retriever.sessions.refreshed_corpora import IndexState
from retriever.sessions.session_table import CheckedRequest, Session, Sessions
from retriever.tree import DraftTree

_TOKEN: Final = np.dtype(np.int32)
_DONE: Final = object()

PAUSE_S: Final = 1e-4
"""Pause in which another thread can get a lock that this thread takes repeatedly: Python's locks
are not fair."""

_MANY: Final = 1 << 12  # tokens


class DrafterState:
    """The state of a drafter, and the operations that a process and a service share.

    `ending` and `drafting_ahead` work in pieces of a millisecond or two. After each piece they
    yield without the lock.

    Args:
        indexes: open indexes, all of one vocabulary; closed with the drafter.
        options: see `DrafterOptions`.

    Attributes:
        limits: the limits in force; `take_limits` changes them.
        vocabulary: vocabulary of the indexes, or as given.
        lock: held while sessions, pools or the predictor are used.
        predictor: grows the trees.
        sessions: the open sessions.
        ledger: the memory ledger.
        eviction: makes room in the ledger.
        bindings: indexes and phrases of each tenant.
        pools: outputs of each tenant, and their log.
        findings: stores findings of decoders.
        grammars: caches compiled grammars of constrained outputs.
        plugins: the plugins, including `findings` and `grammars`.
        draft_counts: counts of drafts and their outcomes.
        uses: usage of each tenant, as counted by a service.
        fingerprint: fingerprint of the tokenizer; empty while it is unknown.
        named: while the tokenizer is unknown, the tokenizer's fingerprint that each tenant named.
        base_bytes: memory of the process when it was ready, without the counted data.
        hold: whether indexes are held in memory.
        copying: held while the state directory is copied.

    Raises:
        InvalidRequestError: the indexes have different vocabularies, or a phrase does not fit
            theirs.
        StateError: `state` cannot be used.
        VocabularyMismatchError: `state` holds outputs of another tokenizer.
        RetrieverError: a plugin cannot be attached.
    """

    def __init__(
        self, indexes: Sequence[IndexState] = (), **options: Unpack[DrafterOptions]
    ) -> None:
        attached = options.get("plugins") or ()
        for each in attached:
            each.check()
        finish_list()
        phrases, bound = options.get("phrases") or NO_PHRASES, options.get("bound") or {}
        self.limits = with_ceilings(options.get("limits", DEFAULT_LIMITS))
        self.vocabulary = common_vocabulary(indexes, phrases, bound, options.get("vocabulary"))
        self.uses = TenantUses()
        self.base_bytes = 0
        self.lock = Lock()
        self.predictor = options.get("predictor") or Predictor(
            self.limits.max_budget_nodes, num_threads=options.get("threads", 1)
        )
        self.draft_counts = DraftCounts(self.predictor.counted)
        self._bound_steps()
        self.sessions = Sessions(self.limits, options.get("clock", time.monotonic))
        self.ledger = Ledger(self.limits.max_bytes, self.limits.max_tenant_bytes)
        self.bindings = Bindings(indexes, phrases, bound, self.sessions, self.lock)
        self.fingerprint = self.vocabulary.fingerprint if self.vocabulary else ""
        self.pools = Pools.open(
            self.limits,
            options.get("state"),
            self.fingerprint,
            options.get("durability", DEFAULT_DURABILITY),
            self.bindings.has_corpus,
            self.ledger,
        )
        self.plugins = Plugins()
        self.ledger.evictor = self.eviction = Eviction(
            self.ledger, self.sessions, self.pools, self.plugins, self.lock
        )
        self.named: dict[str, str] = {}  # fingerprints by tenant
        self._keeps_elsewhere = self.pools.is_logged or bool(attached)
        self.findings = findings_of(self)
        self.grammars = KeptGrammars(self.ledger, options.get("tokenizer"))
        self.plugins += [self.grammars, self.findings, *(each.attach(self) for each in attached)]
        self.fingerprint = self.fingerprint or self.pools.fingerprint
        if self.fingerprint:
            self.plugins.on_vocabulary(self.fingerprint, self.vocabulary)
        self.hold = options.get("hold_indexes", False)
        self.copying = Lock()
        self.pools.get("")  # callers without a tenant do not wait for the log
        if (refresh_s := options.get("refresh_s", 0.0)) > 0:
            self.bindings.watch(refresh_s)

    def prepare(
        self, prompt: ArrayLike, options: SequenceOptions = DEFAULT, charge: Charge | None = None
    ) -> Session:
        """Return a session for `begin`: the part of `open` that is slow for a long prompt.

        Args:
            prompt: integers[n].
            options: options of the sequence.
            charge: the charge from `ServiceFace.charge_reading`, if it was called.

        Raises:
            InvalidRequestError: the prompt or an option is invalid.
            NotServedError: there is a constraint, and no tokenizer.
            LimitExceededError: there is no room for it, or the prompt or a prediction is too long.
        """
        tokens = self.tokens(prompt)
        check_length(len(tokens), self.limits)
        size = self.vocabulary.size if self.vocabulary else None
        options = checked_options(options, size, self.limits, keeps_tenants=True)
        expected, tenant = options.predictions, options.tenant
        needed = context_bytes(len(tokens))
        try:
            charge = charge or self.ledger.take(tenant, needed)
            charge.ensure(needed)  # before the memory is allocated
            context = Context(tokens, charge)
        except MemoryError as error:
            raise out_of_memory() from error
        predicted = self._read(expected, tenant) if expected else None
        pool, phrases = self.pool(tenant), self.bindings.phrases(tenant)
        cursor = phrases.cursor(tokens) if phrases else None
        corpus = self.bindings.corpus(tenant)
        remember = options.remember
        databases = Databases(
            context, pool, corpus, learns=remember, phrases=cursor, predictions=predicted
        )
        if options.constraint is not None:
            grammar = self.grammars.compiled(tenant, options.constraint)
            databases.force(grammar.drafts(tenant), len(tokens))
        known = options.without_predictions
        return Session(databases, len(tokens), remember, options=known)

    def begin(self, key: SessionKey, prepared: Session) -> None:
        """Start a sequence as `open` does, under a name that no open session has."""
        check_session_name(key.name)
        with self.lock:
            self.sessions.add(key, prepared)
            prepared.databases.set_corpus(self.bindings.corpus(prepared.tenant))
            if not prepared.options.is_alone:
                self._join(prepared)

    def add_predictions(self, key: SessionKey, predictions: Sequence[Prediction]) -> None:
        """Do what `EmbeddedDrafter.add_predictions` does; predictions are read without the lock."""
        added = self._predictions(predictions)
        while True:
            with self.lock:
                session = self.sessions.get(key)
                known = session.databases.predictions
            before = [] if known is None else known.texts()
            expected = self._predictions([*before, *added])
            if len(expected) == len(before):
                return
            predicted = self._read(expected, session.tenant)
            with self.lock:
                if session.is_open and session.databases.predictions is known:
                    session.databases.expect(predicted)
                    return

    def drafting_ahead(
        self, step: CheckedRequest, until_s: float = math.inf
    ) -> Iterator[DraftTree]:
        """Draft for the outcomes of a committed request; yield without the lock after each.

        Stops at the first outcome that cannot be drafted for. The reason may be that `until_s` (by
        `time.monotonic`) has passed, the sequence has continued or ended, or a database has no room
        or does not support drafts ahead.
        """
        session, request = step.session, step.request
        for outcome in step.outcomes:
            if time.monotonic() >= until_s:
                return
            with self.lock:
                if not session.is_open or session.is_committing:
                    return
                databases = session.databases
                has_gone_on = len(databases.context) != request.length
                if has_gone_on or not databases.can_suppose(len(outcome)):
                    return
                databases.set_corpus(self.bindings.corpus(session.tenant))
                tree = self.predictor.suppose(
                    databases, outcome, request.budget_nodes, request.min_probability
                )
            yield tree

    def count_step(self, num_drafts: int, seconds: float) -> None:
        """Count a step that `commit_each` and `draft_each` made."""
        with self.lock:
            self.draft_counts.stepped(num_drafts, seconds)

    def end(
        self, key: SessionKey, new_tokens: ArrayLike | None = None, *, remember: bool = True
    ) -> Saving:
        """End a sequence as `close` does, without waiting for the state directory; see `flush`.

        Returns:
            The save status of its output; it shows whether the disk took it after the next `flush`.
        """
        saving, pieces = self.ending(key, new_tokens, remember=remember)
        finish(pieces)
        return saving

    def ending(
        self,
        key: SessionKey,
        new_tokens: ArrayLike | None = None,
        *,
        remember: bool = True,
        length: int = 0,
    ) -> tuple[Saving, Generator[None, None, None]]:
        """Do what `end` does; the iterator adds the output to the generations, in pieces.

        Args:
            key: key of the session.
            new_tokens: as for `end`.
            remember: as for `end`.
            length: length of the whole sequence, if stated.

        Raises:
            OutOfSequenceError: the session has another length; it stays open.
        """
        tokens = NO_TOKENS if new_tokens is None else self.tokens(new_tokens)
        with self.lock:
            ended = self.sessions.get(key)
            check_not_committing(ended, key.name)
            num_known = len(ended.databases.context)
            check_length(num_known + len(tokens), self.limits)
            if length:
                check_stated_length(key.name, num_known, len(tokens), length)
            self.sessions.remove(key)
            self.predictor.note(ended.databases, tokens)
            # The tokens are not added to the sequence, because nothing drafts from it now.
            if not (remember and ended.remember):
                return Saving(SaveStatus.NOTHING), self.locked(iter(()))
            saving, pieces = self.remembering(key, ended, tokens)
        return saving, self.locked(pieces)

    def flush(self) -> None:
        """Write remembered outputs to the state directory, and notify plugins.

        Outputs that the disk refuses stay in memory. The result of `end` and `log_failures` show
        this.
        """
        if self._keeps_elsewhere:
            with self.plugins.storing():
                self.pools.commit()

    def draft_prepared(
        self, prepared: Session, budget_nodes: int, min_probability: float = 0.0
    ) -> DraftTree:
        """Draft for a context that `prepare` has read."""
        check_draft(budget_nodes, min_probability, self.limits)
        began = perf_counter()
        with self.lock:
            tree = self.grow(prepared.databases, budget_nodes, min_probability)
            self.draft_counts.drafted_bare(perf_counter() - began)
        return tree

    def share_findings(self, model: str, findings: Findings, *, tenant: str = "") -> None:
        """Store findings of a decoder for a later run or for the tenant's other decoders.

        This drafter neither drafts from them nor checks them. Wrong findings degrade drafts of the
        tenant's decoders but never change an output. See `FindingsStore.share_findings`.

        Raises:
            InvalidRequestError: they are not valid findings.
            NotPossibleError: this drafter stores no findings.
            LimitExceededError: there is no room for them.
            StorageError: the disk refuses.
        """
        check_tenant_name(tenant)
        size = self.vocabulary.size if self.vocabulary else None
        self.findings.share(tenant, model, findings, size)
        with self.lock:
            self.name_vocabulary(tenant)

    def fetch_findings(self, model: str, before: int = 0, *, tenant: str = "") -> FoundPage:
        """Return a page of the findings of a tenant's decoders; see `FindingsStore`."""
        check_tenant_name(tenant)
        return self.findings.fetch(tenant, model, before)

    def delete(self, tenant: str, key: SessionKey | None = None) -> None:
        """Delete data of a tenant, or of its sessions with a name; see `EmbeddedDrafter.delete`.

        Other callers draft meanwhile.
        """
        check_tenant_name(tenant)
        scope = Scope(tenant)
        if key is not None:
            check_session_name(key.name)
            scope = Scope(tenant, session_origin(key.name))
            with self.lock, suppress(UnknownSessionError):
                self.sessions.remove(key).databases.clear()
        try:
            self.forget(scope, self.plugins.on_deleting)
        finally:
            self.plugins.settle()

    def forget(self, scope: Scope, tell: Callable[[Scope], None]) -> None:
        """Delete a scope after calling `tell` with it; see `deletion.forget`."""
        forget(self.sessions, self.pools, self.plugins, self.lock, scope, tell)

    def shut_down(self) -> None:
        """Stop plugins, within a second or so; close the indexes and the state."""
        self.flush()
        self.plugins.shut_down()
        self.bindings.shut_down()
        self.pools.close()

    @property
    def token_widths(self) -> set[int]:
        """Token widths, in bytes, of the tenants' corpora; each width needs separate kernels."""
        return set(map(width_of, self.bindings.corpora_of_all()))

    def census(self) -> Census:
        """Count the data in memory now, with short pauses so that drafts do not wait."""
        with self.lock:
            sessions = self.sessions.all()
        census = census_of(sessions, self.pools.all(), self.ledger, self.lock)
        return replace(
            census,
            recycled_bytes=self.findings.num_bytes,
            base_bytes=self.base_bytes + resident_bytes()[1],
        )

    def _join(self, session: Session) -> None:
        """Let a session's group draft from it, unless there is no room for that."""
        pool = session.databases.pool
        if session.options.group and pool.running is None and GROUPS.are_wanted():
            with suppress(LimitExceededError):
                least = running_bytes(FEWEST_TOKENS)
                charge = self.ledger.take(pool.tenant, least, is_locked=True)
                pool.running = RunningOutputs(charge)
        session.databases.join(session.options, is_shared=session.remember)

    def locked(self, pieces: Iterator[None]) -> Generator[None, None, None]:
        """Do each piece of work with the lock held."""
        while True:
            with self.lock:
                if next(pieces, _DONE) is _DONE:
                    return
            yield

    def tokens(self, tokens: ArrayLike) -> TokenIds:
        """Return tokens as int32[n]: a copy, unless they are a view of bytes, which cannot change.

        Raises:
            InvalidRequestError: they are not a one-dimensional array of token ids.
        """
        if type(tokens) is np.ndarray and tokens.dtype is _TOKEN and tokens.ndim == 1:
            base: object = tokens.base
            kept = tokens if type(base) is bytes else tokens.copy()
            if self._are_inside(kept):
                return kept
        return checked_tokens(tokens, self.vocabulary.size if self.vocabulary else None)

    def _are_inside(self, tokens: TokenIds) -> bool:
        """Return whether all tokens, int32[n], are in the vocabulary."""
        bound = self.predictor.bounds[BOUNDS.VOCABULARY]
        if len(tokens) > _MANY:  # four times as fast for many tokens, slower for few
            return bool(tokens.view(np.uint32).max() < bound)
        return bool(first_outside(tokens, bound) < 0)

    def _predictions(self, predictions: Iterable[Prediction]) -> list[Prediction]:
        size = self.vocabulary.size if self.vocabulary else None
        return checked_predictions(predictions, size, self.limits)

    def _read(self, expected: Sequence[Prediction], tenant: str) -> Predictions:
        """Return checked predictions as a database."""
        num_tokens = sum(len(each.tokens) for each in expected)
        charge = self.ledger.take(tenant, predictions_bytes(num_tokens, len(expected)))
        try:
            return Predictions(expected, charge)
        except MemoryError as error:
            raise out_of_memory() from error

    def pool(self, tenant: str) -> Pool:
        """Return a tenant's outputs; load them if they are not in memory.

        Raises:
            InvalidRequestError: the tenant's name is invalid.
        """
        check_tenant_name(tenant)
        return self.pools.get(tenant)

    def checked(self, request: DraftRequest, namespace: str) -> CheckedRequest:
        """Check a request against its session, with the lock held.

        Raises:
            RetrieverError: the request is refused.
        """
        session = self.sessions.get(SessionKey(namespace, request.session))
        check_not_committing(session, request.session)
        check_draft(request.budget_nodes, request.min_probability, self.limits)
        outcomes: list[TokenIds] = []
        if request.outcomes:
            check_outcomes([len(outcome) for outcome in request.outcomes], self.limits)
            outcomes = [self.tokens(outcome) for outcome in request.outcomes]
        tokens = self.tokens(request.new_tokens)
        num_known = len(session.databases.context)
        check_length(num_known + len(tokens), self.limits)
        check_step(request, num_known, len(tokens))
        return CheckedRequest(session, tokens, request, outcomes)

    def step(self, requests: Sequence[DraftRequest]) -> list[DraftTree]:
        """Do a step with the lock held; it is done or refused as a whole.

        The kernel checks the numbers of the requests.
        """
        if len(requests) > 1:
            check_batch(requests, self.limits)
        try:
            if len(requests) == 1:
                return [self.predictor.step(*self.asked(requests[0]))]
            return self.predictor.step_all([self.asked(request) for request in requests])
        except (RefusedStepError, struct.error, TypeError) as error:
            check_batch(requests, self.limits)
            place = error.place if isinstance(error, RefusedStepError) else 0
            self.checked(requests[place], "")  # raises an error with the reason
            raise

    def asked(self, request: DraftRequest, namespace: str = "") -> Asked:
        """Return a request for the predictor; tokens are checked only if they are not int32[n]."""
        key: Any = (namespace, request.session)  # faster to create than a `SessionKey`
        session = self.sessions.get(key)
        if session.is_committing:
            check_not_committing(session, request.session)
        tokens = request.new_tokens
        if type(tokens) is not np.ndarray or tokens.dtype is not _TOKEN or tokens.ndim != 1:
            request = request._replace(new_tokens=self.tokens(tokens))
        return session.databases, request

    def grow(self, databases: Databases, budget: int, min_probability: float) -> DraftTree:
        """Draft from databases, with the lock held."""
        databases.set_corpus(self.bindings.corpus(databases.pool.tenant))
        return self.predictor.draft(databases, budget, min_probability)

    def remembering(
        self, key: SessionKey, ended: Session, tokens: TokenIds = NO_TOKENS
    ) -> tuple[Saving, Iterator[None]]:
        """Return the save status of an ended session's output, and the pieces that add it."""
        context = ended.databases.context
        output = np.concatenate((context.last(len(context) - ended.prompt_length), tokens))
        if len(output):
            self.name_vocabulary(ended.tenant)
        version = ended.options.policy_version or 0
        entry, pieces = self.pools.remembering(ended.databases.pool, output, key.name, version)
        self.plugins.on_remembered(entry)
        return entry.saving if entry is not None else Saving(SaveStatus.NOTHING), pieces

    def name_vocabulary(self, tenant: str) -> None:
        """Adopt a tenant's tokenizer for stored and replicated data, if none was known."""
        fingerprint = self.named.get(tenant, "")
        if self.fingerprint or not fingerprint or not self._keeps_elsewhere:
            return
        self.fingerprint = fingerprint
        self.pools.name_vocabulary(fingerprint)
        self.plugins.on_vocabulary(fingerprint, self.vocabulary)

    def take_limits(self, limits: Limits) -> None:
        """Put limits in force, with the lock held."""
        self.limits = self.sessions.limits = limits = with_ceilings(limits)
        self.ledger.max_bytes, self.ledger.max_tenant_bytes = (
            limits.max_bytes,
            limits.max_tenant_bytes,
        )
        self.pools.take_limits(limits)
        self._bound_steps()

    def _bound_steps(self) -> None:
        """Set the predictor's bounds from the limits and the vocabulary."""
        bounds, limits = self.predictor.bounds, self.limits
        most = min(limits.max_budget_nodes, limits.max_step_nodes)
        bounds[BOUNDS.NODES] = most if limits.max_batch > 0 else -1
        bounds[BOUNDS.TOKENS] = limits.max_sequence_tokens
        if self.vocabulary is not None:
            bounds[BOUNDS.VOCABULARY] = self.vocabulary.size


def finish(pieces: Iterable[None], pause_s: float = 0.0) -> None:
    """Do all pieces of work; pauses make sure that other threads get the lock between them."""
    for _ in pieces:
        time.sleep(pause_s)


def check_not_committing(session: Session, name: str) -> None:
    """Refuse a second request of a session during a long commit.

    Raises:
        OutOfSequenceError: its tokens are being committed.
    """
    if session.is_committing:
        raise OutOfSequenceError(
            f"another step of session {shown(name)} is still being committed: send one step "
            "of a session after the other"
        )
