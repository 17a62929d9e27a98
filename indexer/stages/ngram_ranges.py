"""Counts n-grams by ranges, and joins the sorted ranges from disk."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from indexer.format.names import COUNT_DTYPE, MAX_ORDER, POSITION_DTYPE, Tokens, token_dtype
from indexer.format.opening import Segment, map_array
from indexer.format.output import write_file
from indexer.format.table_sums import (
    MIN_COUNTS,
    NUM_CODES,
    Level,
    count_ngrams,
    in_order,
    merge_levels,
    prune,
)

STRIDE: Final = 1 << 20
"""Occurrences to count at a time. The arrays take tens of MB, which is long enough for numpy."""

COUNTING_BYTES: Final = 256 << 20
"""Most memory that `count_range` takes, without mapped files; 180 MB were measured."""

_MAX_PREFIX: Final = MAX_ORDER - 2


@dataclass(frozen=True, slots=True)
class NgramRange:
    """All n-grams that share their first tokens and whose next token is in a range.

    Attributes:
        prefix: the shared first tokens, up to two.
        begin: smallest next token.
        end: largest next token plus one.
        prefix_count: occurrences of the prefix in all segments.
    """

    prefix: tuple[int, ...]
    begin: int
    end: int
    prefix_count: int

    @property
    def is_first(self) -> bool:
        """Whether this is the first range with its prefix. Every prefix has one first range."""
        return self.begin == 0


@dataclass(frozen=True, slots=True)
class _Run:
    """Adjacent suffixes of a segment that start with the same tokens."""

    tokens: Tokens
    suffixes: NDArray[np.uint32]
    starts: NDArray[np.uint32]
    begin: int
    end: int

    @classmethod
    def whole(cls, segment: Segment) -> "_Run":
        return cls(segment.tokens, segment.suffixes, segment.starts, 0, len(segment.suffixes))

    def within(self, begin: int, end: int) -> "_Run":
        return _Run(self.tokens, self.suffixes, self.starts, begin, end)

    def next_tokens(self, places: NDArray[np.int64], depth: int) -> Tokens:
        """Return the tokens at offset `depth` of some suffixes."""
        positions = self.suffixes.take(places, mode="clip").astype(np.int64)
        return self.tokens.take(positions + depth, mode="clip")

    def places_of(self, values: NDArray[np.int64], depth: int) -> NDArray[np.int64]:
        """Return, for each token, the first suffix whose token at `depth` is not smaller."""
        if depth == 0:
            return self.starts[values].astype(np.int64)
        low, high = np.full(len(values), self.begin), np.full(len(values), self.end)
        while (is_open := low < high).any():
            middle = (low + high) // 2
            is_smaller = self.next_tokens(middle, depth) < values
            low = np.where(is_open & is_smaller, middle + 1, low)
            high = np.where(is_open & ~is_smaller, middle, high)
        return low


def plan_ranges(
    segments: Sequence[Segment], vocabulary_size: int, stride: int = STRIDE
) -> Iterator[NgramRange]:
    """Yield ranges that cover all n-grams of two and more tokens, in ascending order.

    Each range has few occurrences, or contains only n-grams with the same first three tokens. Such
    n-grams are few. If a token is very frequent, its n-grams are divided by their second token. If
    a pair of tokens is very frequent, its n-grams are divided by their third token.

    Args:
        segments: segments with valid arrays.
        vocabulary_size: largest token id plus one.
        stride: number of occurrences that counts as few.
    """
    whole = [_Run.whole(segment) for segment in segments]
    yield from _divided(whole, (), vocabulary_size, stride)


def _divided(
    runs: Sequence[_Run], prefix: tuple[int, ...], vocabulary_size: int, stride: int
) -> Iterator[NgramRange]:
    depth = len(prefix)
    bounds = _bounds(runs, depth, vocabulary_size, stride)
    places = np.array([run.places_of(bounds, depth) for run in runs])
    occurrences = places.sum(axis=0)
    prefix_count = sum(run.end - run.begin for run in runs)
    first, last = 0, len(bounds) - 1
    while first < last:
        most = occurrences[first] + stride
        end = max(int(np.searchsorted(occurrences, most, side="right")) - 1, first + 1)
        if occurrences[end] > most and depth < _MAX_PREFIX:
            ends = places[:, [first, end]].tolist()
            parts = [run.within(*each) for run, each in zip(runs, ends, strict=True)]
            yield from _divided(parts, (*prefix, int(bounds[first])), vocabulary_size, stride)
        elif occurrences[end] > occurrences[first] or (depth == _MAX_PREFIX and first == 0):
            yield NgramRange(prefix, int(bounds[first]), int(bounds[end]), prefix_count)
        first = end


def _bounds(
    runs: Sequence[_Run], depth: int, vocabulary_size: int, stride: int
) -> NDArray[np.int64]:
    """Return tokens at which ranges may end.

    Two adjacent ends have few occurrences or only a single token between them.
    """
    if depth == 0:
        return np.arange(vocabulary_size + 1)
    step = max(stride // (2 * len(runs)), 1)
    samples = [
        run.next_tokens(np.arange(run.begin, run.end, step), depth).astype(np.int64) for run in runs
    ]
    seen = np.concatenate(samples)
    seen = seen[seen < vocabulary_size]
    return np.unique(np.concatenate([[0, vocabulary_size], seen, seen + 1]))


def count_range(
    segments: Sequence[Segment], each: NgramRange, vocabulary_size: int, stride: int = STRIDE
) -> list[Level]:
    """Return levels 2 to 4 of the n-grams of a range, each sorted by parent and token.

    Counts are exact, over all segments. If a pair is the prefix of several ranges, each of these
    ranges contains the pair, with the pair's total count.

    Args:
        segments: as for `plan_ranges`.
        each: one of the ranges that `plan_ranges` yielded.
        vocabulary_size: largest token id plus one.
        stride: number of occurrences to count at a time.
    """
    dtype = token_dtype(vocabulary_size)
    parts = [_nothing(dtype)]
    for segment in segments:
        for suffixes in _pieces(_run_of(segment, each), stride):
            parts.append(count_ngrams(segment.tokens, suffixes))
            if sum(len(part[-1]) for part in parts) > stride:
                parts = [merge_levels(parts)]
    pairs, *longer = merge_levels(parts)
    if len(each.prefix) == _MAX_PREFIX:
        first, second = each.prefix
        pairs = Level(np.array([first]), np.array([second], dtype), np.array([each.prefix_count]))
    return [pairs, *longer]


def _nothing(dtype: np.dtype[np.unsignedinteger]) -> list[Level]:
    empty = Level(np.empty(0, np.int64), np.empty(0, dtype), np.empty(0, np.int64))
    return [empty] * (MAX_ORDER - 1)


def _run_of(segment: Segment, each: NgramRange) -> _Run:
    run = _Run.whole(segment)
    ranges = [*((token, token + 1) for token in each.prefix), (each.begin, each.end)]
    for depth, bounds in enumerate(ranges):
        run = run.within(*run.places_of(np.array(bounds), depth).tolist())
    return run


def _pieces(run: _Run, stride: int) -> Iterator[NDArray[np.uint32]]:
    for begin in range(run.begin, run.end, stride):
        yield run.suffixes[begin : min(begin + stride, run.end)]


_PAIRS: Final = 0
_TRIPLES: Final = 1


@dataclass(frozen=True, slots=True, eq=False)
class Branches:
    """Counted n-grams of a range: its part of the trie, in a file.

    Attributes:
        counted: the counted range.
        path: path of the file, with parents, tokens and codes of levels 2 to 4.
        sizes: number of entries of each level.
        histograms: int64[3, 256], number of entries of each level, by code. If a pair is the prefix
            of several ranges, only the first range counts it.
        dtype: dtype of tokens.
    """

    counted: NgramRange
    path: Path
    sizes: tuple[int, ...]
    histograms: NDArray[np.int64]
    dtype: np.dtype[Any]

    def levels(self) -> list[Level]:
        """Return levels 2 to 4, mapped into memory, with codes instead of counts."""
        content = map_array(self.path, np.dtype(np.uint8))
        columns, begin = [], 0
        for dtype in (POSITION_DTYPE, self.dtype, COUNT_DTYPE):
            for size in self.sizes:
                end = begin + size * dtype.itemsize
                columns.append(content[begin:end].view(dtype))
                begin = end
        num_levels = len(self.sizes)
        return [Level(*columns[number::num_levels]) for number in range(num_levels)]


def write_branches(
    segments: Sequence[Segment],
    counted: NgramRange,
    vocabulary_size: int,
    path: Path,
    stride: int = STRIDE,
) -> Branches:
    """Count the n-grams of a range, and write those that may get an entry in a table.

    Args:
        segments: segments with valid arrays.
        counted: the range to count.
        vocabulary_size: largest token id plus one.
        path: path of the file.
        stride: number of occurrences to count at a time.

    Raises:
        IndexerError: the disk is full, or the system denies the write.
    """
    levels = in_order(prune(count_range(segments, counted, vocabulary_size, stride), MIN_COUNTS))
    histograms = np.array([np.bincount(each.counts, minlength=NUM_CODES) for each in levels])
    if len(counted.prefix) > 1 and not counted.is_first:
        histograms[_PAIRS] = 0
    columns = [
        *(level.parents.astype(POSITION_DTYPE) for level in levels),
        *(level.tokens for level in levels),
        *(level.counts for level in levels),
    ]
    write_file(path, b"".join(column.data for column in columns), durable=False)
    sizes = tuple(len(level) for level in levels)
    return Branches(counted, path, sizes, histograms, token_dtype(vocabulary_size))


def joined(branches: Iterable[Branches]) -> Iterator[list[Level]]:
    """Yield the entries of all branches in the format's order, in pieces of levels 2 to 4.

    In each piece, parents are numbered from the piece's first entry. A piece without entries of
    some level may continue with children of that level's previous entry.

    Args:
        branches: branches in the order of their ranges. If a range has a prefix, all ranges with
            the same first token must be present.
    """
    for is_divided, group in groupby(branches, lambda each: each.counted.prefix[:1]):
        if is_divided:
            yield from _by_code([_member(list(each)) for _, each in _by_pair(group)])
        else:
            for each in group:
                yield each.levels()


def _by_pair(group: Iterable[Branches]) -> Iterator[tuple[Any, Iterator[Branches]]]:
    """Group the branches of one first token by pair; a branch without a pair is its own group."""
    return groupby(
        group, lambda each: each.counted.prefix[1:] or (each.counted.begin, each.counted.end)
    )


class _Range:
    """A branch whose entries of one level may have to be merged with other branches' entries."""

    def __init__(self, branches: Branches, level: int) -> None:
        self._levels, self._level = branches.levels(), level
        codes = self._levels[level].counts
        self.codes = np.unique(codes).tolist()
        rising = codes[::-1]  # entries all have one parent and are in order of descending code
        self._ends = {
            code: len(codes) - int(np.searchsorted(rising, code, side="left"))
            for code in self.codes
        }

    def with_code(self, code: int) -> Iterator[list[Level]]:
        """Yield the entries with this code, and all n-grams that have them as a prefix."""
        if end := self._ends.get(code):
            above = [each for each in self._ends.values() if each < end]
            yield _subtrees(self._levels, self._level, max(above, default=0), end)


class _Pair:
    """The branches of one pair, which are divided by the third token."""

    def __init__(self, branches: Sequence[Branches]) -> None:
        self._pair = branches[0].levels()[_PAIRS]
        self._ranges = [_Range(each, _TRIPLES) for each in branches]
        self.codes = self._pair.counts.tolist()

    def with_code(self, code: int) -> Iterator[list[Level]]:
        """Yield the pair, if it has this code, and then all n-grams that have it as a prefix."""
        if code in self.codes:
            nothing = Level(*(column[:0] for column in _columns(self._pair)))
            yield [self._pair, *[nothing] * (MAX_ORDER - 2)]
            yield from _by_code(self._ranges)


def _member(branches: Sequence[Branches]) -> _Range | _Pair:
    is_pair = len(branches[0].counted.prefix) > 1
    return _Pair(branches) if is_pair else _Range(branches[0], _PAIRS)


def _by_code(members: Sequence[_Range | _Pair]) -> Iterator[list[Level]]:
    """Yield one parent's entries by descending code; entries with equal codes by token."""
    for code in sorted({code for each in members for code in each.codes}, reverse=True):
        for each in members:
            yield from each.with_code(code)


def _subtrees(levels: Sequence[Level], level: int, begin: int, end: int) -> list[Level]:
    """Return the entries of a level from `begin` up to `end`, with all their descendants.

    Levels below `level` are empty, so the parents of its entries have no meaning.
    """
    found = [Level(*(column[:0] for column in _columns(each))) for each in levels[:level]]
    offset = 0
    for each in levels[level:]:
        parents = each.parents[begin:end].astype(np.int64) - offset
        found.append(Level(parents, each.tokens[begin:end], each.counts[begin:end]))
        offset = begin
        if len(found) < len(levels):
            above = levels[len(found)].parents
            begin, end = np.searchsorted(above, np.array([begin, end], above.dtype)).tolist()
    return found


def _columns(level: Level) -> tuple[NDArray[Any], ...]:
    return level.parents, level.tokens, level.counts
