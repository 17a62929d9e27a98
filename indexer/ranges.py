"""Counting n-grams by ranges, each of which takes little memory whatever the corpus is like."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from indexer.format import MAX_ORDER, Tokens, token_dtype
from indexer.ngrams import Level, count_ngrams, merge_levels
from indexer.opening import Segment

_STRIDE: Final = 1 << 20
"""Occurrences that are looked at together."""

COUNTING_BYTES: Final = 256 << 20
"""What `count_range` takes at most, mapped files not counted: measured are 180 MB."""

_MAX_PREFIX: Final = MAX_ORDER - 2


@dataclass(frozen=True, slots=True)
class NgramRange:
    """N-grams that begin with the same tokens and whose next token is in a range.

    Attributes:
        prefix: up to two tokens.
        begin: the least next token.
        end: the largest one, plus one.
        prefix_count: occurrences of the prefix, over all segments.
    """

    prefix: tuple[int, ...]
    begin: int
    end: int
    prefix_count: int

    @property
    def is_first(self) -> bool:
        """Whether no range before has the prefix; there always is a first one."""
        return self.begin == 0


@dataclass(frozen=True, slots=True)
class _Run:
    """Neighbours in the suffix array of a segment that begin with the same tokens."""

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
        """Return the tokens that stand `depth` behind the beginnings of suffixes."""
        positions = self.suffixes.take(places, mode="clip").astype(np.int64)
        return self.tokens.take(positions + depth, mode="clip")

    def places_of(self, values: NDArray[np.int64], depth: int) -> NDArray[np.int64]:
        """Return for each token the first suffix whose token at `depth` is not smaller."""
        if depth == 0:
            return self.starts[values].astype(np.int64)
        low, high = np.full(len(values), self.begin), np.full(len(values), self.end)
        while (is_open := low < high).any():
            middle = (low + high) // 2
            is_smaller = self.next_tokens(middle, depth) < values
            low = np.where(is_open & is_smaller, middle + 1, low)
            high = np.where(is_open & ~is_smaller, middle, high)
        return low


def plan_ranges(segments: Sequence[Segment], vocabulary_size: int) -> Iterator[NgramRange]:
    """Yield ranges that hold all n-grams of two tokens and more, in rising order.

    Each has few occurrences, or is of n-grams that have their first three tokens in common, which
    are few. The n-grams of a token that is very frequent are divided by their second token, those
    of a very frequent pair by the third.

    Args:
        segments: whose arrays are sound.
        vocabulary_size: largest token id plus one.
    """
    yield from _divided([_Run.whole(segment) for segment in segments], (), vocabulary_size)


def _divided(
    runs: Sequence[_Run], prefix: tuple[int, ...], vocabulary_size: int
) -> Iterator[NgramRange]:
    depth = len(prefix)
    bounds = _bounds(runs, depth, vocabulary_size)
    places = np.array([run.places_of(bounds, depth) for run in runs])
    occurrences = places.sum(axis=0)
    prefix_count = sum(run.end - run.begin for run in runs)
    first, last = 0, len(bounds) - 1
    while first < last:
        most = occurrences[first] + _STRIDE
        end = max(int(np.searchsorted(occurrences, most, side="right")) - 1, first + 1)
        if occurrences[end] > most and depth < _MAX_PREFIX:
            ends = places[:, [first, end]].tolist()
            parts = [run.within(*each) for run, each in zip(runs, ends, strict=True)]
            yield from _divided(parts, (*prefix, int(bounds[first])), vocabulary_size)
        elif occurrences[end] > occurrences[first] or (depth == _MAX_PREFIX and first == 0):
            yield NgramRange(prefix, int(bounds[first]), int(bounds[end]), prefix_count)
        first = end


def _bounds(runs: Sequence[_Run], depth: int, vocabulary_size: int) -> NDArray[np.int64]:
    """Return tokens between which a range may end: between two there are few occurrences.

    Or there is a single token between them.
    """
    if depth == 0:
        return np.arange(vocabulary_size + 1)
    step = max(_STRIDE // (2 * len(runs)), 1)
    samples = [
        run.next_tokens(np.arange(run.begin, run.end, step), depth).astype(np.int64) for run in runs
    ]
    seen = np.concatenate(samples)
    seen = seen[seen < vocabulary_size]
    return np.unique(np.concatenate([[0, vocabulary_size], seen, seen + 1]))


def count_range(segments: Sequence[Segment], each: NgramRange, vocabulary_size: int) -> list[Level]:
    """Return levels 2 to 4 of the n-grams of a range, each sorted by parent and token.

    Their counts are exact, over all segments. A pair that several ranges have for a prefix is in
    all of these, with its own count.

    Args:
        segments: as for `plan_ranges`.
        each: of the ranges that it yielded.
        vocabulary_size: largest token id plus one.
    """
    dtype = token_dtype(vocabulary_size)
    parts = [_nothing(dtype)]
    for segment in segments:
        for suffixes in _pieces(_run_of(segment, each)):
            parts.append(count_ngrams(segment.tokens, suffixes))
            if sum(len(part[-1]) for part in parts) > _STRIDE:
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


def _pieces(run: _Run) -> Iterator[NDArray[np.uint32]]:
    for begin in range(run.begin, run.end, _STRIDE):
        yield run.suffixes[begin : min(begin + _STRIDE, run.end)]
