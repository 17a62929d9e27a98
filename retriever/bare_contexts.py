"""Drafts for bare contexts, without a session; and what spoke for each of their nodes."""

from threading import Lock
from time import perf_counter

from numpy.typing import ArrayLike

from retriever.bindings import Bindings
from retriever.databases import Databases
from retriever.explanation import Explanation
from retriever.limits import Limits, check_documents, check_draft
from retriever.predictor import Predictor
from retriever.provenance import Evidence, locate, trace_nodes
from retriever.sources import Sources
from retriever.tally import Tally
from retriever.tree import DraftTree


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
