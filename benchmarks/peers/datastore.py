"""Tokens to look up by suffix array: the segments of indexes, and outputs in memory."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
from numba import njit
from numpy.typing import NDArray

from indexer.reader import Index
from indexer.suffixes import sort_suffixes
from retriever.drafter import TokenIds

END: Final = -1
"""Stands in a continuation where its document has ended."""

_SEPARATOR: Final = np.uint32(np.iinfo(np.uint32).max)


@dataclass(frozen=True, slots=True)
class SortedText:
    """Documents, each ended by the largest value of the dtype, with the order of their suffixes.

    Attributes:
        tokens: unsigned[n].
        suffixes: uint32[m], positions in the lexicographic order of what stands there.
    """

    tokens: NDArray[Any]
    suffixes: NDArray[np.uint32]


class Datastore:
    """Indexes and outputs in one; the outputs of finished sequences may join.

    Args:
        indexes: open indexes.
        outputs: int32[n] each.
    """

    def __init__(self, indexes: Sequence[Index], outputs: Sequence[TokenIds]) -> None:
        self._fixed = [sorted_text(outputs), *texts_of(indexes)]
        self._finished: list[TokenIds] = []
        self.texts = self._fixed

    def remember(self, output: TokenIds) -> None:
        """Add int32[n]; all that was added since the beginning is sorted anew."""
        self._finished.append(output.copy())
        self.texts = [sorted_text(self._finished), *self._fixed]


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
    return int(_longest(text.tokens, text.suffixes, query))


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


def continuations(
    text: SortedText, begin: int, end: int, skip: int, depth: int, limit: int
) -> NDArray[np.int32]:
    """Return int32[rows, depth], what follows a match, in lexicographic order, `END` after an end.

    Args:
        text: where the match is.
        begin: first suffix of the match.
        end: after its last.
        skip: length of the match.
        depth: tokens of each row.
        limit: most rows; of more occurrences an even sample is read.
    """
    rows = np.empty((min(end - begin, limit), depth), np.int32)
    _read(text.tokens, text.suffixes, begin, end, skip, rows)
    return rows


@njit(cache=True, nogil=True)
def _longest(tokens: NDArray[Any], suffixes: NDArray[Any], query: NDArray[Any]) -> int:
    """Bisect on the length: where an end occurs, every shorter one does."""
    low, high = 0, len(query)
    while low < high:
        middle = (low + high + 1) >> 1
        begin, end = find_range(tokens, suffixes, query[len(query) - middle :])
        if begin < end:
            low = middle
        else:
            high = middle - 1
    return low


@njit(cache=True, nogil=True)
def find_range(
    tokens: NDArray[Any], suffixes: NDArray[Any], pattern: NDArray[Any]
) -> tuple[int, int]:
    """Return the half-open range of suffixes that begin with the pattern."""
    begin = _bisect(tokens, suffixes, pattern, 0, len(suffixes), 0)
    end = _bisect(tokens, suffixes, pattern, begin, len(suffixes), 1)
    return begin, end


@njit(cache=True, nogil=True)
def _bisect(
    tokens: NDArray[Any],
    suffixes: NDArray[Any],
    pattern: NDArray[Any],
    low: int,
    high: int,
    bound: int,
) -> int:
    """Return the first suffix that compares to the pattern as `bound` or greater."""
    while low < high:
        middle = (low + high) >> 1
        if _compare(tokens, np.int64(suffixes[middle]), pattern) < bound:
            low = middle + 1
        else:
            high = middle
    return low


@njit(cache=True, nogil=True)
def _compare(tokens: NDArray[Any], position: int, pattern: NDArray[Any]) -> int:
    """Order a suffix against a pattern: -1, 0 where it begins so, or 1."""
    for offset in range(len(pattern)):
        if position + offset >= len(tokens):
            return -1
        token, wanted = np.int64(tokens[position + offset]), np.int64(pattern[offset])
        if token != wanted:
            return -1 if token < wanted else 1
    return 0


@njit(cache=True, nogil=True)
def _read(
    tokens: NDArray[Any],
    suffixes: NDArray[Any],
    begin: int,
    end: int,
    skip: int,
    rows: NDArray[Any],
) -> None:
    separator = np.int64(np.iinfo(tokens.dtype).max)
    rows[:] = -1
    for row in range(len(rows)):
        position = np.int64(suffixes[begin + (end - begin) * row // len(rows)]) + skip
        for offset in range(rows.shape[1]):
            if position + offset >= len(tokens) or np.int64(tokens[position + offset]) == separator:
                break
            rows[row, offset] = tokens[position + offset]
