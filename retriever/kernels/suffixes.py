"""Suffix arrays: occurrences of the longest ends of the context in a segment.

Arrays of a segment, as the indexer writes them: `tokens` unsigned[n] with the dtype's maximum after
each document, `suffixes` unsigned[m] positions in the order of what stands there, and `starts`
unsigned[vocabulary + 1], where in `suffixes` those that begin with each token begin.
"""

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from retriever.kernels.compiling import kernel, prefetch
from retriever.kernels.layout import FEW, Found, SegmentArrays
from retriever.kernels.similarity import WINDOW, similarity_of


class Interval(NamedTuple):
    """The occurrences of an end of the query.

    Attributes:
        length: of the end, in tokens.
        begin: the first one's place in `suffixes`.
        end: the place after the last one.
    """

    length: int
    begin: int
    end: int


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
    What occurs often is bisected; longer ends occur where it does, and there in the same order.

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
    shortest, longest = max(shortest, segment.limits[0].shortest), min(longest, query.shape[0])
    if longest < shortest:
        return row, 0, shortest
    often, seldom = _find_ends(segment, query, shortest, longest)
    if often.begin == often.end:
        return row, 0, shortest  # nor does any longer end occur
    if often.end - often.begin <= FEW:
        return _collect_few(segment, query, often, longest, depth, found, row)
    longest_match = often.length
    if seldom.begin < seldom.end:
        row, longest_match, _ = _collect_few(segment, query, seldom, longest, depth, found, row)
    row = _collect_many(segment, query, often, depth, found, row)
    return row, longest_match, often.length


@kernel()
def _find_ends(
    segment: SegmentArrays, query: NDArray[np.int32], shortest: int, longest: int
) -> tuple[Interval, Interval]:
    """Find an end of the query that says where all longer ones occur that are looked for.

    Returns:
        The shortest end, or a longer one that has enough occurrences; and the end that has one
        token more and not enough occurrences, empty where the first has few or is the longest.
    """
    tokens, suffixes, starts = segment.tokens, segment.suffixes, segment.starts
    enough, last = segment.limits[0].enough, query.shape[0]
    begin, end = find_interval(tokens, suffixes, starts, query[last - shortest :])
    often, seldom = Interval(shortest, begin, end), Interval(longest + 1, 0, 0)
    step = 1
    while often.end - often.begin > FEW and often.length + 1 < seldom.length:
        length = min(often.length + step, (often.length + seldom.length) >> 1)
        begin, end = find_interval(tokens, suffixes, starts, query[last - length :])
        if end - begin >= enough:
            often = Interval(length, begin, end)
        else:
            seldom = Interval(length, begin, end)
        step *= 2
    return often, seldom


@kernel()
def _collect_few(
    segment: SegmentArrays,
    query: NDArray[np.int32],
    of: Interval,
    longest: int,
    depth: int,
    found: Found,
    row: int,
) -> tuple[int, int, int]:
    """Write continuations of an end of at most FEW occurrences, and of longer ones.

    Returns:
        The first free row, the length of the longest match, and that of the last end that was
        looked for.
    """
    tokens, suffixes, matches = segment.tokens, segment.suffixes, found.matches
    limits = segment.limits[0]
    longest_match = _match_occurrences(tokens, suffixes, query, of, matches)
    longest_match = length = min(longest, longest_match)
    while True:
        count, shorter = _count_matches(matches, of, length)
        read = min(count, limits.samples)
        number = sample = 0
        for index in range(of.end - of.begin):
            if matches[index] < length:
                continue
            number += 1
            if number <= count * sample // read:
                continue
            sample += 1
            if matches[index] == length:  # or it is among the occurrences of the longer end
                position = np.int64(suffixes[of.begin + index]) - (length - of.length)
                row = _write(segment, position, length, count / read, depth, found, row)
        if count >= limits.enough or length == of.length:
            return row, longest_match, length
        length = shorter


@kernel()
def _match_occurrences(
    tokens: NDArray[Any],
    suffixes: NDArray[Any],
    query: NDArray[np.int32],
    of: Interval,
    matches: NDArray[np.int32],
) -> int:
    """Write how long a match each occurrence is the end of; return the longest."""
    for place in range(of.begin, of.end):
        _prefetch_around(tokens, np.int64(suffixes[place]))
    longest_match = 0
    for place in range(of.begin, of.end):
        position, length = np.int64(suffixes[place]), of.length
        while _goes_on(tokens, position, query, length):
            position -= 1
            length += 1
        matches[place - of.begin] = length
        longest_match = max(longest_match, length)
    return longest_match


@kernel(inline="always")
def _count_matches(matches: NDArray[np.int32], of: Interval, length: int) -> tuple[int, int]:
    """Return how many matches are so long, and the length of the longest that is shorter."""
    count, shorter = 0, of.length
    for index in range(of.end - of.begin):
        if matches[index] >= length:
            count += 1
        else:
            shorter = max(shorter, matches[index])
    return count, shorter


@kernel()
def _collect_many(
    segment: SegmentArrays,
    query: NDArray[np.int32],
    of: Interval,
    depth: int,
    found: Found,
    row: int,
) -> int:
    """Write continuations of an end of the query, without those of longer ones."""
    tokens, suffixes = segment.tokens, segment.suffixes
    count = of.end - of.begin
    read = min(count, segment.limits[0].samples)
    for sample in range(read):
        prefetch(suffixes, of.begin + count * sample // read)
    for sample in range(read):
        _prefetch_around(tokens, np.int64(suffixes[of.begin + count * sample // read]))
    for sample in range(read):
        position = np.int64(suffixes[of.begin + count * sample // read])
        if not _goes_on(tokens, position, query, of.length):
            row = _write(segment, position, of.length, count / read, depth, found, row)
    return row


@kernel(inline="always")
def _prefetch_around(tokens: NDArray[Any], position: int) -> None:
    """Prefetch what is read of an occurrence, and what stands around it."""
    prefetch(tokens, position - WINDOW)
    prefetch(tokens, position + WINDOW)


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
def _write(
    segment: SegmentArrays,
    position: int,
    length: int,
    count: float,
    depth: int,
    found: Found,
    row: int,
) -> int:
    """Write what follows a match at a position, if there is room; return the first free row."""
    if row == found.rows.shape[0]:
        return row
    tokens, vocabulary_size = segment.tokens, segment.starts.shape[0] - 1
    copied = _copy(tokens, position + length, vocabulary_size, depth, found.continuations[row])
    if copied == 0:
        return row
    separator = np.int64(np.iinfo(tokens.dtype).max)
    to = found.rows[row]
    to.length = copied
    to.match = length
    to.source = segment.limits[0].source
    to.count = count
    to.similarity = similarity_of(tokens, -1, position, 0, separator, found.recent)
    return row + 1
