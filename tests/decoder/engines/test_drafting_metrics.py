"""Acceptance by position and source, as it is exposed."""

import numpy as np
import pytest

from decoder.engines.drafting_metrics import DraftingMetrics
from decoder.observation import Statistics
from retriever.tree import ROOT, DraftTree, Source

exposition = pytest.importorskip("prometheus_client.exposition")


def test_counts_are_exposed_by_position_and_source() -> None:
    from prometheus_client import CollectorRegistry  # noqa: PLC0415  (an extra)

    registry = CollectorRegistry()
    metrics = DraftingMetrics(registry)
    tree = DraftTree.checked(
        [1, 2, 3], [ROOT, 0, 1], [0.9, 0.8, 0.7], [Source.CORPUS, Source.CONTEXT, Source.CONTEXT]
    )
    for path in ([0, 1], [0], []):
        counts = Statistics()
        counts.record(tree, np.array(path, np.int64), len(path) + 1)
        metrics.add(counts)
    text = exposition.generate_latest(registry).decode()
    for line in (
        "foredraft:spec_drafts_total 3.0",
        'foredraft:spec_accepted_tokens_per_pos_total{position="0"} 2.0',
        'foredraft:spec_accepted_tokens_per_pos_total{position="1"} 1.0',
        'foredraft:spec_accepted_tokens_total{source="corpus"} 2.0',
        'foredraft:spec_accepted_tokens_total{source="context"} 1.0',
        'foredraft:spec_draft_tokens_total{source="context"} 6.0',
    ):
        assert line in text
