"""What an index holds, in numbers."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

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
    """

    path: str
    vocabulary: Vocabulary
    num_tokens: int
    num_documents: int
    num_segments: int
    num_bytes: int

    def to_json(self) -> dict[str, Any]:
        """Return the summary for machines to read."""
        return {
            "path": self.path,
            "format_version": FORMAT_VERSION,
            "tokens": self.num_tokens,
            "documents": self.num_documents,
            "segments": self.num_segments,
            "bytes": self.num_bytes,
            "vocabulary_size": self.vocabulary.size,
            "fingerprint": self.vocabulary.fingerprint,
        }

    def describe(self) -> str:
        """Return the summary for people to read."""
        lines = [
            f"{self.path}: format version {FORMAT_VERSION}",
            f"documents    {self.num_documents:,}",
            f"tokens       {self.num_tokens:,} in {self.num_segments} segment(s)",
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
        FormatVersionError: the index is of a newer format.
    """
    with Index.open(path) as index:
        return Summary(
            path=str(path),
            vocabulary=index.vocabulary,
            num_tokens=index.num_tokens,
            num_documents=index.num_documents,
            num_segments=len(index.segments),
            num_bytes=index.num_bytes,
        )
