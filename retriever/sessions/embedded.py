"""The embedded drafter: an interface to the state that a service also uses."""

import math
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from time import perf_counter
from typing import Self, Unpack

from numpy.typing import ArrayLike

from retriever.drafter import DEFAULT, DraftRequest, OfOneProcess, Prediction, SequenceOptions
from retriever.limits import Limits, check_draft
from retriever.sequences import SessionKey, check_batch
from retriever.sessions.bindings import BoundPaths
from retriever.sessions.cold_start import warm_drafts
from retriever.sessions.draft_counts import NOTHING_HELD, DrafterStats, resident_bytes
from retriever.sessions.drafter_state import DrafterState
from retriever.sessions.options import DrafterOptions, OpeningOptions, opened_indexes
from retriever.sessions.refreshed_corpora import IndexState
from retriever.tree import DraftTree


class EmbeddedDrafter(OfOneProcess):
    """Drafts from the sequence itself, generations, listed phrases and indexes; a `Drafter`.

    Thread-safe; drafts run one after the other.

    Args:
        indexes: open indexes, all of one vocabulary; closed with the drafter.
        options: see `DrafterOptions`.

    Attributes:
        state: state of the drafter; services (`ServiceFace`) and operators (`Administration`) also
            use it.
        vocabulary: vocabulary of the indexes, or as given.
        keeps_tenants: see `Drafter`.

    Raises: as `DrafterState`.
    """

    keeps_tenants = True

    def __init__(
        self, indexes: Sequence[IndexState] = (), **options: Unpack[DrafterOptions]
    ) -> None:
        self.state = state = DrafterState(indexes, **options)
        self.vocabulary = state.vocabulary
        # Used in each step: saves attribute look-ups.
        self._lock, self._counts, self._step = state.lock, state.draft_counts, state.step

    @property
    def limits(self) -> Limits:
        """The limits in force."""
        return self.state.limits

    @classmethod
    def open_indexes(
        cls,
        paths: Iterable[Path | str],
        *,
        bound: BoundPaths | None = None,
        **options: Unpack[OpeningOptions],
    ) -> Self:
        """Open the indexes at `paths` and draft from them; otherwise like the constructor.

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

    def open(self, session: str, prompt: ArrayLike, options: SequenceOptions = DEFAULT) -> None:
        """Start a sequence; see `Drafter.open`.

        Drafts come from the tenant's own generations, never another tenant's, and from its running
        sequences. Predictions are used only in this session.
        """
        state = self.state
        state.begin(SessionKey("", session), state.prepare(prompt, options))

    def add_predictions(self, session: str, predictions: Sequence[Prediction]) -> None:
        """Add texts that the rest of a sequence is expected to contain.

        A prediction with the same tokens as an earlier one of the session is ignored.

        Args:
            session: an open session; no other session's drafts are affected.
            predictions: in any order.

        Raises:
            UnknownSessionError: the session is not open.
            InvalidRequestError: one is empty, or has a token outside the vocabulary.
            LimitExceededError: the session's predictions would be too many or too long.
        """
        self.state.add_predictions(SessionKey("", session), predictions)

    def draft(self, requests: Sequence[DraftRequest]) -> list[DraftTree]:
        """Commit new tokens and draft for each sequence; see `Drafter.draft`.

        A step is first checked as a whole: if any request is refused, nothing of the step is done.
        (A service refuses requests individually.)
        """
        began = perf_counter()
        with self._lock:
            trees = self._step(requests)
            self._counts.stepped(len(trees), perf_counter() - began)
        return trees

    def draft_ahead(
        self, requests: Sequence[DraftRequest], timeout_s: float = math.inf
    ) -> list[list[DraftTree]]:
        """Commit new tokens and draft for tokens that may come; see `AheadDrafter.draft_ahead`.

        This also drafts for the current sequences, because learning needs the last draft. A step is
        first checked as a whole, as in `draft`.
        """
        state = self.state
        check_batch(requests, state.limits)
        began, until_s = perf_counter(), time.monotonic() + timeout_s
        with state.lock:
            steps = [state.checked(request, "") for request in requests]
            state.step(requests)
        trees = [list(state.drafting_ahead(step, until_s)) for step in steps]
        state.count_step(len(steps), perf_counter() - began)
        return trees

    def close(
        self, session: str, new_tokens: ArrayLike | None = None, *, remember: bool = True
    ) -> None:
        """End a sequence; see `Drafter.close`.

        If there is a state directory and the output is remembered, it is on disk once this returns.
        Replication follows without blocking.
        """
        self.state.end(SessionKey("", session), new_tokens, remember=remember)
        self.state.flush()

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

        Nodes less probable than `min_probability` are omitted. `predictions` are texts that are
        expected to follow, each from its beginning.

        Raises:
            InvalidRequestError: the context, a prediction, the budget or the tenant is invalid.
        """
        check_draft(budget_nodes, min_probability, self.state.limits)
        options = SequenceOptions(remember=False, predictions=tuple(predictions), tenant=tenant)
        prepared = self.state.prepare(context, options)
        return self.state.draft_prepared(prepared, budget_nodes, min_probability)

    def remember(self, output: ArrayLike, *, tenant: str = "") -> None:
        """Add the output of a sequence generated elsewhere, and save it as `close` does."""
        state = self.state
        pool, tokens = state.pool(tenant), state.tokens(output)
        with state.lock:
            state.name_vocabulary(tenant)
            state.plugins.on_remembered(state.pools.remember(pool, tokens))
        state.flush()

    def delete(self, tenant: str = "", session: str | None = None) -> None:
        """Delete a tenant's outputs and the findings of its decoders, in memory and on disk.

        Open sessions will not remember what they have generated so far. The server and the other
        drafters delete replicated outputs as soon as the server can be reached.

        Args:
            tenant: the tenant; empty for callers without one.
            session: delete only the outputs of sessions with this name, and end an open one. The
                tenant's learned weights then stay, because they contain no tokens. All findings of
                its decoders are deleted, because their session is unknown.

        Raises:
            InvalidRequestError: a name is invalid.
            StorageError: the disk refuses; the data in memory is deleted anyway.
        """
        self.state.delete(tenant, None if session is None else SessionKey("", session))

    def refresh(self) -> bool:
        """Switch to the indexes' latest snapshots once these are warm; return whether any changed.

        An index that cannot be opened stays at its old snapshot. The failure is logged and counted
        in `DrafterStats.refresh_failures`, and the next refresh retries.
        """
        return self.state.bindings.refresh()

    def warm(self) -> None:
        """Compile or load the kernels for drafts now, so that no draft waits for them.

        Additional kernels for groups, predictions, listed phrases and drafts ahead are compiled on
        first use.
        """
        state = self.state
        warm_drafts(state.token_widths)
        state.bindings.warm()
        state.base_bytes = 0
        state.base_bytes = resident_bytes()[0] - state.census().memory_bytes

    def stats(self, *, census: bool = True) -> DrafterStats:
        """Return the content of the drafter and its counts.

        Args:
            census: whether to count the data in memory, too. This pauses regularly, so that drafts
                do not wait; omit it for frequent calls.
        """
        state = self.state
        return DrafterStats(
            indexes=state.bindings.corpora("").current.indexes,
            missing_indexes=state.bindings.missing,
            index_outcomes=state.bindings.outcomes,
            refresh_failures=state.bindings.failures,
            num_sessions=len(state.sessions),
            draft_counts=state.draft_counts,
            is_logged=state.pools.is_logged,
            log_failures=state.pools.log_failures,
            plugins={each.name: each.counts for each in state.plugins if each.counts is not None},
            evictions=state.eviction.counts,
            census=state.census() if census else NOTHING_HELD,
        )

    def shut_down(self) -> None:
        """Stop plugins, within a second or so; close the indexes and the state."""
        self.state.shut_down()
