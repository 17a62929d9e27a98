"""Where n-grams stand in indexed documents: for questions that can wait, not for drafts."""

from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Sequence
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from indexer.errors import IndexerError
from indexer.reader import Index, Segment
from retriever.errors import ProvenanceError
from retriever.explanation import DocumentOccurrence

_LOOKS_PER_DOCUMENT: Final = 8
"""Occurrences to look at for each document that is wanted: many may stand in one."""


def find_ngram(segment: Segment, ngram: Sequence[int]) -> NDArray[Any]:
    """Return unsigned[n], where in a segment an n-gram begins, in the order of what follows it.

    Bisects the suffix array. What a damaged disk says is not read beyond the arrays.

    Args:
        segment: where to look.
        ngram: token ids, at least one.
    """
    wanted = list(ngram)
    tokens, suffixes, starts = segment.tokens, segment.suffixes, segment.starts
    if not 0 <= wanted[0] < len(starts) - 1:
        return suffixes[:0]

    def beginning(place: int) -> list[int]:
        position = int(suffixes[place])
        words: list[int] = tokens[position : position + len(wanted)].tolist()
        return words

    low, high = int(starts[wanted[0]]), min(int(starts[wanted[0] + 1]), len(suffixes))
    begin = bisect_left(range(high), wanted, low, high, key=beginning)
    end = bisect_right(range(high), wanted, begin, high, key=beginning)
    return suffixes[begin:end]


def count_and_locate(
    indexes: Sequence[Index], ngram: Sequence[int], max_documents: int
) -> tuple[int, tuple[DocumentOccurrence, ...]]:
    """Return how often an n-gram occurs, and documents that it occurs in.

    Args:
        indexes: where to look.
        ngram: token ids, at least one; places are given of the last.
        max_documents: most documents to name, a first occurrence in each; taken evenly from all
            occurrences in a segment.

    Raises:
        ProvenanceError: an index is damaged or closed.
    """
    count = 0
    found: dict[tuple[str, str, int], DocumentOccurrence] = {}
    for index in indexes:
        for number, segment in enumerate(index.segments):
            begins = find_ngram(segment, ngram)
            count += len(begins)
            for key, occurrence in _documents(index, number, begins, ngram, max_documents):
                if len(found) < max_documents:
                    found.setdefault(key, occurrence)
    return count, tuple(found.values())


def _documents(
    index: Index, number: int, begins: NDArray[Any], ngram: Sequence[int], max_documents: int
) -> Iterator[tuple[tuple[str, str, int], DocumentOccurrence]]:
    """Yield documents of a segment that hold the n-gram, some of them again and again."""
    segment = index.segments[number]
    looks = min(len(begins), _LOOKS_PER_DOCUMENT * max_documents)
    for look in range(looks):
        begin = int(begins[len(begins) * look // looks])
        if not np.array_equal(segment.tokens[begin : begin + len(ngram)], ngram):
            continue  # damaged
        last = begin + len(ngram) - 1
        try:
            document = index.document_at(number, last)
        except (IndexerError, ValueError) as error:
            raise ProvenanceError(f"where a token stands cannot be told: {error}") from error
        place = last - document.start
        yield (
            (str(index.path), segment.name, document.start),
            DocumentOccurrence(index.path.name, document.name, document.licence, place),
        )
