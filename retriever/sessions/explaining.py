"""Explaining a draft: its tree with the evidence for each node."""

from collections.abc import Sequence

from numpy.typing import ArrayLike

from retriever.drafter import Prediction, SequenceOptions
from retriever.limits import DEFAULT_DOCUMENTS, check_documents, check_draft
from retriever.predict.provenance import DraftedRows, locate, trace_nodes
from retriever.sessions.drafter_state import DrafterState
from retriever.sessions.embedded import EmbeddedDrafter
from retriever.sessions.session_table import Session
from retriever.tree import Explanation


def explain(  # noqa: PLR0913  (the last four are options)
    drafter: EmbeddedDrafter,
    context: ArrayLike,
    budget_nodes: int,
    min_probability: float = 0.0,
    *,
    max_documents: int = DEFAULT_DOCUMENTS,
    tenant: str = "",
    predictions: Sequence[Prediction] = (),
) -> Explanation:
    """Draft as `draft_context` does, with the evidence for each node; this takes milliseconds.

    At most `max_documents` documents are named for each node. Generations are not shown.

    Raises:
        InvalidRequestError: the context, a prediction, a number or the tenant is invalid.
        ProvenanceError: an index is damaged.
    """
    state = drafter.state
    check_documents(max_documents)
    check_draft(budget_nodes, min_probability, state.limits)
    options = SequenceOptions(remember=False, predictions=tuple(predictions), tenant=tenant)
    prepared = state.prepare(context, options)
    return explain_prepared(state, prepared, budget_nodes, min_probability, max_documents)


def explain_prepared(
    state: DrafterState,
    prepared: Session,
    budget_nodes: int,
    min_probability: float,
    max_documents: int,
) -> Explanation:
    """Do what `explain` does, for a context that `prepare` has read."""
    check_documents(max_documents)
    check_draft(budget_nodes, min_probability, state.limits)
    with state.lock:
        tree = state.grow(prepared.databases, budget_nodes, min_probability)
        evidence = DraftedRows.of(state.predictor, budget_nodes)
        # The indexes of this draft, even after a refresh.
        indexes = state.bindings.corpora(prepared.tenant).current.indexes
    supports = list(trace_nodes(tree, prepared.databases, evidence))
    return Explanation(tree, tuple(locate(supports, indexes, max_documents)))
