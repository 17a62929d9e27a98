"""Screens a document: excluded phrases remove it or its lines, and secrets are replaced."""

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
    """What is excluded because of a listed phrase."""

    DOCUMENT = "document"
    LINE = "line"


@dataclass(frozen=True, slots=True)
class ScreenOptions:
    """The phrases and secrets to screen for. It can be pickled, with its phrases.

    Attributes:
        phrases: phrases; documents or lines that contain one are left out.
        scope: whether whole documents or only lines are left out. A document whose name or licence
            contains a phrase is left out in either case.
        ignore_case: whether to ignore upper and lower case of phrases.
        redact: whether to replace secrets with a placeholder.
    """

    phrases: ExcludedPhrases | None = None
    scope: ExcludeScope = ExcludeScope.DOCUMENT
    ignore_case: bool = False
    redact: bool = False

    @property
    def record(self) -> ScreeningRecord:
        """The record of this screening in an index. It contains no phrase."""
        if self.phrases is None:
            return ScreeningRecord(self.redact)
        how = [*sorted(self.phrases.texts), str(self.scope), str(self.ignore_case)]
        return ScreeningRecord(self.redact, checksum_of("\n".join(how).encode()))

    @property
    def key(self) -> str:
        """A checksum of everything that a result depends on, including phrases' line numbers."""
        lines = () if self.phrases is None else (self.phrases.texts, self.phrases.lines)
        return checksum_of(repr((self.record, lines)).encode())

    def at_least(self, before: ScreeningRecord, index: Path) -> "ScreenOptions":
        """Return the options, extended by the screening that an index already has.

        Raises:
            IndexerError: the index was screened with a list of phrases, but no list is given now.
        """
        if before.excluded and self.record.excluded != before.excluded:
            raise IndexerError(
                f"{index} was built with a list of excluded phrases: give the same "
                "--exclude-phrases, --exclude-scope and --exclude-ignore-case, or use another "
                "folder"
            )
        if before.redacted and not self.redact:
            _log.info("%s was built with --redact, so new documents are redacted, too", index)
            return replace(self, redact=True)
        return self

    def screener(self) -> "Screen":
        """Return the screener of this process. It is cached, because creating it takes seconds.

        Raises:
            IndexerError: secrets should be redacted, but the library for this is not installed.
        """
        return _screen(self)


def screening_of(
    path: Path | None, scope: str, *, ignore_case: bool, redact: bool
) -> ScreenOptions:
    """Return the screening that a command's options define.

    Raises:
        IndexerError: the phrase file cannot be read.
    """
    phrases = None if path is None else ExcludedPhrases.load(path)
    return ScreenOptions(phrases, ExcludeScope(scope), ignore_case, redact)


class Screened(NamedTuple):
    """A document in the form that may be indexed."""

    name: str
    text: str
    licence: str = ""


@lru_cache(maxsize=1)
def _screen(options: ScreenOptions) -> "Screen":
    return Screen(options)


class Screen:
    """Screens documents one by one. Created once per process, because that takes seconds.

    Args:
        options: the phrases and secrets to screen for.

    Attributes:
        tally: counts of what was removed so far.

    Raises:
        IndexerError: secrets should be redacted, but the library for this is not installed.
    """

    def __init__(self, options: ScreenOptions) -> None:
        self._phrases: PhraseFinder | None = None
        if options.phrases is not None:
            self._phrases = PhraseFinder(options.phrases, ignore_case=options.ignore_case)
        self._by_line = options.scope is ExcludeScope.LINE
        self._secrets = SecretFinder() if options.redact else None
        self.tally = ScreenTally()

    def take_tally(self) -> ScreenTally:
        """Return the counts since the last call, and reset them."""
        taken, self.tally = self.tally, ScreenTally()
        return taken

    def screen(self, name: str, text: str, licence: str = "") -> Screened | None:
        """Return the document without excluded lines and secrets; None if it must be left out.

        Phrases are searched before and after secrets are replaced, so the result contains none.
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
        """Return the text that may be indexed, given the phrases found so far; None for none."""
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
