"""The state of a running service, as reported by metrics and the status page."""

import time
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from indexer.reader import Index
from retriever.operations.observer import ServiceObserver
from retriever.replication.replication_state import ReplicationCounts
from retriever.sessions.bindings import IndexOutcome
from retriever.sessions.draft_counts import NOTHING_HELD, Census, DraftCounts
from retriever.sessions.embedded import EmbeddedDrafter


@dataclass(frozen=True, slots=True)
class IndexReport:
    """One index.

    Attributes:
        name: of its folder; its path where two folders have one name.
        snapshot: number of the current snapshot.
        age_s: since that was published, in seconds.
        num_tokens: tokens in it.
        num_documents: documents in it.
        num_bytes: its size on disk.
    """

    name: str
    snapshot: int
    age_s: float
    num_tokens: int
    num_documents: int
    num_bytes: int


@dataclass(slots=True)
class Service:
    """A running service, as reports read it.

    Attributes:
        drafter: answers requests; None until it is open, when all counts are zero.
        observer: counts its calls.
        began_s: start time, in seconds since 1970.
    """

    drafter: EmbeddedDrafter | None
    observer: ServiceObserver
    began_s: float

    @property
    def draft_counts(self) -> DraftCounts:
        """Counts of drafts and their outcomes."""
        return self.drafter.draft_counts if self.drafter is not None else DraftCounts()

    @property
    def log_failures(self) -> int:
        """Outputs that could not be kept on disk."""
        return self.drafter.log_failures if self.drafter is not None else 0

    @property
    def refresh_failures(self) -> int:
        """Failed attempts to open a changed index."""
        return self.drafter.refresh_failures if self.drafter is not None else 0

    @property
    def missing_indexes(self) -> list[Path]:
        """Indexes that are to be drafted from and that cannot be opened."""
        return self.drafter.missing_indexes if self.drafter is not None else []

    @property
    def replication(self) -> ReplicationCounts:
        """Counts of replicated outputs."""
        return self.drafter.replication if self.drafter is not None else ReplicationCounts()

    @property
    def evictions(self) -> Mapping[str, int]:
        """How often what has made room."""
        return self.drafter.evictions if self.drafter is not None else {}

    @property
    def index_outcomes(self) -> list[IndexOutcome]:
        """What came of the nodes that indexes proposed, by the indexes drafted from together."""
        return self.drafter.index_outcomes if self.drafter is not None else []

    def census(self) -> Census:
        """Return what is in memory now."""
        return self.drafter.census() if self.drafter is not None else NOTHING_HELD

    def indexes(self) -> list[IndexReport]:
        """Return the indexes in their current snapshots."""
        indexes = self.drafter.indexes if self.drafter is not None else ()
        names = Counter(index.path.name for index in indexes)
        return [_report(index, unique=names[index.path.name] == 1) for index in indexes]


def installed_version() -> str:
    """Return the installed version; `unknown` where the package was copied, not installed."""
    try:
        return version("foredraft")
    except PackageNotFoundError:
        return "unknown"


def _report(index: Index, *, unique: bool) -> IndexReport:
    return IndexReport(
        index.path.name if unique else str(index.path),
        index.number,
        max(0.0, time.time() - index.published_s),
        index.num_tokens,
        index.num_documents,
        index.num_bytes,
    )
