"""Metrics of replication."""

from collections.abc import Iterator

from prometheus_client.core import CounterMetricFamily, Metric

from retriever.operations.metrics import counter, gauge, labelled
from retriever.plugins.replication.replication_state import SKIPPED, ReplicationCounts


def metrics_of(counts: ReplicationCounts) -> Iterator[Metric]:
    """Yield the counts of replication."""
    for name, text, value in (
        ("published", "Records of outputs that the server accepted.", counts.published),
        ("dropped", "Records that were dropped because the queue was full.", counts.dropped),
        ("learned", "Records of other services that were kept.", counts.learned),
        ("failures", "Failed calls to the server.", counts.failures),
    ):
        yield counter(f"replication_{name}", text, value)
    yield labelled(
        CounterMetricFamily(
            "foredraft_replication_skipped",
            "Records of other services that were not kept, by reason.",
            labels=["reason"],
        ),
        [((reason,), counts.skipped.get(reason, 0)) for reason in SKIPPED],
    )
    yield gauge("replication_queued", "Records waiting to be sent.", counts.queued)
    yield gauge(
        "replication_connected",
        "Whether the Redis server answered the last call: 1 or 0.",
        float(counts.connected),
    )
    yield gauge(
        "replication_unsent_deletions",
        "Deletions that were not sent to the server yet.",
        counts.unsent_deletions,
    )
