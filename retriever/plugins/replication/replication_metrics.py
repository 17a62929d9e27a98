"""What a service shows of replication among its metrics."""

from collections.abc import Iterator

from prometheus_client.core import CounterMetricFamily, Metric

from retriever.operations.metrics import counter, gauge, labelled
from retriever.plugins.replication.replication_state import SKIPPED, ReplicationCounts


def metrics_of(counts: ReplicationCounts) -> Iterator[Metric]:
    """Yield what replication has counted."""
    for name, text, value in (
        ("published", "Records of outputs that the server took.", counts.published),
        ("dropped", "Records that were not sent: too many waited.", counts.dropped),
        ("learned", "Records of other services that were remembered.", counts.learned),
        ("failures", "Times that the server was away, or refused.", counts.failures),
    ):
        yield counter(f"replication_{name}", text, value)
    yield labelled(
        CounterMetricFamily(
            "foredraft_replication_skipped",
            "Records of other services that were not remembered, by reason.",
            labels=["reason"],
        ),
        [((reason,), counts.skipped.get(reason, 0)) for reason in SKIPPED],
    )
    yield gauge("replication_queued", "Records that wait to be sent.", counts.queued)
    yield gauge(
        "replication_connected",
        "Whether the server that outputs are shared through answered last: 1 or 0.",
        float(counts.connected),
    )
    yield gauge(
        "replication_unsent_deletions",
        "Deletions that the server does not know of yet.",
        counts.unsent_deletions,
    )
