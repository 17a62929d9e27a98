"""The state of a running service, as reported by metrics and the status page."""

import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version

from indexer.reader import Index
from retriever.operations.observer import ServiceObserver
from retriever.sessions.draft_counts import DrafterStats
from retriever.sessions.drafter_plugins import DrafterPlugin
from retriever.sessions.embedded import EmbeddedDrafter


@dataclass(frozen=True, slots=True)
class IndexReport:
    """Report on one index.

    Attributes:
        name: name of its folder, or its path if two folders have the same name.
        snapshot: number of the current snapshot.
        age_s: time since the snapshot was published, in seconds.
        num_tokens: number of tokens.
        num_documents: number of documents.
        num_bytes: size on disk, in bytes.
    """

    name: str
    snapshot: int
    age_s: float
    num_tokens: int
    num_documents: int
    num_bytes: int


@dataclass(slots=True)
class Service:
    """A running service, as reports see it.

    Attributes:
        drafter: answers requests; None until it is open. Until then, all counts are zero.
        observer: counts its calls.
        began_s: start time, in seconds since 1970.
    """

    drafter: EmbeddedDrafter | None
    observer: ServiceObserver
    began_s: float

    @property
    def plugins(self) -> Sequence[DrafterPlugin]:
        """The plugins that store the drafter's data."""
        return () if self.drafter is None else self.drafter.state.plugins

    def stats(self, *, census: bool = True) -> DrafterStats:
        """Return the contents and counts of the drafter; see `EmbeddedDrafter.stats`."""
        return DrafterStats() if self.drafter is None else self.drafter.stats(census=census)


def reports_of(indexes: Sequence[Index]) -> list[IndexReport]:
    """Return the reports on the current snapshots of indexes."""
    names = Counter(index.path.name for index in indexes)
    return [_report(index, unique=names[index.path.name] == 1) for index in indexes]


def installed_version() -> str:
    """Return the installed version; `unknown` if the package was copied instead of installed."""
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
