"""The interface between a build and the `screening` plugin, which screens documents."""

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
        """Return the screened name, text and licence, or None if the document is excluded."""
        ...

    def take_tally(self) -> ScreenTally:
        """Return the counts since the last call, and reset them."""
        ...


class Screening(Protocol):
    """Options for screening; can be pickled and hashed."""

    @property
    def record(self) -> ScreeningRecord:
        """The record of this screening in an index. It contains no phrase."""
        ...

    @property
    def key(self) -> str:
        """A checksum of everything that a screening result depends on."""
        ...

    def at_least(self, before: ScreeningRecord, index: Path) -> "Screening":
        """Return the options, extended by the screening that an index already has.

        Raises:
            IndexerError: the index was screened with a list of phrases, but no list is given now.
        """
        ...

    def screener(self) -> Screener:
        """Return the screener of this process."""
        ...


def screened_as(before: ScreeningRecord, asked: Screening | None, index: Path) -> Screening | None:
    """Return the screening for new documents, at least as strict as for the existing ones.

    Args:
        before: screening of the existing documents.
        asked: requested screening of new documents.
        index: folder of the index, for messages.

    Raises:
        MissingPluginError: the existing documents were screened, but the plugin is not installed.
        IndexerError: the index was screened with a list of phrases, but no list is given now.
    """
    if before == NOT_SCREENED:
        return asked
    if asked is None:
        found: Any = plugged(SCREENING, f"{index}, whose documents are screened,").ScreenOptions()
        asked = found
    return asked.at_least(before, index)


def record_of(screen: Screening | None) -> ScreeningRecord:
    """Return the record of a screening in an index."""
    return NOT_SCREENED if screen is None else screen.record
