"""Making phrase tables: of all n-grams of a corpus, those that earn their bytes.

That the shortest and most frequent n-grams draft about as well as all of them is what CREST found
(Ho, Park and Wang, 2024, arXiv:2408.04678): a tenth of the space for drafts of the same length.
"""

from collections.abc import Sequence
from typing import Final

import numpy as np
from numpy.typing import NDArray

from indexer.counts import COUNT_SCALE, encode_counts
from indexer.errors import DamagedIndexError
from indexer.format import MAX_ORDER, POSITION_DTYPE
from indexer.ngrams import Level, merge_levels
from indexer.phrases import PhraseTables

MIN_COUNTS: Final = (1, 2, 2)
"""Of n-grams of 2, 3 and 4 tokens that have an entry, where all fit; their own codes."""

_TURNS: Final = (1, 2, 0)
"""In which these are raised where not all fit."""

MAX_BYTES_PER_TOKEN: Final = 2
"""Of levels 2 to 4, for every token of the corpus."""

MIN_BYTES: Final = 1 << 23
"""Levels 2 to 4 may always have: small corpora repeat less, and their tables cost little."""

_MAX_BYTES: Final = 2**32 - 1
"""Levels 2 to 4 may ever have: entries are numbered in four bytes."""

NUM_CODES: Final = 256
"""Of counts: see `indexer.counts`."""

_STARTS_BYTES: Final = POSITION_DTYPE.itemsize * (MAX_ORDER - 2)
"""Of levels without entries."""


def merge_tables(tables: Sequence[PhraseTables]) -> PhraseTables:
    """Return one set of tables for several corpora: of all n-grams in any, counts summed.

    N-grams that one of the tables left out count as if they were not in its corpus. No larger
    than the tables together, whose sizes bound the memory that it takes.

    Args:
        tables: one at least, all for one vocabulary; not changed.

    Raises:
        ValueError: there are none, or for several vocabularies.
        DamagedIndexError: the entries of one do not divide the next level.
    """
    if len({each.vocabulary_size for each in tables}) != 1:
        raise ValueError("phrase tables are merged for one vocabulary")
    if len(tables) == 1:
        return tables[0]
    counts = np.sum([COUNT_SCALE[each.counts[0]] for each in tables], axis=0)
    return _packed(counts, in_order(merge_levels([_levels_of(each) for each in tables])))


def size_limit(num_tokens: int) -> int:
    """Return how many bytes levels 2 to 4 may have for a corpus of so many tokens."""
    return min(max(MAX_BYTES_PER_TOKEN * num_tokens, MIN_BYTES), _MAX_BYTES)


def prune(levels: Sequence[Level], least: Sequence[int]) -> list[Level]:
    """Return the n-grams whose counts, or codes, are at least those given; sorted as they were.

    Args:
        levels: 2 to 4: no n-gram has more than its first tokens. Where there is nothing of a level
            but of the next one, parents are left as they are.
        least: for each level, never less for longer n-grams.
    """
    pruned = []
    places = None
    for level, least_count in zip(levels, least, strict=True):
        is_kept = level.counts >= least_count
        entries = level[is_kept]
        if places is not None and len(places):
            entries = Level(places[entries.parents], entries.tokens, entries.counts)
        pruned.append(entries)
        places = np.cumsum(is_kept) - 1
    return pruned


def in_order(levels: Sequence[Level]) -> list[Level]:
    """Return the same n-grams in the order of the format, with codes for counts.

    Args:
        levels: 2 to 4, each sorted by parent and token.
    """
    ordered = []
    places = None
    for level in levels:
        parents = level.parents if places is None else places[level.parents]
        codes = encode_counts(level.counts)
        order = np.argsort(parents << 8 | (NUM_CODES - 1 - codes), kind="stable")
        ordered.append(Level(parents[order], level.tokens[order], codes[order]))
        places = np.empty(len(order), np.int64)
        places[order] = np.arange(len(order))
    return ordered


def least_codes(histograms: NDArray[np.int64], token_bytes: int, max_bytes: int) -> list[int]:
    """Return the least code for each of levels 2 to 4 with which all of them fit.

    From `MIN_COUNTS` on they are raised by one in turn, those of n-grams of 4, 2 and 3 tokens,
    until all fit or none are left.

    Args:
        histograms: int64[3, 256], entries of levels 2 to 4 by code.
        token_bytes: size of a token.
        max_bytes: of tokens, codes and starts of all three.
    """
    steps = np.arange(len(histograms) * NUM_CODES)
    least = [
        np.minimum(min_count + (steps + len(histograms) - 1 - turn) // len(histograms), NUM_CODES)
        for min_count, turn in zip(MIN_COUNTS, _TURNS, strict=True)
    ]
    num_from = np.pad(np.cumsum(histograms[:, ::-1], axis=1)[:, ::-1], ((0, 0), (0, 1)))
    sizes = _STARTS_BYTES + sum(
        _entry_bytes(number, token_bytes) * num_from[number, codes]
        for number, codes in enumerate(least)
    )
    step = min(int(np.searchsorted(-sizes, -max_bytes)), len(steps) - 1)
    return [int(codes[step]) for codes in least]


def _entry_bytes(number: int, token_bytes: int) -> int:
    is_last = number == MAX_ORDER - 2
    return token_bytes + 1 + (0 if is_last else POSITION_DTYPE.itemsize)


def _packed(counts: NDArray[np.int64], levels: Sequence[Level]) -> PhraseTables:
    sizes = [len(counts), *(len(level) for level in levels)]
    return PhraseTables(
        tuple(_starts(level.parents, size) for level, size in zip(levels, sizes[:-1], strict=True)),
        (levels[0].tokens[:0], *(level.tokens for level in levels)),
        (encode_counts(counts), *(level.counts for level in levels)),
    )


def _starts(parents: NDArray[np.int64], num_parents: int) -> NDArray[np.uint32]:
    num_children = np.bincount(parents, minlength=num_parents)
    return np.concatenate([[0], np.cumsum(num_children)]).astype(POSITION_DTYPE)


def _levels_of(tables: PhraseTables) -> list[Level]:
    if any(np.any(starts[1:] < starts[:-1]) for starts in tables.starts):
        raise DamagedIndexError(
            "the phrase tables of an index are damaged: `python -m indexer verify` says of which"
        )
    return [
        Level(
            np.repeat(np.arange(len(starts) - 1), np.diff(starts)),
            tables.tokens[number],
            COUNT_SCALE[tables.counts[number]],
        )
        for number, starts in enumerate(tables.starts, start=1)
    ]
