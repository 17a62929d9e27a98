"""The n-grams of one range, counted and in order, on disk until all ranges are counted."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from indexer.format import COUNT_DTYPE, MAX_ORDER, POSITION_DTYPE, token_dtype
from indexer.ngrams import Level
from indexer.opening import Segment, map_array
from indexer.output import write_file
from indexer.ranges import NgramRange, count_range
from indexer.tables import MIN_COUNTS, NUM_CODES, in_order, prune

_PAIRS: Final = 0
_TRIPLES: Final = 1


@dataclass(frozen=True, slots=True, eq=False)
class Branches:
    """Counted n-grams of a range: the part of the trie that begins with it, in a file.

    Attributes:
        counted: the range.
        path: of the file: parents, tokens and codes of levels 2 to 4.
        sizes: entries of each level.
        histograms: int64[3, 256], entries of each level by code; a pair that several ranges have
            for a prefix stands in that of the first.
        dtype: of tokens.
    """

    counted: NgramRange
    path: Path
    sizes: tuple[int, ...]
    histograms: NDArray[np.int64]
    dtype: np.dtype[Any]

    def levels(self) -> list[Level]:
        """Return levels 2 to 4 with codes for counts, mapped."""
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
    segments: Sequence[Segment], counted: NgramRange, vocabulary_size: int, path: Path
) -> Branches:
    """Count the n-grams of a range, drop those that have no entry in any table, and write them.

    Args:
        segments: whose arrays are sound.
        counted: the range.
        vocabulary_size: largest token id plus one.
        path: of the file.

    Raises:
        IndexerError: the disk is full or refuses.
    """
    levels = in_order(prune(count_range(segments, counted, vocabulary_size), MIN_COUNTS))
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
    """Yield the entries of all branches in the order of the format, in pieces of levels 2 to 4.

    In each piece, parents are numbered from its own first entry on. A piece may go on with
    children of the last entry of a level that it has no entry of.

    Args:
        branches: in the order of their ranges; those with a prefix, of all that have its token.
    """
    for is_divided, group in groupby(branches, lambda each: each.counted.prefix[:1]):
        if is_divided:
            yield from _by_code([_member(list(each)) for _, each in _by_pair(group)])
        else:
            for each in group:
                yield each.levels()


def _by_pair(group: Iterable[Branches]) -> Iterator[tuple[Any, Iterator[Branches]]]:
    """Divide the branches of one first token into those of one pair, and others by themselves."""
    return groupby(
        group, lambda each: each.counted.prefix[1:] or (each.counted.begin, each.counted.end)
    )


class _Range:
    """Branches whose entries of one level may have to be mixed with those of others."""

    def __init__(self, branches: Branches, level: int) -> None:
        self._levels, self._level = branches.levels(), level
        codes = self._levels[level].counts
        self.codes = np.unique(codes).tolist()
        rising = codes[::-1]  # entries stand by falling code: all of one parent
        self._ends = {
            code: len(codes) - int(np.searchsorted(rising, code, side="left"))
            for code in self.codes
        }

    def with_code(self, code: int) -> Iterator[list[Level]]:
        """Yield the entries that have this code, and all that begins with them."""
        if end := self._ends.get(code):
            above = [each for each in self._ends.values() if each < end]
            yield _subtrees(self._levels, self._level, max(above, default=0), end)


class _Pair:
    """Branches of one pair, divided by the third token."""

    def __init__(self, branches: Sequence[Branches]) -> None:
        self._pair = branches[0].levels()[_PAIRS]
        self._ranges = [_Range(each, _TRIPLES) for each in branches]
        self.codes = self._pair.counts.tolist()

    def with_code(self, code: int) -> Iterator[list[Level]]:
        """Yield the pair, if it has this code, and then all that begins with it."""
        if code in self.codes:
            nothing = Level(*(column[:0] for column in _columns(self._pair)))
            yield [self._pair, *[nothing] * (MAX_ORDER - 2)]
            yield from _by_code(self._ranges)


def _member(branches: Sequence[Branches]) -> _Range | _Pair:
    is_pair = len(branches[0].counted.prefix) > 1
    return _Pair(branches) if is_pair else _Range(branches[0], _PAIRS)


def _by_code(members: Sequence[_Range | _Pair]) -> Iterator[list[Level]]:
    """Yield entries of one parent by falling code, and those of one code in order of tokens."""
    for code in sorted({code for each in members for code in each.codes}, reverse=True):
        for each in members:
            yield from each.with_code(code)


def _subtrees(levels: Sequence[Level], level: int, begin: int, end: int) -> list[Level]:
    """Return the entries of a level from `begin` up to `end`, and all that begins with them.

    Of the levels below nothing, so that their parents mean nothing.
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
