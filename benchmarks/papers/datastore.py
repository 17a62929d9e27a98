"""Tokens to look up by suffix array: the segments of indexes, and outputs in memory."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from benchmarks.papers.kernels.suffix_search import find_range, longest_end, read_rows
from indexer.reader import Index
from indexer.stages.segments import sort_suffixes
from retriever.drafter import TokenIds

END: Final = -1
"""Stands in a continuation where its document has ended."""

_SEPARATOR: Final = np.uint32(np.iinfo(np.uint32).max)


@dataclass(frozen=True, slots=True)
class SortedText:
    """Documents, each ended by the largest value of the dtype, with the order of their suffixes.

    Attributes:
        tokens: unsigned[n].
        suffixes: uint32[m], positions in the lexicographic order of what stands there; or
            uint8[m, bytes], the same packed, little-endian.
    """

    tokens: NDArray[Any]
    suffixes: NDArray[Any]

    @property
    def num_bytes(self) -> int:
        """Size of both."""
        return self.tokens.nbytes + self.suffixes.nbytes

    def packed(self, num_bytes: int) -> "SortedText":
        """Return the same with positions in so many bytes each."""
        wide = self.suffixes.astype("<u8").view(np.uint8).reshape(-1, 8)
        return SortedText(self.tokens, np.ascontiguousarray(wide[:, :num_bytes]))


class Datastore:
    """Indexes and outputs in one; the outputs of finished sequences may join.

    Args:
        indexes: open indexes.
        outputs: int32[n] each.
        pointer_bytes: bytes that each position is packed into; None to leave them in four.
    """

    def __init__(
        self,
        indexes: Sequence[Index],
        outputs: Sequence[TokenIds],
        pointer_bytes: int | None = None,
    ) -> None:
        self._pointer_bytes = pointer_bytes
        self._fixed = [*map(self._laid_out, (sorted_text(outputs), *texts_of(indexes)))]
        self._finished: list[TokenIds] = []
        self.texts = self._fixed

    def remember(self, output: TokenIds) -> None:
        """Add int32[n]; sorts all added tokens again."""
        self._finished.append(output.copy())
        self.texts = [self._laid_out(sorted_text(self._finished)), *self._fixed]

    def _laid_out(self, text: SortedText) -> SortedText:
        return text if self._pointer_bytes is None else text.packed(self._pointer_bytes)


def texts_of(indexes: Sequence[Index]) -> list[SortedText]:
    """Return the segments of indexes."""
    return [SortedText(part.tokens, part.suffixes) for index in indexes for part in index.segments]


def sorted_text(outputs: Iterable[TokenIds]) -> SortedText:
    """Sort the suffixes of outputs, int32[n] each."""
    pieces = [np.append(output.astype(np.uint32), _SEPARATOR) for output in outputs]
    tokens = np.concatenate(pieces) if pieces else np.empty(0, np.uint32)
    return SortedText(tokens, sort_suffixes(tokens))


def longest_match(text: SortedText, query: TokenIds) -> int:
    """Return how many of the last tokens of the query, int32[q], occur together."""
    return int(longest_end(text.tokens, text.suffixes, query))


def occurrences(text: SortedText, pattern: TokenIds) -> tuple[int, int]:
    """Return the half-open range of `suffixes` that begin with the pattern, int32[k]."""
    begin, end = find_range(text.tokens, text.suffixes, pattern)
    return int(begin), int(end)


def first_occurrence(text: SortedText, pattern: TokenIds) -> int:
    """Return where a pattern that occurs, int32[k], occurs first."""
    begin, end = occurrences(text, pattern)
    return int(text.suffixes[begin:end].min())


def continuation(text: SortedText, begin: int, length: int) -> TokenIds:
    """Return int32[n], the tokens from a position on, at most `length`, to their document's end."""
    tokens = text.tokens[begin : begin + length]
    ends = np.flatnonzero(tokens == np.iinfo(tokens.dtype).max)
    return tokens[: ends[0] if len(ends) else len(tokens)].astype(np.int32)


def continuations(text: SortedText, pattern: TokenIds, depth: int, limit: int) -> NDArray[np.int32]:
    """Return int32[rows, depth], what follows a pattern, in lexicographic order.

    Args:
        text: where to look.
        pattern: int32[k].
        depth: tokens of each row; `END` stands where the document has ended.
        limit: most rows; of more occurrences an even sample is read.
    """
    begin, end = occurrences(text, pattern)
    rows = np.empty((min(end - begin, limit), depth), np.int32)
    read_rows(text.tokens, text.suffixes, begin, end, len(pattern), rows)
    return rows
