"""Suffix arrays: occurrences of the longest suffixes of the query in a segment.

The indexer writes these arrays of a segment. `tokens`, unsigned[n], has the dtype's maximum after
each document. `suffixes`, unsigned[m], holds positions sorted by the text that starts there.
`starts`, unsigned[vocabulary + 1], says where in `suffixes` the group of each first token starts.
`keys`, uint64[m / stride, rounded up], holds the tokens after the first token of every `stride`-th
suffix, or is empty.
"""

from typing import Any, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from retriever.kernels.compiling import kernel, prefetch
from retriever.kernels.layout import Found, SegmentArrays
from retriever.kernels.similarity import WINDOW, similarity_of

KEY_SIZE: Final = 64
"""Number of bits in a key."""

PROBES: Final = 8
"""Reads that a search prefetches concurrently. One random read of a segment of gigabytes takes up
to a microsecond, including page tables. Eight reads take hardly longer, and 16 twice as long."""


_AT, _BEHIND = np.int64(0), np.int64(1)
"""Bounds to search: the first suffix that starts with a pattern, and the first one after those. Not
literals: numba compiles a kernel separately for each literal argument."""


class Interval(NamedTuple):
    """The occurrences of a suffix of the query.

    Attributes:
        length: length of the query suffix, in tokens.
        begin: index in `suffixes` of the first occurrence.
        end: index after the last occurrence.
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
    """Write continuations of the longest suffixes of the query, from a sample of occurrences.

    Occurrences are sorted by their continuations, so an even sample preserves their proportions.
    Only frequent query suffixes need a bisection: longer ones occur among their occurrences, in the
    same order.

    Args:
        segment: the segment to search, and the parameters of the search.
        query: int32[q], the last tokens of the context, ids inside the vocabulary.
        shortest: shorter query suffixes are not searched, because suffixes of this length occur
            often enough in earlier segments; 0 in the first segment.
        longest: longer query suffixes are known not to occur.
        depth: most tokens to copy for each occurrence.
        found: rows and continuations are written from index `row` on.
        row: first free row.

    Returns:
        The first free row afterwards, the length of the longest match, and `shortest` for the next
        segment.
    """
    shortest, longest = max(shortest, segment.limits[0].shortest), min(longest, query.shape[0])
    if longest < shortest:
        return row, 0, shortest
    few = found.matches.shape[0]
    often, seldom = _find_ends(segment, query, shortest, longest, few)
    if often.begin == often.end:
        return row, 0, shortest  # so no longer suffix occurs
    if often.end - often.begin <= few:
        return _collect_few(segment, query, often, longest, depth, found, row)
    longest_match = often.length
    if seldom.begin < seldom.end:
        row, longest_match, _ = _collect_few(segment, query, seldom, longest, depth, found, row)
    row = _collect_many(segment, query, _whole(segment, query, often), depth, found, row)
    return row, longest_match, often.length


@kernel()
def _find_ends(
    segment: SegmentArrays, query: NDArray[np.int32], shortest: int, longest: int, few: int
) -> tuple[Interval, Interval]:
    """Find a query suffix whose occurrences include those of all longer suffixes to search.

    Returns:
        First, the shortest query suffix, or a longer one with enough occurrences. If it has over
        `few`, the interval covers only the first of them. Second, a longer query suffix with too
        few occurrences. It is empty if the first has few occurrences or none is longer.
    """
    enough, last = segment.limits[0].enough, query.shape[0]
    begin, end = find_interval(segment, query[last - shortest :], few + 1)
    often, seldom = Interval(shortest, begin, end), Interval(longest + 1, 0, 0)
    step = 1
    while often.end - often.begin > few and often.length + 1 < seldom.length:
        length = min(often.length + step, (often.length + seldom.length) >> 1)
        begin, end = find_interval(segment, query[last - length :], few + 1)
        if end - begin >= enough:
            often = Interval(length, begin, end)
        else:
            seldom = Interval(length, begin, end)
        step *= 2
    return often, seldom


@kernel()
def _whole(segment: SegmentArrays, query: NDArray[np.int32], of: Interval) -> Interval:
    """Extend an interval from the first occurrences to all occurrences."""
    pattern = query[query.shape[0] - of.length :]
    low, high = _narrow(segment, pattern, _BEHIND)
    last = max(of.end, low) - 1
    return Interval(of.length, of.begin, _find_end(segment, pattern, last, high))


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
    """Write continuations of a query suffix with at most FEW occurrences, and of longer suffixes.

    Returns:
        The first free row, the length of the longest match, and the length of the shortest query
        suffix that was used.
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
            if matches[index] == length:  # longer matches were already written
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
    """Write the match length at each occurrence; return the longest length."""
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
    """Return how many matches have at least this length, and the longest shorter length."""
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
    """Write continuations of a query suffix, except where a longer suffix matches."""
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
    """Prefetch the tokens before and after an occurrence that will be read."""
    prefetch(tokens, position - WINDOW)
    prefetch(tokens, position + WINDOW)


@kernel()
def find_interval(segment: SegmentArrays, pattern: NDArray[np.int32], most: int) -> tuple[int, int]:
    """Return the half-open range of `suffixes` that start with the pattern (int32[k], k ≥ 1).

    If there are more than `most` occurrences, the range covers the first of them.
    """
    low, high = _narrow(segment, pattern, _AT)
    begin, end = _bisect(segment, pattern, low, high, _AT), _bucket(segment, pattern)[1]
    if begin >= end or _compare(segment.tokens, np.int64(segment.suffixes[begin]), pattern) != 0:
        return begin, begin
    return begin, _find_end(segment, pattern, begin, min(end, begin + most))


@kernel(inline="always")
def _bucket(segment: SegmentArrays, pattern: NDArray[np.int32]) -> tuple[int, int]:
    """Return the range of `suffixes` that start with the pattern's first token."""
    begin, end = segment.starts[pattern[0]], segment.starts[pattern[0] + 1]
    return np.int64(begin), min(np.int64(end), segment.suffixes.shape[0])


@kernel()
def _narrow(segment: SegmentArrays, pattern: NDArray[np.int32], bound: int) -> tuple[int, int]:
    """Return the part of the pattern's bucket that `_bisect` still has to search.

    If there are keys, the part is shorter than a stride, unless the pattern is longer than a key.
    """
    keys, stride = segment.keys, segment.limits[0].key_stride
    bits = segment.limits[0].key_bits
    low, high = _bucket(segment, pattern)
    if keys.shape[0] == 0 or pattern.shape[0] == 1:
        return low, high
    first = (low + stride - 1) // stride  # the bucket has the keys from `first` to `behind`
    behind = min((high + stride - 1) // stride, keys.shape[0])
    is_told = pattern.shape[0] - 1 <= KEY_SIZE // bits
    least, greatest = _keys_of(pattern, bits)
    below = above = first  # keys before `below` are too small, keys from `above` on too large
    if bound == 0 or not is_told:
        below = above = _bisect_keys(keys, least, first, behind)
    if bound == 1 or not is_told:
        above = _bisect_keys(keys, greatest + np.uint64(1), below, behind)
    if bound == 1 and is_told:
        below = above
    if above < behind:
        high = above * stride
    if below > first:
        low = (below - 1) * stride + 1
    return low, high


@kernel(inline="always")
def _keys_of(pattern: NDArray[np.int32], bits: int) -> tuple[int, int]:
    """Return the smallest and the largest key of suffixes that start with the pattern."""
    least = greatest = np.uint64(0)
    width = np.uint64(bits)
    for offset in range(1, KEY_SIZE // bits + 1):
        least, greatest = least << width, greatest << width
        if offset < pattern.shape[0]:
            least |= np.uint64(pattern[offset])
            greatest |= np.uint64(pattern[offset])
        else:
            greatest |= (np.uint64(1) << width) - np.uint64(1)
    return least, greatest


@kernel()
def _bisect_keys(keys: NDArray[np.uint64], key: int, low: int, high: int) -> int:
    """Return the index of the first key that is at least `key`; each round reads several keys."""
    while low < high:
        width = (high - low + PROBES - 1) // PROBES
        less = 0
        for probe in range(1, PROBES + 1):
            less += keys[min(low + probe * width, high) - 1] < key
        low, high = min(low + less * width, high), min(low + (less + 1) * width - 1, high)
    return low


@kernel()
def _find_end(segment: SegmentArrays, pattern: NDArray[np.int32], begin: int, end: int) -> int:
    """Return the first index after `begin` whose suffix does not start with the pattern, or `end`.

    Most patterns have few occurrences in a large bucket. So this is a galloping search that reads
    several suffixes at once.
    """
    tokens, suffixes = segment.tokens, segment.suffixes
    width = 1
    while begin + width < end:
        ahead = width
        for _ in range(PROBES):
            prefetch(tokens, np.int64(suffixes[min(begin + ahead, end - 1)]) + 1)
            ahead *= 2
        while width < ahead and begin + width < end:
            if _compare(tokens, np.int64(suffixes[begin + width]), pattern) != 0:
                return _bisect(segment, pattern, begin + (width >> 1) + 1, begin + width, _BEHIND)
            width *= 2
    return _bisect(segment, pattern, begin + (width >> 1) + 1, end, _BEHIND)


@kernel()
def _bisect(
    segment: SegmentArrays, pattern: NDArray[np.int32], low: int, high: int, bound: int
) -> int:
    """Return the first index whose suffix compares to the pattern as `bound` or greater."""
    tokens, suffixes = segment.tokens, segment.suffixes
    while low < high:
        width = (high - low + PROBES - 1) // PROBES
        for probe in range(1, PROBES + 1):
            place = min(low + probe * width, high) - 1
            prefetch(tokens, np.int64(suffixes[place]) + 1)
        less = 0
        while less < PROBES:
            place = min(low + (less + 1) * width, high) - 1
            if _compare(tokens, np.int64(suffixes[place]), pattern) >= bound:
                break
            less += 1
        low, high = min(low + less * width, high), min(low + (less + 1) * width - 1, high)
    return low


@kernel(inline="always")
def _compare(tokens: NDArray[Any], position: int, pattern: NDArray[np.int32]) -> int:
    """Compare a suffix with the pattern: -1 (less), 0 (starts with the pattern) or 1 (greater)."""
    for offset in range(1, pattern.shape[0]):  # `starts` guarantees the first token
        if position + offset >= tokens.shape[0]:
            return -1
        token, wanted = np.int64(tokens[position + offset]), np.int64(pattern[offset])
        if token != wanted:
            return -1 if token < wanted else 1
    return 0


@kernel(inline="always")
def _goes_on(tokens: NDArray[Any], position: int, query: NDArray[np.int32], length: int) -> bool:
    """Return whether the match extends beyond `length`: the token before it agrees too."""
    if position == 0 or position > tokens.shape[0] or length >= query.shape[0]:
        return False
    return np.int64(tokens[position - 1]) == np.int64(query[query.shape[0] - length - 1])


@kernel(inline="always")
def _copy(
    tokens: NDArray[Any], begin: int, vocabulary_size: int, depth: int, out: NDArray[np.int32]
) -> int:
    """Copy tokens up to the end of the document or to a damaged token."""
    length = 0
    while length < depth and begin + length < tokens.shape[0]:
        token = np.int64(tokens[begin + length])
        if token >= vocabulary_size:  # a separator or a damaged token
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
    """Write the tokens after a match at a position if there is room; return the first free row."""
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
