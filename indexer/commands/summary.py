"""Summarises an index in numbers."""

from collections import Counter
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from indexer.format.names import FORMAT_VERSION
from indexer.format.phrase_tables import COUNT_SCALE
from indexer.format.records import ScreeningRecord
from indexer.reader import Index, Segment
from indexer.tokenizer import Vocabulary


@dataclass(frozen=True, slots=True)
class SegmentSummary:
    """A segment in numbers; see `SegmentRecord`."""

    name: str
    num_documents: int
    num_tokens: int

    def to_json(self) -> dict[str, Any]:
        """Return the summary as JSON values."""
        return {"name": self.name, "documents": self.num_documents, "tokens": self.num_tokens}


@dataclass(frozen=True, slots=True)
class Summary:
    """An index in numbers.

    Attributes:
        path: directory of the index.
        snapshot: number of the snapshot; it rises with every change.
        changed_s: time of the last change, in seconds since 1970.
        vocabulary: vocabulary of the tokenizer that the index was built with.
        num_tokens: number of tokens, without separators.
        num_documents: number of documents.
        segments: summaries of the segments.
        keeps_texts: whether the texts are stored.
        screening: what screening removed from the documents.
        licences: number of documents by licence; the key is empty for an unknown licence.
        num_bytes: size on disk.
        num_ngrams: number of entries of the phrase tables, for n-grams of 2, 3 and 4 tokens.
        min_counts: count of the rarest n-gram of 2, 3 and 4 tokens; 0 if there are none.
        num_phrase_bytes: size of the phrase tables, which is part of `num_bytes`.
        num_uncounted_tokens: number of tokens added since the phrase tables were built.
    """

    path: str
    snapshot: int
    changed_s: float
    vocabulary: Vocabulary
    num_tokens: int
    num_documents: int
    segments: tuple[SegmentSummary, ...]
    keeps_texts: bool
    screening: ScreeningRecord
    licences: dict[str, int]
    num_bytes: int
    num_ngrams: tuple[int, ...]
    min_counts: tuple[int, ...]
    num_phrase_bytes: int
    num_uncounted_tokens: int

    def to_json(self) -> dict[str, Any]:
        """Return the summary as JSON values."""
        return {
            "path": self.path,
            "format_version": FORMAT_VERSION,
            "snapshot": self.snapshot,
            "changed": self._changed(),
            "tokens": self.num_tokens,
            "documents": self.num_documents,
            "licences": self.licences,
            "keeps_texts": self.keeps_texts,
            "redacted": self.screening.redacted,
            "excluded_phrases": self.screening.excluded or None,
            "segments": [segment.to_json() for segment in self.segments],
            "bytes": self.num_bytes,
            "phrases": {
                "ngrams": list(self.num_ngrams),
                "min_counts": list(self.min_counts),
                "bytes": self.num_phrase_bytes,
                "bytes_per_token": round(self.num_phrase_bytes / self.num_tokens, 3),
                "uncounted_tokens": self.num_uncounted_tokens,
            },
            "tokenizer": self.vocabulary.name or None,
            "vocabulary_size": self.vocabulary.size,
            "fingerprint": self.vocabulary.fingerprint,
        }

    def describe(self) -> str:
        """Return the summary as text."""
        lengths = enumerate(self.num_ngrams, start=2)
        ngrams = ", ".join(f"{number:,} of {length} tokens" for length, number in lengths)
        counts = ", ".join(f"{count:,}" for count in self.min_counts)
        per_token = self.num_phrase_bytes / self.num_tokens
        licences = sorted(self.licences.items(), key=lambda item: (-item[1], item[0]))
        lines = [
            f"{self.path}: format version {FORMAT_VERSION}, snapshot {self.snapshot}",
            f"changed      {self._changed()}",
            f"documents    {self.num_documents:,}",
            *(f"  {number:>10,} {licence or 'of unknown licence'}" for licence, number in licences),
            f"texts        {'kept' if self.keeps_texts else 'not kept'}",
            f"screened     {self._screened()}",
            f"tokens       {self.num_tokens:,} in {len(self.segments)} segment(s)",
            *(
                f"  {each.name}   {each.num_tokens:,} of {each.num_documents:,} document(s)"
                for each in self.segments
            ),
            f"phrases      {ngrams}, seen at least {counts} times",
            f"             {self.num_phrase_bytes:,} bytes, {per_token:.2f} per token indexed",
            f"             {self.num_uncounted_tokens:,} tokens added since they were counted",
            f"on disk      {self.num_bytes:,} bytes",
            f"tokenizer    {self.vocabulary.name or 'of unknown name'}",
            f"vocabulary   {self.vocabulary.size:,} tokens",
            f"fingerprint  {self.vocabulary.fingerprint}",
        ]
        return "\n".join(lines)

    def _screened(self) -> str:
        parts = ["secrets are replaced"] if self.screening.redacted else []
        parts += ["a list of phrases is left out"] if self.screening.excluded else []
        return ", ".join(parts) or "no"

    def _changed(self) -> str:
        """Return the time of the last change in ISO 8601, in the local time zone."""
        return (
            datetime.fromtimestamp(self.changed_s, UTC).astimezone().isoformat(timespec="seconds")
        )


def summarise(path: Path | str) -> Summary:
    """Open an index and summarise its contents.

    Raises:
        IndexNotFoundError: there is no index.
        DamagedIndexError: opening finds damage, or a document's licence is invalid.
        FormatVersionError: the index has another format.
    """
    with Index.open(path) as index:
        return Summary(
            path=str(path),
            snapshot=index.number,
            changed_s=index.published_s,
            vocabulary=index.vocabulary,
            num_tokens=index.num_tokens,
            num_documents=index.num_documents,
            segments=tuple(_segment(segment) for segment in index.segments),
            keeps_texts=index.keeps_texts,
            screening=index.screening,
            licences=_licences(index),
            num_bytes=index.num_bytes,
            num_ngrams=index.phrases.num_entries[1:],
            min_counts=tuple(_min_count(counts) for counts in index.phrases.counts[1:]),
            num_phrase_bytes=index.phrases.num_bytes,
            num_uncounted_tokens=index.num_uncounted_tokens,
        )


def _segment(segment: Segment) -> SegmentSummary:
    return SegmentSummary(segment.name, len(segment.documents), len(segment.suffixes))


def _licences(index: Index) -> dict[str, int]:
    counted: Counter[str] = Counter()
    for segment in index.segments:
        counted.update(segment.documents.count_licences())
    return dict(sorted(counted.items()))


def _min_count(codes: NDArray[np.uint8]) -> int:
    return int(COUNT_SCALE[codes.min()]) if len(codes) else 0
