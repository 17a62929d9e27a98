"""What is told of a running service: as metrics, and on the status page."""

import time
from collections import Counter
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version

from indexer.reader import Index
from retriever.operations.observer import ServiceObserver
from retriever.replication.replication_state import ReplicationCounts
from retriever.sessions.draft_counts import NOTHING_HELD, Census, DraftCounts
from retriever.sessions.embedded import EmbeddedDrafter


@dataclass(frozen=True, slots=True)
class IndexReport:
    """One index.

    Attributes:
        name: of its folder; its path where two folders have one name.
        snapshot: number of the snapshot that is drafted from.
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
    """A service that is running: whatever reports ask is here.

    Attributes:
        drafter: what answers; None until it is open, and nothing is held or counted until then.
        observer: what looks after it.
        began_s: when it began, in seconds since 1970.
    """

    drafter: EmbeddedDrafter | None
    observer: ServiceObserver
    began_s: float

    @property
    def draft_counts(self) -> DraftCounts:
        """What was drafted, and what became of it."""
        return self.drafter.draft_counts if self.drafter is not None else DraftCounts()

    @property
    def log_failures(self) -> int:
        """Outputs that could not be kept on disk."""
        return self.drafter.log_failures if self.drafter is not None else 0

    @property
    def refresh_failures(self) -> int:
        """How often an index had changed and could not be opened."""
        return self.drafter.refresh_failures if self.drafter is not None else 0

    @property
    def replication(self) -> ReplicationCounts:
        """What became of the outputs that are shared with other services."""
        return self.drafter.replication if self.drafter is not None else ReplicationCounts()

    def census(self) -> Census:
        """Return what is held now."""
        return self.drafter.census() if self.drafter is not None else NOTHING_HELD

    def indexes(self) -> list[IndexReport]:
        """Return the indexes, as they are drafted from now."""
        indexes = self.drafter.indexes if self.drafter is not None else ()
        names = Counter(index.path.name for index in indexes)
        return [_report(index, unique=names[index.path.name] == 1) for index in indexes]


def installed_version() -> str:
    """Return the version that is installed; `unknown` where it was not installed but copied."""
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
