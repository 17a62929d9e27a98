"""Screening one document: excluded phrases keep it out, or lines of it; secrets are replaced."""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from enum import StrEnum
from functools import lru_cache
from logging import getLogger
from pathlib import Path
from typing import Final, NamedTuple

from indexer.build_report import ScreenTally
from indexer.errors import IndexerError
from indexer.format.records import ScreeningRecord, checksum_of
from indexer.plugins.screening.exclusion import ExcludedPhrases, Hits, PhraseFinder, spans_of
from indexer.plugins.screening.redaction import Secret, SecretFinder, redacted

_log = getLogger(__name__)

WITHHELD: Final = "(a name with an excluded phrase)"


class ExcludeScope(StrEnum):
    """The part that is left out for a listed phrase."""

    DOCUMENT = "document"
    LINE = "line"


@dataclass(frozen=True, slots=True)
class ScreenOptions:
    """The phrases and secrets to screen for; can be pickled, phrases included.

    Attributes:
        phrases: documents or lines that hold one of them are left out.
        scope: whether whole documents are left out, or lines. A document whose name or licence
            holds a phrase is left out in either case.
        ignore_case: phrases are found in upper and lower case.
        redact: secrets are replaced by a placeholder.
    """

    phrases: ExcludedPhrases | None = None
    scope: ExcludeScope = ExcludeScope.DOCUMENT
    ignore_case: bool = False
    redact: bool = False

    @property
    def record(self) -> ScreeningRecord:
        """What an index of documents that were so screened says of itself; no phrase is in it."""
        if self.phrases is None:
            return ScreeningRecord(self.redact)
        how = [*sorted(self.phrases.texts), str(self.scope), str(self.ignore_case)]
        return ScreeningRecord(self.redact, checksum_of("\n".join(how).encode()))

    @property
    def key(self) -> str:
        """A checksum of all that a result depends on: of phrases their lines, too."""
        lines = () if self.phrases is None else (self.phrases.texts, self.phrases.lines)
        return checksum_of(repr((self.record, lines)).encode())

    def at_least(self, before: ScreeningRecord, index: Path) -> "ScreenOptions":
        """Return it with what the documents of an index were screened for before.

        Raises:
            IndexerError: a list of phrases was left out before, and is not named.
        """
        if before.excluded and self.record.excluded != before.excluded:
            raise IndexerError(
                f"{index} was built without what a list of phrases names: give the same "
                "--exclude-phrases, --exclude-scope and --exclude-ignore-case, or use another "
                "folder"
            )
        if before.redacted and not self.redact:
            _log.info("%s was built with --redact, so new documents are redacted, too", index)
            return replace(self, redact=True)
        return self

    def screener(self) -> "Screen":
        """Return what screens in this process: making it takes seconds, so it is kept.

        Raises:
            IndexerError: secrets are to be redacted, and the library for it is not installed.
        """
        return _screen(self)


def screening_of(
    path: Path | None, scope: str, *, ignore_case: bool, redact: bool
) -> ScreenOptions:
    """Return what options of a command say.

    Raises:
        IndexerError: the file of phrases cannot be read.
    """
    phrases = None if path is None else ExcludedPhrases.load(path)
    return ScreenOptions(phrases, ExcludeScope(scope), ignore_case, redact)


class Screened(NamedTuple):
    """A document as it may be indexed."""

    name: str
    text: str
    licence: str = ""


@lru_cache(maxsize=1)
def _screen(options: ScreenOptions) -> "Screen":
    return Screen(options)


class Screen:
    """Screens documents one by one; made once per process, for making it takes seconds.

    Args:
        options: the phrases and secrets to screen for.

    Attributes:
        tally: counts of what was removed so far.

    Raises:
        IndexerError: secrets are to be redacted, and the library for it is not installed.
    """

    def __init__(self, options: ScreenOptions) -> None:
        self._phrases: PhraseFinder | None = None
        if options.phrases is not None:
            self._phrases = PhraseFinder(options.phrases, ignore_case=options.ignore_case)
        self._by_line = options.scope is ExcludeScope.LINE
        self._secrets = SecretFinder() if options.redact else None
        self.tally = ScreenTally()

    def take_tally(self) -> ScreenTally:
        """Return the counts since the last call, and start new ones."""
        taken, self.tally = self.tally, ScreenTally()
        return taken

    def screen(self, name: str, text: str, licence: str = "") -> Screened | None:
        """Return the document without excluded lines and secrets; None if it must be left out.

        Phrases are searched before and again after secrets are replaced, so that the result holds
        none.
        """
        found = [*self._excluded(name), *self._excluded(licence)]
        secrets = [self._redactable(name), self._redactable(licence), self._redactable(text)]
        shown_name, shown_licence = redacted(name, secrets[0]), redacted(licence, secrets[1])
        found += [*self._excluded(shown_name), *self._excluded(shown_licence)]
        place = WITHHELD if found else shown_name
        kept = self._kept(text, secrets[2], found, place)
        if kept is None:
            return None
        self.tally.redact((secret.kind for of_part in secrets for secret in of_part), place)
        return Screened(shown_name, kept, shown_licence)

    def _kept(
        self, text: str, secrets: list[Secret], found: Iterable[int], place: str
    ) -> str | None:
        """Return the text that may stay, given phrases found before; None if none of it may."""
        rounds = (secrets, []) if secrets else (secrets,)
        excluded = set(found)
        lines: list[set[int]] = []
        for in_round in rounds:
            hits = self._hits(text)
            lines += hits.values()
            if not self._by_line:
                excluded.update(*hits.values())
            text = redacted(text, in_round, spans_of(text, hits))
        if excluded:
            self.tally.exclude_document(excluded, place)
            return None
        self.tally.exclude_lines(lines, place)
        return text

    def _hits(self, text: str) -> Hits:
        return self._phrases.find(text) if self._phrases is not None else {}

    def _excluded(self, label: str) -> set[int]:
        return set().union(*self._hits(label).values())

    def _redactable(self, text: str) -> list[Secret]:
        return self._secrets.find(text) if self._secrets is not None else []
