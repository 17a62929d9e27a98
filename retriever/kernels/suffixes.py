"""Suffix arrays: occurrences of the longest ends of the context in a segment.

Arrays of a segment, as the indexer writes them: `tokens` unsigned[n] with the dtype's maximum after
each document, `suffixes` unsigned[m] positions in the order of what stands there, and `starts`
unsigned[vocabulary + 1], where in `suffixes` those that begin with each token begin.
"""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from retriever.kernels.compiling import kernel, prefetch
from retriever.kernels.layout import Found, SegmentArrays
from retriever.kernels.similarity import WINDOW, similarity_of


@kernel()
def collect_suffixes(
    segment: SegmentArrays,
    query: NDArray[np.int32],
    shortest: int,
    longest: int,
    depth: int,
    found: Found,
    row: int,
) -> tuple[int, int, int]:
    """Write continuations of the longest ends of the query, sampled evenly over occurrences.

    Occurrences stand in the order of their continuations, so that an even sample keeps the shares.

    Args:
        segment: what to search, and how.
        query: int32[q], the last tokens of the context, ids inside the vocabulary.
        shortest: shorter ends are not looked for: those of this length occur often enough in
            segments before this one; 0 in the first.
        longest: ends of the query longer than this are known not to occur.
        depth: most tokens to copy for each occurrence.
        found: rows and continuations are written from `row` on.
        row: first free row.

    Returns:
        The first free row afterwards, the length of the longest match, and what is `shortest` for
        the next segment.
    """
    tokens, suffixes, starts = segment.tokens, segment.suffixes, segment.starts
    rows, continuations, recent = found.rows, found.continuations, found.recent
    limits = segment.limits[0]
    shortest, samples, enough = max(shortest, limits.shortest), limits.samples, limits.enough
    length, longest_match = min(longest, query.shape[0]) + 1, 0
    if length <= shortest:
        return row, 0, shortest
    of_shortest = _find_end(tokens, suffixes, starts, query, shortest)
    begin, end = 0, 0
    separator = np.int64(np.iinfo(tokens.dtype).max)
    # An end that occurs no more often than a longer one occurs where that does, and adds no row.
    while of_shortest[1] - of_shortest[0] > end - begin:
        length, begin, end = _next_end(
            tokens, suffixes, starts, query, shortest, of_shortest, length, end - begin
        )
        longest_match = max(longest_match, length)
        read = min(end - begin, samples)
        _prefetch_samples(tokens, suffixes, begin, end, read)
        for sample in range(read):
            if row == rows.shape[0]:
                return row, longest_match, shortest
            position = np.int64(suffixes[begin + (end - begin) * sample // read])
            if _goes_on(tokens, position, query, length):
                continue  # it is among the occurrences of the longer end
            copied = _copy(
                tokens, position + length, starts.shape[0] - 1, depth, continuations[row]
            )
            if copied > 0:
                _write(rows[row], copied, length, limits.source, (end - begin) / read)
                rows[row].similarity = similarity_of(tokens, -1, position, 0, separator, recent)
                row += 1
        if end - begin >= enough:
            return row, longest_match, length
    return row, longest_match, shortest


@kernel(inline="always")
def _prefetch_samples(
    tokens: NDArray[Any], suffixes: NDArray[Any], begin: int, end: int, read: int
) -> None:
    """Prefetch what is read of evenly sampled occurrences, and what stands around them."""
    if read == 1:
        return
    for sample in range(read):
        prefetch(suffixes, begin + (end - begin) * sample // read)
    for sample in range(read):
        position = np.int64(suffixes[begin + (end - begin) * sample // read])
        prefetch(tokens, position - WINDOW)
        prefetch(tokens, position + WINDOW)


@kernel(inline="always")
def _find_end(
    tokens: NDArray[Any],
    suffixes: NDArray[Any],
    starts: NDArray[Any],
    query: NDArray[np.int32],
    length: int,
) -> tuple[int, int]:
    """Return the range of `suffixes` that start with the last tokens of the query."""
    return find_interval(tokens, suffixes, starts, query[query.shape[0] - length :])


@kernel()
def _next_end(
    tokens: NDArray[Any],
    suffixes: NDArray[Any],
    starts: NDArray[Any],
    query: NDArray[np.int32],
    shortest: int,
    of_shortest: tuple[int, int],
    above: int,
    count: int,
) -> tuple[int, int, int]:
    """Return the longest end of the query that occurs more than `count` times, and its range.

    Ends of `above` tokens and more do not, and that of `shortest` does, in its range. Mostly it is
    the next one; where a long match occurs once, so do many of its ends, and steps grow.
    """
    length, begin, end = shortest, *of_shortest
    step = 1
    while above - length > 1:
        probe = max(above - step, (above + length) >> 1)
        first, last = _find_end(tokens, suffixes, starts, query, probe)
        if last - first > count:
            length, begin, end = probe, first, last
        else:
            above = probe
            step *= 2
    return length, begin, end


@kernel()
def find_interval(
    tokens: NDArray[Any], suffixes: NDArray[Any], starts: NDArray[Any], pattern: NDArray[np.int32]
) -> tuple[int, int]:
    """Return the half-open range of `suffixes` that start with the pattern (int32[k], k ≥ 1)."""
    low, end = np.int64(starts[pattern[0]]), np.int64(starts[pattern[0] + 1])
    end = min(end, suffixes.shape[0])
    begin = _bisect(tokens, suffixes, pattern, low, end, 0)
    if begin >= end or _compare(tokens, np.int64(suffixes[begin]), pattern) != 0:
        return begin, begin
    width = 1  # few occurrences in a large bucket: gallop from the first one
    while begin + width < end:
        if _compare(tokens, np.int64(suffixes[begin + width]), pattern) != 0:
            break
        width *= 2
    return begin, _bisect(tokens, suffixes, pattern, begin, min(begin + width, end), 1)


@kernel(inline="always")
def _bisect(
    tokens: NDArray[Any],
    suffixes: NDArray[Any],
    pattern: NDArray[np.int32],
    low: int,
    high: int,
    bound: int,
) -> int:
    """Return the first index whose suffix compares to the pattern as `bound` or greater."""
    while low < high:
        middle = (low + high) >> 1
        if _compare(tokens, np.int64(suffixes[middle]), pattern) < bound:
            low = middle + 1
        else:
            high = middle
    return low


@kernel(inline="always")
def _compare(tokens: NDArray[Any], position: int, pattern: NDArray[np.int32]) -> int:
    """Order the suffix at `position` against the pattern: -1, 0 where it starts so, or 1."""
    for offset in range(1, pattern.shape[0]):  # the first token is equal: `starts` says so
        if position + offset >= tokens.shape[0]:
            return -1
        token, wanted = np.int64(tokens[position + offset]), np.int64(pattern[offset])
        if token != wanted:
            return -1 if token < wanted else 1
    return 0


@kernel(inline="always")
def _goes_on(tokens: NDArray[Any], position: int, query: NDArray[np.int32], length: int) -> bool:
    """Whether the match is longer than `length`: the token before it fits too."""
    if position == 0 or position > tokens.shape[0] or length >= query.shape[0]:
        return False
    return np.int64(tokens[position - 1]) == np.int64(query[query.shape[0] - length - 1])


@kernel(inline="always")
def _copy(
    tokens: NDArray[Any], begin: int, vocabulary_size: int, depth: int, out: NDArray[np.int32]
) -> int:
    """Copy tokens up to the end of the document, or to what is damaged."""
    length = 0
    while length < depth and begin + length < tokens.shape[0]:
        token = np.int64(tokens[begin + length])
        if token >= vocabulary_size:  # separators are as well
            break
        out[length] = token
        length += 1
    return length


@kernel(inline="always")
def _write(row: Any, length: int, match: int, source: int, count: float) -> None:
    row.length = length
    row.match = match
    row.source = source
    row.count = count
