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
    def plugins(self) -> Sequence[DrafterPlugin]:
        """What else keeps data of the drafter."""
        return () if self.drafter is None else self.drafter.state.plugins

    def stats(self, *, census: bool = True) -> DrafterStats:
        """Return what the drafter holds and has counted; see `EmbeddedDrafter.stats`."""
        return DrafterStats() if self.drafter is None else self.drafter.stats(census=census)


def reports_of(indexes: Sequence[Index]) -> list[IndexReport]:
    """Return what is reported of indexes in their snapshots."""
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
