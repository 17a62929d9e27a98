"""What an index holds, in numbers."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from indexer.counts import COUNT_SCALE
from indexer.format import FORMAT_VERSION
from indexer.reader import Index
from indexer.tokenizer import Vocabulary


@dataclass(frozen=True, slots=True)
class Summary:
    """An index in numbers.

    Attributes:
        path: the index's directory.
        vocabulary: of the tokenizer that it was built with.
        num_tokens: tokens, separators not counted.
        num_documents: documents.
        num_segments: segments.
        num_bytes: size on disk.
        num_ngrams: entries of the phrase tables, of n-grams of 2, 3 and 4 tokens.
        min_counts: of each of these, how often the rarest occurs; 0 if there are none.
        num_phrase_bytes: size of the phrase tables, part of `num_bytes`.
    """

    path: str
    vocabulary: Vocabulary
    num_tokens: int
    num_documents: int
    num_segments: int
    num_bytes: int
    num_ngrams: tuple[int, ...]
    min_counts: tuple[int, ...]
    num_phrase_bytes: int

    def to_json(self) -> dict[str, Any]:
        """Return the summary for machines to read."""
        return {
            "path": self.path,
            "format_version": FORMAT_VERSION,
            "tokens": self.num_tokens,
            "documents": self.num_documents,
            "segments": self.num_segments,
            "bytes": self.num_bytes,
            "phrases": {
                "ngrams": list(self.num_ngrams),
                "min_counts": list(self.min_counts),
                "bytes": self.num_phrase_bytes,
                "bytes_per_token": round(self.num_phrase_bytes / self.num_tokens, 3),
            },
            "vocabulary_size": self.vocabulary.size,
            "fingerprint": self.vocabulary.fingerprint,
        }

    def describe(self) -> str:
        """Return the summary for people to read."""
        lengths = enumerate(self.num_ngrams, start=2)
        ngrams = ", ".join(f"{number:,} of {length} tokens" for length, number in lengths)
        counts = ", ".join(f"{count:,}" for count in self.min_counts)
        per_token = self.num_phrase_bytes / self.num_tokens
        lines = [
            f"{self.path}: format version {FORMAT_VERSION}",
            f"documents    {self.num_documents:,}",
            f"tokens       {self.num_tokens:,} in {self.num_segments} segment(s)",
            f"phrases      {ngrams}, seen at least {counts} times",
            f"             {self.num_phrase_bytes:,} bytes, {per_token:.2f} per token indexed",
            f"on disk      {self.num_bytes:,} bytes",
            f"vocabulary   {self.vocabulary.size:,} tokens",
            f"fingerprint  {self.vocabulary.fingerprint}",
        ]
        return "\n".join(lines)


def summarise(path: Path | str) -> Summary:
    """Open an index and count what it holds.

    Raises:
        IndexNotFoundError: there is no index.
        DamagedIndexError: the index is damaged as far as opening checks.
        FormatVersionError: the index is of another format.
    """
    with Index.open(path) as index:
        return Summary(
            path=str(path),
            vocabulary=index.vocabulary,
            num_tokens=index.num_tokens,
            num_documents=index.num_documents,
            num_segments=len(index.segments),
            num_bytes=index.num_bytes,
            num_ngrams=index.phrases.num_entries[1:],
            min_counts=tuple(_min_count(counts) for counts in index.phrases.counts[1:]),
            num_phrase_bytes=index.phrases.num_bytes,
        )


def _min_count(codes: NDArray[np.uint8]) -> int:
    return int(COUNT_SCALE[codes.min()]) if len(codes) else 0
