"""Prometheus metrics, read from existing counters when they are scraped."""

from collections.abc import Iterable, Iterator
from itertools import accumulate
from typing import Final

from prometheus_client import CollectorRegistry, ProcessCollector
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)
from prometheus_client.registry import Collector

from retriever.operations.service_report import Service, installed_version, reports_of
from retriever.sessions.draft_counts import BOUNDS_S, DraftCounts, DrafterStats, Latencies
from retriever.sessions.eviction import EVICTED
from retriever.tree import drafted_sources
from retriever.v1 import retriever_pb2 as pb

SHOWN_FAIL_OPENS: Final = tuple(
    name.removeprefix("FAIL_OPEN_REASON_").lower() for name, _ in pb.FailOpenReason.items()
)
"""Reasons why clients continue without a draft."""


def registry_of(service: Service) -> CollectorRegistry:
    """Return the metrics of a service and its process."""
    registry = CollectorRegistry()
    ProcessCollector(registry=registry)
    registry.register(ServiceCollector(service))
    return registry


class ServiceCollector(Collector):
    """Reads a service's counters at collection, without delaying drafts."""

    def __init__(self, service: Service) -> None:
        self._service = service

    def collect(self) -> Iterable[Metric]:
        """Yield all metrics of the service."""
        stats = self._service.stats()
        yield from self._of_life()
        yield from _of_drafts(stats.draft_counts)
        yield from _of_outcomes(stats.draft_counts)
        yield from self._of_calls()
        yield from _of_memory(stats)
        yield from _of_indexes(stats)
        yield from _of_failures(stats)
        yield from _of_clients(stats.draft_counts)
        for plugin in self._service.plugins:
            yield from plugin.metrics()

    def _of_life(self) -> Iterator[Metric]:
        ready = self._service.observer.lifecycle.is_ready
        yield gauge("ready", "Whether the service takes calls: 1 or 0.", float(ready))
        yield from self._of_credentials()
        yield labelled(
            GaugeMetricFamily("foredraft_info", "The version, as a label.", labels=["version"]),
            [((installed_version(),), 1)],
        )

    def _of_credentials(self) -> Iterator[Metric]:
        files = self._service.observer.lifecycle.credentials
        for name, text, values in (
            (
                "unreadable",
                "Whether a credential file cannot be used: 1 or 0.",
                [float(each.failing_s is not None) for each in files],
            ),
            (
                "unreadable_seconds",
                "How long a credential file has been unusable; 0 while it is usable.",
                [each.failing_s or 0.0 for each in files],
            ),
            (
                "admitting",
                "Whether the last content of a file admits callers: 0 after the grace period.",
                [float(each.admits) for each in files],
            ),
        ):
            yield labelled(
                GaugeMetricFamily(f"foredraft_credentials_{name}", text, labels=["file"]),
                [((each.name,), value) for each, value in zip(files, values, strict=True)],
            )

    def _of_calls(self) -> Iterator[Metric]:
        calls = self._service.observer.calls
        yield labelled(
            CounterMetricFamily(
                "foredraft_calls", "Calls that have ended.", labels=["method", "status", "reason"]
            ),
            [((e.method, e.status, e.reason), n) for e, n in calls.ended.copy().items()],
        )
        yield labelled(
            CounterMetricFamily(
                "foredraft_refused",
                "Calls that ended with an error, by status, and the limit or kind of error.",
                labels=["method", "status", "reason"],
            ),
            [((e.method, e.status, e.reason), n) for e, n, _ in calls.refusals()],
        )
        yield labelled(
            GaugeMetricFamily("foredraft_calls_under_way", "Calls under way.", labels=["method"]),
            [((method,), n) for method, n in calls.under_way.copy().items()],
        )


def _of_drafts(draft_counts: DraftCounts) -> Iterator[Metric]:
    bare, all_drafts = draft_counts.num_bare, sum(draft_counts.drafts.counts)
    yield labelled(
        CounterMetricFamily("foredraft_drafts", "Drafts, by kind.", labels=["kind"]),
        [(("session",), all_drafts - bare), (("bare",), bare)],
    )
    yield _histogram(
        "step_seconds", "Time of a step of a stream, for all its sequences.", draft_counts.steps
    )
    yield _histogram(
        "draft_seconds",
        "Time of a step, divided by its number of sequences.",
        draft_counts.drafts,
    )


def _of_outcomes(draft_counts: DraftCounts) -> Iterator[Metric]:
    nodes, accepted = draft_counts.by_source.tolist()
    for name, text, counts in (
        ("nodes", "Nodes of drafts whose outcome is known, by database.", nodes),
        (
            "accepted_tokens",
            "Committed tokens that the last draft contained, by database.",
            accepted,
        ),
    ):
        yield labelled(
            CounterMetricFamily(f"foredraft_{name}", text, labels=["source"]),
            [((each.label,), counts[each]) for each in drafted_sources()],
        )
    yield labelled(
        CounterMetricFamily(
            "foredraft_accepted_tokens_per_pos",
            "Drafts whose token at a position was committed, 0 for the first.",
            labels=["position"],
        ),
        [((str(at),), count) for at, count in enumerate(draft_counts.accepted_at())],
    )
    yield counter("outcomes", "Drafts whose outcome is known.", draft_counts.num_outcomes)
    yield counter(
        "committed_tokens",
        "Tokens that were committed after these drafts.",
        draft_counts.num_committed,
    )


def _of_memory(stats: DrafterStats) -> Iterator[Metric]:
    census = stats.census
    yield gauge("sessions", "Sessions that are open.", sum(census.sessions.values()))
    yield gauge("session_tokens", "Tokens of open sessions.", census.session_tokens)
    yield gauge("session_bytes", "Memory of open sessions.", census.session_bytes)
    yield gauge("tenants", "Tenants whose outputs are in memory.", census.tenants)
    yield gauge("generations_tokens", "Tokens of generations in memory.", census.generations_tokens)
    yield gauge("generations_bytes", "Memory of generations.", census.generations_bytes)
    yield gauge("recycled_bytes", "Memory of findings of decoders.", census.recycled_bytes)
    yield gauge(
        "memory_bytes",
        "Memory by the service's own count: what it stores, and what it had when ready.",
        census.memory_bytes,
    )
    yield gauge("memory_reserved_bytes", "Memory taken from max_bytes.", census.reserved_bytes)
    yield labelled(
        CounterMetricFamily(
            "foredraft_evictions", "Evictions to make room, by what was evicted.", labels=["what"]
        ),
        [((what,), stats.evictions.get(what, 0)) for what in EVICTED],
    )


def _of_indexes(stats: DrafterStats) -> Iterator[Metric]:
    reports = reports_of(stats.indexes)
    for name, text, values in (
        ("snapshot", "Number of the snapshot.", [each.snapshot for each in reports]),
        (
            "snapshot_age_seconds",
            "Time since the snapshot was published.",
            [each.age_s for each in reports],
        ),
        ("tokens", "Tokens in the index.", [each.num_tokens for each in reports]),
        ("documents", "Documents in the index.", [each.num_documents for each in reports]),
        ("bytes", "Size of the index on disk.", [each.num_bytes for each in reports]),
    ):
        yield labelled(
            GaugeMetricFamily(f"foredraft_index_{name}", text, labels=["index"]),
            [((each.name,), value) for each, value in zip(reports, values, strict=True)],
        )

    yield gauge(
        "indexes_missing",
        "Configured indexes that cannot be opened.",
        len(stats.missing_indexes),
    )


def _of_failures(stats: DrafterStats) -> Iterator[Metric]:
    yield counter("log_failures", "Outputs that could not be stored on disk.", stats.log_failures)
    yield counter(
        "refresh_failures",
        "Times that a changed index could not be opened.",
        stats.refresh_failures,
    )


def _of_clients(draft_counts: DraftCounts) -> Iterator[Metric]:
    told = draft_counts.fail_opens
    numbers = pb.FailOpenReason.values()
    counts = [(name, told[n]) for name, n in zip(SHOWN_FAIL_OPENS, numbers, strict=True)]
    yield labelled(
        CounterMetricFamily(
            "foredraft_client_fail_opens",
            "Missed drafts that clients report, by reason.",
            labels=["reason"],
        ),
        [((reason,), times) for reason, times in counts],
    )


_Family = CounterMetricFamily | GaugeMetricFamily


def gauge(name: str, text: str, value: float) -> Metric:
    """Return a current value, `foredraft_NAME`."""
    return GaugeMetricFamily(f"foredraft_{name}", text, value=value)


def counter(name: str, text: str, value: float) -> Metric:
    """Return a number that only increases, `foredraft_NAME_total`."""
    return CounterMetricFamily(f"foredraft_{name}", text, value=value)


def labelled(family: _Family, samples: Iterable[tuple[tuple[str, ...], float]]) -> Metric:
    """Return a family with one sample per tuple of labels."""
    for labels, value in samples:
        family.add_metric(list(labels), value)
    return family


def _histogram(name: str, text: str, latencies: Latencies) -> Metric:
    bounds = [*(repr(bound) for bound in BOUNDS_S), "+Inf"]
    counts = accumulate(latencies.counts.copy())
    return HistogramMetricFamily(
        f"foredraft_{name}",
        text,
        buckets=list(zip(bounds, counts, strict=True)),
        sum_value=latencies.total_s,
    )
