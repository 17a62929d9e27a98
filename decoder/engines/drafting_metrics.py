"""Metrics that engines lack: acceptance by position, and by the token's source.

vLLM counts all accepted drafts, including foredraft's, under its own names. The metrics of this
module have names of their own, in the registry that the engine exposes.
"""

from collections.abc import Mapping
from functools import cache
from logging import getLogger
from typing import TYPE_CHECKING, Any, Final

from retriever.tree import Source

if TYPE_CHECKING:  # that module depends on transformers
    from decoder.observation import Statistics

_MOST_POSITIONS: Final = 64
"""Number of positions that are counted separately; later positions count as the last one."""

_log = getLogger(__name__)


class DraftingMetrics:
    """Counters of the drafts that an engine verified; create them in the process that drafts.

    Args:
        registry: Prometheus registry for the counters; the process's default if not given.
    """

    def __init__(self, registry: Any = None) -> None:
        from prometheus_client import REGISTRY  # noqa: PLC0415  (the engine first sets the registry's folder)

        self._registry = registry or REGISTRY
        self._drafts = self._counter("drafts", "Verified drafts, one for each request of a step.")
        self._accepted_at = self._counter(
            "accepted_tokens_per_pos", "Drafts whose token at a position was accepted.", "position"
        )
        self._accepted_of = self._counter(
            "accepted_tokens", "Drafted tokens that were accepted, by source.", "source"
        )
        self._drafted_of = self._counter(
            "draft_tokens", "Drafted tokens that were verified, by source.", "source"
        )

    def add(self, counts: "Statistics") -> None:
        """Add the counts since the last call."""
        self._drafts.inc(counts.num_drafts)
        for position, count in enumerate(counts.accepted_per_position()):
            self._accepted_at.labels(str(min(position, _MOST_POSITIONS - 1))).inc(count)
        _add(self._accepted_of, counts.accepted)
        _add(self._drafted_of, counts.drafted)

    def _counter(self, name: str, documentation: str, *labels: str) -> Any:
        from prometheus_client import Counter  # noqa: PLC0415  (as above)

        return Counter(f"foredraft:spec_{name}", documentation, labels, registry=self._registry)


@cache
def process_metrics() -> DraftingMetrics | None:
    """Return the process's metrics, always the same object; `None` if creating them fails."""
    try:
        return DraftingMetrics()
    except Exception as error:  # noqa: BLE001  (the engine must start in any case)
        _log.warning("acceptance by position and source is not exposed: %s", error)
        return None


def _add(counter: Any, counts: Mapping[Source, int]) -> None:
    for source, count in counts.items():
        counter.labels(source.label).inc(count)
