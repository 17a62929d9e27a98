"""The embedded drafter: databases, predictor and sessions in the caller's process."""

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Self, Unpack

from numpy.typing import ArrayLike

from indexer.reader import Index
from retriever.assembly import assemble
from retriever.bindings import BoundPaths
from retriever.census import Census, census_of
from retriever.corpora import warm_kernels
from retriever.drafter import DraftRequest
from retriever.drafter_options import DrafterOptions, OpeningOptions, opened_indexes
from retriever.explanation import Explanation
from retriever.limits import DEFAULT_DOCUMENTS
from retriever.sessions import Session, SessionKey
from retriever.tree import DraftTree
from retriever.warmth.counts import WarmthCounts


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
        WarmthError: `warmth` cannot be used; not if the server is away, for it may come.
    """

    def __init__(self, indexes: Sequence[Index] = (), **options: Unpack[DrafterOptions]) -> None:
        parts = assemble(indexes, options)
        self.limits, self.vocabulary = parts.limits, parts.vocabulary
        self.tally, self.steps = parts.tally, parts.steps
        self._lock, self._sessions, self._pools = parts.lock, parts.sessions, parts.pools
        self._live, self._predictor, self._warmth = parts.live, parts.predictor, parts.warmth
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
        self._warmth.shut_down()
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
    def warmth(self) -> WarmthCounts:
        """What became of the outputs that are shared with other drafters."""
        return self._warmth.counts

    def census(self) -> Census:
        """Count what is held now, without keeping drafts waiting for longer than a moment."""
        with self._lock:
            sessions = self._sessions.all()
        return census_of(sessions, self._pools.all(), self._lock)
