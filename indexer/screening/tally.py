"""What screening took out, and why: counts that several processes keep and one adds up."""

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

_MAX_PLACES: Final = 3
_LINES: Final = "lines with an excluded phrase"
_DOCUMENTS: Final = "documents with an excluded phrase"


@dataclass(slots=True)
class ScreenTally:
    """Counts by reason; no text of a document, a phrase or a secret is in it.

    Attributes:
        num_documents: documents left out.
        num_lines: lines left out of documents that stayed.
        num_redacted: documents in which a secret was replaced, in the text, name or licence.
        documents_by_phrase: documents left out, by the phrase's line in its file. A document that
            holds several phrases counts for each.
        lines_by_phrase: lines left out, likewise.
        secrets: places replaced, by kind.
        places: by reason, names of the first documents, at most three, as screened.
    """

    num_documents: int = 0
    num_lines: int = 0
    num_redacted: int = 0
    documents_by_phrase: Counter[int] = field(default_factory=Counter)
    lines_by_phrase: Counter[int] = field(default_factory=Counter)
    secrets: Counter[str] = field(default_factory=Counter)
    places: dict[str, list[str]] = field(default_factory=dict)

    def exclude_document(self, phrases: Iterable[int], place: str) -> None:
        """Count a document that is left out for the phrases."""
        self.num_documents += 1
        self.documents_by_phrase.update(set(phrases))
        self._keep(_DOCUMENTS, place)

    def exclude_lines(self, phrases: Iterable[Iterable[int]], place: str) -> None:
        """Count lines that are left out of a document, each for its phrases."""
        for of_line in phrases:
            self.num_lines += 1
            self.lines_by_phrase.update(of_line)
            self._keep(_LINES, place)

    def redact(self, kinds: Iterable[str], place: str) -> None:
        """Count secrets that are replaced in a document, by kind."""
        found = Counter(kinds)
        self.num_redacted += bool(found)
        self.secrets += found
        for kind in found:
            self._keep(kind, place)

    def add(self, other: "ScreenTally") -> None:
        """Add what another process, or an earlier part, counted."""
        self.num_documents += other.num_documents
        self.num_lines += other.num_lines
        self.num_redacted += other.num_redacted
        self.documents_by_phrase += other.documents_by_phrase
        self.lines_by_phrase += other.lines_by_phrase
        self.secrets += other.secrets
        for reason, places in other.places.items():
            for place in places:
                self._keep(reason, place)

    def to_json(self) -> dict[str, Any]:
        """Return the counts for machines to read; phrases are lines of their file, from 1."""
        return {
            "documents_excluded": self.num_documents,
            "lines_excluded": self.num_lines,
            "documents_redacted": self.num_redacted,
            "documents_by_phrase": _ordered(self.documents_by_phrase),
            "lines_by_phrase": _ordered(self.lines_by_phrase),
            "secrets": dict(sorted(self.secrets.items())),
            "places": dict(sorted(self.places.items())),
        }

    def describe(self) -> str:
        """Return the counts for people to read, in one line."""
        documents = _by_phrase(self.documents_by_phrase)
        lines = _by_phrase(self.lines_by_phrase)
        kinds = ", ".join(f"{count} {kind}" for kind, count in self.secrets.most_common())
        parts = [
            f"{self.num_documents} documents left out{documents}{self._first(_DOCUMENTS)}",
            f"{self.num_lines} lines left out{lines}{self._first(_LINES)}",
            f"{self.secrets.total()} secrets redacted in {self.num_redacted} documents"
            + (f" ({kinds})" if kinds else ""),
        ]
        return "; ".join(parts)

    def _keep(self, reason: str, place: str) -> None:
        places = self.places.setdefault(reason, [])
        if len(places) < _MAX_PLACES and place not in places:
            places.append(place)

    def _first(self, reason: str) -> str:
        return f" (first: {self.places[reason][0]})" if reason in self.places else ""


def _ordered(counts: Mapping[int, int]) -> dict[str, int]:
    return {str(line): counts[line] for line in sorted(counts)}


def _by_phrase(counts: Counter[int]) -> str:
    """Return which lines of the list were found most often."""
    shown = [f"line {line}: {count}" for line, count in counts.most_common(_MAX_PLACES)]
    more = [f"{len(counts) - _MAX_PLACES} more"] if len(counts) > _MAX_PLACES else []
    return f" by the list's {', '.join(shown + more)}" if shown else ""
