"""Screening what gets into an index, as the plugin `screening` does it: what a build asks of it."""

from pathlib import Path
from typing import Any, Final, Protocol

from indexer.build_report import ScreenTally
from indexer.format.records import NOT_SCREENED, ScreeningRecord
from indexer.launch import plugged

EXCLUDED: Final = "excluded phrase"

SCREENING: Final = "indexer.plugins.screening.screen"


class Screener(Protocol):
    """Screens documents one by one."""

    def screen(self, name: str, text: str, licence: str) -> tuple[str, str, str] | None:
        """Return name, text and licence as they may be indexed; None if the document may not."""
        ...

    def take_tally(self) -> ScreenTally:
        """Return the counts since the last call, and start new ones."""
        ...


class Screening(Protocol):
    """What is screened for; can be pickled and hashed."""

    @property
    def record(self) -> ScreeningRecord:
        """What an index of documents that were so screened says of itself; no phrase is in it."""
        ...

    @property
    def key(self) -> str:
        """A checksum of all that a result depends on."""
        ...

    def at_least(self, before: ScreeningRecord, index: Path) -> "Screening":
        """Return it with what the documents of an index were screened for before.

        Raises:
            IndexerError: a list of phrases was left out before, and is not named.
        """
        ...

    def screener(self) -> Screener:
        """Return what screens in this process."""
        ...


def screened_as(before: ScreeningRecord, asked: Screening | None, index: Path) -> Screening | None:
    """Return how documents of an index are screened: as those that were there before, at least.

    Args:
        before: of these.
        asked: of those that come.
        index: its folder, for messages.

    Raises:
        MissingPluginError: documents were screened before, and the plugin is not there.
        IndexerError: a list of phrases was left out before, and is not named.
    """
    if before == NOT_SCREENED:
        return asked
    if asked is None:
        found: Any = plugged(SCREENING, f"{index}, whose documents are screened,").ScreenOptions()
        asked = found
    return asked.at_least(before, index)


def record_of(screen: Screening | None) -> ScreeningRecord:
    """Return what an index says of its screening."""
    return NOT_SCREENED if screen is None else screen.record
