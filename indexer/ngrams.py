"""Counting n-grams: in suffix order all occurrences of one stand together."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from indexer.format import MAX_ORDER, Tokens, separator_of

_TOKEN_BITS: Final = np.uint64(32)


@dataclass(frozen=True, slots=True, eq=False)
class Level:
    """N-grams of one length: a level of a trie that is being made.

    Attributes:
        parents: int64[n], for each the entry of its first tokens in the level below, which for
            n-grams of two tokens is the first token itself.
        tokens: uint16[n] or uint32[n], the last token of each.
        counts: int64[n] of occurrences, or uint8[n] of codes.
    """

    parents: NDArray[np.int64]
    tokens: NDArray[Any]
    counts: NDArray[Any]

    def __len__(self) -> int:
        return len(self.tokens)

    def __getitem__(self, kept: NDArray[Any]) -> "Level":
        return Level(self.parents[kept], self.tokens[kept], self.counts[kept])


def count_ngrams(tokens: Tokens, suffixes: NDArray[np.uint32]) -> list[Level]:
    """Return levels 2 to 4 of the n-grams that begin at sorted suffixes and hold no separator.

    Args:
        tokens: unsigned[t] of a segment.
        suffixes: uint32[m], m ≥ 1, neighbours in its suffix array.
    """
    separator = separator_of(tokens.dtype)
    positions = suffixes.astype(np.int64)
    # Past the end of the tokens the last one is read again, which is a separator.
    column = tokens.take(positions, mode="clip")
    parents_begin, differs = column, _changes(column)
    is_whole = column != separator
    levels = []
    for order in range(2, MAX_ORDER + 1):
        column = tokens.take(positions + (order - 1), mode="clip")
        differs |= _changes(column)
        is_whole &= column != separator
        begins = np.flatnonzero(differs)
        counts = np.diff(begins, append=len(positions))
        begins, counts = begins[is_whole[begins]], counts[is_whole[begins]]
        if order == 2:  # noqa: PLR2004  (level 1 has no entries of its own to point to)
            parents = parents_begin[begins].astype(np.int64)
        else:
            parents = np.searchsorted(parents_begin, begins, side="right") - 1
        levels.append(Level(parents, column[begins], counts))
        parents_begin = begins
    return levels


def merge_levels(parts: Sequence[list[Level]]) -> list[Level]:
    """Return the n-grams of all parts, with their counts summed, sorted by parent and token.

    Args:
        parts: levels 2 to 4 of each; may be in any order where there are several.
    """
    parts = [part for part in parts if len(part[0])] or parts[:1]
    if len(parts) == 1:
        return parts[0]
    merged = []
    places = None
    for levels in zip(*parts, strict=True):
        parents = [level.parents for level in levels]
        if places is not None:
            parents = [place[each] for place, each in zip(places, parents, strict=True)]
        level, places = _merge_level(levels, parents)
        merged.append(level)
    return merged


def _merge_level(
    levels: Sequence[Level], parents: Sequence[NDArray[np.int64]]
) -> tuple[Level, list[NDArray[np.int64]]]:
    """Return a merged level, and for each part where its entries are in it.

    Args:
        levels: of each part.
        parents: of the entries of each part, in the merged level below.
    """
    keys = [
        each.astype(np.uint64) << _TOKEN_BITS | level.tokens
        for each, level in zip(parents, levels, strict=True)
    ]
    merged, places = np.unique(np.concatenate(keys), return_inverse=True)
    counts = np.bincount(places, np.concatenate([level.counts for level in levels]))
    level = Level(
        (merged >> _TOKEN_BITS).astype(np.int64),
        merged.astype(levels[0].tokens.dtype),
        counts.astype(np.int64),
    )
    ends = np.cumsum([len(each) for each in levels])
    return level, np.split(places, ends[:-1])


def _changes(column: NDArray[Any]) -> NDArray[np.bool_]:
    """Tell for each element whether another one stands before it."""
    changes = np.ones(len(column), np.bool_)
    np.not_equal(column[1:], column[:-1], out=changes[1:])
    return changes
